"""Acceptance models: the luck of a text, and what length and confidence heads know of it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, PrivateAttr, model_validator
from scipy.special import logit, ndtr, ndtri

from adasim.calibration.survival import AnyCurve, harden, hardening_power
from adasim.calibration.text import hardness, runs, solve_thresholds
from adasim.errors import InputError
from adasim.files import Columns, find, read_columns
from adasim.types import Component, FloatArray, IntArray, Request

Factor = Annotated[float, Field(gt=0)]

BINS_PER_TOKEN = 8
SIGNAL_MARGIN = 6.0  # standard deviations of head noise covered beyond 0..K


class HeadQuality(Component):
    """How well heads know L: one noisy look at the truth, s = L + noise * N(0, 1), per request and position.

    The length head reports 1 + s + bias. The confidence curve is the Bayes posterior P(L >= k | s + bias)
    under the domain's own distribution of L: calibrated when ``bias`` is 0. ``noise`` and ``bias`` are in
    tokens.

    The drafter's own margin carries the same look, uncalibrated: a draft of margin m, the ones before it accepted, is
    accepted with probability sigmoid(margin_slope m + margin_intercept) (at bias 0). Published fits have slopes of
    0.44 to 0.83 and intercepts of -0.92 to -0.14 (vLLM PR 52228, six drafters): drafters are overconfident.
    """

    noise: float = Field(default=2.0, ge=0.05, le=30)
    bias: float = Field(default=0.0, ge=-30, le=30)
    margin_slope: float = Field(default=0.5, gt=0, le=10)
    margin_intercept: float = Field(default=-0.5, ge=-10, le=10)

    def margin(self, survival: FloatArray) -> FloatArray:
        """The drafter's margins [n, K] that go with confidence curves [n, K]; at most about 20 / slope."""
        before = np.concatenate([np.ones((len(survival), 1)), survival[:, :-1]], axis=1)
        sure = np.divide(survival, before, out=np.zeros_like(survival), where=before > 0)
        return (logit(sure.clip(1e-9, 1 - 1e-9)) - self.margin_intercept) / self.margin_slope

    def posterior(self, survival: FloatArray) -> FloatArray:
        """P(L >= k | signal bin), [bins, K], for one domain's survival curve [K]."""
        mass = -np.diff(np.concatenate([[1.0], survival, [0.0]]))  # P(L = l), l = 0..K
        signal = self.bins(len(survival))
        log_like = -(((signal[:, None] - np.arange(len(mass))) / self.noise) ** 2) / 2
        like = np.exp(log_like - log_like.max(axis=1, keepdims=True)) * mass
        at_least = np.cumsum(like[:, ::-1], axis=1)[:, ::-1]
        return at_least[:, 1:] / at_least[:, :1]

    def bins(self, max_draft_len: int) -> FloatArray:
        """Signal values of the posterior's rows."""
        reach = np.ceil(SIGNAL_MARGIN * self.noise + abs(self.bias))
        return np.arange(-reach * BINS_PER_TOKEN, (max_draft_len + reach) * BINS_PER_TOKEN + 1) / BINS_PER_TOKEN


@dataclass(frozen=True, slots=True)
class Luck:
    """The luck of all requests of a run, flat: request i's output position t is at ``base[i] + t``."""

    base: IntArray  # [requests]
    run: IntArray  # [sum output_len] L(t)
    signal: FloatArray  # [sum output_len] L + bias + noise
    posterior: FloatArray  # [domains, bins, K]
    bins_from: float  # signal of bin 0
    head: HeadQuality

    def survival(self, domains: IntArray, at: IntArray) -> FloatArray:
        """Confidence curves [n, K] of requests in ``domains`` [n] at flat positions ``at`` [n]."""
        rows = np.rint((self.signal[at] - self.bins_from) * BINS_PER_TOKEN).astype(np.int64)
        return self.posterior[domains, rows.clip(0, self.posterior.shape[1] - 1)]

    def margin(self, domains: IntArray, at: IntArray) -> FloatArray:
        """The drafter's margins [n, K] at the same positions."""
        return self.head.margin(self.survival(domains, at))


