"""Confidences of earlier rounds, for decisions that cannot wait for the present ones."""

from collections import deque

import numpy as np

from adasim.kernels import kernels
from adasim.types import FloatArray, IntArray


class StaleCurves:
    """Keeps the curves of the last rounds and gives back those of ``steps`` rounds ago for today's requests.

    Args:
        steps: age in rounds; 0 = the present curves.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._kept: deque[tuple[IntArray, FloatArray]] = deque(maxlen=steps + 1)

    def swap(self, request_ids: IntArray, curves: FloatArray) -> FloatArray | None:
        """Store the present curves [n, K]; get the old ones for the same requests [n, K], None before there are any.

        Requests that were not there get the mean curve of those that were.
        """
        if not self._steps:
            return curves
        self._kept.append((request_ids, np.ascontiguousarray(curves)))
        if len(self._kept) <= self._steps:
            return None
        ids, old = self._kept[0]
        if ids is request_ids:  # a batch keeps its array while nobody comes or goes
            return old
        carried = np.empty_like(curves)
        kernels().carry(ids, old, request_ids, carried)
        return carried
