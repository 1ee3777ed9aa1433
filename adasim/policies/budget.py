"""A budget of drafts for the whole batch: how large, and who gets it."""

from abc import ABC
from typing import Literal

import numpy as np
from pydantic import Field, PrivateAttr

from adasim.kernels import kernels
from adasim.policies.base import Policy
from adasim.policies.stale import StaleCurves
from adasim.policies.step_times import StepTimes
from adasim.types import BatchView, DraftView, EngineCaps, FloatArray, IntArray, constant


class BatchBudget(Policy, ABC):
    """Sizes the budget by tokens per second, from confidences ``stale_steps`` rounds old; spends it by the present ones.

    ``stop``: "early" takes the first budget after which tokens per second fall, "best" the maximum of all.
    """

    stop: Literal["early", "best"] = "early"
    stale_steps: int = Field(default=1, ge=0, le=8)
    _known: tuple[StepTimes, StaleCurves] = PrivateAttr()

    def start(self, caps: EngineCaps) -> None:
        """Forget old confidences."""
        self._known = StepTimes(caps), StaleCurves(self.stale_steps)

    def share(self, batch: BatchView, draft: DraftView, survival: FloatArray) -> IntArray:
        """Verify lengths [n] by survival curves [n, K]; everything while there are no old ones."""
        times, stale = self._known
        survival = drafted_only(survival, draft.draft_lens)
        old = stale.swap(batch.request_ids, survival)
        if old is None:
            return draft.draft_lens + 1
        budget = budget_of(old, times.by_tokens(batch), early=self.stop == "early")
        if draft.draft_lens is not constant(*survival.shape):
            budget = min(budget, int(draft.draft_lens.sum()))
        return spend(survival, budget)


def budget_of(survival: FloatArray, seconds: FloatArray, *, early: bool) -> int:
    """Drafts m with the most (n + sum of the m largest S) / seconds[m], or the first local maximum.

    Args:
        survival: curves [n, K]; -1 where nothing was drafted.
        seconds: of rounds that verify n, n + 1, ... tokens, [n K + 1].
        early: stop before the first m that is worse than m - 1.
    """
    rising = np.sort(survival, axis=None)
    if early:
        return kernels().early_budget(len(survival), rising, seconds)
    likeliest = rising[::-1]
    likeliest = likeliest[: np.count_nonzero(likeliest >= 0)]
    tokens = len(survival) + np.concatenate([[0.0], np.cumsum(likeliest)])
    return int((tokens / seconds[: len(tokens)]).argmax())


def drafted_only(survival: FloatArray, draft_lens: IntArray) -> FloatArray:
    """Survival curves [n, K] with -1 where nothing was drafted."""
    width = survival.shape[1]
    if draft_lens is constant(len(draft_lens), width) or int(draft_lens.min(initial=width)) == width:
        return survival
    return np.where(np.arange(width) < draft_lens[:, None], survival, -1.0)


def spend(survival: FloatArray, budget: int, least: float | None = None) -> IntArray:
    """Verify lengths [n], anchors counted, when the ``budget`` likeliest of all drafts [n, K] are verified.

    Curves fall along a row, so the likeliest drafts of a row are a prefix. Among equals the first in row order
    wins.

    Args:
        survival: P(first k drafts accepted); -1 where nothing was drafted.
        budget: drafts to verify, 0..number of drafts.
        least: survival of the last of them, where it is known already.
    """
    if budget <= 0:
        return np.ones(len(survival), dtype=np.int64)
    lengths, place = np.empty(len(survival), dtype=np.int64), survival.size - budget
    if least is None:
        least = np.partition(survival, place, axis=None)[place]  # finds it without sorting
    kernels().spend(np.ascontiguousarray(survival), budget, least, lengths)
    return lengths
