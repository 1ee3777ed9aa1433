"""Data-parallel attention ranks: an admission each, and one batch of all for the length policy."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from adasim.serving.admission import Admission
from adasim.serving.batch import Batch, Prefill
from adasim.serving.kv import KvPool
from adasim.serving.recorder import Recorder
from adasim.types import FloatArray, IntArray, StepOutcome


class RankedPool:
    """KV memory of all ranks."""

    def __init__(self, pools: Sequence[KvPool]) -> None:
        self._pools = pools

    @property
    def used(self) -> int:
        """Blocks in use."""
        return sum(pool.used for pool in self._pools)


class RankedBatch:
    """The batches of all ranks as one, rank after rank; see :class:`~adasim.serving.batch.Batch`."""

    def __init__(self, ranks: Sequence[Batch]) -> None:
        self._ranks = ranks
        self.parts: list[Prefill | None] = [None] * len(ranks)  # of the latest prefill, by rank

    def __len__(self) -> int:
        return sum(len(batch) for batch in self._ranks)

    @property
    def request(self) -> IntArray:
        """Indices of all requests."""
        return np.concatenate([batch.request for batch in self._ranks])

    @property
    def prefilling(self) -> IntArray:
        """Indices of those with tokens left to prefill."""
        return np.concatenate([batch.prefilling for batch in self._ranks])

    @property
    def decoding(self) -> IntArray:
        """Indices of the requests that take part in a round."""
        return np.concatenate([batch.decoding for batch in self._ranks])

    @property
    def context(self) -> IntArray:
        """Tokens known of each request, the anchor counted."""
        return np.concatenate([batch.context for batch in self._ranks])

    def whole_prompts(self, limit: int) -> Prefill:
        """Whole prompts, up to ``limit`` tokens or one prompt a rank."""
        self.parts = [batch.whole_prompts(limit) if len(batch.prefilling) else None for batch in self._ranks]
        return self._joined()

    def chunk(self, limit: int) -> Prefill:
        """``limit`` tokens a rank."""
        self.parts = [batch.chunk(limit) if len(batch.prefilling) else None for batch in self._ranks]
        return self._joined()

    def _joined(self) -> Prefill:
        parts = [part for part in self.parts if part is not None]
        total = sum(part.total for part in parts)
        context = sum(part.total * part.context for part in parts) / total
        ids, tokens = (np.concatenate([part[i] for part in parts]) for i in range(2))
        return Prefill(ids, tokens, total, context)


class Ranks:
    """Stands where an engine's :class:`~adasim.serving.admission.Admission` does.

    Args:
        ranks: share one table of ``lives``.
        routing: which rank an arriving request joins: each in turn, or the one with the fewest waiting and running.
    """

    def __init__(self, ranks: Sequence[Admission], routing: Literal["round_robin", "least_requests"]) -> None:
        self.ranks, self.routing, self.lives = ranks, routing, ranks[0].lives
        self.batch, self.pool = RankedBatch([r.batch for r in ranks]), RankedPool([r.pool for r in ranks])
        self.rank = np.zeros(len(self.lives), dtype=np.int64)  # of each request
        self._turn = 0
        most = sum(len(r.accepted) for r in ranks)
        self.accepted, self.emitted = np.empty((2, most), dtype=np.int64)  # of the latest round
        self.listens = ranks[0].listens

    @property
    def queue(self) -> list[int]:
        """Who waits."""
        return [index for rank in self.ranks for index in rank.queue]

    @property
    def evicted(self) -> int:
        """Requests that lost their memory in this step."""
        return sum(rank.evicted for rank in self.ranks)

    @evicted.setter
    def evicted(self, count: int) -> None:
        for rank in self.ranks:
            rank.evicted = count

    def submit(self, index: int, now_s: float) -> None:
        """A request arrives."""
        self._route(index).submit(index, now_s)

    def join(self, index: int, *, first: bool = False) -> None:
        """A request comes with its KV cache computed; ``first``: back to the rank that evicted it, before the others."""
        (self.ranks[self.rank[index]] if first else self._route(index)).join(index, first=first)

    def _route(self, index: int) -> Admission:
        if self.routing == "round_robin":
            rank, self._turn = self._turn, (self._turn + 1) % len(self.ranks)
        else:
            rank = min(range(len(self.ranks)), key=lambda r: len(self.ranks[r].queue) + len(self.ranks[r].batch))
        self.rank[index] = rank
        return self.ranks[rank]

    def admit(self, now_s: float) -> None:
        """Let every rank's scheduler move waiting requests into its batch."""
        for rank in self.ranks:
            rank.admit(now_s)

    def slices(self, ids: IntArray) -> list[slice]:
        """Where each rank's requests lie in ``ids`` [n], which go rank after rank."""
        bounds = np.searchsorted(self.rank[ids], np.arange(len(self.ranks) + 1)).tolist()
        return [slice(a, b) for a, b in pairwise(bounds)]

    def reserve(self, ids: IntArray, draft_lens: IntArray) -> NDArray[np.bool_]:
        """Hold k + 1 KV slots for each request; see :meth:`Admission.reserve`."""
        kept = [r.reserve(ids[s], draft_lens[s]) for r, s in zip(self.ranks, self.slices(ids), strict=True)]
        return np.concatenate(kept)

    def land_prefill(self, prefill: Prefill, now_s: float) -> tuple[int, FloatArray]:
        """A step computed prompt tokens; see :meth:`Admission.land_prefill`."""
        landed = [
            rank.land_prefill(part, now_s)
            for rank, part in zip(self.ranks, self.batch.parts, strict=True)
            if part is not None
        ]
        return sum(ready for ready, _ in landed), np.concatenate([gaps_s for _, gaps_s in landed])

    def land(
        self,
        ids: IntArray,
        draft_lens: IntArray,
        verify_lens: IntArray,
        run: IntArray,
        now_s: float,
        recorder: Recorder,
    ) -> tuple[int, int]:
        """A round ended; see :meth:`Admission.land`."""
        accepted = emitted = 0
        for rank, s in zip(self.ranks, self.slices(ids), strict=True):
            n = s.stop - s.start
            if not n:
                continue
            of = rank.land(ids[s], draft_lens[s], verify_lens[s], run[s], now_s, recorder)
            self.accepted[s], self.emitted[s] = rank.accepted[:n], rank.emitted[:n]
            accepted, emitted = accepted + of[0], emitted + of[1]
        return accepted, emitted

    def finish(self, now_s: float) -> list[int]:
        """Requests that have all their tokens leave; their indices."""
        return [index for rank in self.ranks for index in rank.finish(now_s)]

    def observe(self, outcome: StepOutcome) -> None:
        """Tell every rank's scheduler of its part."""
        for rank, s in zip(self.ranks, self.slices(outcome.request_ids), strict=True):
            columns = "request_ids", "draft_lens", "verify_lens", "accepted", "emitted"
            part = {name: getattr(outcome, name)[s] for name in columns}
            rank.observe(replace(outcome, **part, queue_depth=len(rank.queue)))
