"""A row of a throughput table: tokens per second at a batch and a draft length."""

from typing import NamedTuple


class Row(NamedTuple):
    """One row: a batch that decodes steadily."""

    batch: int
    k: int  # draft tokens verified per request and round, the anchor not counted; 0 = plain decoding
    tok_s: float | None = None  # output tokens per second of the whole batch
    tau: float | None = None  # tokens per request and round, the bonus token counted
    context: float | None = None  # mean context of a request, tokens
    steps: int | None = None  # draft passes; null: one a draft (chains)
    top_k: int = 1  # above 1: the drafts form a tree

    @property
    def tokens(self) -> int:
        """Tokens of a verification pass."""
        return self.batch * (self.k + 1)

    @property
    def tree(self) -> bool:
        """Whether drafts branch: k is then the tree's tokens less its root."""
        return self.top_k > 1

    @property
    def passes(self) -> int:
        """Draft passes of a round, of an autoregressive drafter."""
        return self.steps if self.steps is not None and self.k else self.k

    @property
    def told_tau(self) -> float | None:
        """tau that needs no model of acceptance: of plain decoding, and of trees where measured."""
        return 1.0 if not self.k else self.tau if self.tree else None
