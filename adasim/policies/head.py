"""AdaFlash's length head."""

from typing import Literal

import numpy as np
from pydantic import Field

from adasim.errors import InputError
from adasim.policies.base import Policy
from adasim.types import BatchView, DraftView, EngineCaps, IntArray


class Head(Policy):
    """verify_len = clamp(round(gamma * B * a_hat), min_verify_len, draft_len + 1), per request.

    ``B * a_hat`` is ``DraftView.accept_len``, the head's estimate of the accepted length with the anchor
    counted. The released code rounds; the paper takes the floor (arXiv 2607.19223), which is 0.4-0.5 shorter.
    ``rounding`` chooses; ``gamma`` scales: the paper has 1.0, the released scripts 1.3. No cost model: the same length
    at every load. With at most ``idle_up_to`` running requests the head is off and everything is verified; 48 in the
    released setup.
    """

    kind: Literal["head"] = "head"
    gamma: float = Field(default=1.0, gt=0, le=100)
    rounding: Literal["round", "floor"] = "round"
    min_verify_len: int = Field(default=1, ge=1)
    idle_up_to: int = Field(default=0, ge=0)

    @property
    def needs(self) -> frozenset[str]:
        """The head's output."""
        return frozenset({"accept_len"})

    def start(self, caps: EngineCaps) -> None:
        """Check the minimum against the engine's block."""
        if self.min_verify_len > caps.block:
            raise InputError(f"{self.label}: min_verify_len {self.min_verify_len}; allowed 1..{caps.block}")

    def verify_lens(self, batch: BatchView, draft: DraftView) -> IntArray:
        """The head's length times gamma, clamped, [n]."""
        assert draft.accept_len is not None
        if len(batch) <= self.idle_up_to:
            return draft.draft_lens + 1
        scaled = self.gamma * draft.accept_len
        whole = np.rint(scaled) if self.rounding == "round" else np.floor(scaled)
        lengths = np.maximum(whole, self.min_verify_len).astype(np.int64)
        return np.minimum(lengths, draft.draft_lens + 1)
