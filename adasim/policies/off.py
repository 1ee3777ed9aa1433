"""No speculation."""

from typing import Literal

from adasim.policies.base import LengthRule, Policy
from adasim.types import BatchView, DraftView, IntArray, constant


class Off(Policy):
    """Plain decoding: one token per request and round, no draft pass.

    No drafter is loaded. To decode plainly beside a loaded one, and pay for it, take ``fixed`` with verify_len 1.
    """

    kind: Literal["off"] = "off"

    @property
    def loads_drafter(self) -> bool:
        """No."""
        return False

    def draft_lens(self, batch: BatchView) -> IntArray:
        """Zeros, [n]."""
        return constant(len(batch), 0)

    def verify_lens(self, batch: BatchView, draft: DraftView) -> IntArray:
        """Ones, [n]: only the anchor."""
        return constant(len(batch), 1)

    def rule(self, running: int, queued: int) -> LengthRule:
        """0 and 1."""
        return LengthRule(0, 1)
