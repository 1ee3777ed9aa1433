"""Collects what a run does, and turns it into records."""

from collections.abc import Sequence

import numpy as np

from adasim.records import BlockRecord, EventRecord, GapRecord, Records, RequestRecord, StepRecord, frame
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
        self.events: list[EventRecord] = []
        self.draft_version = 0  # of the drafter in use
        self._gaps: list[GapRecord] = []
        self._shape = (len(domains), block + 1, block)
        self._blocks: dict[int, IntArray] = {}  # by drafter version
        self.last_arrival_s = 0.0

    def round(self, domains: IntArray, verify_lens: IntArray, accepted: IntArray, gaps_s: FloatArray) -> None:
        """One round's blocks and chunk gaps, one entry a request."""
        if self.draft_version not in self._blocks:
            self._blocks[self.draft_version] = np.zeros(self._shape, dtype=np.int64)
        np.add.at(self._blocks[self.draft_version], (domains, verify_lens, accepted), 1)
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
                x.draft_version,
            )
            for i, x in enumerate(lives)
        ]
        blocks = [
            BlockRecord(self.domains[d], v, a, int(counts[d, v, a]), version)
            for version, counts in self._blocks.items()
            for d, v, a in np.argwhere(counts).tolist()
        ]
        return Records(
            frame(StepRecord, self.steps),
            frame(RequestRecord, requests),
            frame(BlockRecord, blocks),
            frame(GapRecord, self._gaps),
            frame(EventRecord, self.events),
            self.last_arrival_s,
        )