class AcceptanceModel(Component, ABC):
    """Gives every output position of every request its L, whatever the policy.

    Luck is keyed by (seed, request id, output token index): two policies that meet at the same position of
    the same request see the same L.
    """

    kind: str
    head: HeadQuality = HeadQuality()

    @abstractmethod
    def check(self, domains: Sequence[str], max_draft_len: int) -> None:
        """Refuse what cannot be answered.

        Raises:
            InputError: a domain or a draft length the model does not cover.
        """

    def check_requests(self, requests: Sequence[Request]) -> None:
        """Refuse requests outside the model's range.

        Raises:
            InputError: the first such request.
        """

    @abstractmethod
    def luck(self, requests: Sequence[Request], domains: Sequence[str], seed: int, max_draft_len: int) -> Luck:
        """Luck of ``requests``, whose ``domain`` indexes ``domains``."""

    def _with_heads(self, run: list[IntArray], noise: list[FloatArray], curves: list[FloatArray]) -> Luck:
        lengths = [len(r) for r in run]
        flat = np.concatenate(run)
        signal = flat + self.head.bias + self.head.noise * np.concatenate(noise)
        posterior = np.stack([self.head.posterior(c) for c in curves])
        base = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
        return Luck(base, flat, signal, posterior, float(self.head.bins(curves[0].size)[0]), self.head)


def request_rng(seed: int, request: int, stream: int) -> np.random.Generator:
    """A random stream of one request: 0 its tokens, 1 its heads, 2 what its tokens share, 3 its predictor."""
    return np.random.Generator(np.random.Philox(key=[(seed << 2) + stream, request]))


class CurveAcceptance(AcceptanceModel):
    """Acceptance by domain from survival curves, over correlated text (see ``calibration.text``).

    ``tau_by_context`` and ``tau_by_temperature`` scale tau, linearly between their points; outside them is
    an error. The curves hold where the factor is 1.
    """

    kind: Literal["curves"] = "curves"
    curves: dict[str, AnyCurve] = Field(min_length=1)
    spread: float = Field(default=0.0, ge=0, lt=1)
    correlation: float = Field(default=0.0, ge=0, lt=1)
    range_tokens: float = Field(default=3.0, gt=0, le=1000)
    temperature: float = Field(default=0.0, ge=0)
    tau_by_temperature: dict[float, Factor] | None = Field(default=None, min_length=1)
    tau_by_context: dict[int, Factor] | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        if self.spread + self.correlation >= 1:
            raise ValueError("spread + correlation must stay below 1: each token has luck of its own")
        if self.temperature and self.tau_by_temperature is None:
            raise ValueError("temperature has no effect without tau_by_temperature")
        if self.tau_by_temperature is not None:
            _factor(self.tau_by_temperature, self.temperature, "temperature")
        return self

    def check(self, domains: Sequence[str], max_draft_len: int) -> None:
        """Every domain needs a curve that reaches ``max_draft_len``."""
        unknown = sorted(set(domains) - set(self.curves))
        if unknown:
            raise InputError(
                f"acceptance: no curve for domain {', '.join(unknown)}; there are {', '.join(sorted(self.curves))}"
            )
        for name in domains:
            curve = self.survival(name, max_draft_len)
            for factor in (self.tau_by_context or {}).values():
                hardening_power(curve, factor)

    def check_requests(self, requests: Sequence[Request]) -> None:
        """Contexts must lie within ``tau_by_context``."""
        if self.tau_by_context is None:
            return
        low, high = min(self.tau_by_context), max(self.tau_by_context)
        for r in requests:
            last = r.prompt_len + r.output_len
            if r.prompt_len < low or last > high:
                raise InputError(
                    f"acceptance.tau_by_context: request {r.id} has context {r.prompt_len}..{last}; covered {low}..{high}"
                )

    def survival(self, domain: str, max_draft_len: int) -> FloatArray:
        """The curve of a domain at the model's temperature, [max_draft_len]."""
        curve = self.curves[domain].survival(max_draft_len)
        curve = np.maximum(curve, 1e-12)  # a zero would leave the thresholds beyond it undefined
        if self.tau_by_temperature is None:
            return curve
        return harden(curve, _factor(self.tau_by_temperature, self.temperature, "temperature"))

    def luck(self, requests: Sequence[Request], domains: Sequence[str], seed: int, max_draft_len: int) -> Luck:
        """See :meth:`AcceptanceModel.luck`."""
        curves = [self.survival(d, max_draft_len) for d in domains]
        text = (self.spread, self.correlation, self.range_tokens)
        thresholds = [solve_thresholds(c, *text) for c in curves]
        powers = [_PowerByContext(self.tau_by_context, c) if self.tau_by_context else None for c in curves]
        run, noise = [], []
        for r in requests:
            streams = request_rng(seed, r.id, 0), request_rng(seed, r.id, 2)
            g = hardness(*streams, r.output_len + max_draft_len + 1, *text)
            power = powers[r.domain]
            if power is not None:
                g = power.apply(g, r)
            run.append(runs(g, thresholds[r.domain], r.output_len))
            noise.append(request_rng(seed, r.id, 1).standard_normal(r.output_len))
        return self._with_heads(run, noise, curves)


