"""What rules with one chain length for the whole batch share."""

from abc import ABC, abstractmethod
from collections.abc import Iterable

import numpy as np
from pydantic import PrivateAttr

from adasim.errors import InputError
from adasim.policies.base import Policy
from adasim.types import BatchView, DraftView, EngineCaps, IntArray


class OneLength(Policy, ABC):
    """Chooses k before drafting, the same for all, and verifies all k drafts.

    ``draft_block`` drafts the full block whatever k is and verifies k of it, as one-pass drafters that were
    trained on blocks of one size need (SGLang PR 24596); k = 0 drafts nothing either way.
    """

    draft_block: bool = False
    _k: int = PrivateAttr(default=0)

    @abstractmethod
    def choose(self, batch: BatchView) -> int:
        """Draft tokens of every request in this round, 0..max_draft_len."""

    def draft_lens(self, batch: BatchView) -> IntArray:
        """k for all, or the full block, [n]."""
        self._k = self.choose(batch)
        drafted = batch.caps.max_draft_len if self.draft_block and self._k else self._k
        return np.full(len(batch), drafted, dtype=np.int64)

    def verify_lens(self, batch: BatchView, draft: DraftView) -> IntArray:
        """k + 1 for all, [n]."""
        return np.minimum(draft.draft_lens, self._k) + 1

    def check_drafts(self, lengths: Iterable[int], caps: EngineCaps) -> None:
        """Refuse draft lengths that the engine does not have.

        Raises:
            InputError: which, and what is allowed.
        """
        bad = sorted({k for k in lengths if not 0 <= k <= caps.max_draft_len})
        if bad:
            raise InputError(f"{self.label}: {', '.join(map(str, bad))} drafts; allowed 0..{caps.max_draft_len}")


def floors(table: dict[int, object], what: str, label: str) -> list[int]:
    """Rising lower bounds of a table {from this size on: value}.

    Raises:
        InputError: it leaves size 1 without a value.
    """
    found = sorted(table)
    if not found or found[0] > 1:
        raise InputError(f"{label}: {what} must begin at 1, it begins at {found[0] if found else 'nothing'}")
    return found
