"""Fits of plain sums of terms, with intervals: what draft, prefill and overhead share."""

import numpy as np
import pandas as pd

from adasim.calibration.estimate.part import DRAWS, LEAST_RUNS, interval, weights
from adasim.calibration.estimate.regression import fit, independent
from adasim.calibration.estimate.steps import Speed
from adasim.calibration.interval import Estimate
from adasim.types import FloatArray


def fit_terms(
    table: pd.DataFrame, columns: dict[str, FloatArray], part: str, seed: int, speed: Speed
) -> tuple[dict[str, float], dict[str, Estimate], list[str], FloatArray, float]:
    """Constants of ``ms`` as a sum of ``columns``, those first in line preferred where some cannot be told apart.

    Args:
        table: columns ms, count, block, one row a cell.
        columns: name of the constant -> what it multiplies, [rows].
        part: what intervals are named after.
        seed: of the bootstrap.
        speed: of the machine; how well its usual value is known widens all intervals.

    Returns:
        Constants, intervals, notes, fitted milliseconds [rows], relative half-width of predictions.
    """
    names = list(columns)
    terms, ms = np.stack(list(columns.values()), axis=1), table["ms"].to_numpy()
    used = independent(terms, names, ms)
    count = np.sqrt(table["count"].to_numpy(dtype=float))
    found = fit(terms[:, used], ms, count)
    by_run = table["block"].nunique() >= LEAST_RUNS
    group, known = pd.factorize(table["block"] if by_run else np.arange(len(table)))
    drawn = []
    other_ms = ms * speed.cases(table, seed, DRAWS)
    for w, mine in zip(weights(len(known), seed, DRAWS), other_ms, strict=True):
        weight = count * w[group]
        kept = weight > 0
        drawn.append(fit(terms[kept][:, used], mine[kept], weight[kept]))
    draws = np.array(drawn)
    how = f"bootstrap over {len(known)} {'runs' if by_run else 'cells of few runs'}"
    constants = dict.fromkeys(names, 0.0) | {names[i]: float(v) for i, v in zip(used, found, strict=True)}
    intervals = {}
    for j, i in enumerate(used):
        intervals[f"{part}.{names[i]}"] = interval(float(found[j]), draws[:, j], len(known), how, (0.0, np.inf))
    absent = [n for i, n in enumerate(names) if i not in used and np.abs(terms[:, i]).max() > 0]
    never = [n for i, n in enumerate(names) if np.abs(terms[:, i]).max() == 0]
    notes = [f"{part}: {', '.join(absent)} cannot be told from the other terms here, taken as 0"] * bool(absent)
    notes += [f"{part}: {', '.join(never)}: no such step was recorded, taken as 0"] * bool(never)
    fitted = terms[:, used] @ found
    spread = np.abs(terms[:, used] @ draws.T / np.maximum(fitted, 1e-12)[:, None] - 1)
    return constants, intervals, notes, fitted, float(1.96 * np.median(spread))
