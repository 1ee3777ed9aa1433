"""Survival curves: P(first k drafts are all accepted), k = 1..K."""

from abc import ABC, abstractmethod
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from adasim.calibration.tree import solve_alpha, tree_survival
from adasim.errors import InputError
from adasim.types import Component, FloatArray

Probability = Annotated[float, Field(ge=0, le=1)]


def tau(survival: FloatArray) -> float:
    """Expected tokens per round when all K drafts are verified, the bonus token counted."""
    return float(1 + survival.sum())


def hardening_power(survival: FloatArray, factor: float) -> float:
    """The power of every conditional acceptance that scales tau by ``factor``.

    Args:
        survival: P(first k drafts accepted), [K], positive.
        factor: wanted tau / tau.

    Raises:
        InputError: no power does: positions that are always accepted stay so, none exceeds 1.
    """
    if factor == 1:
        return 1.0
    from scipy.optimize import brentq  # slow to import, not always needed

    logs = np.log(survival)
    lowest, highest = 1 + int((survival == 1).sum()), len(survival) + 1
    target = factor * tau(survival)
    if not lowest < target < highest:
        raise InputError(
            f"acceptance: a factor of {factor:.3g} asks for tau {target:.3g}; possible: {lowest}..{highest}, exclusive"
        )
    return float(np.exp(brentq(lambda x: tau(np.exp(np.exp(x) * logs)) - target, -20, 20)))


def harden(survival: FloatArray, factor: float) -> FloatArray:
    """The curve with tau scaled by ``factor``; see :func:`hardening_power`."""
    return np.power(survival, hardening_power(survival, factor), dtype=np.float64)


class Curve(Component, ABC):
    """One domain's acceptance when full blocks are verified, pooled over rounds."""

    kind: str

    @abstractmethod
    def survival(self, max_draft_len: int) -> FloatArray:
        """The curve, [max_draft_len].

        Raises:
            InputError: the data do not reach that far or cannot be met.
        """


class Geometric(Curve):
    """Every draft is accepted with the same probability: S_k = alpha^k."""

    kind: Literal["geometric"] = "geometric"
    alpha: Annotated[float, Field(ge=0, lt=1)]

    def survival(self, max_draft_len: int) -> FloatArray:
        """alpha^k."""
        return np.power(self.alpha, np.arange(1, max_draft_len + 1), dtype=np.float64)


class Fading(Curve):
    """Chances that change along the chain: logit P(draft j accepted | those before are) = logit(alpha) + slope ln j.

    Below 0 later drafts are accepted less often (EAGLE), above 0 more often (some multi-token prediction layers).
    """

    kind: Literal["fading"] = "fading"
    alpha: Annotated[float, Field(gt=0, lt=1)]
    slope: float = Field(default=0.0, ge=-10, le=10)

    def survival(self, max_draft_len: int) -> FloatArray:
        """Products of the chances."""
        from scipy.special import logit  # slow to import, not always needed

        return fading(np.array([logit(self.alpha)]), np.array([self.slope]), max_draft_len)[0]


def fading(start: FloatArray, slope: FloatArray, draft_len: int) -> FloatArray:
    """Survival of many :class:`Fading` curves, [n, draft_len]; ``start``: logit of the first chance, ``slope``: [n]."""
    from scipy.special import expit  # slow to import, not always needed

    place = np.log(np.arange(1, draft_len + 1))
    return np.cumprod(expit(start[:, None] + slope[:, None] * place), axis=1, dtype=np.float64)


class Measured(Curve):
    """The curve itself, from position 1."""

    kind: Literal["measured"] = "measured"
    values: list[Probability] = Field(min_length=1)

    @model_validator(mode="after")
    def _falls(self) -> Self:
        if np.any(np.diff(self.values) > 0):
            raise ValueError("survival must not rise with the position (is this the conditional rate?)")
        return self

    def survival(self, max_draft_len: int) -> FloatArray:
        """The first ``max_draft_len`` values."""
        if len(self.values) < max_draft_len:
            raise InputError(
                f"acceptance: the measured curve has {len(self.values)} positions, the engine drafts {max_draft_len}"
            )
        return np.array(self.values[:max_draft_len])


