"""What length and confidence heads know of L, and what they make of it."""

from collections.abc import Sequence
from math import sqrt
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from adasim.errors import InputError
from adasim.types import Component, FloatArray

BINS_PER_TOKEN = 8
LEAST_VARIANCE = 0.01  # of L, tokens squared: where it is always the same, a look still has some noise
SIGNAL_MARGIN = 6.0  # standard deviations of head noise covered beyond 0..K
Noise = Annotated[float, Field(ge=0.05, le=30)]


class Reports(Component):
    """What the length head was seen to report in one domain, and how much it says of L.

    Attributes:
        noise: of the look at L, standard deviations of the domain's L.
        quantiles: of the reports, tokens with the anchor counted, at evenly spaced probabilities from 0 to 1.
    """

    noise: Noise
    quantiles: list[float] = Field(min_length=2)

    @model_validator(mode="after")
    def _rising(self) -> Self:
        if self.quantiles != sorted(self.quantiles):
            raise ValueError("quantiles must not fall")
        return self


class Confidence(Component):
    """A drafter's confidences in one domain: a look at L of their own, and curves that may claim more than it knows.

    A curve is the posterior of a look of equal rank among those of noise ``claims``, ``bias`` added to it. Calibrated
    when claims is noise and bias 0.

    Attributes:
        noise: of the look at L, standard deviations of the domain's L.
        claims: noise that the curves speak of, in the same unit: below ``noise`` they are too sure of themselves, above
            too unsure. null = noise.
        bias: tokens; above 0 they promise too much.
    """

    noise: Noise
    claims: Noise | None = None
    bias: float = Field(default=0.0, ge=-30, le=30)


