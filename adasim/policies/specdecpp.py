"""SpecDec++."""

from typing import Literal

import numpy as np
from pydantic import Field

from adasim.policies.base import Policy
from adasim.policies.budget import drafted_only
from adasim.types import BatchView, DraftView, IntArray


class SpecDecPP(Policy):
    """Stop once some draft is likely wrong: verify the first k drafts while 1 - p_1 p_2 ... p_k <= ``stop_above``.

    p_i is the acceptance head's probability for draft i, so the product is the survival curve S_k. Source: SpecDec++
    (arXiv 2405.19715), whose h is 0.7 here. There the loop is autoregressive and stops drafting; a one-pass drafter has
    drafted already and only the verification is cut. Blind to load.
    """

    kind: Literal["specdec++"] = "specdec++"
    stop_above: float = Field(default=0.7, gt=0, lt=1)

    @property
    def needs(self) -> frozenset[str]:
        """A survival curve."""
        return frozenset({"survival"})

    def verify_lens(self, batch: BatchView, draft: DraftView) -> IntArray:
        """1 + the drafts before the risk exceeds ``stop_above``, [n]."""
        assert draft.survival is not None
        safe = drafted_only(draft.survival, draft.draft_lens) >= 1 - self.stop_above
        return 1 + np.count_nonzero(safe, axis=1)
