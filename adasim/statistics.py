"""Intervals for simulation output: replications, batch means, paired ratios; and where the warm-up ends."""

from math import exp, inf, nan, sqrt
from typing import NamedTuple

import numpy as np

from adasim.types import FloatArray

CONFIDENCE = 0.95
BATCHES = 20  # of one run; Schmeiser (1982): more than 30 gain little, fewer than 10 cost much
MSER_BATCH = 5  # observations
MSER_LEAST = 10  # batches; fewer say nothing


class Interval(NamedTuple):
    """An estimate and the limits of its confidence interval; NaN where there is none."""

    estimate: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of the distance between the limits."""
        return (self.high - self.low) / 2


def t_interval(values: FloatArray, confidence: float = CONFIDENCE, *, series: bool = False) -> Interval:
    """Student's interval of a mean, [n] values; NaNs are left out.

    Args:
        values: one a replication, or one a batch of a single run.
        confidence: of the interval.
        series: the values follow each other in time. The interval is then widened by sqrt((1 + r) / (1 - r)), r their
            lag-1 correlation (0 when below), the correction of Steiger et al. (ASAP, 2005) and Tafazzoli et al.
            (Skart, 2011): what is left when batches are too short.
    """
    known = values[~np.isnan(values)]
    n = len(known)
    if n < 2:
        return Interval(float(known[0]) if n else nan, nan, nan)
    mean, variance = float(known.mean()), float(known.var(ddof=1)) / n
    if series and variance > 0:
        r = min(max(lag1(known), 0.0), 0.99)
        variance *= (1 + r) / (1 - r)
    width = _quantile(n, confidence) * sqrt(variance)
    return Interval(mean, mean - width, mean + width)


def lag1(values: FloatArray) -> float:
    """Correlation of neighbours in a series, [n]; 0 when constant."""
    centred = values - values.mean()
    total = float(centred @ centred)
    return float(centred[1:] @ centred[:-1]) / total if total > 0 else 0.0


def ratio_interval(
    over: FloatArray, under: FloatArray, confidence: float = CONFIDENCE, *, series: bool = False
) -> Interval:
    """How many times larger ``over`` is than ``under``, paired: [n] each.

    Positive values: the geometric mean of the ratios, with the t-interval of their logarithms, so that exchanging the
    two inverts it. Where a value is 0 or below: the ratio of the means with Fieller's interval (1954), which may be
    unbounded. ``series`` as in :func:`t_interval`, for positive values only: Fieller's takes batches as independent.
    """
    both = ~(np.isnan(over) | np.isnan(under))
    a, b = over[both], under[both]
    if not len(a):
        return Interval(nan, nan, nan)
    if (a > 0).all() and (b > 0).all():
        logs = t_interval(np.log(a) - np.log(b), confidence, series=series)
        return Interval(*(x if np.isnan(x) else exp(x) for x in logs))
    return _fieller(a, b, confidence)


def _fieller(a: FloatArray, b: FloatArray, confidence: float) -> Interval:
    """Fieller's interval of mean(a) / mean(b), paired."""
    n, mean_a, mean_b = len(a), float(a.mean()), float(b.mean())
    ratio = mean_a / mean_b if mean_b else nan
    if n < 2 or np.isnan(ratio):
        return Interval(ratio, nan, nan)
    (aa, ab), (_, bb) = np.cov(a, b, ddof=1) / n
    scale = (_quantile(n, confidence) / mean_b) ** 2
    g = scale * bb
    if g >= 1:  # the denominator may be 0
        return Interval(ratio, -inf, inf)
    middle = (ratio - scale * ab) / (1 - g)
    width = sqrt(max(scale * (aa - 2 * ratio * ab + ratio**2 * bb - scale * (aa * bb - ab**2)), 0.0)) / (1 - g)
    return Interval(ratio, middle - width, middle + width)


def mser5(series: FloatArray) -> int | None:
    """How many observations at the start of a run are warm-up: White's rule MSER-5 (1997).

    Over batches of five, the cut d that makes var(rest) / len(rest) least: more would throw good data away, less would
    keep the bias. None: the run is too short to tell (fewer than ten batches, or the least lies in its second half).
    """
    usable = len(series) // MSER_BATCH * MSER_BATCH
    z = series[:usable].reshape(-1, MSER_BATCH).mean(axis=1)
    if len(z) < MSER_LEAST:
        return None
    z = z - z.mean()
    left = np.arange(len(z), 0, -1)
    total, squares = np.cumsum(z[::-1])[::-1], np.cumsum(z[::-1] ** 2)[::-1]
    spread = (squares - total**2 / left) / left**2
    cut = int(np.argmin(np.round(spread[: len(z) - MSER_BATCH + 1], 15)))  # the last few vary too little to be trusted
    return MSER_BATCH * cut if cut <= len(z) // 2 else None


def simultaneous(comparisons: int, confidence: float = CONFIDENCE) -> float:
    """Confidence of each interval so that all hold together (Bonferroni)."""
    return 1 - (1 - confidence) / max(comparisons, 1)


def _quantile(n: int, confidence: float) -> float:
    from scipy.special import stdtrit  # slow to import, not always needed

    return float(stdtrit(n - 1, (1 + confidence) / 2))


def relative(interval: Interval) -> Interval:
    """A ratio as a gain: 1.2 -> +0.2."""
    return Interval(*(x - 1 for x in interval))
