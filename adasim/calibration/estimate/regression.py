"""Times as sums of terms, none below 0, robustly."""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from adasim.types import FloatArray

HUBER = 1.345  # standard deviations beyond which a residual counts less; 95 % efficient on normal noise
STEPS = 6


def fit(terms: FloatArray, values: FloatArray, weights: FloatArray) -> FloatArray:
    """Coefficients >= 0, [terms], that make terms @ coefficients / values near 1: Huber's rule on relative errors.

    Args:
        terms: [rows, terms].
        values: measured, > 0, [rows].
        weights: how much each row counts, [rows].
    """
    design = terms / values[:, None]
    scale = np.maximum(np.abs(design).max(axis=0), 1e-300)  # nnls is no friend of columns of very different size
    weight = weights
    found = np.zeros(terms.shape[1])
    for _ in range(STEPS):
        root = np.sqrt(weight)
        found = nnls(design / scale * root[:, None], root)[0] / scale
        off = design @ found - 1
        spread = 1.4826 * _median(np.abs(off), weights)
        if spread < 1e-9:
            break
        weight = weights * np.minimum(1.0, HUBER * spread / np.maximum(np.abs(off), 1e-12))
    return found


def independent(terms: FloatArray, names: Sequence[str], values: FloatArray) -> list[int]:
    """Indices of terms, the first ones preferred, that can be told apart on these rows."""
    design = terms / values[:, None]
    design = design / np.maximum(np.linalg.norm(design, axis=0), 1e-300)
    kept: list[int] = []
    for i in range(len(names)):
        if not np.abs(terms[:, i]).max() > 0:
            continue
        one = design[:, [*kept, i]]
        if np.linalg.svd(one, compute_uv=False)[-1] > 0.02:
            kept.append(i)
    return kept


def _median(values: FloatArray, weights: FloatArray) -> float:
    order = np.argsort(values)
    at = np.searchsorted(np.cumsum(weights[order]), weights.sum() / 2)
    return float(values[order[min(at, len(values) - 1)]])