class Anchored(Curve):
    """Two measured points and tau fix the curve: S_i = S_1 (S_last / S_1)^(((i-1)/(last-1))^c), c from tau.

    Two points alone do not: .89 -> .13 over 15 positions is tau 7.05 if geometric, 8.65 if linear
    (AdaFlash, arXiv 2607.19223, Fig. 2c reports 7.09).
    """

    kind: Literal["anchored"] = "anchored"
    first: Annotated[float, Field(gt=0, lt=1)]
    last: Annotated[float, Field(gt=0, lt=1)]
    last_position: int = Field(default=15, ge=3)
    tau: Annotated[float, Field(gt=1)]

    @model_validator(mode="after")
    def _solvable(self) -> Self:
        if self.last >= self.first:
            raise ValueError("last must be below first")
        low, high = (tau(self._curve(c)) for c in (0.02, 50.0))
        if not low < self.tau < high:
            raise ValueError(f"tau {self.tau} cannot be met by these anchors; allowed {low:.2f}..{high:.2f}")
        return self

    def _curve(self, c: float) -> FloatArray:
        share = np.arange(self.last_position) / (self.last_position - 1)
        return self.first * (self.last / self.first) ** (share**c)

    def survival(self, max_draft_len: int) -> FloatArray:
        """The curve with c solved from tau."""
        if max_draft_len > self.last_position:
            raise InputError(
                f"acceptance: the anchored curve ends at position {self.last_position}, the engine drafts {max_draft_len}"
            )
        from scipy.optimize import brentq

        c = brentq(lambda x: tau(self._curve(x)) - self.tau, 0.02, 50.0)
        return self._curve(c)[:max_draft_len]


class Budgets(Curve):
    """Accepted tokens per request and round at several verify lengths, of the same full rounds cut short.

    ``tokens`` maps verify_len (anchor counted) to tokens (bonus counted); (1, 1) is implied. Between the
    points: monotone cubic interpolation, whose steps are the survival curve.
    """

    kind: Literal["budgets"] = "budgets"
    tokens: dict[int, Annotated[float, Field(ge=1)]] = Field(min_length=2)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        lengths = [0, 1, *(n for n in sorted(self.tokens) if n > 1)]
        values = [0.0, 1.0, *(self.tokens[n] for n in lengths[2:])]
        slopes = np.diff(values) / np.diff(lengths)
        if min(self.tokens) < 1 or np.any(slopes < 0) or np.any(np.diff(slopes) > 0):
            raise ValueError("accepted tokens must rise with the verify length, ever more slowly")
        return self

    def survival(self, max_draft_len: int) -> FloatArray:
        """Steps of the interpolated accepted tokens."""
        from scipy.interpolate import PchipInterpolator  # slow to import, not always needed

        lengths = sorted({1, *self.tokens})
        if lengths[-1] < max_draft_len + 1:
            raise InputError(
                f"acceptance: budgets end at verify length {lengths[-1]}, the engine's block is {max_draft_len + 1}"
            )
        values = [0.0, 1.0, *(self.tokens[n] for n in lengths if n > 1)]
        steps = np.diff(PchipInterpolator([0, *lengths], values)(np.arange(max_draft_len + 2)))[1:]
        return np.minimum.accumulate(np.clip(steps, 0, 1))


class Tree(Curve):
    """A draft tree of ``tokens`` nodes (root counted), ``steps`` deep, that branches into at most ``top_k``.

    ``alpha`` is the chance of the drafter's first choice, or is solved from ``tau``; the chances of its further
    choices fall with the power 1 + ``tail`` of their rank (0.51 fits AngelSlim #163). See ``calibration.tree``. All nodes
    are verified, and a path of them accepted: use it with ``fixed`` at verify_len = ``tokens``.
    """

    kind: Literal["tree"] = "tree"
    steps: int = Field(ge=1)
    top_k: int = Field(ge=1)
    tokens: int = Field(ge=2)
    alpha: Annotated[float, Field(gt=0, lt=1)] | None = None
    tau: Annotated[float, Field(gt=1)] | None = None
    tail: float = Field(default=0.51, gt=0)

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if (self.alpha is None) == (self.tau is None):
            raise ValueError("give alpha or tau")
        self._alpha()
        return self

    def _alpha(self) -> float:
        if self.tau is None:
            assert self.alpha is not None
            return self.alpha
        return solve_alpha(self.tau, self.tail, self.steps, self.top_k, self.tokens)

    def survival(self, max_draft_len: int) -> FloatArray:
        """P(a path of k nodes accepted), 0 beyond the depth."""
        if max_draft_len < self.tokens - 1:
            raise InputError(
                f"acceptance: a tree of {self.tokens} tokens needs max_draft_len {self.tokens - 1}, not {max_draft_len}"
            )
        curve = np.zeros(max_draft_len)
        curve[: self.steps] = tree_survival(self._alpha(), self.tail, self.steps, self.top_k, self.tokens)
        return curve


class Hardened(Curve):
    """Another curve's shape at another ``tau``: every conditional acceptance raised to one power."""

    kind: Literal["hardened"] = "hardened"
    of: Annotated[Geometric | Measured | Anchored | Budgets, Field(discriminator="kind")]
    tau: Annotated[float, Field(gt=1)]

    def survival(self, max_draft_len: int) -> FloatArray:
        """The curve, its power solved over ``max_draft_len`` drafts."""
        curve = self.of.survival(max_draft_len)
        return harden(curve, self.tau / tau(curve))


AnyCurve = Annotated[Geometric | Fading | Measured | Anchored | Budgets | Tree | Hardened, Field(discriminator="kind")]
