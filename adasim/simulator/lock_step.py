"""Seconds of a step that several attention ranks run together."""

from typing import Self

import numpy as np

from adasim.calibration.cost import CostModel
from adasim.calibration.parallel import Load
from adasim.serving.ranks import Ranks
from adasim.types import BatchView, IntArray, StepSeconds


class LockStep:
    """Prices a step as long as its slowest rank takes: the most requests, drafts, tokens and context of any.

    Engines pad every rank to the largest, idle ones included, because all meet in every layer. MLPs and LM head see the
    tokens that exist (padding reaches no expert).

    Args:
        cost: of a step that every rank runs alike, by what one of them does.
        ranks: whose requests are running.
        ragged: whether verify lengths are packed; else all are as long as the longest.
    """

    def __init__(self, cost: CostModel, ranks: Ranks, *, ragged: bool) -> None:
        self.cost, self.ranks, self.ragged = cost, ranks, ragged
        self._slowest, self._context = Load(0, 0, 0), 0.0

    def round(self, view: BatchView, draft_lens: IntArray, verify_lens: IntArray) -> Self:
        """The next ``step`` is a round of these lengths [n]."""
        rank, count = self.ranks.rank[view.request_ids], len(self.ranks.ranks)

        def most(values: IntArray) -> int:
            return int(np.bincount(rank, values, count).max())

        verified = verify_lens if self.ragged else np.full_like(verify_lens, verify_lens.max())
        requests = int(np.bincount(rank).max())
        self._slowest = Load(requests, most(draft_lens + (draft_lens > 0)), most(verified))
        self._context = most(view.context_lens) / requests
        return self

    def prefill(self) -> Self:
        """The next ``step`` only prefills."""
        self._slowest, self._context = Load(0, 0, 0), 0.0
        return self

    def step(
        self,
        batch: int,
        draft_positions: int,
        verified: int,
        context: float,
        *,
        longest_draft: int = 0,
        prefill: int = 0,
        prefill_context: float = 0.0,
        reads_head: bool = False,
        drafter_loaded: bool = True,
        eager: bool = False,
        ragged: bool = False,
    ) -> StepSeconds:
        """See :meth:`CostModel.step`; the counts are over all ranks."""
        everybody = Load(batch, draft_positions, verified, prefill)
        slowest, parts = self._slowest, [part for part in self.ranks.batch.parts if part is not None]
        if prefill:
            slowest = slowest._replace(prefill=max(part.total for part in parts))
            prefill_context = max(part.total * part.context for part in parts) / slowest.prefill
        step = self.cost.step(
            slowest.requests,
            slowest.positions,
            slowest.verified,
            self._context,
            longest_draft=longest_draft,
            prefill=slowest.prefill,
            prefill_context=prefill_context,
            reads_head=reads_head,
            drafter_loaded=drafter_loaded,
            eager=eager,
            ragged=ragged,
        )
        if not (eager or prefill):
            slowest = slowest._replace(verified=self.cost.captured(slowest.verified))
        return add(step, self.cost.padding(slowest, everybody, longest_draft))


class BalancedRanks:
    """What policies believe: every rank has its share of the requests, all requests are alike."""

    def __init__(self, cost: CostModel, ranks: int) -> None:
        self.cost, self.ranks = cost, ranks

    def round_s(self, batch: int, draft_positions: int, verified: int, context: float) -> float:
        """See :meth:`CostModel.round_s`; the counts are over all ranks."""
        requests = -(-batch // self.ranks)
        positions, tokens = (-(-n * requests // batch) for n in (draft_positions, verified))
        longest = draft_positions // batch - 1 if draft_positions else 0
        step = self.cost.step(requests, positions, tokens, context, longest_draft=longest, reads_head=True)
        everybody = Load(batch, draft_positions, verified)
        padded = Load(requests, positions, self.cost.captured(tokens))
        return add(step, self.cost.padding(padded, everybody, longest)).total


def add(step: StepSeconds, more: StepSeconds) -> StepSeconds:
    """Both, part by part."""
    return StepSeconds(*(a + b for a, b in zip(step, more, strict=True)))
