"""A dense grid of measured points, linear in between."""

from bisect import bisect_left
from collections.abc import Sequence

from adasim.errors import InputError

Axis = list[float]


class Grid:
    """Values over three named axes; an axis with one point is constant.

    Args:
        name: what messages call it.
        labels: names of the axes.
        axes: rising points of each axis.
        values: nested [a][b][c].
        extrapolate: go on with the outermost slope instead of refusing; ``outside`` tells of it.
    """

    def __init__(
        self,
        name: str,
        labels: Sequence[str],
        axes: Sequence[Axis],
        values: list[list[list[float]]],
        *,
        extrapolate: bool,
    ) -> None:
        self.name, self.labels, self.axes, self.values = name, labels, axes, values
        self.extrapolate = extrapolate
        self.outside: set[str] = set()  # labels of axes that look-ups left

    def at(self, a: float, b: float, c: float) -> float:
        """Trilinear value, not below 0.

        Raises:
            InputError: outside the grid, unless ``extrapolate``.
        """
        i, u = self._place(0, a)
        j, v = self._place(1, b)
        k, w = self._place(2, c)
        total = 0.0
        for plane, p in ((i, 1 - u), (i + 1, u)):
            if not p:
                continue
            for line, q in ((j, 1 - v), (j + 1, v)):
                if not q:
                    continue
                cells = self.values[plane][line]
                total += p * q * (cells[k] if not w else (1 - w) * cells[k] + w * cells[k + 1])
        return max(total, 0.0)

    def _place(self, axis: int, value: float) -> tuple[int, float]:
        """Cell and share within it; shares beyond 0..1 extrapolate."""
        points = self.axes[axis]
        last = len(points) - 1
        if last == 0 and axis == 2:
            return 0, 0.0  # no context axis was measured: constant
        if not points[0] <= value <= points[last]:
            self.check(axis, value)
            self.outside.add(self.labels[axis])
        if last == 0:
            return 0, 0.0
        i = min(max(bisect_left(points, value) - 1, 0), last - 1)
        return i, (value - points[i]) / (points[i + 1] - points[i])

    def check(self, axis: int, value: float) -> None:
        """Refuse a value that may not be looked up."""
        points, label = self.axes[axis], self.labels[axis]
        if points[0] <= value <= points[-1] or (self.extrapolate and len(points) > 1):
            return
        way_out = "" if len(points) == 1 else ", or set cost.extrapolate: true"
        raise InputError(
            f"{self.name}: {label} {value:g} is outside the measured {points[0]:g}..{points[-1]:g}; measure it{way_out}"
        )
