"""TETRIS and ECHO: a fixed budget for the batch, spread by confidence."""

from typing import Literal

from pydantic import Field

from adasim.policies.base import Policy
from adasim.policies.budget import drafted_only, spend
from adasim.types import BatchView, DraftView, IntArray


class Tetris(Policy):
    """Verify the ``drafts`` likeliest drafts of the whole batch in every round, whatever its size, anchors besides.

    Likeliest means largest survival S_k, the product of confidences. The budget is what the target can verify at
    little cost, found beforehand; no cost model. Source: TETRIS (arXiv 2502.15197); ECHO (arXiv 2604.09603) spreads
    its K_max in the same way over trees. D-Cut is the same with a budget proportional to the batch.
    """

    kind: Literal["tetris"] = "tetris"
    drafts: int = Field(default=128, ge=0)

    @property
    def needs(self) -> frozenset[str]:
        """A survival curve."""
        return frozenset({"survival"})

    def verify_lens(self, batch: BatchView, draft: DraftView) -> IntArray:
        """The anchor and the kept drafts of each request, [n]."""
        assert draft.survival is not None
        budget = min(self.drafts, int(draft.draft_lens.sum()))
        return spend(drafted_only(draft.survival, draft.draft_lens), budget)
