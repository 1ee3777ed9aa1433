"""Seconds of drafting."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from adasim.calibration.cost import LinearDraft
from adasim.calibration.estimate.part import FittedPart
from adasim.calibration.estimate.recording import RecordedTrial
from adasim.calibration.estimate.regions import regions
from adasim.calibration.estimate.steps import Speed, cells, machine_speed, rounds_table
from adasim.calibration.estimate.terms import fit_terms
from adasim.calibration.interval import Estimate
from adasim.types import FloatArray

HEADS = ("head_ms", "head_per_request_ms")  # of Overhead
CONTEXT_MATTERS = 0.1  # correlation of what is left with the context, beyond which a note tells


def fit_draft(trials: Sequence[RecordedTrial], seed: int = 0, speed: Speed | None = None) -> FittedPart[LinearDraft]:
    """Draft time = base + per request + per position (anchors counted), one pass a round.

    What heads take while drafting is told apart and left for the overhead (``extra``). Runs without drafts: all 0, and a
    note.
    """
    speed = speed or machine_speed(trials)
    rows = rounds_table(trials)
    table = _cells(rows, speed)
    if table.empty:
        return FittedPart(LinearDraft(), notes=["draft: no round drafted; drafting is taken to be free"])
    drafts = rows[rows["positions"] > 0]
    some = drafts.groupby("trial")["reads_head"].transform("nunique") > 1
    heads = dict[str, float]()
    told: dict[str, Estimate] = {}
    if some.any():  # runs whose rounds differ in that alone tell it from what else differs between runs
        apart = _cells(drafts[some], speed)
        found, limits, _, _, _ = fit_terms(apart, _columns(apart), "draft", seed, speed)
        heads = {name: found[name] for name in HEADS}
        told = {n: at for n, at in limits.items() if n.removeprefix("draft.") in HEADS}
        beside = sum(heads[name] * _columns(table)[name] for name in HEADS)
        table = table.assign(ms=np.maximum(table["ms"] - beside, 0.1 * table["ms"]))
    columns = {name: c for name, c in _columns(table).items() if name not in heads}
    constants, intervals, notes, fitted, width = fit_terms(table, columns, "draft", seed, speed)
    intervals |= told
    heads = heads or {name: constants.pop(name) for name in HEADS}
    kinds = sorted(set(table["reads"]) - {""})
    if len(kinds) > 1:
        notes.append(f"draft: heads cost the same whether asked for {' or '.join(kinds)}: fitted together")
    off = fitted / table["ms"].to_numpy() - 1
    logs = np.log(table["context"].to_numpy())
    if len(table) >= 8 and logs.std() > 0.2:
        slope = float(np.polyfit(logs, off, 1)[0])
        if abs(slope) > CONTEXT_MATTERS:
            notes.append(
                f"draft: time also depends on context, which its form leaves out (error {slope:+.0%} per e-fold)"
            )
    error = float(np.hypot(np.median(np.abs(off)), width))
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


def _cells(rows: pd.DataFrame, speed: Speed) -> pd.DataFrame:
    """Rounds that drafted, as on the machine at its usual speed."""
    table = cells(rows, "draft_s", ("reads",))
    table = table[table["positions"] > 0]
    return table.assign(ms=speed.steady_ms(table, "draft_s"))


def _columns(table: pd.DataFrame) -> dict[str, FloatArray]:
    """What each constant multiplies, [rows]."""
    reads = (table["reads"] != "").to_numpy(dtype=float)
    return {
        "base_ms": np.ones(len(table)),
        "per_position_ms": table["positions"].to_numpy(dtype=float),
        "per_request_ms": table["drafting"].to_numpy(dtype=float),
        "head_ms": reads,
        "head_per_request_ms": reads * table["batch"].to_numpy(dtype=float),
    }
