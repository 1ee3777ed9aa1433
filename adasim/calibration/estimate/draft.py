"""Seconds of drafting."""

from collections.abc import Sequence

import numpy as np

from adasim.calibration.cost import LinearDraft
from adasim.calibration.estimate.part import FittedPart
from adasim.calibration.estimate.recording import RecordedTrial
from adasim.calibration.estimate.regions import regions
from adasim.calibration.estimate.steps import Speed, cells, machine_speed, rounds_table
from adasim.calibration.estimate.terms import fit_terms

HEADS = ("head_ms", "head_per_request_ms")  # of Overhead
CONTEXT_MATTERS = 0.1  # correlation of what is left with the context, beyond which a note tells


def fit_draft(trials: Sequence[RecordedTrial], seed: int = 0, speed: Speed | None = None) -> FittedPart[LinearDraft]:
    """Draft time = base + per request + per position (anchors counted), one pass a round.

    What heads take while drafting is told apart and left for the overhead (``extra``). Runs without drafts: all 0, and a
    note.
    """
    speed = speed or machine_speed(trials)
    table = cells(rounds_table(trials), "draft_s", ("reads",))
    table = table[table["positions"] > 0]
    if table.empty:
        return FittedPart(LinearDraft(), notes=["draft: no round drafted; drafting is taken to be free"])
    table = table.assign(ms=speed.steady_ms(table, "draft_s"))
    reads = (table["reads"] != "").to_numpy(dtype=float)
    columns = {
        "base_ms": np.ones(len(table)),
        "per_position_ms": table["positions"].to_numpy(),
        "per_request_ms": table["drafting"].to_numpy(),
        "head_ms": reads,
        "head_per_request_ms": reads * table["batch"].to_numpy(),
    }
    constants, intervals, notes, fitted, width = fit_terms(table, columns, "draft", seed, speed)
    off = fitted / table["ms"].to_numpy() - 1
    logs = np.log(table["context"].to_numpy())
    if len(table) >= 8 and logs.std() > 0.2:
        slope = float(np.polyfit(logs, off, 1)[0])
        if abs(slope) > CONTEXT_MATTERS:
            notes.append(
                f"draft: time also depends on context, which its form leaves out (error {slope:+.0%} per e-fold)"
            )
    error = float(np.hypot(np.median(np.abs(off)), width))
    heads = {name: constants.pop(name) for name in HEADS}
    kinds = sorted(set(table["reads"]) - {""})
    if len(kinds) > 1:
        notes.append(f"draft: heads cost the same whether asked for {' or '.join(kinds)}: fitted together")
    points = table[["block", "batch", "positions", "context", "ms", "count"]].assign(fitted_ms=fitted)
    return FittedPart(
        LinearDraft.model_validate(constants),
        intervals,
        regions("draft", table, fitted),
        {"draft positions": (float(table["positions"].min()), float(table["positions"].max()))},
        {"draft passes": int(table["count"].sum())},
        notes,
        error,
        {"draft": points},
        heads,
    )
