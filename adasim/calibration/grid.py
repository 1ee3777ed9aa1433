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
        extrapolate: go on with the outermost slope instead of refusing; look-ups outside are counted.
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
        self.outside: dict[str, tuple[int, float]] = {}  # label -> look-ups, farthest

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
            self._leave(axis, value)
        if last == 0:
            return 0, 0.0
        i = min(max(bisect_left(points, value) - 1, 0), last - 1)
        return i, (value - points[i]) / (points[i + 1] - points[i])

    def _leave(self, axis: int, value: float) -> None:
        points, label = self.axes[axis], self.labels[axis]
        if not self.extrapolate or len(points) == 1:
            raise InputError(
                f"{self.name}: {label} {value:g} is outside the measured {points[0]:g}..{points[-1]:g}; "
                f"measure it, or set cost.extrapolate: true"
            )
        edge = points[0] if value < points[0] else points[-1]
        count, farthest = self.outside.get(label, (0, edge))
        self.outside[label] = (count + 1, max(farthest, value, key=lambda x: abs(x - edge)))
