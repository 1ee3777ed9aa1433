"""Seconds of a round outside draft and verification, by what the round did."""

from collections.abc import Sequence

import numpy as np

from adasim.calibration.cost import Overhead
from adasim.calibration.estimate.part import FittedPart
from adasim.calibration.estimate.recording import RecordedTrial
from adasim.calibration.estimate.regions import regions
from adasim.calibration.estimate.steps import Speed, cells, machine_speed, rounds_table
from adasim.calibration.estimate.terms import fit_terms


def fit_overhead(trials: Sequence[RecordedTrial], seed: int = 0, speed: Speed | None = None) -> FittedPart[Overhead]:
    """What rounds pay for deciding, bookkeeping and scheduling; pauses between steps are counted.

    Rounds without any: all 0, and a note.
    """
    speed = speed or machine_speed(trials)
    table = cells(rounds_table(trials), "overhead_s", ("reads_head", "drafter_loaded"))
    if table.empty:
        return FittedPart(Overhead(), notes=["overhead: none was recorded"])
    table = table.assign(ms=speed.steady_ms(table, "overhead_s"))
    drafts = (table["positions"] > 0).to_numpy(dtype=float)
    columns = {
        "round_ms": np.ones(len(table)),
        "per_request_ms": table["batch"].to_numpy(dtype=float),
        "speculative_ms": drafts,
        "head_ms": drafts * table["reads_head"].to_numpy(),
        "head_per_request_ms": drafts * table["reads_head"].to_numpy() * table["batch"].to_numpy(),
        "per_verified_ms": drafts * table["tokens"].to_numpy(),
        "per_draft_position_ms": table["positions"].to_numpy(),
        "idle_drafter_ms": (1 - drafts) * table["drafter_loaded"].to_numpy(),
    }
    constants, intervals, notes, fitted, width = fit_terms(table, columns, "overhead", seed, speed)
    off = fitted / table["ms"].to_numpy() - 1
    kept = ["block", "batch", "tokens", "positions", "reads_head", "ms", "count"]
    return FittedPart(
        Overhead(**constants),
        intervals,
        regions("overhead", table, fitted),
        {},
        {"rounds": int(table["count"].sum())},
        notes,
        float(np.hypot(np.median(np.abs(off)), width)),
        {"overhead": table[kept].assign(fitted_ms=fitted)},
    )
