"""Cost from published speed-ups alone: hardware nobody named, in units of its own plain round.

A speed-up says tau x plain round / speculative round; no seconds appear. With the model's shape known (a roofline), a
few cells at different batches fix what is left: how many tokens a pass may have before arithmetic, not memory, bounds
it; what every request adds to a round; what speculation adds to one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from scipy.optimize import brentq, least_squares

from adasim.calibration.cost import CostModel
from adasim.calibration.roofline import RooflineCost
from adasim.errors import InputError
from adasim.types import FloatArray

AnyModel = TypeVar("AnyModel", bound=CostModel)


@dataclass(frozen=True, slots=True)
class Method:
    """What one round of a method does, per request, and how long its requests are."""

    tau: float  # tokens per round
    verify_len: float  # mean tokens verified, the anchor counted
    block: int  # positions the drafter fills, the anchor counted
    prompt_len: int
    output_len: int


def speedup(cost: CostModel, batch: int, method: Method) -> float:
    """Steady speed-up over plain decoding; every request's prefill is a step of its own that all wait for."""
    mean_context = method.prompt_len + method.output_len / 2
    prefill_s = cost.step(0, 0, 0, 0.0, prefill=method.prompt_len, prefill_context=method.prompt_len / 2).total
    plain_s = cost.step(batch, 0, batch, mean_context).total / batch + prefill_s / method.output_len
    round_s = cost.step(
        batch,
        batch * method.block,
        round(batch * method.verify_len),
        mean_context,
        longest_draft=method.block - 1,
    ).total
    return plain_s / (round_s / (batch * method.tau) + prefill_s / method.output_len)


def fit_roofline(cost: RooflineCost, method: Method, speedups: Mapping[int, float]) -> RooflineCost:
    """``compute_efficiency``, ``per_request_ms`` and ``overhead.speculative_ms`` from one method's speed-ups.

    Least squares over their logarithms. Only ratios of times matter: the memory bandwidth stays as given and sets
    the unit.

    Args:
        cost: what is known; the three numbers are replaced.
        method: one that always verifies the full block.
        speedups: batch -> its speed-up.

    Raises:
        InputError: fewer than three batches.
    """
    if len(speedups) < 3:
        raise InputError("roofline: needs speed-ups at three batches or more")

    def model(x: FloatArray) -> RooflineCost:
        efficiency, per_request, speculative = np.exp(x).tolist()
        changed = {"compute_efficiency": min(efficiency, 1.0), "per_request_ms": per_request}
        return with_speculative_ms(cost.model_copy(update=changed), speculative)

    def miss(x: FloatArray) -> list[float]:
        trial = model(x)
        return [np.log(speedup(trial, b, method) / s) for b, s in speedups.items()]

    return model(least_squares(miss, np.log([0.4, 0.03, 2.0]), x_scale=0.1).x)


def with_speculative_ms(cost: AnyModel, ms: float) -> AnyModel:
    """The same cost, with this constant in every speculative round."""
    return cost.model_copy(update={"overhead": cost.overhead.model_copy(update={"speculative_ms": ms})})


def fit_speculative_ms(cost: CostModel, method: Method, batch: int, measured: float) -> float:
    """Milliseconds in every speculative round with which the speed-up is the measured one.

    Raises:
        InputError: even without any the model is slower.
    """

    def miss(ms: float) -> float:
        return speedup(with_speculative_ms(cost, ms), batch, method) - measured

    if miss(0.0) < 0:
        raise InputError(f"speculative_ms: at batch {batch} the model is slower than {measured:g} even without any")
    return float(brentq(miss, 0.0, 1e4))


def fit_time_share(without: float, measured: float) -> float:
    """Share of the time that is lost beside the steps, from the speed-up without that loss and the measured one.

    Raises:
        InputError: nothing is lost.
    """
    if measured > without:
        raise InputError(f"time share: {measured:g} was measured where {without:g} is possible: nothing is lost")
    return 1 - measured / without
