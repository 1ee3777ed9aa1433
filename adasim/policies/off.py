"""No speculation."""

from typing import Literal

from adasim.policies.base import Policy
from adasim.types import BatchView, DraftView, IntArray, constant


class Off(Policy):
    """Plain decoding: one token per request and round, no draft pass."""

    kind: Literal["off"] = "off"

    def draft_lens(self, batch: BatchView) -> IntArray:
        """Zeros, [n]."""
        return constant(len(batch), 0)

    def verify_lens(self, batch: BatchView, draft: DraftView) -> IntArray:
        """Ones, [n]: only the anchor."""
        return constant(len(batch), 1)
