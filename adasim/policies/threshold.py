"""Keep drafting while the drafter is sure."""

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from adasim.policies.base import Policy
from adasim.types import BatchView, DraftView, FloatArray, IntArray


class Threshold(Policy):
    """Verify the leading tokens whose confidence exceeds ``threshold``.

    Confidence of token k is P(accepted | the k - 1 before were) = S_k / S_{k-1}. ``auto`` takes the batch's
    mean confidence, clamped to 0.1..0.8 (vLLM PRs 35301 and 43522). DISCO's stop-or-go classifier is used in the same
    way. Blind to load.
    """

    kind: Literal["threshold"] = "threshold"
    threshold: Annotated[float, Field(gt=0, lt=1)] | Literal["auto"] = 0.5

    @property
    def needs(self) -> frozenset[str]:
        """A survival curve."""
        return frozenset({"survival"})

    def verify_lens(self, batch: BatchView, draft: DraftView) -> IntArray:
        """1 + the leading run of confident drafts, [n]."""
        assert draft.survival is not None
        confidence = conditional(draft.survival)
        drafted = np.arange(confidence.shape[1]) < draft.draft_lens[:, None]
        limit = self.threshold
        if limit == "auto":
            limit = float(np.clip(confidence[drafted].mean() if drafted.any() else 0.1, 0.1, 0.8))
        sure = (confidence > limit) & drafted
        return 1 + np.cumprod(sure, axis=1).sum(axis=1)


def conditional(survival: FloatArray) -> FloatArray:
    """Conditional acceptance [n, K] of a survival curve [n, K]; 0 where nothing survives."""
    before = np.concatenate([np.ones((len(survival), 1)), survival[:, :-1]], axis=1)
    return np.divide(survival, before, out=np.zeros_like(survival), where=before > 0)