class HeadQuality(Component):
    """How well heads know L: one noisy look at the truth, s = L + noise * N(0, 1), per request and position.

    The confidence curve is the Bayes posterior P(L >= k | s) under the domain's own distribution of L: calibrated, but
    where the length head reports in its own terms ("truth", "mean"): then s + ``bias`` is what it goes by, so that it is
    calibrated when ``bias`` is 0. The length head reports 1 + s + bias ("truth"), or as a regression trained on L would,
    1 + the mean of that posterior ("mean"): shrunk towards the domain's mean, never below 1 or above the block. ``bias``
    is in tokens; so is ``noise``, but with "mean" in standard deviations of the domain's L: a regression explains about
    the same share of it everywhere.

    "measured": a head that is miscalibrated in any way, and better in one domain than in another. Its look has the noise
    of the domain's ``measured`` times ``noise``, and it reports the quantile of the reports seen there that the look is
    of all looks there, plus ``bias``.

    ``confidence``: domains whose confidences were measured, and know more or less than the length head does; their look
    has the same luck as the head's.

    The drafter's own margin carries the same look, uncalibrated: a draft of margin m, the ones before it accepted, is
    accepted with probability sigmoid(margin_slope m + margin_intercept) (at bias 0). Published fits have slopes of
    0.44 to 0.83 and intercepts of -0.92 to -0.14 (vLLM PR 52228, six drafters): drafters are overconfident.
    """

    noise: Noise = 2.0
    bias: float = Field(default=0.0, ge=-30, le=30)
    reports: Literal["truth", "mean", "measured"] = "truth"
    measured: dict[str, Reports] | None = Field(default=None, min_length=1)
    confidence: dict[str, Confidence] | None = Field(default=None, min_length=1)
    margin_slope: float = Field(default=0.5, gt=0, le=10)
    margin_intercept: float = Field(default=-0.5, ge=-10, le=10)

    @model_validator(mode="after")
    def _told(self) -> Self:
        if (self.reports == "measured") != (self.measured is not None):
            raise ValueError('measured belongs to reports "measured", and only to it')
        return self

    def check(self, domains: Sequence[str]) -> None:
        """Refuse domains whose reports were not seen.

        Raises:
            InputError: which.
        """
        unknown = sorted(set(domains) - set(self.measured)) if self.measured is not None else []
        if unknown:
            known = ", ".join(sorted(self.measured or {}))
            raise InputError(f"acceptance.head.measured: no reports of domain {', '.join(unknown)}; there are {known}")

    def confident(self, domain: str) -> "HeadQuality":
        """The heads whose look the confidences of a domain go by."""
        own = (self.confidence or {}).get(domain)
        return self if own is None else HeadQuality(noise=own.noise, reports="mean")

    def confidences(self, survival: FloatArray, looks: FloatArray, domain: str = "") -> FloatArray:
        """Confidence curves [bins, K] where confidences go by ``looks`` [bins], for one domain's survival curve [K]."""
        own = (self.confidence or {}).get(domain)
        if own is None:
            return self.posterior(survival, looks, domain)
        claimed = HeadQuality(noise=own.claims or own.noise, reports="mean")
        among, rank = claimed.bins(len(survival)), self.confident(domain).rank(survival, looks)
        # far out, looks share a rank, or nearly, which would make the slope between them infinite
        ranks, first = np.unique(claimed.rank(survival, among).round(12), return_index=True)
        equal = np.interp(rank, ranks, among[first])
        return claimed.posterior(survival, equal + own.bias)

    def margin(self, survival: FloatArray) -> FloatArray:
        """The drafter's margins [n, K] that go with confidence curves [n, K]; at most about 20 / slope."""
        from scipy.special import logit  # slow to import, not always needed

        before = np.concatenate([np.ones((len(survival), 1)), survival[:, :-1]], axis=1)
        sure = np.divide(survival, before, out=np.zeros_like(survival), where=before > 0)
        return (logit(sure.clip(1e-9, 1 - 1e-9)) - self.margin_intercept) / self.margin_slope

    @property
    def look_bias(self) -> float:
        """Tokens by which the look itself is off."""
        return 0.0 if self.reports == "measured" else self.bias

    def sigma(self, survival: FloatArray, domain: str = "") -> float:
        """Standard deviation of the look at L, tokens, in a domain with that survival curve [K]."""
        if self.reports == "truth":
            return self.noise
        mean, square = survival.sum(), (np.arange(1, 2 * len(survival), 2) * survival).sum()  # of L
        own = self.measured[domain].noise if self.measured is not None else 1.0
        return self.noise * own * sqrt(max(float(square - mean**2), LEAST_VARIANCE))

    def posterior(self, survival: FloatArray, signal: FloatArray | None = None, domain: str = "") -> FloatArray:
        """P(L >= k | signal), [bins, K], for one domain's survival curve [K]; signals are the bins unless given."""
        mass = -np.diff(np.concatenate([[1.0], survival, [0.0]]))  # P(L = l), l = 0..K
        signal = self.bins(len(survival)) if signal is None else signal
        log_like = -(((signal[:, None] - np.arange(len(mass))) / self.sigma(survival, domain)) ** 2) / 2
        like = np.exp(log_like - log_like.max(axis=1, keepdims=True)) * mass
        at_least = np.cumsum(like[:, ::-1], axis=1)[:, ::-1]
        return at_least[:, 1:] / at_least[:, :1]

    def report(self, survival: FloatArray, domain: str = "") -> FloatArray:
        """What a length head reports that does not say what it sees, by bin of the look, the anchor counted, [bins]."""
        if self.measured is None:
            return 1 + self.posterior(survival).sum(axis=1)
        rank, seen = self.rank(survival, self.bins(len(survival)), domain), self.measured[domain].quantiles
        return np.interp(rank, np.linspace(0, 1, len(seen)), seen) + self.bias

    def rank(self, survival: FloatArray, looks: FloatArray, domain: str = "") -> FloatArray:
        """P(a look is below this one), [looks], for one domain's survival curve [K]."""
        from scipy.special import ndtr  # slow to import, not always needed

        mass, run = -np.diff(np.concatenate([[1.0], survival, [0.0]])), np.arange(len(survival) + 1)
        return np.asarray(ndtr((looks[:, None] - run) / self.sigma(survival, domain)) @ mass, dtype=np.float64)

    def bins(self, max_draft_len: int) -> FloatArray:
        """Signal values of the posterior's rows."""
        widest = 1.0 if self.reports == "truth" else max_draft_len / 2  # no L in 0..K has a larger standard deviation
        if self.measured is not None:
            widest *= max(r.noise for r in self.measured.values())
        reach = np.ceil(SIGNAL_MARGIN * self.noise * widest + abs(self.bias))
        return np.arange(-reach * BINS_PER_TOKEN, (max_draft_len + reach) * BINS_PER_TOKEN + 1) / BINS_PER_TOKEN
