"""How much longer verification takes where requests verify different lengths."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from adasim.calibration.estimate.part import interval, weights
from adasim.calibration.interval import Estimate
from adasim.types import FloatArray

LEAST_PAIRS = 4  # ragged cells that have equal lengths beside them
ALIKE = 1.25  # ratio of contexts that count as one
WIDEST = 1.6  # ratio of the token counts between which equal lengths are interpolated


def ragged_share(table: pd.DataFrame, seed: int) -> Estimate | None:
    """The share by which ragged passes take longer than equal lengths of as many tokens; None: too few to compare.

    Each is compared with equal lengths of the same batch and about the same context, linearly between the nearest token
    counts on either side; the median counts. What cannot be told from 0 is 0.

    Args:
        table: cells with batch, tokens, context, drafter_loaded, ragged, ms, block.
        seed: of the bootstrap.
    """
    even, uneven = table[~table["ragged"]], table[table["ragged"]]
    ratios = np.array([_ratio(row, even) for row in uneven.to_dict("records")], dtype=np.float64)
    known = np.isfinite(ratios)
    if known.sum() < LEAST_PAIRS:
        return None
    found, (block, names) = ratios[known], pd.factorize(uneven["block"][known])
    draws = np.array([_median(found, w[block]) for w in weights(len(names), seed)])
    how = f"{len(found)} ragged cells beside equal lengths, bootstrap over {len(names)} runs"
    share = interval(max(float(np.median(found)) - 1, 0.0), draws - 1, len(names), how, (0.0, 10.0))
    return share if share.low > 0 else share.model_copy(update={"value": 0.0})


def _ratio(row: Mapping[Any, Any], even: pd.DataFrame) -> float:
    """Of a ragged cell to equal lengths; NaN: none are near."""
    near = even[
        (even["batch"] == row["batch"])
        & (even["drafter_loaded"] == row["drafter_loaded"])
        & even["context"].between(row["context"] / ALIKE, row["context"] * ALIKE)
    ]
    times = near.groupby("tokens")["ms"].median()
    low, high = times[times.index <= row["tokens"]], times[times.index >= row["tokens"]]
    if low.empty or high.empty or high.index[0] > WIDEST * low.index[-1]:
        return np.nan
    ends = [low.index[-1], high.index[0]], [low.iloc[-1], high.iloc[0]]
    return float(row["ms"]) / float(np.interp(row["tokens"], *ends))


def _median(values: FloatArray, weight: FloatArray) -> float:
    order = np.argsort(values)
    share = np.cumsum(weight[order])
    return float(values[order][np.searchsorted(share, share[-1] / 2)])
