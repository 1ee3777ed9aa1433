"""A row of a throughput table: tokens per second at a batch and a draft length."""

from typing import NamedTuple

from adasim.importers.fields import Malformed
from adasim.importers.tables import RunRow

REACHED = 0.8  # of the clients' limit in flight: it was the batch
CUT = 0.95  # of the drafts configured were verified: lengths did not vary


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


def row_of(run: RunRow) -> Row:
    """A run as a batch that decodes steadily.

    Raises:
        Malformed: it does not tell enough, or its lengths varied.
    """
    k = run.k
    if k is None and run.tau is None and run.engine == "vllm":
        k = 0  # its files show counters wherever it drafts
    if k is None:
        raise Malformed("their draft length is not told, or varied (a table with a column k can tell it)")
    if run.rounds and run.drafted is not None and run.drafted < CUT * run.rounds * k:
        raise Malformed("fewer drafts were verified than configured, so that their length varied")
    batch = batch_of(run)
    tok_s = run.output_tok_s or (1e3 * batch / run.tpot_mean_ms if batch and run.tpot_mean_ms else None)
    if batch is None:
        tok_s = None  # the accept length is still good
    tau = run.tau if k else None
    tree = k > 0 and (run.topk or 1) > 1
    if tok_s is None and tau is None:
        raise Malformed("they hold neither tokens per second at a concurrency nor the accept length of drafts")
    if tree and (run.depth is None or tau is None):
        raise Malformed("a tree needs its steps and its accept length: no formula for chains gives it")
    return Row(
        batch or 1,
        k,
        tok_s,
        tau,
        context_of(run),
        steps=run.depth if tree else None,
        top_k=run.topk or 1 if tree else 1,
    )


def batch_of(run: RunRow) -> int | None:
    """Requests in flight: the clients' limit, or the mean where there was none or it was not reached."""
    mean = run.concurrency_mean
    if mean is None and run.e2e_mean_ms and run.requests and run.duration_s:
        mean = run.e2e_mean_ms / 1e3 * run.requests / run.duration_s  # Little's law
    limit = run.concurrency
    found = mean if limit is None or (mean is not None and mean < REACHED * limit) else limit
    return None if found is None else max(1, round(found))


def context_of(run: RunRow) -> float | None:
    """Mean tokens of a request while it decodes."""
    if run.context is not None or not run.requests or run.prompt_tokens is None or run.output_tokens is None:
        return run.context
    return (run.prompt_tokens + run.output_tokens / 2) / run.requests
