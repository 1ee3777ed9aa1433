"""vLLM's adaptive verification for drafters without a confidence head."""

from typing import Literal

import numpy as np
from pydantic import Field, PrivateAttr

from adasim.policies.acceptance_estimator import AcceptanceEstimator
from adasim.policies.budget import BatchBudget
from adasim.types import BatchView, DraftView, EngineCaps, FloatArray, IntArray, StepOutcome


class VllmAdaptive(BatchBudget):
    """The budget with the most (n + sum of S) / seconds, S estimated online from the drafter's margins.

    p_k = sigmoid(w margin_k + b_k) is refitted every ``interval`` rounds (see :class:`AcceptanceEstimator`, also for
    the censoring rule) on what was seen since, plus ``memory`` of what was counted before. Until ``warmup_refits``
    refits are done everything is verified: at first there is nothing to go by, and a rule that cuts from the start sees
    little of the later positions. ``stop`` = "best" is the maximum over all budgets; ``stale_steps``: the age of the
    confidences that size the budget. Source: vLLM PRs 47808 (budget) and 52228 (estimator). There, sampled drafts show
    log q of the token drawn instead of the margin; that looks at the token it decides on, so it is not offered here.
    """

    kind: Literal["vllm_adaptive"] = "vllm_adaptive"
    stop: Literal["early", "best"] = "best"
    interval: int = Field(default=100, ge=1)
    warmup_refits: int = Field(default=3, ge=1)
    memory: float = Field(default=0.0, ge=0, le=1)
    _estimator: AcceptanceEstimator = PrivateAttr()
    _shown: dict[int, FloatArray] = PrivateAttr()  # margins by step, until their outcome is known
    _rounds: int = PrivateAttr(default=0)

    @property
    def needs(self) -> frozenset[str]:
        """Margins and a cost model."""
        return frozenset({"margin", "cost"})

    def start(self, caps: EngineCaps) -> None:
        """Forget what was learnt."""
        super().start(caps)
        self._estimator = AcceptanceEstimator(caps.max_draft_len, self.memory)
        self._shown, self._rounds = {}, 0

    def verify_lens(self, batch: BatchView, draft: DraftView) -> IntArray:
        """All in the warm-up; then the anchor and the kept drafts of each request, [n]."""
        assert draft.margin is not None
        self._shown[batch.step] = draft.margin
        lengths = self.share(batch, draft, self._estimator.survival(draft.margin))
        warm = self._rounds >= self.warmup_refits * self.interval
        return lengths if warm else draft.draft_lens + 1

    def observe(self, outcome: StepOutcome) -> None:
        """Count one round; refit every ``interval`` rounds."""
        margin = self._shown.pop(outcome.step, None)
        if margin is None or not np.any(outcome.draft_lens):
            return
        self._estimator.observe(margin, outcome)
        self._rounds += 1
        if self._rounds % self.interval == 0:
            self._estimator.refit()
