"""Prompts by domain: the packaged ones, or a folder of ``<domain>*.jsonl`` files."""

import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from adasim.errors import InputError

PACKAGED = Path(str(files("adasim") / "real" / "prompts_data"))


def read_prompts(folder: str | None, rows: Sequence[int] | None = None) -> dict[str, list[str]]:
    """The ``prompt`` of each line, by domain (a file's name up to its first ``_`` or ``.``).

    Args: rows: first and last + 1 of the lines to take; None = all.
    Raises InputError: no such folder or file, or a line without a prompt.
    """
    source = PACKAGED if folder is None else Path(folder).expanduser()
    found: dict[str, list[str]] = {}
    for path in sorted(source.glob("*.jsonl")):
        domain = path.stem.split("_")[0]
        found[domain] = read_lines(path)[slice(*(rows or (None,)))]
    empty = [d for d, prompts in found.items() if not prompts]
    if not found or empty:
        raise InputError(
            f"prompts: {source} holds no prompt" + (f" for {', '.join(empty)} in rows {rows}" if empty else "")
        )
    return found


def read_lines(path: Path) -> list[str]:
    """The ``prompt`` of each line of a file.

    Raises InputError: a line without a prompt.
    """
    return [_prompt(line, path, i) for i, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)]


def _prompt(line: str, path: Path, number: int) -> str:
    try:
        return str(json.loads(line)["prompt"])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}, line {number}: not an object with a prompt: {error}") from error
