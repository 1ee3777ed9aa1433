"""Turns pydantic's complaints into messages that say what, where, and what is allowed."""

import difflib
from collections.abc import Sequence
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from adasim.errors import InputError


def explain(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """One line a problem: dotted path, what is wrong, what is allowed."""
    return [line for detail in error.errors() for line in _lines(detail, model)]


def _lines(detail: ErrorDetails, model: type[BaseModel]) -> list[str]:
    path = _path(detail["loc"], model)
    inner = detail.get("ctx", {}).get("error")
    if isinstance(inner, InputError):
        return list(inner.problems)
    if inner is not None:
        return [f"{path}: {inner}" if path else str(inner)]
    return [f"{path}: {_says(detail, model)}"]


def _says(detail: ErrorDetails, model: type[BaseModel]) -> str:
    """What is wrong and what is allowed."""
    kind, value = detail["type"], detail["input"]
    if kind == "extra_forbidden":
        fields = _fields(detail["loc"][:-1], model)
        close = difflib.get_close_matches(str(detail["loc"][-1]), fields, n=1)
        hint = f"; did you mean {close[0]}?" if close else "."
        return f"unknown key{hint} Allowed: {', '.join(fields)}"
    if kind == "missing":
        return "is missing"
    if kind == "union_tag_invalid":
        context = detail["ctx"]
        return f"kind {context['tag']!r}; allowed: {context['expected_tags'].replace(chr(39), '')}"
    if kind == "union_tag_not_found":
        return "kind is missing"
    shown = "" if isinstance(value, dict | list | BaseModel) else f"got {value!r}, "
    return shown + detail["msg"][0].lower() + detail["msg"][1:]


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
    return [f for k in kinds if _is_model(k) for f in k.model_fields]


def _step(kinds: list[Any], part: int | str) -> tuple[list[Any], bool]:
    """Types one step down the path, and whether the step is a field or item (else: a union's tag)."""
    options = [o for k in kinds for o in _unwrap(k)]
    tagged = [o for o in options if _is_model(o) and _tag(o) == part]
    if tagged and len(options) > 1:
        return tagged, False
    down: list[Any] = []
    found = False
    for option in options:
        if _is_model(option) and part in option.model_fields:
            down.append(option.model_fields[str(part)].annotation)
            found = True
        elif get_origin(option) is list and isinstance(part, int):
            down.append(get_args(option)[0])
            found = True
        elif get_origin(option) is dict:
            down.append(get_args(option)[1])
            found = True
    if found:
        return down, True
    # pydantic also names the branch of an untagged union ("float", "dict[...]"): not part of the path
    is_key = bool(options) and all(_is_model(o) for o in options)
    return (kinds, False) if not is_key else ([], True)


def _unwrap(kind: Any) -> list[Any]:
    if get_origin(kind) is Annotated:
        return _unwrap(get_args(kind)[0])
    if get_origin(kind) is Union or type(kind).__name__ == "UnionType":
        return [o for k in get_args(kind) for o in _unwrap(k)]
    return [kind]


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _tag(kind: type[BaseModel]) -> str | None:
    field = kind.model_fields.get("kind")
    return field.default if field else None
