"""Throughput and acceptance tables people write (CSV): batch or concurrency x k -> tokens per second, accept length.

Columns are known by their names, in any order, with units or remarks in brackets. Three shapes are read:

- a row a cell: ``batch_size,steps,throughput_tok_s,accept_length``;
- wide, a variant in a column's name: ``AL_eagle3``, ``k7_tok_s``, ``baseline_s``;
- turned round, a metric a row: ``metric,mtp1,mtp8``.

Columns that are no number become the run's label; numbers that are not understood are named in a note.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from adasim.importers.checks import acceptance, run_of
from adasim.importers.columns import BASELINE, POSITION, column_of, k_of, variant_of
from adasim.importers.fields import Malformed, needed, number, whole
from adasim.importers.head import Head
from adasim.importers.sink import Sink
from adasim.importers.source import Source
from adasim.importers.tables import AcceptanceRow, RunRow

MEASURES = {"output_tok_s", "tok_s_user", "tau", "tpot_mean_ms", "tpot_p50_ms", "ttft_p50_ms", "ttft_mean_ms", "accepted"}
LOADS = {"concurrency", "k", "steps", "policy", "verify_len", "domain"}
NAMED = {"policy", "model", "dataset"}  # labels that need no name
Cells = dict[str, str]


def recognises(head: Head) -> bool:
    """A table with a measure, and a load or length to set it against; or metrics row by row."""
    if len(head.columns) < 2 or {"ms"} & {column_of(c) for c in head.columns}:
        return False
    names = {column_of(c) or c for c in head.columns} | {variant_of(c)[0] for c in head.columns}
    return bool(names & MEASURES and names & LOADS) or bool({"metric", "best_k"} & names)


def read(source: Source, sink: Sink) -> None:
    """Fill runs, and survival where positions are given."""
    run = 0
    seen: dict[tuple[object, ...], int] = {}
    for line, cells in _rows(source):
        with source.guard(line):
            for label, variant in _variants(cells):
                row, survival = run_row(source, variant, label, run)
                if not row.k and row.k is not None and not survival:  # plain decoding stands beside every k
                    key = tuple(row._replace(run=0))
                    if key in seen:
                        source.note("plain decoding is repeated for every length: kept once")
                        continue
                    seen[key] = run
                sink.add(run_of(source, row))
                sink.extend(AcceptanceRow(source.name, run, row.label, i, s, row.rounds) for i, s in survival)
                run += 1


def run_row(source: Source, cells: Mapping[str, str], label: str, run: int) -> tuple[RunRow, list[tuple[int, float]]]:
    """A cell of the table, and survival by position where it is given."""
    values, said = _understood(source, cells)
    k, depth = _lengths(values, said, label)
    rate = number(values, "acceptance_rate", high=100)
    rounds, drafted = whole(values, "rounds"), whole(values, "drafted")
    accepted = whole(values, "accepted")
    if k is None and rounds and drafted:
        k = depth = round(drafted / rounds)
    if rounds is None and drafted and k:
        rounds = round(drafted / k)
    tau = number(values, "tau")
    if k == 0:
        tau, rate, rounds, drafted, accepted = None if tau is None else 1.0, None, None, None, None
    found = acceptance(
        source,
        tau=tau,
        rate=None if rate is None else rate / (100 if rate > 1 else 1),
        rounds=rounds,
        drafted=drafted,
        accepted=accepted,
        k=k,
        depth=depth,
    )
    survival = [] if k == 0 else sorted(_survival(values))
    duration, tokens = number(values, "duration_s"), whole(values, "output_tokens")
    tok_s = number(values, "output_tok_s")
    if tok_s is None and duration and tokens:
        tok_s = tokens / duration
    concurrency = number(values, "concurrency", low=1)
    user = number(values, "tok_s_user")
    tpot = number(values, "tpot_mean_ms") or (1e3 / user if user else None)
    measured: dict[str, Any] = {n: number(values, n) for n in RunRow._fields if n.endswith("_ms")} | {
        "tpot_mean_ms": tpot
    }
    row = RunRow(
        source.name,
        run,
        " · ".join([*(v if n in NAMED else f"{n}={v}" for n, v in said.items()), *([label] if label else [])]),
        model=said.get("model"),
        dataset=said.get("dataset"),
        k=k,
        depth=depth,
        topk=whole(values, "topk") if k else None,
        concurrency=concurrency,
        requests=whole(values, "requests"),
        duration_s=duration,
        output_tokens=tokens,
        output_tok_s=tok_s,
        tau=found.tau,
        acceptance_rate=found.rate,
        rounds=rounds,
        drafted=drafted,
        accepted=accepted,
        **measured,
    )
    if "best_k" in values:
        source.note("lengths that others chose, not measurements")
    elif tok_s is None and found.tau is None and duration is None and not any(v is not None for v in measured.values()):
        raise Malformed("no measure in this row: tokens per second, accept length or a latency")
    return row, survival


def _understood(source: Source, cells: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Cells under our names, and those that only label the row."""
    values, said = dict[str, str](), dict[str, str]()
    for name, cell in cells.items():
        known = column_of(name)
        if known == "concurrency" and "best_k" in map(column_of, cells) and not _numeric(cell):
            said[name] = cell  # a range of loads
        elif known is None or known in NAMED:
            if cell:
                said[known or name] = cell
            if known is None and _numeric(cell):
                source.note(f"column {name} is not understood: it is kept in the label")
        elif cell:
            if name.endswith("_pct"):
                values[known] = str(needed(number(cells, name, high=100), name) / 100)
            elif values.setdefault(known, cell) != cell:
                raise Malformed(f"two columns give {known}: {values[known]} and {cell}")
            if "rank" in name:
                source.note(f"{name} is of one rank, not of the whole engine")
    return values, said


