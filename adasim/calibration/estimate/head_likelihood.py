"""How likely reports of a length head are, together with what was then accepted."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
from scipy.optimize import minimize

from adasim.calibration.head_quality import SIGNAL_MARGIN, HeadQuality
from adasim.types import FloatArray

Form = Literal["truth", "mean"]
NOISE, BIAS = (0.05, 30.0), (-30.0, 30.0)  # of HeadQuality
LEAST_NOISE: dict[Form, float] = {"truth": NOISE[0], "mean": 0.25}  # below, means are steps
TURNS, MORE_TURNS = 12, 2  # of fitting the head and the distribution of L in turn; the latter with a good start
STEPS = 40  # of expectation-maximisation a turn
SETTLED = 1e-3  # tokens
LEAST_SLOPE, LEAST_MASS = 1e-12, 1e-9
SIGNALS = 400  # that the mean of L is computed for
ODD = 0.01  # share of reports that may be anything
ROOT = float(np.sqrt(2 * np.pi))


@dataclass(frozen=True, slots=True)
class Told:
    """A fitted head.

    Attributes:
        reports: the form.
        noise, bias: see :class:`HeadQuality`.
        log_likelihood: of all rounds.
        masses: P(L = l), [domains, K + 1].
    """

    reports: Form
    noise: float
    bias: float
    log_likelihood: float
    masses: FloatArray

    @property
    def quality(self) -> HeadQuality:
        """As a component."""
        return HeadQuality(noise=self.noise, bias=self.bias, reports=self.reports)


class HeadLikelihood:
    """Reports r and accepted drafts of rounds, under a head that sees s = L + bias + noise.

    "truth": r = 1 + s. "mean": r = 1 + f(s), the mean of L given s under the domain's distribution; f rises, so that r
    gives s back, with the density of s times ds/dr. One report in a hundred may be anything from 1 to K + 1: no such head
    gives it, and it shall not decide.

    Args:
        rounds: with accept_len, accepted, verify_len, domain.
        depth: K.
        survival: of full blocks by domain, [K] each; the distribution of L elsewhere is estimated.
    """

    def __init__(self, rounds: pd.DataFrame, depth: int, survival: Mapping[str, FloatArray] | None = None) -> None:
        self.run = np.arange(depth + 1)
        self.report = rounds["accept_len"].to_numpy(dtype=float) - 1
        self.domain, names = pd.factorize(rounds["domain"])
        self.names = [str(name) for name in names]
        accepted, verified = rounds["accepted"].to_numpy()[:, None], rounds["verify_len"].to_numpy()[:, None]
        complete = accepted == verified - 1
        self.possible = np.where(complete, self.run >= accepted, self.run == accepted)  # [rounds, K + 1]
        given = survival or {}
        self._open = [d for d, name in enumerate(names) if name not in given]
        self.masses = np.full((len(names), depth + 1), 1 / (depth + 1))
        for d, name in enumerate(names):
            if name in given:
                mass = np.maximum(-np.diff(np.concatenate([[1.0], given[name], [0.0]])), LEAST_MASS)
                self.masses[d] = mass / mass.sum()

    def fit(self, form: Form, weight: FloatArray | None = None, start: Told | None = None) -> Told:
        """The likeliest noise and bias where rounds count so often, [rounds]."""
        w = np.ones(len(self.report)) if weight is None else weight
        noise, bias = (2.0, 0.0) if start is None else (start.noise, start.bias)
        if start is not None:
            self.masses = start.masses
        elif self._open:
            self._learn("truth", noise, bias, w)
        total = 0.0
        for _ in range((TURNS if start is None else MORE_TURNS) if self._open else 1):
            if self._open:
                self._learn(form, noise, bias, w)
            before = noise, bias
            noise, bias, total = self._likeliest(form, noise, bias, w)
            if abs(noise - before[0]) + abs(bias - before[1]) < SETTLED:
                break
        return Told(form, noise, bias, total, self.masses)

    def believed(self, told: Told) -> FloatArray:
        """P(L = l | report) of every round, whatever was then accepted, [rounds, K + 1]."""
        look, _ = self._look(told.reports, told.noise, told.bias)
        sigma = self._sigma(told.reports, told.noise)
        return _shares(self._logs(look, sigma, told.bias) + np.log(told.masses + 1e-300)[self.domain])

    def _likeliest(self, form: Form, noise: float, bias: float, w: FloatArray) -> tuple[float, float, float]:
        prior = np.where(self.possible, self.masses[self.domain], 0.0)
        low, high = np.log(LEAST_NOISE[form]), np.log(NOISE[1])

        def unlikely(x: FloatArray) -> float:
            noise, bias = float(np.exp(np.clip(x[0], low, high))), float(np.clip(x[1], *BIAS))
            look, log_slope = self._look(form, noise, bias)
            sigma = self._sigma(form, noise)
            density = np.exp(self._logs(look, sigma, bias) + (log_slope - np.log(sigma * ROOT))[:, None])
            like = ((1 - ODD) * density + ODD / len(self.run)) * prior
            return -float(w @ np.log(like.sum(axis=1)))

        first = np.array([np.log(max(noise, LEAST_NOISE[form])), bias])
        simplex = first + np.array([[0.0, 0.0], [0.2, 0.0], [0.0, 0.3]])
        options: Any = {"xatol": SETTLED, "fatol": 0.01, "initial_simplex": simplex}
        best = minimize(unlikely, first, method="Nelder-Mead", options=options)
        return float(np.exp(np.clip(best.x[0], low, high))), float(np.clip(best.x[1], *BIAS)), -float(best.fun)

    def _learn(self, form: Form, noise: float, bias: float, w: FloatArray) -> None:
        """The distribution of L in domains whose survival was not given, by expectation-maximisation."""
        look, _ = self._look(form, noise, bias)
        like, masses = self._logs(look, self._sigma(form, noise), bias), self.masses.copy()
        like = np.exp(like - like.max(axis=1, keepdims=True)) * self.possible + 1e-300 * self.possible
        for d in self._open:
            mine, count = like[self.domain == d], w[self.domain == d]
            for _ in range(STEPS):
                seen = mine * masses[d]
                found = count @ (seen / np.maximum(seen.sum(axis=1, keepdims=True), 1e-300)) + 1e-9
                masses[d] = found / found.sum()
        self.masses = masses

    def _sigma(self, form: Form, noise: float) -> FloatArray:
        """Standard deviation of the look at L, tokens, [rounds]."""
        head = HeadQuality(noise=noise, reports=form)
        return np.array([head.sigma(1 - np.cumsum(m)[:-1]) for m in self.masses])[self.domain]

    def _logs(self, look: FloatArray, sigma: FloatArray, bias: float) -> FloatArray:
        """Log density of what the head sees, but for a constant, by L, [rounds, K + 1]."""
        return np.asarray(-(((look[:, None] - self.run - bias) / sigma[:, None]) ** 2) / 2, dtype=np.float64)

    def _look(self, form: Form, noise: float, bias: float) -> tuple[FloatArray, FloatArray]:
        """What the head saw, [rounds], and log ds/dr there."""
        if form == "truth":
            return self.report, np.zeros(len(self.report))
        head = HeadQuality(noise=noise, reports=form)
        look, log_slope = np.empty(len(self.report)), np.empty(len(self.report))
        for d, mass in enumerate(self.masses):
            mine, survival = self.domain == d, 1 - np.cumsum(mass)[:-1]
            reach = SIGNAL_MARGIN * head.sigma(survival) + abs(bias)
            signal = np.linspace(-reach, self.run[-1] + reach, SIGNALS)
            report = self.report[mine]
            mean = head.posterior(survival, signal).sum(axis=1) + LEAST_SLOPE * np.arange(SIGNALS)
            look[mine] = np.interp(report, mean, signal)
            slope = np.interp(look[mine], signal, np.gradient(mean, signal))
            inside = (report >= mean[0]) & (report <= mean[-1])
            log_slope[mine] = np.where(inside, -np.log(np.maximum(slope, LEAST_SLOPE)), -np.inf)
        return look, log_slope


def _shares(logs: FloatArray) -> FloatArray:
    like = np.exp(logs - logs.max(axis=1, keepdims=True))
    return np.asarray(like / like.sum(axis=1, keepdims=True), dtype=np.float64)
