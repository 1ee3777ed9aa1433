"""What an estimator hands back."""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from adasim.calibration.interval import Estimate, Residual
from adasim.types import FloatArray

Model = TypeVar("Model")
DRAWS = 200  # bootstrap samples
Z = 1.959964  # of 95 %
LEAST_RUNS = 4  # to resample whole runs; with fewer, cells are, which says nothing of the host's drift
TRIM = 0.05  # share of the largest errors that averages leave out: outliers of the clock are not the model's fault


@dataclass(slots=True)
class FittedPart(Generic[Model]):
    """A component fitted to recorded runs.

    Attributes:
        model: the component.
        intervals: of its parameters, by name.
        residuals: by region.
        ranges: lowest and highest value of each input it was fitted on.
        counts: of what it was fitted on.
        notes: what a report must say: what could not be told, what was left out.
        error: relative error to expect of it (cost: of its times; acceptance: of tau); NaN = unknown.
        points: measured against fitted, for pictures.
        extra: constants that belong into other parts.
        held_out: relative error on what was left out of the fit, where that was tried; NaN = it was not.
    """

    model: Model
    intervals: dict[str, Estimate] = field(default_factory=dict)
    residuals: list[Residual] = field(default_factory=list)
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    error: float = float("nan")
    points: dict[str, pd.DataFrame] = field(default_factory=dict)
    extra: dict[str, float] = field(default_factory=dict)
    held_out: float = float("nan")


def weights(groups: int, seed: int = 0, draws: int = DRAWS) -> FloatArray:
    """How often each of ``groups`` is drawn in each bootstrap sample, [draws, groups]."""
    rng = np.random.default_rng([seed, groups])
    return rng.multinomial(groups, np.full(groups, 1 / groups), size=draws).astype(np.float64)


def interval(
    value: float,
    draws: FloatArray,
    groups: int,
    how: str,
    limits: tuple[float, float] = (-np.inf, np.inf),
    *,
    extra: float = 0.0,
) -> Estimate:
    """A percentile interval, widened for few groups, within ``limits``.

    Few groups make bootstrap samples too much alike: distances from ``value`` grow by t(groups - 1) / z and
    sqrt(n / (n - 1)). One group says nothing: the interval is all of ``limits``.

    Args:
        value: the estimate.
        draws: of it, one a bootstrap sample; NaNs are left out.
        groups: that were resampled.
        how: for the reader.
        limits: that the parameter can take.
        extra: a half-width added to both sides (what no resampling sees).
    """
    known = draws[np.isfinite(draws)]
    if groups < 2 or len(known) < 20:
        low, high = limits
    else:
        wider = float(stdtrit(groups - 1, 0.975)) / Z * np.sqrt(groups / (groups - 1))
        low, high = value + wider * (np.quantile(known, [0.025, 0.975]) - value)
        low, high = min(float(low), value) - extra, max(float(high), value) + extra
    big = 1e12  # files hold no infinities
    return Estimate(
        value=float(value),
        low=float(np.clip(low, max(limits[0], -big), limits[1])),
        high=float(np.clip(high, limits[0], min(limits[1], big))),
        how=how,
    )


def trimmed(errors: FloatArray, weight: FloatArray | None = None) -> float:
    """Mean of the smallest 95 % of errors, NaNs left out, by ``weight`` where it is given."""
    known, w = errors[np.isfinite(errors)], np.ones(len(errors)) if weight is None else weight
    w = w[np.isfinite(errors)]
    order = np.argsort(known)
    kept = order[: max(1, round(len(known) * (1 - TRIM)))]
    return float(np.average(known[kept], weights=w[kept]))


def residual(part: str, region: str, off: FloatArray) -> Residual:
    """Of one region, from fitted / measured - 1."""
    return Residual(part=part, region=region, error=trimmed(np.abs(off)), bias=float(np.median(off)), count=len(off))
