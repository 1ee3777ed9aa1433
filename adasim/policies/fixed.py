"""The same length for everybody, always."""

from typing import Literal

from pydantic import Field

from adasim.errors import InputError
from adasim.policies.base import LengthRule, Policy
from adasim.types import BatchView, DraftView, EngineCaps, IntArray, constant


class Fixed(Policy):
    """Verify ``verify_len`` tokens of every request in every round.

    ``draft_len`` defaults to ``verify_len - 1`` (a drafter of that block size); set it to draft a longer
    block than is verified.
    """

    kind: Literal["fixed"] = "fixed"
    verify_len: int = Field(default=8, ge=1)
    draft_len: int | None = Field(default=None, ge=0)

    @property
    def _draft_len(self) -> int:
        return self.verify_len - 1 if self.draft_len is None else self.draft_len

    def start(self, caps: EngineCaps) -> None:
        """Check the lengths against the engine's block."""
        if not self.verify_len - 1 <= self._draft_len <= caps.max_draft_len:
            raise InputError(
                f"{self.label}: verify_len {self.verify_len} with draft_len {self._draft_len}; allowed: "
                f"verify_len 1..{caps.block}, draft_len verify_len - 1..{caps.max_draft_len}"
            )

    def draft_lens(self, batch: BatchView) -> IntArray:
        """``draft_len`` for all, [n]."""
        return constant(len(batch), self._draft_len)

    def verify_lens(self, batch: BatchView, draft: DraftView) -> IntArray:
        """``verify_len`` for all, [n]."""
        return constant(len(batch), self.verify_len)

    def rule(self, running: int, queued: int) -> LengthRule:
        """``draft_len`` and ``verify_len``."""
        return LengthRule(self._draft_len, self.verify_len)
