"""Public arrival traces, read line by line: a bad line is named."""

import csv
import json
import math
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from adasim.errors import InputError
from adasim.files import find

HASH_BLOCK = 512  # prompt tokens per hash id (Mooncake)
MAX_PROBLEMS = 10

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
def _read(
    path: Path, modified_ns: int, form: TraceFormat | None, limit: int | None, skip_empty: bool
) -> list[TraceRow]:
    problems: list[str] = []
    rows: list[TraceRow] = []
    with path.open(newline="", encoding="utf-8") as lines:
        for number, parse in _records(path, lines, form):
            if limit is not None and len(rows) == limit:
                break
            try:
                row = parse()
                _check(row, rows[-1] if rows else None, skip_empty)
            except (KeyError, TypeError, ValueError) as error:
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
    path = find(name, "workload.path")
    return _read(path, path.stat().st_mtime_ns, form, limit, skip_empty)


def _records(
    path: Path, lines: Iterator[str], form: TraceFormat | None
) -> Iterator[tuple[int, Callable[[], TraceRow]]]:
    """Line number and parser of every record."""
    if form == "mooncake" or (form is None and path.suffix in {".jsonl", ".json"}):
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, lambda line=line: _mooncake(json.loads(line))  # type: ignore[misc]
        return
    reader = csv.DictReader(lines)
    header = reader.fieldnames or []
    known = [f for f, columns in CSV_COLUMNS.items() if set(columns) <= set(header)]
    if not known or (form is not None and form not in known):
        wanted = "; ".join(f"{f}: {','.join(c)}" for f, c in CSV_COLUMNS.items() if form in {None, f})
        raise InputError(f"{path}: line 1: columns {','.join(header) or '(none)'}; expected {wanted}")
    time, prompt, output = CSV_COLUMNS[known[0]]
    clock = _azure_seconds if known[0] == "azure" else float
    for row in reader:
        yield (
            reader.line_num,
            lambda row=row: TraceRow(clock(row[time]), _count(row[prompt]), _count(row[output])),  # type: ignore[misc]
        )


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
    whole, _, fraction = text.strip().partition(".")
    stamp = datetime.strptime(whole, "%Y-%m-%d %H:%M:%S")
    return (stamp - datetime(2000, 1, 1)).total_seconds() + (float("0." + fraction) if fraction else 0.0)


def _count(value: str | int | None) -> int:
    if isinstance(value, bool) or value is None:
        raise ValueError(f"{value!r} is not a token count")
    number = int(value)
    if number != float(value) or number < 0:
        raise ValueError(f"{value!r} is not a token count")
    return number


def _check(row: TraceRow, before: TraceRow | None, skip_empty: bool) -> None:
    if not math.isfinite(row.arrival_s) or row.arrival_s < 0:
        raise ValueError(f"arrival {row.arrival_s} must be a number >= 0")
    if before is not None and row.arrival_s < before.arrival_s:
        raise ValueError("arrives before the line above it; sort the trace by time")
    if not skip_empty and not (row.prompt_len and row.output_len):
        raise ValueError("no prompt or no output tokens; set workload.skip_empty: true to leave such requests out")
