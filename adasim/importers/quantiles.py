"""Mean and percentiles of a stream in bounded memory."""

import math
from array import array
from collections import Counter

import numpy as np

from adasim.types import FloatArray

EXACT = 100_000
WIDTH = 0.002  # relative width of a bin beyond that
ZERO = -(10**9)  # the bin of zeros


class Quantiles:
    """Exact up to 100,000 values (numpy's linear interpolation); beyond, within 0.2 % by logarithmic bins."""

    def __init__(self) -> None:
        self.count = 0
        self._sum = 0.0
        self._values = array("d")
        self._bins: Counter[int] = Counter()

    def add(self, value: float) -> None:
        """One more value >= 0."""
        self.extend(np.array([value]))

    def extend(self, values: FloatArray) -> None:
        """More values >= 0."""
        self.count += len(values)
        self._sum += float(values.sum())
        self._values.frombytes(values.astype(np.float64).tobytes())
        if len(self._values) > EXACT:
            self._fold()

    @property
    def mean(self) -> float | None:
        """Their mean."""
        return self._sum / self.count if self.count else None

    def at(self, q: float) -> float | None:
        """Percentile ``q`` (0..100)."""
        if not self.count:
            return None
        if not self._bins:
            return float(np.percentile(np.frombuffer(self._values), q))
        self._fold()
        rank, seen, key = q / 100 * (self.count - 1), 0, ZERO
        for key in sorted(self._bins):
            seen += self._bins[key]
            if seen > rank:
                break
        return 0.0 if key == ZERO else math.exp((key + 0.5) * WIDTH)

    def _fold(self) -> None:
        values = np.frombuffer(self._values)
        positive = values[values > 0]
        keys, counts = np.unique(np.floor(np.log(positive) / WIDTH).astype(np.int64), return_counts=True)
        self._bins.update(dict(zip(keys.tolist(), counts.tolist(), strict=True)))
        if zeros := len(values) - len(positive):
            self._bins[ZERO] += zeros
        self._values = array("d")
