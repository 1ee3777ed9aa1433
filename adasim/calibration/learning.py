"""Learning curves: how training rounds and the buffer's domain mix move a drafter's tau, by domain and loss.

Nothing here is measured. Asymptotes come from published tau; rates and forgetting are assumptions, named as such.
"""

from collections.abc import Sequence
from math import exp, log10
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BeforeValidator, Field, model_validator

from adasim.errors import InputError
from adasim.types import Component, FloatArray

# tau at concurrency 1 on Qwen3-8B, greedy. Six sets and the GSM8K ablation: AdaFlash (arXiv 2607.19223), Tables 1 and 2;
# DFlash on GSM8K: DFlash (arXiv 2602.06036), Table 1, another harness, so the GSM8K shares are rough.
SIX_SETS = {"dflash": 5.86, "forward_kl": 7.05, "full": 7.28}
GSM8K = {"dflash": 6.54, "reverse_kl": 7.389, "clipped": 7.590, "full": 7.751}
BEST_ALPHA, BEST_DELTA = 0.8, 0.01
FREE_NATS = 10.0  # no position of a working drafter is further from its target than this


def _reached(tau: dict[str, float], loss: str) -> float:
    """Share of the full loss's gain in tau that a loss reached in the same experiment."""
    return (tau[loss] - tau["dflash"]) / (tau["full"] - tau["dflash"])


class Frozen(Component):
    """No training: drafter and head stay as loaded."""

    kind: Literal["frozen"] = "frozen"

    @property
    def reach(self) -> float:
        """0."""
        return 0.0


class ForwardKl(Component):
    """KL(p || q), as online speculative decoding (OSD) trains; its share is OSD's, whatever else differs there."""

    kind: Literal["forward_kl"] = "forward_kl"

    @property
    def reach(self) -> float:
        """Share of the full loss's gain, 0.84: tau 7.05 where the full loss reaches 7.28 from 5.86."""
        return _reached(SIX_SETS, "forward_kl")


class ClippedReverseKl(Component):
    """alpha * hard label + (1 - alpha) * clipped reverse KL: AdaFlash's loss.

    Published are three corners on GSM8K: alpha 0 without clip (70 % of the full gain), alpha 0 clipped per entry at
    0.01 (87 %), alpha 0.8 clipped so (100 %, the best of both). Between and beyond them the shape is assumed: a parabola
    in alpha with its top at 0.8; what the clip gives falls with (1 - alpha), and with the square of the decades between
    delta and 0.01, until nothing is left at a factor of 10.

    ``clip``: "entry" caps vocabulary terms (the paper), "position" caps a position's sum over the vocabulary divided by
    the ``tokens`` of a batch (the released code: 512 anchors x 15 positions), "none" neither.
    """

    kind: Literal["clipped_reverse_kl"] = "clipped_reverse_kl"
    alpha: float = Field(default=BEST_ALPHA, ge=0, le=1)
    delta: float = Field(default=BEST_DELTA, gt=0)
    clip: Literal["entry", "position", "none"] = "entry"
    tokens: int = Field(default=7680, ge=1)

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.clip == "position" and self.delta * self.tokens < FREE_NATS:
            binds = self.delta * self.tokens
            raise ValueError(
                f"a position clip at delta {self.delta:g} x {self.tokens} tokens binds above {binds:.3g} nats; what that "
                f"does is not published: allowed from {FREE_NATS:g} nats, where it hardly ever binds"
            )
        return self

    @property
    def reach(self) -> float:
        """Share of the full loss's gain."""
        unclipped, clipped = _reached(GSM8K, "reverse_kl"), _reached(GSM8K, "clipped")
        decades = abs(log10(self.delta / BEST_DELTA)) if self.clip == "entry" else 1.0
        lost = (1 - self.alpha) * (clipped - unclipped) * min(decades**2, 1.0)
        return 1 - (1 - clipped) * ((self.alpha - BEST_ALPHA) / BEST_ALPHA) ** 2 - lost


NAMED: dict[str, dict[str, Any]] = {
    "frozen": {"kind": "frozen"},
    "forward_kl": {"kind": "forward_kl"},
    "reverse_kl": {"kind": "clipped_reverse_kl", "alpha": 0.0, "clip": "none"},
    "clipped_reverse_kl": {"kind": "clipped_reverse_kl", "alpha": 0.0},
    "adaflash": {"kind": "clipped_reverse_kl"},
    "adaflash_code": {"kind": "clipped_reverse_kl", "clip": "position"},
}


