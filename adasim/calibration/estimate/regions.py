"""How far a fit is off, by batch and tokens a request."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from adasim.calibration.estimate.part import residual
from adasim.calibration.interval import Residual
from adasim.types import FloatArray

BATCHES, LENGTHS = (1, 4, 16, 64), (1, 4, 8)  # upper ends of regions


def regions(part: str, table: pd.DataFrame, fitted_ms: FloatArray) -> list[Residual]:
    """Errors by batch and tokens a request."""
    batch = np.searchsorted(BATCHES, table["batch"])
    length = np.searchsorted(LENGTHS, (table["tokens"] / table["batch"]).round(3))
    off = fitted_ms / table["ms"].to_numpy() - 1
    out = []
    for b, n in sorted(set(zip(batch.tolist(), length.tolist(), strict=True))):
        region = f"batch {_between(BATCHES, b)}, {_between(LENGTHS, n)} tokens a request"
        out.append(residual(part, region, off[(batch == b) & (length == n)]))
    return out


def _between(edges: Sequence[int], i: int) -> str:
    if i == 0:
        return f"{edges[0]}"
    return f"{edges[i - 1] + 1}-{edges[i]}" if i < len(edges) else f"over {edges[-1]}"
