"""Public arrival traces, read line by line: a bad line is named."""

import csv
import json
import math
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from adasim.errors import InputError
from adasim.files import find

HASH_BLOCK = 512  # prompt tokens per hash id (Mooncake)
MAX_PROBLEMS = 10
MAX_TOKENS = 10_000_000
AZURE_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d)?")

TraceFormat = Literal["azure", "mooncake", "vidur"]
CSV_COLUMNS: dict[TraceFormat, tuple[str, str, str]] = {
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "vidur": ("arrived_at", "num_prefill_tokens", "num_decode_tokens"),
}


class TraceRow(NamedTuple):
    """One request of a trace; the first arrives at 0."""

    arrival_s: float
    prompt_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()


@lru_cache(maxsize=4)
def _read(path: Path, modified_ns: int, form: TraceFormat | None, limit: int | None, skip_empty: bool) -> list[TraceRow]:
    problems: list[str] = []
    rows: list[TraceRow] = []
    with path.open(newline="", encoding="utf-8-sig") as lines:
        for number, parse in _records(path, lines, form):
            if limit is not None and len(rows) == limit:
                break
            try:
                row = parse()
                check_row(row, rows[-1] if rows else None, skip_empty=skip_empty)
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
                problems.append(f"{path}: line {number}: {what}")
                if len(problems) == MAX_PROBLEMS:
                    break
                continue
            if row.prompt_len and row.output_len:
                rows.append(row)
    if problems:
        raise InputError(*problems)
    return [r._replace(arrival_s=r.arrival_s - rows[0].arrival_s) for r in rows]


def read_trace(
    name: str, form: TraceFormat | None = None, limit: int | None = None, *, skip_empty: bool = False
) -> list[TraceRow]:
    """The trace's requests, in order of arrival, the first at 0 s.

    Args:
        name: a path, or the name of a packaged file.
        form: "azure", "mooncake" or "vidur"; None = recognise it.
        limit: the first so many requests; None = all.
        skip_empty: leave out requests without prompt or output tokens instead of refusing them.

    Raises:
        InputError: no such file, or lines that are malformed or out of order; the first ten are named.
    """
    path = find(name, "path")
    try:
        return _read(path, path.stat().st_mtime_ns, form, limit, skip_empty)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: cannot be read as a trace: {error}") from error


def _records(path: Path, lines: Iterator[str], form: TraceFormat | None) -> Iterator[tuple[int, Callable[[], TraceRow]]]:
    """Line number and parser of every record."""
    if form == "mooncake" or (form is None and path.suffix in {".jsonl", ".json"}):
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, partial(json_row, line)
        return
    reader = csv.DictReader(lines)
    header = reader.fieldnames or []
    known = [f for f, columns in CSV_COLUMNS.items() if set(columns) <= set(header)]
    if not known or (form is not None and form not in known):
        wanted = "; ".join(f"{f}: {','.join(c)}" for f, c in CSV_COLUMNS.items() if form in {None, f})
        raise InputError(f"{path}: line 1: columns {','.join(header) or '(none)'}; expected {wanted}")
    for row in reader:
        yield reader.line_num, partial(csv_row, row, known[0])


def json_row(line: str) -> TraceRow:
    """One line of Mooncake's. Raises KeyError, TypeError or ValueError when malformed."""
    return _mooncake(json.loads(line))


def _mooncake(row: dict[str, Any]) -> TraceRow:
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    ids = row.get("hash_ids", [])
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise ValueError("hash_ids must be a list of whole numbers")
    prompt = _count(row["input_length"])
    if len(ids) > math.ceil(prompt / HASH_BLOCK):
        raise ValueError(f"{len(ids)} hash_ids for {prompt} tokens, {HASH_BLOCK} tokens each")
    whole = tuple(ids[: prompt // HASH_BLOCK])  # a partly filled last block is not shared
    return TraceRow(float(row["timestamp"]) / 1e3, prompt, _count(row["output_length"]), whole)


def _azure_seconds(text: str) -> float:
    found = AZURE_TIME.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a time like 2023-11-16 18:17:03.9799600")
    day, clock, fraction, zone = found.groups()
    stamp = datetime.fromisoformat(f"{day}T{clock}{(zone or '+00:00').replace('Z', '+00:00')}")
    return stamp.timestamp() + float(fraction or 0)


def csv_row(row: dict[str, Any], form: TraceFormat) -> TraceRow:
    """One row of Azure's or Vidur's table. Raises ValueError when malformed."""
    names = CSV_COLUMNS[form]
    clock: Callable[[str], float] = _azure_seconds if form == "azure" else float
    if None in row:
        raise ValueError("more fields than the header has")
    time, prompt, output = (row[n] for n in names)
    if time is None:
        raise ValueError(f"{names[0]} is missing")
    try:
        return TraceRow(clock(time), _count(prompt), _count(output))
    except ValueError as error:
        if "could not convert" in str(error):
            raise ValueError(f"{time!r} is not a number of seconds") from error
        raise


def _count(value: str | float | None) -> int:
    """A token count, from text or JSON."""
    try:
        number = int(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else -1
        whole = number >= 0 and number == float(str(value)) and number <= MAX_TOKENS
    except (ValueError, OverflowError):
        whole = False
    if not whole:
        raise ValueError(f"{value!r:.40} is not a token count (a whole number, 0..{MAX_TOKENS})")
    return number


def check_row(row: TraceRow, before: TraceRow | None, *, skip_empty: bool) -> None:
    """Raises ValueError unless the row can follow ``before``."""
    if not math.isfinite(row.arrival_s) or row.arrival_s < 0:
        raise ValueError(f"arrival {row.arrival_s} must be a number >= 0")
    if before is not None and row.arrival_s < before.arrival_s:
        raise ValueError("arrives before the line above it; sort the trace by time")
    if not skip_empty and not (row.prompt_len and row.output_len):
        raise ValueError("no prompt or no output tokens; set workload.skip_empty: true to leave such requests out")