def _named(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if value not in NAMED:
        raise ValueError(f"unknown loss {value!r}; allowed: {', '.join(NAMED)}, or its fields")
    return NAMED[value]


AnyLoss = Annotated[Frozen | ForwardKl | ClippedReverseKl, Field(discriminator="kind")]
NamedLoss = Annotated[AnyLoss, BeforeValidator(_named)]


class LearningCurve(Component):
    """One domain's tau, as a factor of what it was as loaded, over training rounds.

    With a share s of the buffer, d factor / d round = s (asymptote - factor) / rounds - (1 - s) (factor - floor) /
    forgetting_rounds: an exponential approach to the asymptote where the buffer is all of the domain, and to the floor
    where it holds none. The default gain is AdaFlash's (5.86 -> 7.28, mean of six sets, arXiv 2607.19223); the rest is
    assumed: published runs stop after 61 to 201 rounds, their curves and any forgetting are not published.

    Attributes:
        gain: tau gained at the asymptote with the full loss, as a share of tau as loaded.
        rounds: rounds in which the gap to the asymptote falls to 1/e.
        forgetting_rounds: rounds without the domain in which the gap to the floor falls to 1/e; null = never forgotten.
        floor: the factor that a forgotten domain falls to.
    """

    gain: float = Field(default=round(SIX_SETS["full"] / SIX_SETS["dflash"] - 1, 3), ge=0)
    rounds: float = Field(default=30.0, gt=0)
    forgetting_rounds: float | None = Field(default=200.0, gt=0)
    floor: float = Field(default=0.95, gt=0, le=1)

    def asymptote(self, reach: float) -> float:
        """The factor after endless rounds on this domain with a loss of that ``reach``."""
        return 1 + self.gain * reach

    def after(self, factor: float, rounds: float, share: float, reach: float) -> float:
        """The factor after ``rounds`` more, with a ``share`` of the buffer. Exact: two steps equal one of both."""
        learn = share / self.rounds
        forget = (1 - share) / self.forgetting_rounds if self.forgetting_rounds else 0.0
        if not learn + forget:
            return factor
        floor = min(self.floor, factor)  # a domain below its floor does not gain by being forgotten
        goal = (learn * self.asymptote(reach) + forget * floor) / (learn + forget)
        return goal + (factor - goal) * exp(-(learn + forget) * rounds)

    def check(self, domain: str, tau: float, limits: tuple[float, float], reach: float, spoilt: float = 1.0) -> None:
        """Refuse factors that no acceptance curve can have.

        Args:
            domain: whose curve this is.
            tau: as loaded.
            limits: of tau, exclusive.
            reach: of the loss.
            spoilt: a factor on top.

        Raises:
            InputError: floor or asymptote take tau to the limits or beyond.
        """
        floor = self.floor if self.forgetting_rounds is not None else 1.0
        for name, factor in (("floor", floor), ("gain", self.asymptote(reach))):
            if factor * spoilt != 1 and not limits[0] < factor * spoilt * tau < limits[1]:
                why = name if spoilt == 1 else f"{name} with a fault of {spoilt:g}"
                raise InputError(
                    f"backend.learning: {why} takes {domain} to tau {factor * spoilt * tau:.3g}; "
                    f"possible: {limits[0]:g}..{limits[1]:g}, exclusive"
                )


def passes_worth(before: Sequence[int], epochs: int, reuse: float) -> list[float]:
    """What a round's passes over each sample are worth, in first passes: the n-th pass counts reuse^(n - 1).

    Args:
        before: passes each sample has had in earlier rounds.
        epochs: passes of this round.
        reuse: worth of a pass in terms of the one before, 0..1.
    """
    fresh = sum(reuse**n for n in range(epochs))
    return [reuse**n * fresh for n in before]


def round_worth(worth: Sequence[float], buffer: int, reuse: float, epochs: int = 2) -> float:
    """A round in units of the published one: ``buffer`` fresh samples and 2 epochs, whatever this one's epochs.

    Args:
        worth: of its samples, see :func:`passes_worth`.
        buffer: samples of the round that the curve's ``rounds`` count (published: 128).
        reuse: as there.
        epochs: of that round.
    """
    return sum(worth) / (buffer * sum(reuse**n for n in range(epochs)))


def mix_of(worth: Sequence[float], domains: Sequence[int], count: int) -> FloatArray:
    """Share of the training that each of ``count`` domains gets, [count]."""
    weights = np.bincount(domains, weights=worth, minlength=count)
    return weights / max(weights.sum(), 1e-300)