class _PowerByContext:
    """Hardens text as its context grows: conditional acceptance c becomes c^power, power from tau's factor."""

    def __init__(self, table: dict[int, float], curve: FloatArray) -> None:
        self.contexts = sorted(table)
        self.powers = [hardening_power(curve, table[c]) for c in self.contexts]

    def apply(self, g: FloatArray, request: Request) -> FloatArray:
        power = np.interp(request.prompt_len + np.arange(len(g)), self.contexts, self.powers)
        # P(g' <= q) = P(g <= q)^power, with u = Phi(g): u' = u^(1/power)
        u = ndtr(g) ** (1 / power)
        return ndtri(u)


def _factor(table: dict[float, float], at: float, what: str) -> float:
    points = sorted(table)
    if not points[0] <= at <= points[-1]:
        raise InputError(f"acceptance.tau_by_{what}: {at} is outside {points[0]}..{points[-1]}")
    return float(np.interp(at, points, [table[p] for p in points]))


class RecordedAcceptance(AcceptanceModel):
    """Replays L from full-block rounds of a real run: CSV or Parquet columns request, domain, position, accepted.

    Position counts output tokens before the round; a simulated request takes a recorded one of its domain,
    chosen by (seed, request id). Inside a recorded run of length L from t, position t + j has L - j (at
    least: the drafter may do better from nearer by). A longer output wraps around. ``max_draft_len`` says how many
    drafts the recorded blocks had; an engine that drafts fewer sees the runs cut to its block.
    """

    kind: Literal["recorded"] = "recorded"
    file: str
    max_draft_len: int = Field(default=15, ge=1)
    _rows: dict[str, list[IntArray]] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _read(self) -> Self:
        self._rows = _recorded_runs(find(self.file, "file"))
        return self

    def check(self, domains: Sequence[str], max_draft_len: int) -> None:
        """Every domain needs recorded requests, of blocks at least as long as the engine's."""
        unknown = sorted(set(domains) - set(self._rows))
        if unknown:
            raise InputError(
                f"{self.file}: no recorded request of domain {', '.join(unknown)}; "
                f"there are {', '.join(sorted(self._rows))}"
            )
        longest = max(int(r.max()) for rows in self._rows.values() for r in rows)
        if longest > self.max_draft_len:
            raise InputError(f"{self.file}: a run of {longest}, but acceptance.max_draft_len says {self.max_draft_len}")
        if self.max_draft_len < max_draft_len:
            raise InputError(
                f"{self.file}: recorded with {self.max_draft_len} drafts a block, the engine drafts {max_draft_len}"
            )

    def luck(self, requests: Sequence[Request], domains: Sequence[str], seed: int, max_draft_len: int) -> Luck:
        """See :meth:`AcceptanceModel.luck`."""
        run, noise = [], []
        for r in requests:
            rows = self._rows[domains[r.domain]]
            text = rows[int(request_rng(seed, r.id, 0).integers(len(rows)))]
            run.append(np.resize(text, r.output_len).clip(max=max_draft_len))
            noise.append(request_rng(seed, r.id, 1).standard_normal(r.output_len))
        curves = []
        for d in domains:
            pooled = np.concatenate(self._rows[d])
            share = [(pooled >= k).mean() for k in range(1, max_draft_len + 1)]
            curves.append(np.maximum(share, 1e-12))
        return self._with_heads(run, noise, curves)


def _recorded_runs(path: Path) -> dict[str, list[IntArray]]:
    """L(t) of every recorded request by domain."""
    table = read_columns(
        path, Columns(required=("request", "domain", "position", "accepted"), whole=("position", "accepted"))
    )
    rows: dict[str, list[IntArray]] = {}
    for (domain, _), found in table.groupby(["domain", "request"], sort=True):
        rounds = found.sort_values("position")
        position, accepted = rounds["position"].to_numpy(), rounds["accepted"].to_numpy()
        if np.any(np.diff(position) != accepted[:-1] + 1):
            at = int(np.argmax(np.diff(position) != accepted[:-1] + 1))
            raise InputError(
                f"{path}: request {rounds['request'].iloc[0]}: the round at position {position[at]} accepted "
                f"{accepted[at]}, so the next must be at {position[at] + accepted[at] + 1}, "
                f"not {position[at + 1]} (full blocks only)"
            )
        text = np.concatenate([np.arange(a, -1, -1) for a in accepted]).astype(np.int64)
        text = np.concatenate([np.repeat(text[:1], position[0]), text])  # before the first round: as at it
        rows.setdefault(str(domain), []).append(text)
    return rows


AnyAcceptance = Annotated[CurveAcceptance | RecordedAcceptance, Field(discriminator="kind")]
