"""No speculation."""

from typing import Literal

import numpy as np

from adasim.policies.base import Policy
from adasim.types import BatchView, DraftView, IntArray


class Off(Policy):
    """Plain decoding: one token per request and round, no draft pass."""

    kind: Literal["off"] = "off"

    def draft_lens(self, batch: BatchView) -> IntArray:
        """Zeros, [n]."""
        return np.zeros(len(batch), dtype=np.int64)

    def verify_lens(self, batch: BatchView, draft: DraftView) -> IntArray:
        """Ones, [n]: only the anchor."""
        return np.ones(len(batch), dtype=np.int64)
