"""The best static draft length by batch size, by formula: expected tokens per second of a round.

Nothing is simulated: no queue, no prefill, no batch that thins out. What full rounds cut to k accept stands for what
rounds of k drafts accept; where acceptance is correlated along the text, short blocks see somewhat easier text (3 to 5 %
more in DSpark's figures), which this leaves out.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import nan
from typing import NamedTuple

import numpy as np

from adasim.calibration.cost import CostModel
from adasim.errors import InputError
from adasim.types import FloatArray

ALIKE = 0.01  # lengths less than this far behind the best, relative, count as best: fewer switches of graphs


@dataclass(frozen=True, slots=True)
class Rates:
    """Output tokens per second of a batch, by draft length: ``tok_s`` [K + 1], k = 0..K; NaN = not measured."""

    batch: int
    tok_s: FloatArray

    @property
    def k(self) -> int:
        """The length with the most."""
        return int(np.nanargmax(self.tok_s))

    @property
    def best_tok_s(self) -> float:
        """Its tokens per second."""
        return float(self.tok_s[self.k])

    @property
    def gain(self) -> float:
        """How much more than k = 0 beside the loaded drafter that is, relative; NaN where that was not measured."""
        return self.best_tok_s / float(self.tok_s[0]) - 1


class Range(NamedTuple):
    """Batches ``first`` to ``last``, inclusive, draft ``k`` tokens."""

    first: int
    last: int
    k: int


def tokens_per_round(curves: FloatArray, shares: FloatArray) -> FloatArray:
    """Tokens of a request and round, bonus counted, by draft length k = 0..K, [K + 1].

    Pooled over domains as tau is: all tokens over all rounds, the harmonic mean by share of tokens. A domain that is
    accepted less takes more rounds for its tokens, so more of a batch is of it.

    Args:
        curves: survival by domain, [domains, K].
        shares: of the output tokens by domain, [domains], sum 1.
    """
    tau = np.cumsum(np.concatenate([np.ones((len(curves), 1)), curves], axis=1), axis=1)
    pooled: FloatArray = 1 / (shares @ (1 / tau))
    return pooled


def rates(
    cost: CostModel, tokens: FloatArray, batches: Iterable[int], context: float, *, draft_block: bool = False
) -> list[Rates]:
    """Tokens per second by draft length, for every batch of which the cost knows at least one length.

    Args:
        cost: of the engine with its drafter; lengths and batches that it refuses are left out.
        tokens: of :func:`tokens_per_round`, [K + 1].
        batches: requests that decode together.
        context: their mean context, tokens.
        draft_block: the drafter fills the full block whatever k is (SGLang's DFLASH family), unless k is 0.
    """
    found = (Rates(n, _tok_s(cost, tokens, n, context, draft_block)) for n in batches)
    return [r for r in found if not np.isnan(r.tok_s).all()]


def _tok_s(cost: CostModel, tokens: FloatArray, batch: int, context: float, draft_block: bool) -> FloatArray:
    per_s = np.full(len(tokens), nan)
    for k in range(len(tokens)):
        drafts = (len(tokens) - 1 if draft_block else k) if k else 0
        drafted = batch * (drafts + 1) if k else 0
        try:
            step = cost.step(batch, drafted, batch * (k + 1), context, longest_draft=drafts)
        except InputError:  # outside what was measured
            continue
        per_s[k] = batch * tokens[k] / step.total
    return per_s


def ranges(found: Sequence[Rates], alike: float = ALIKE) -> list[Range]:
    """The best length by range of batches; a length is kept while it is at most ``alike`` behind the best.

    Args:
        found: batches rising; those between two of them, and from 1 on, take the entry before (the first: its own).
        alike: relative loss that is accepted for fewer ranges.
    """
    made: list[Range] = []
    for r in found:
        if made and r.tok_s[made[-1].k] >= (1 - alike) * r.best_tok_s:  # NaN: not
            made[-1] = made[-1]._replace(last=r.batch)
            continue
        if made:
            made[-1] = made[-1]._replace(last=r.batch - 1)
        made.append(Range(r.batch if made else 1, r.batch, r.k))
    return made
