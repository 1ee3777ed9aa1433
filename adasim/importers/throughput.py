"""Throughput and acceptance tables people write (CSV): batch or concurrency x k -> tokens per second, accept length.

Columns are known by their names (``columns.py``), in any order and shape (``shapes.py``). Those that hold no number
become the run's label, and so do numbers that are not understood, which a note names. Rows of plain decoding say whether
accept lengths count the bonus token: theirs is 1 or 0.
"""

from collections.abc import Mapping
from typing import Any

from adasim.importers.acceptance import acceptance
from adasim.importers.bonus import bonus_of, tau_of
from adasim.importers.cells import NAMED, understood
from adasim.importers.checks import run_of
from adasim.importers.columns import column_of, variant_of
from adasim.importers.fields import Malformed, number, whole
from adasim.importers.head import Head
from adasim.importers.lengths import lengths_of
from adasim.importers.runs import recognises as imported
from adasim.importers.shapes import Cells, rows_of, variants_of
from adasim.importers.sink import Sink
from adasim.importers.source import Source
from adasim.importers.tables import AcceptanceRow, RunRow
from adasim.importers.vllm_bench import falling

MEASURES = {"output_tok_s", "tok_s_user", "tau", "tpot_mean_ms", "tpot_p50_ms", "ttft_p50_ms", "ttft_mean_ms", "accepted"}
LOADS = {"concurrency", "k", "steps", "policy", "verify_len", "domain"}


def recognises(head: Head) -> bool:
    """A table with a measure, and a load or length to set it against; or metrics row by row."""
    if len(head.columns) < 2 or "ms" in map(column_of, head.columns) or imported(head):
        return False
    names = {column_of(c) or c for c in head.columns} | {variant_of(c)[0] for c in head.columns}
    return bool(names & MEASURES and names & LOADS) or bool({"metric", "best_k"} & names)


def read(source: Source, sink: Sink) -> None:
    """Fill runs, and survival where positions are given."""
    run = 0
    seen: set[RunRow] = set()
    rows = [*rows_of(source)]
    bonus = bonus_of(source, (cells for _, cells in rows))
    for line, cells in rows:
        with source.guard(line):
            for label, variant in variants_of(cells):
                row, survival = run_row(source, variant, label, run, bonus)
                if not row.k and row.k is not None and not survival:  # plain decoding stands beside every k
                    if row._replace(run=0) in seen:
                        source.note("plain decoding is repeated for every length: kept once")
                        continue
                    seen.add(row._replace(run=0))
                sink.add(run_of(source, row))
                sink.extend(AcceptanceRow(source.name, run, row.label, i, s, row.rounds) for i, s in survival)
                run += 1


def run_row(
    source: Source, cells: Cells, label: str, run: int, bonus: bool | None
) -> tuple[RunRow, list[tuple[int, float]]]:
    """A cell of the table, and survival by position where it is given; ``bonus``: accept lengths count it."""
    values, said = understood(source, cells)
    k, depth = lengths_of(values, said, label)
    rate = number(values, "acceptance_rate", high=100)
    rounds, drafted = whole(values, "rounds"), whole(values, "drafted")
    accepted = whole(values, "accepted")
    if k is None and rounds and drafted:
        k = depth = round(drafted / rounds)
    if rounds is None and drafted and k:
        rounds = round(drafted / k)
    tau = tau_of(source, values, k, bonus)
    if k == 0:
        rate = rounds = drafted = accepted = None
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
    survival = [] if k == 0 else _survival(values)
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
    context = number(values, "context")
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
        context=context or None,
        **measured,
    )
    if "best_k" in values:
        source.note("lengths that others chose, not measurements")
    elif tok_s is None and found.tau is None and duration is None and not any(v is not None for v in measured.values()):
        raise Malformed("no measure in this row: tokens per second, accept length or a latency")
    return row, survival


def _survival(values: Mapping[str, str]) -> list[tuple[int, float]]:
    """Positions, from 1, and their survival."""
    names = {int(n.removeprefix("position_")): n for n in values if n.startswith("position_")}
    shares = [(i, number(values, names[i], high=1)) for i in sorted(names)]
    known = [(i, s) for i, s in shares if s is not None]
    falling([s for _, s in known], "positions")
    return known
