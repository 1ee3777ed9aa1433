"""The shapes in which people write tables, brought to one: a row a run.

- a row a run: ``batch_size,steps,throughput_tok_s,accept_length``;
- wide, a variant in a column's name: ``AL_eagle3``, ``k7_tok_s``, ``baseline_s``;
- turned round, a metric a row: ``metric,mtp1,mtp8``, or in pairs: ``setup,metric,nospec,spec``.
"""

from collections.abc import Iterator

from adasim.importers.columns import BASELINE, POSITION, column_of, variant_of
from adasim.importers.fields import Malformed
from adasim.importers.source import Source

Cells = dict[str, str]


def rows_of(source: Source) -> Iterator[tuple[int, Cells]]:
    """Rows as they are, or turned round when metrics stand below one another."""
    turned: dict[str, Cells] = {}
    last = 0
    for line, cells in source.records():
        if "metric" not in cells:
            yield line, cells
        elif next(iter(cells)) == "metric" and not any(map(column_of, cells)):
            for name, cell in cells.items():
                if name != "metric":
                    turned.setdefault(name, {"policy": name})[cells["metric"]] = cell
            last = line
        else:
            yield from _pair(source, line, cells)
    for cells in turned.values():
        yield last, {n: c for n, c in cells.items() if c}


def _pair(source: Source, line: int, cells: Cells) -> Iterator[tuple[int, Cells]]:
    """A row that compares one metric without and with speculation."""
    with source.guard(line):
        values = {n: c for n, c in cells.items() if variant_of(n)[1] or n in {"nospec", "spec", "off", "on"}}
        if not values:
            raise Malformed("no columns to compare, like nospec and spec")
        if column_of(cells["metric"]) is None:
            raise Malformed(f"metric {cells['metric']!r} is not understood")
        wrong = [f"{n} is {c!r}" for n, c in values.items() if c and not is_number(c)]
        if wrong:
            raise Malformed(", ".join(wrong) + ", allowed: a number")
        about = {n: c for n, c in cells.items() if n not in {*values, "metric", "note"}}
        for name, cell in values.items():
            if cell:
                yield line, {**about, "policy": name, cells["metric"]: cell}


def variants_of(cells: Cells) -> Iterator[tuple[str, Cells]]:
    """A row for every variant that column names tell apart; one without a label where none do."""
    named: dict[str, Cells] = {}
    for name, cell in cells.items():
        if column_of(name) is None:
            known, variant = variant_of(name)
            if known is not None and variant:
                named.setdefault(variant, {})[known] = cell
    if not named:
        yield "", cells
        return
    shared = {n: c for n, c in cells.items() if column_of(n) is not None or variant_of(n)[0] is None}
    counted = {"tau", "rounds", "drafted", "accepted", "output_tokens", "acceptance_rate"}
    for variant, own in named.items():
        if not any(own.values()):
            continue
        plain = BASELINE.fullmatch(variant) is not None
        kept = {
            n: c for n, c in shared.items() if not plain or (column_of(n) not in counted and not POSITION.fullmatch(n))
        }
        yield variant, kept | own


def is_number(cell: str) -> bool:
    """Whether it reads as one."""
    try:
        float(cell)
    except ValueError:
        return False
    return True
