"""The upper bound."""

from typing import Literal

from adasim.policies.base import Policy
from adasim.types import BatchView, DraftView, IntArray


class Oracle(Policy):
    """Verify exactly the drafts that will be accepted, and the token after them. Simulator only."""

    kind: Literal["oracle"] = "oracle"

    @property
    def needs(self) -> frozenset[str]:
        """The truth."""
        return frozenset({"truth"})

    def verify_lens(self, batch: BatchView, draft: DraftView) -> IntArray:
        """L + 1, [n]."""
        assert draft.truth is not None
        return (draft.truth + 1).clip(max=draft.draft_lens + 1)
