"""Measured cells as a table, where they make a grid."""

import numpy as np
import pandas as pd

from adasim.calibration.cost import Point, TableCost
from adasim.calibration.estimate.part import trimmed
from adasim.types import FloatArray

APART = 0.35  # of logarithms: contexts further apart are different points of the grid


def make_table(table: pd.DataFrame) -> tuple[TableCost, float] | None:
    """A table where the cells make a grid, and its error where every inner cell is interpolated from its neighbours."""
    logs = np.log(table["context"].to_numpy())
    order = np.sort(logs)
    edges = (order[1:] + order[:-1])[np.diff(order) > APART] / 2
    level = np.searchsorted(edges, logs)
    length = (table["tokens"] / table["batch"]).round(2)
    rows = table.assign(level=level, length=length)
    if any(np.ptp(part) > 2 * APART for _, part in pd.Series(logs).groupby(level)):
        return None
    where = ["batch", "length", "level"]
    at = rows.groupby(where)["ms"].median()
    axes = [sorted(at.index.get_level_values(k).unique()) for k in where]
    if len(at) != np.prod([len(a) for a in axes]) or len(axes[0]) < 2 or len(axes[1]) < 3:
        return None
    context = np.exp(rows.groupby("level")["context"].apply(lambda c: np.log(c).mean())).round(1)
    points = [
        Point(
            batch=int(b),
            tokens_per_request=float(n),
            context=float(context[c]) if len(axes[2]) > 1 else None,
            ms=float(ms),
        )
        for (b, n, c), ms in zip(at.index.to_list(), at.to_list(), strict=True)
    ]
    values = at.to_numpy().reshape([len(a) for a in axes])
    inner = []
    for axis in (0, 1):
        x = np.array(axes[axis], dtype=float)
        v = np.moveaxis(values, axis, 0)
        for i in range(1, len(x) - 1):
            share = (x[i] - x[i - 1]) / (x[i + 1] - x[i - 1])
            inner.append(np.abs(((1 - share) * v[i - 1] + share * v[i + 1]) / v[i] - 1).ravel())
    return TableCost(points=points, extrapolate=True), trimmed(np.concatenate(inner)) if inner else np.inf


def looked_up(model: TableCost, table: pd.DataFrame) -> FloatArray:
    """Milliseconds of each row."""
    asked = zip(table["batch"].round().astype(int), table["tokens"].round().astype(int), table["context"], strict=True)
    return np.array([1e3 * model.verify_s(b, t, c) for b, t, c in asked])
