"""Finding and reading the files a user names, writing files whole or not at all."""

import json
import os
import re
import tempfile
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from adasim.errors import InputError

PROFILES = Path(str(files("adasim") / "calibration" / "profiles"))
BASE: ContextVar[Path] = ContextVar("BASE", default=Path())  # folder of the file being loaded
USED: ContextVar[set[Path]] = ContextVar("USED")  # files read while a scenario loads, for its manifest


def find(name: str, where: str) -> Path:
    """The file of that name: absolute, beside the file that names it, in the current folder, or packaged.

    Raises:
        InputError: there is none.
    """
    for folder in (BASE.get(), Path(), PROFILES):
        path = folder / name
        if is_file(path):
            if (used := USED.get(None)) is not None:
                used.add(path.resolve())
            return path
    packaged = ", ".join(sorted(p.name for p in PROFILES.iterdir() if p.suffix != ".py"))
    raise InputError(f"{where}: no file {name} beside the scenario, here, or among the packaged ones ({packaged})")


def is_file(path: Path) -> bool:
    """Whether there is such a file; a name the system cannot have is no file."""
    try:
        return path.is_file()
    except OSError:
        return False


@dataclass(frozen=True)
class Columns:
    """What a table must and may have; ``whole`` columns hold integers >= 0, ``positive`` numbers > 0."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    positive: tuple[str, ...] = ()


def read_columns(path: Path, columns: Columns) -> pd.DataFrame:
    """A CSV or Parquet table, checked.

    Raises:
        InputError: unreadable, empty, a column missing or unknown, or a bad value (its row is named, the first below the
            header being 1).
    """
    try:
        table = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path, comment="#")
    except Exception as error:  # whatever the reader throws, the user needs the file's name
        raise InputError(f"{path}: cannot be read as a table: {error}") from error
    names = set(table.columns)
    allowed = (*columns.required, *columns.optional)
    problems = [f"{path}: column {c} is missing" for c in columns.required if c not in names]
    problems += [f"{path}: unknown column {c}; allowed: {', '.join(allowed)}" for c in sorted(names - set(allowed))]
    if not problems and table.empty:
        problems.append(f"{path}: no rows")
    problems += [
        f"{path}: row {i + 1}: {c} is empty"
        for c in columns.required
        if c in names and c not in (*columns.whole, *columns.positive)
        for i in np.flatnonzero(table[c].isna())[:5]
    ]
    if problems:
        raise InputError(*problems)
    for column in (*columns.whole, *columns.positive):
        if column not in names:
            continue
        numbers = pd.to_numeric(table[column], errors="coerce")
        bad = ~np.isfinite(numbers)
        if column in columns.whole:
            bad |= (numbers < 0) | (numbers % 1 != 0)
            rule = "a whole number >= 0"
        else:
            bad |= numbers <= 0
            rule = "a number > 0"
        problems += [
            f"{path}: row {i + 1}: {column} is {table[column].iloc[i]}, must be {rule}" for i in np.flatnonzero(bad)[:5]
        ]
        table[column] = numbers.fillna(0).astype(np.int64) if column in columns.whole else numbers
    if problems:
        raise InputError(*problems)
    return table


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars (``off`` is a word, ``1e-3`` a number), and no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        written = [k for k, _ in node.value if k.tag != "tag:yaml.org,2002:merge"]
        keys = [self.construct_object(k, deep=True) for k in written]
        for i, key in enumerate(keys):
            if key in keys[:i]:
                mark = written[i].start_mark
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", mark)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in resolvers if tag not in {"tag:yaml.org,2002:bool", "tag:yaml.org,2002:float"}]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|false)$"), list("tf"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:(?:\d+\.\d*|\.\d+)(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(?:inf|nan|Inf|NaN))$"),
    list("-+0123456789."),
)


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text.

    Raises:
        InputError: not YAML; names line and column.
    """
    try:
        return yaml.load(text, _Loader)
    except RecursionError as error:
        raise InputError(f"{where}: is nested too deeply") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f": line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise InputError(f"{where}{place}: {getattr(error, 'problem', None) or error}") from error


def load_yaml(path: Path) -> dict[str, Any]:
    """A YAML file that holds a mapping.

    Raises:
        InputError: unreadable, not YAML, or not a mapping.
    """
    try:
        value = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: must hold keys and values, not {type(value).__name__}")
    return value


def write_atomic(path: Path, content: bytes | str) -> None:
    """Write a file whole or not at all; lines end in a bare newline everywhere."""
    data = content.encode() if isinstance(content, str) else content
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def to_json(value: Any) -> str:
    """A JSON document; what is not a number becomes null."""

    def clean(item: Any) -> Any:
        if isinstance(item, dict):
            return {str(k): clean(v) for k, v in item.items()}
        if isinstance(item, list | tuple):
            return [clean(v) for v in item]
        return None if isinstance(item, float) and not np.isfinite(item) else item

    return json.dumps(clean(value), indent=1, default=str, allow_nan=False) + "\n"


@contextmanager
def loading_from(folder: Path) -> Iterator[set[Path]]:
    """Names resolve beside ``folder`` first; yields the set of files that get read."""
    base, used = BASE.set(folder), USED.set(set())
    try:
        yield USED.get()
    finally:
        BASE.reset(base)
        USED.reset(used)
