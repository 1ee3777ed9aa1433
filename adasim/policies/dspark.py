"""DSpark's hardware-aware budget."""

from typing import Literal

from adasim.policies.budget import BatchBudget
from adasim.types import BatchView, DraftView, IntArray


class DSpark(BatchBudget):
    """One budget for the batch: the likeliest prefixes are admitted while tokens per second rise.

    All (request, position) prefixes are sorted by survival S; with the m likeliest, tokens = n + the sum of their S, and
    seconds come from the cost model's table of n requests and n + m tokens. ``stop`` = "early" takes the first m after
    which tokens / seconds falls: DSpark (arXiv 2607.05147) looks no further, so as to stay lossless. "best" takes the
    maximum over all m. On a staircase the early stop stands before the first riser that does not pay at once.

    The size of the budget is decided from confidences ``stale_steps`` rounds old, one or two, so that the host need not
    wait; who gets it, from the present ones. Until there are old ones, everything is verified.
    """

    kind: Literal["dspark"] = "dspark"

    @property
    def needs(self) -> frozenset[str]:
        """A survival curve and a cost model."""
        return frozenset({"survival", "cost"})

    def verify_lens(self, batch: BatchView, draft: DraftView) -> IntArray:
        """The anchor and the kept drafts of each request, [n]."""
        assert draft.survival is not None
        return self.share(batch, draft, draft.survival)
