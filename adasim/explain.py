"""Turns pydantic's complaints into messages that say what, where, and what is allowed."""

import difflib
import re
from collections.abc import Sequence
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, Tag, ValidationError
from pydantic_core import ErrorDetails

from adasim.errors import InputError

# how pydantic names the branches of a union without tags
BRANCH = re.compile(r"(constrained-)?(float|int|str|bool)|(dict|list|literal|function-\w+)[\[(].*")


def explain(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """One line a problem: dotted path, what is wrong, what is allowed."""
    problems: dict[str, list[str]] = {}
    for detail in error.errors():
        path = _path(detail["loc"], model)
        inner = detail.get("ctx", {}).get("error")
        says = list(inner.problems) if isinstance(inner, InputError) else [_says(detail, model)]
        problems.setdefault(path, []).extend(says)
    return [line for path, says in problems.items() for line in _merged(path, says)]


def _merged(path: str, says: list[str]) -> list[str]:
    """Lines of one path; the branches of a union, which all got the same value, become one."""
    heads = {s.partition(", input should be ")[0] for s in says}
    if len(says) > 1 and len(heads) == 1:
        allowed = dict.fromkeys(s.partition(", input should be ")[2] for s in says)
        return [f"{path}: {heads.pop()}, input should be {' or '.join(allowed)}"]
    return [f"{path}: {s}" if path else s for s in says]


def _says(detail: ErrorDetails, model: type[BaseModel]) -> str:
    """What is wrong and what is allowed."""
    kind, value = detail["type"], detail["input"]
    if kind == "extra_forbidden":
        fields = _fields(detail["loc"][:-1], model)
        close = difflib.get_close_matches(str(detail["loc"][-1]), fields, n=1)
        hint = f"; did you mean {close[0]}?" if close else "."
        return f"unknown key{hint} Allowed: {', '.join(fields)}"
    if kind == "value_error":
        return str(detail["ctx"]["error"])
    if kind == "missing":
        return "is missing"
    if kind == "union_tag_invalid":
        context = detail["ctx"]
        return f"kind {context['tag']!r}; allowed: {context['expected_tags'].replace(chr(39), '')}"
    if kind == "union_tag_not_found":
        return "kind is missing"
    shown = type(value).__name__ if isinstance(value, dict | list | BaseModel) else f"{value!r:.60}"
    return f"got {shown}, {detail['msg'][0].lower()}{detail['msg'][1:]}"


def _path(loc: Sequence[int | str], model: type[BaseModel]) -> str:
    """Dotted path without the tags of unions that pydantic puts in."""
    parts: list[str] = []
    kinds: list[Any] = [model]
    for part in loc:
        kinds, is_field = _step(kinds, part)
        if is_field:
            parts.append(str(part))
    return ".".join(parts)


def _fields(loc: Sequence[int | str], model: type[BaseModel]) -> list[str]:
    """Fields allowed at a path."""
    kinds: list[Any] = [model]
    for part in loc:
        kinds, _ = _step(kinds, part)
    return [f for k in kinds for option, _ in _options(k) if _is_model(option) for f in option.model_fields]


def _step(kinds: list[Any], part: int | str) -> tuple[list[Any], bool]:
    """Types one step down the path, and whether the step is a field or item (else: pydantic's name of a branch)."""
    options = [o for k in kinds for o in _options(k)]
    tagged = [option for option, tag in options if tag == part]
    if tagged and len(options) > 1:
        return tagged, False
    if len(options) > 1 and BRANCH.fullmatch(str(part)):
        return kinds, False
    down: list[Any] = []
    for option, _ in options:
        if _is_model(option):
            if part in option.model_fields:
                down.append(option.model_fields[str(part)].annotation)
        elif get_origin(option) is list and isinstance(part, int):
            down.append(get_args(option)[0])
        elif get_origin(option) is dict:
            down.append(get_args(option)[1])
    if down:
        return down, True
    unknown_key = bool(options) and all(_is_model(option) for option, _ in options)
    return ([], True) if unknown_key else (kinds, False)


def _options(kind: Any, tag: str | None = None) -> list[tuple[Any, str | None]]:
    """The types a value may have, each with the tag that pydantic puts into paths."""
    if get_origin(kind) is Annotated:
        inner, *extras = get_args(kind)
        tags = [e.tag for e in extras if isinstance(e, Tag)]
        return _options(inner, tags[0] if tags else tag)
    if get_origin(kind) is Union or type(kind).__name__ == "UnionType":
        return [o for k in get_args(kind) if k is not type(None) for o in _options(k)]
    if tag is None and _is_model(kind) and "kind" in kind.model_fields:
        tag = kind.model_fields["kind"].default
    return [(kind, tag)]


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