def _lengths(values: Mapping[str, str], said: dict[str, str], label: str) -> tuple[int | None, int | None]:
    """Drafts verified per round and the most that can be accepted, from columns or from what a policy is called."""
    names = [said.get("policy", ""), label]
    if any(BASELINE.fullmatch(n.strip()) for n in names):
        return 0, 0
    adaptive = next((n for n in names if re.search(r"adapt|auto", n, re.IGNORECASE)), None)
    if adaptive is not None:
        return None, k_of(adaptive)
    for column in ("k", "best_k", "steps"):
        cell = values.get(column)
        if cell and not _numeric(cell):
            said[column] = cell  # "autospec": lengths that vary
            return None, None
    k, steps, verified = whole(values, "k"), whole(values, "steps"), whole(values, "verify_len")
    if verified is not None:  # SGLang's num_draft_tokens: the root counted
        drafts = max(verified - 1, 0)
        tree = (whole(values, "topk") or 1) > 1
        return drafts, min(steps, drafts) if tree and steps is not None else drafts
    told = [k, whole(values, "best_k"), steps, *map(k_of, names)]
    k = next((found for found in told if found is not None), None)
    return k, k


def _survival(values: Mapping[str, str]) -> Iterator[tuple[int, float]]:
    for name in values:
        if name.startswith("position_"):
            share = number(values, name, high=1)
            if share is not None:
                yield int(name.removeprefix("position_")), share


def _rows(source: Source) -> Iterator[tuple[int, Cells]]:
    """Rows as they are, or turned round when metrics stand below one another."""
    turned: dict[str, Cells] = {}
    last = 0
    for line, cells in source.records():
        if "metric" not in cells:
            yield line, cells
        elif len(cells) == len([n for n in cells if n == "metric" or _label(n)]) and next(iter(cells)) == "metric":
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
        wrong = [f"{n} is {c!r}" for n, c in values.items() if c and not _numeric(c)]
        if wrong:
            raise Malformed(", ".join(wrong) + ", allowed: a number")
        about = {n: c for n, c in cells.items() if n not in {*values, "metric", "note"}}
        for name, cell in values.items():
            if cell:
                yield line, {**about, "policy": name, cells["metric"]: cell}


def _variants(cells: Cells) -> Iterator[tuple[str, Cells]]:
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


def _label(name: str) -> bool:
    return column_of(name) is None


def _numeric(cell: Any) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
