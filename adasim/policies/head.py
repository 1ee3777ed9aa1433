"""AdaFlash's length head."""

from typing import Annotated, Literal

import numpy as np
from pydantic import Field, PrivateAttr

from adasim.errors import InputError
from adasim.policies.base import LengthRule, Policy
from adasim.types import BatchView, DraftView, EngineCaps, IntArray

Gamma = Annotated[float, Field(gt=0, le=100)]


class Head(Policy):
    """verify_len = clamp(round(gamma * B * a_hat), min_verify_len, draft_len + 1), per request.

    ``B * a_hat`` is ``DraftView.accept_len``, the head's estimate of the accepted length with the anchor
    counted. The released code rounds; the paper takes the floor (arXiv 2607.19223), which is 0.4-0.5 shorter.
    ``rounding`` chooses; ``gamma`` scales: the paper has 1.0, the released scripts 1.3. ``base`` says what it scales:
    the "block", anchor counted, as in the released code, or the "drafts" alone, 1 + round(gamma (B a_hat - 1)), the
    reading of the paper in which k counts drafts.

    No cost model: a number gives the same length at every load; a table {running + queued requests: gamma} (linear
    between its sizes, flat outside) lets it follow the load. With at most ``idle_up_to`` running requests the head is off
    and everything is verified; 48 in the released setup. AdaEAGLE's predicted lengths are used in the same way.
    """

    kind: Literal["head"] = "head"
    gamma: Gamma | dict[Annotated[int, Field(ge=1)], Gamma] = 1.0
    rounding: Literal["round", "floor"] = "round"
    base: Literal["block", "drafts"] = "block"
    min_verify_len: int = Field(default=1, ge=1)
    idle_up_to: int = Field(default=0, ge=0)
    _drafts: int = PrivateAttr(default=0)  # of a full block

    @property
    def needs(self) -> frozenset[str]:
        """The head's output."""
        return frozenset({"accept_len"})

    def start(self, caps: EngineCaps) -> None:
        """Check the minimum against the engine's block."""
        if self.min_verify_len > caps.block:
            raise InputError(f"{self.label}: min_verify_len {self.min_verify_len}; allowed 1..{caps.block}")
        if isinstance(self.gamma, dict) and not self.gamma:
            raise InputError(f"{self.label}: gamma is an empty table")
        self._drafts = caps.max_draft_len

    def verify_lens(self, batch: BatchView, draft: DraftView) -> IntArray:
        """The head's length times gamma, clamped, [n]."""
        assert draft.accept_len is not None
        if len(batch) <= self.idle_up_to:
            return draft.draft_lens + 1
        anchor = 1 if self.base == "drafts" else 0
        scaled = self._gamma(len(batch) + batch.queue_depth) * (draft.accept_len - anchor)
        whole = np.rint(scaled) if self.rounding == "round" else np.floor(scaled)
        lengths = np.maximum(whole + anchor, self.min_verify_len).astype(np.int64)
        return np.minimum(lengths, draft.draft_lens + 1)

    def rule(self, running: int, queued: int) -> LengthRule:
        """The same clamp in numbers."""
        if running <= self.idle_up_to:
            return LengthRule(self._drafts, self._drafts + 1)
        anchor = 1 if self.base == "drafts" else 0
        gamma = self._gamma(running + queued)
        return LengthRule(self._drafts, 0, gamma, anchor, self.rounding == "floor", self.min_verify_len)

    def _gamma(self, load: int) -> float:
        if not isinstance(self.gamma, dict):
            return self.gamma
        loads = sorted(self.gamma)
        return float(np.interp(load, loads, [self.gamma[x] for x in loads]))
