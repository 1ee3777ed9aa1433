"""``runs.csv``, as ``adasim import`` wrote it, with what was noted about the files it came from."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

from adasim.importers.fields import Malformed, number, text, whole
from adasim.importers.head import Head
from adasim.importers.sink import Sink
from adasim.importers.source import Source
from adasim.importers.tables import RunRow

MANIFEST = "manifest.json"
WHAT = "adasim import"  # marks the folders that the command wrote
TAKES: dict[type, Callable[[Mapping[str, Any], str], Any]] = {int: whole, float: number, str: text}
KINDS = {name: next(t for t in (*get_args(hint), hint) if t in TAKES) for name, hint in get_type_hints(RunRow).items()}


def recognises(head: Head) -> bool:
    """The columns of its runs."""
    return head.columns[:3] == RunRow._fields[:3] and "output_tok_s" in head.columns


def read(source: Source, sink: Sink) -> None:
    """Fill runs."""
    for noted in manifest_of(source.path.parent).get("files", []):
        for warning in noted["warnings"]:
            source.note(warning)
    for line, cells in source.records():
        with source.guard(line):
            if unknown := [n for n in cells if n not in KINDS]:
                raise Malformed(f"unknown columns {', '.join(unknown)}: another version's; import the files again")
            values: dict[str, Any] = {n: TAKES[KINDS[n]](cells, n) for n in cells}
            row = RunRow(**{n: v for n, v in values.items() if v is not None})
            if row.engine and row.version:
                source.engines.add((row.engine, row.version))
            sink.add(row)


def manifest_of(folder: Path) -> dict[str, Any]:
    """The manifest of a folder that the command wrote; empty: it is no such folder."""
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and found.get("what") == WHAT else {}
