"""Throughput and acceptance tables people write (CSV): batch or concurrency x k -> tokens per second, accept length.

Columns are known by their names (``columns.py``), in any order and shape (``shapes.py``). Those that hold no number
become the run's label, and so do numbers that are not understood, which a note names.
"""

import re
from collections.abc import Mapping
from typing import Any

from adasim.importers.checks import acceptance, run_of
from adasim.importers.columns import BASELINE, column_of, k_of, variant_of
from adasim.importers.fields import Malformed, needed, number, whole
from adasim.importers.head import Head
from adasim.importers.shapes import is_number, rows_of, variants_of
from adasim.importers.sink import Sink
from adasim.importers.source import Source
from adasim.importers.tables import AcceptanceRow, RunRow
from adasim.importers.vllm_bench import falling

MEASURES = {"output_tok_s", "tok_s_user", "tau", "tpot_mean_ms", "tpot_p50_ms", "ttft_p50_ms", "ttft_mean_ms", "accepted"}
LOADS = {"concurrency", "k", "steps", "policy", "verify_len", "domain"}
LENGTHS = ("k", "best_k", "steps")
NAMED = {"policy", "model", "dataset"}  # labels that need no name


def recognises(head: Head) -> bool:
    """A table with a measure, and a load or length to set it against; or metrics row by row."""
    if len(head.columns) < 2 or {"ms"} & {column_of(c) for c in head.columns}:
        return False
    names = {column_of(c) or c for c in head.columns} | {variant_of(c)[0] for c in head.columns}
    return bool(names & MEASURES and names & LOADS) or bool({"metric", "best_k"} & names)


def read(source: Source, sink: Sink) -> None:
    """Fill runs, and survival where positions are given."""
    run = 0
    seen: set[RunRow] = set()
    for line, cells in rows_of(source):
        with source.guard(line):
            for label, variant in variants_of(cells):
                row, survival = run_row(source, variant, label, run)
                if not row.k and row.k is not None and not survival:  # plain decoding stands beside every k
                    if row._replace(run=0) in seen:
                        source.note("plain decoding is repeated for every length: kept once")
                        continue
                    seen.add(row._replace(run=0))
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
        if known == "concurrency" and "best_k" in map(column_of, cells) and not is_number(cell):
            said[name] = cell  # a range of loads
        elif known is None or known in NAMED:
            if cell:
                said[known or name] = cell
            if known is None and is_number(cell):
                source.note(f"column {name} is not understood: it is kept in the label")
        elif cell:
            if known not in LENGTHS:  # a length may be a word: autospec
                number(cells, name)
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
    for column in LENGTHS:
        cell = values.get(column)
        if cell and not is_number(cell):
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


def _survival(values: Mapping[str, str]) -> list[tuple[int, float]]:
    """Positions, from 1, and their survival."""
    names = {int(n.removeprefix("position_")): n for n in values if n.startswith("position_")}
    shares = [(i, number(values, names[i], high=1)) for i in sorted(names)]
    known = [(i, s) for i, s in shares if s is not None]
    falling([s for _, s in known], "positions")
    return known
