"""Cost tables (CSV): milliseconds of a pass by batch, tokens and context.

``tokens`` are of the whole batch, ``tokens_per_request`` of one. A column ``curve`` or ``part`` says verify, draft or
step; where rows are raw points and medians of them (``stat``), the medians are taken.
"""

from collections.abc import Iterable, Mapping

from adasim.importers.columns import column_of
from adasim.importers.fields import Malformed, needed, number, text, whole
from adasim.importers.head import Head
from adasim.importers.sink import Sink
from adasim.importers.source import Source
from adasim.importers.tables import CostRow

PARTS = ("verify", "draft", "step")
TOKENS = ("tokens", "verify_tokens", "total_tokens", "num_tokens")
EITHER = ("tokens_or_requests",)
BATCH = ("batch", "batch_size", "bs", "num_requests", "requests", "num_reqs")


def recognises(head: Head) -> bool:
    """A table with a column of milliseconds, and one of tokens or requests."""
    columns = set(head.columns)
    return any(column_of(c) == "ms" for c in columns) and bool(columns & {*TOKENS, *BATCH, *EITHER, "tokens_per_request"})


def read(source: Source, sink: Sink) -> None:
    """Fill cost points."""
    held: list[CostRow] = []
    medians = False
    for line, cells in source.records():
        with source.guard(line):
            row = cost_row(source, cells)
            if row.note == "median" and not medians:
                medians, held = True, []
                source.note("raw points and medians of them: the medians are taken")
            if not medians or row.note == "median":
                held.append(row)
    sink.extend(_once(source, held))


def cost_row(source: Source, cells: Mapping[str, str]) -> CostRow:
    """One row."""
    part = next((cells[n] for n in ("curve", "part", "phase") if cells.get(n)), None)
    name = next(n for n in cells if column_of(n) == "ms")
    if part is None:
        part = next((p for p in PARTS if name.startswith(p)), "verify")
    if part not in PARTS:
        raise Malformed(f"part {part!r}, allowed: {', '.join(PARTS)}")
    either = _first(cells, EITHER)
    batch = either if part == "draft" and either is not None else _first(cells, BATCH)
    tokens = either if part != "draft" and either is not None else _first(cells, TOKENS)
    each = whole(cells, "tokens_per_request")
    if tokens is None and each is not None:
        tokens = each * whole_needed(batch, "batch")
    if not (tokens or batch):
        raise Malformed("tokens and batch are both missing")
    ms = needed(number(cells, name), name)
    if ms <= 0:
        raise Malformed(f"{name} is {ms:g}, allowed: a number > 0")
    return CostRow(
        source.name, part, batch, tokens, whole(cells, "context"), ms, text(cells, "stat") or text(cells, "note") or ""
    )


def whole_needed(value: int | None, name: str) -> int:
    """The count.

    Raises:
        Malformed: there is none.
    """
    return int(needed(value, name))


def _first(cells: Mapping[str, str], names: Iterable[str]) -> int | None:
    return next((whole(cells, n) for n in names if cells.get(n)), None)


def _once(source: Source, rows: list[CostRow]) -> list[CostRow]:
    """A point measured more than once by the mean of its measurements."""
    points: dict[tuple[object, ...], list[CostRow]] = {}
    for row in rows:
        points.setdefault((row.part, row.batch, row.tokens, row.context), []).append(row)
    if len(points) < len(rows):
        source.note("points measured more than once: their means are taken")
    return [same[0]._replace(ms=sum(r.ms for r in same) / len(same)) for same in points.values()]
