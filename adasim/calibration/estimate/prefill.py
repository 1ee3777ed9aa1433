"""Seconds of prefills."""

from collections.abc import Sequence

import numpy as np

from adasim.calibration.cost import LinearPrefill
from adasim.calibration.estimate.part import FittedPart, residual
from adasim.calibration.estimate.recording import RecordedTrial
from adasim.calibration.estimate.steps import Speed, cells, machine_speed, prefills_table
from adasim.calibration.estimate.terms import fit_terms

LEAST = 3  # prefills; fewer say nothing
EDGES = (64, 256, 1024)  # prompt tokens of a step


def fit_prefill(trials: Sequence[RecordedTrial], seed: int = 0, speed: Speed | None = None) -> FittedPart[LinearPrefill]:
    """Prefill time = base + per token, of steps that do nothing else. Scheduling pauses before them are counted.

    Beside a drafter, which takes the prompt in, where such were recorded; a note says how much shorter others are. Too
    few prefills: not modelled, and a note.
    """
    speed = speed or machine_speed(trials)
    rows = prefills_table(trials)
    table = cells(rows, "prefill_s", ("drafter_loaded",)) if len(rows) else None
    if table is None or table["count"].sum() < LEAST:
        return FittedPart(LinearPrefill(), notes=["prefill: too few were recorded; not modelled"])
    table = table.assign(ms=speed.steady_ms(table, "prefill_s"))
    loaded = table["drafter_loaded"].astype(bool)
    others = table[~loaded] if table["count"][loaded].sum() >= LEAST else table[:0]
    table = table.drop(others.index)
    tokens = table["tokens"].to_numpy()
    columns = {"per_token_ms": tokens, "base_ms": np.ones(len(table))}
    constants, intervals, notes, fitted, width = fit_terms(table, columns, "prefill", seed, speed)
    off = fitted / table["ms"].to_numpy() - 1
    place = np.searchsorted(EDGES, tokens)
    if len(others):
        says = constants["base_ms"] + constants["per_token_ms"] * others["tokens"].to_numpy()
        more = float(np.median(others["ms"].to_numpy() / says)) - 1
        notes.append(f"prefill: as beside a drafter; without one it takes {more:+.0%}, which is not modelled")
    names = ["up to 64", "65-256", "257-1024", "over 1024"]
    residuals = [residual("prefill", f"{names[i]} prompt tokens", off[place == i]) for i in np.unique(place)]
    return FittedPart(
        LinearPrefill(**constants),
        intervals,
        residuals,
        {"prefill tokens": (float(tokens.min()), float(tokens.max()))},
        {"prefills": int(table["count"].sum())},
        notes,
        float(np.hypot(np.median(np.abs(off)), width)),
        {"prefill": table[["block", "tokens", "ms", "count"]].assign(fitted_ms=fitted)},
    )
