"""No speculation."""

from typing import Literal

import numpy as np

from adasim.policies.base import Policy
from adasim.types import BatchView, DraftView, IntArray


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
        return np.zeros(len(batch), dtype=np.int64)

    def verify_lens(self, batch: BatchView, draft: DraftView) -> IntArray:
        """Ones, [n]: only the anchor."""
        return np.ones(len(batch), dtype=np.int64)
