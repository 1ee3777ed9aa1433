"""Collects what a run does, and turns it into records."""

from collections.abc import Sequence

import numpy as np

from adasim.records import BlockRecord, GapRecord, Records, RequestRecord, StepRecord, frame
from adasim.serving.admission import Life
from adasim.types import FloatArray, IntArray


class Recorder:
    """Rows of every table, in order.

    Args:
        domains: names, indexed by the requests' ``domain``.
        block: positions of a full block, the anchor counted.
    """

    def __init__(self, domains: Sequence[str], block: int) -> None:
        self.domains = domains
        self.steps: list[StepRecord] = []
        self._gaps: list[GapRecord] = []
        self._blocks = np.zeros((len(domains), block + 1, block), dtype=np.int64)
        self.last_arrival_s = 0.0

    def round(self, domains: IntArray, verify_lens: IntArray, accepted: IntArray, gaps_s: FloatArray) -> None:
        """One round's blocks and chunk gaps, one entry a request."""
        np.add.at(self._blocks, (domains, verify_lens, accepted), 1)
        self.gaps(gaps_s)

    def gaps(self, gaps_s: FloatArray) -> None:
        """Time since each request's last chunk, [n]."""
        if not len(gaps_s):
            return
        step = len(self.steps)
        if (gaps_s == gaps_s[0]).all():  # nearly always: everybody took part in the round before
            self._gaps.append(GapRecord(step, float(gaps_s[0]), len(gaps_s)))
            return
        values, counts = np.unique(gaps_s, return_counts=True)
        self._gaps += [GapRecord(step, g, c) for g, c in zip(values.tolist(), counts.tolist(), strict=True)]

    def records(self, lives: Sequence[Life]) -> Records:
        """All tables."""
        requests = [
            RequestRecord(
                i,
                self.domains[x.request.domain],
                x.status,
                x.request.prompt_len,
                x.request.output_len,
                x.arrival_s,
                x.admitted_s,
                x.first_token_s,
                x.finish_s,
                x.tokens,
                x.rounds,
                x.drafts,
                x.verified,
                x.accepted,
                x.evictions,
                x.cached,
            )
            for i, x in enumerate(lives)
        ]
        found = np.argwhere(self._blocks).tolist()
        blocks = [BlockRecord(self.domains[d], v, a, int(self._blocks[d, v, a])) for d, v, a in found]
        return Records(
            frame(StepRecord, self.steps),
            frame(RequestRecord, requests),
            frame(BlockRecord, blocks),
            frame(GapRecord, self._gaps),
            self.last_arrival_s,
        )
