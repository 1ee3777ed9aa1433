"""Collects what a run does, and turns it into records."""

from collections.abc import Sequence
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from adasim.kernels import kernels
from adasim.records import BlockRecord, EventRecord, GapRecord, Records, RequestRecord, StepRecord, frame, table
from adasim.serving.lives import STATUS, Lives
from adasim.serving.rounds import Rounds
from adasim.types import FloatArray, IntArray

if TYPE_CHECKING:
    import pandas as pd


class Rows:
    """Numeric records of one kind, in order, packed: 8 bytes a number."""

    def __init__(self, kind: type[NamedTuple]) -> None:
        self._kind = kind
        self._types = [(name, "f8" if kind.__annotations__[name] is float else "i8") for name in kind._fields]
        self._pack = Struct("".join("d" if t == "f8" else "q" for _, t in self._types)).pack
        self._rows, self._count = bytearray(), 0

    def append(self, record: tuple[float, ...]) -> None:
        """One more; its numbers in the order of the kind's fields."""
        self._rows += self._pack(*record)
        self._count += 1

    def extend(self, records: Sequence[tuple[float, ...]]) -> None:
        """Several more."""
        self._rows += b"".join([self._pack(*record) for record in records])
        self._count += len(records)

    def __len__(self) -> int:
        return self._count

    def _array(self) -> NDArray[np.void]:
        return np.frombuffer(bytes(self._rows), self._types)

    def __getitem__(self, index: int) -> np.void:
        """One record, fields by name."""
        row: np.void = self._array()[index]
        return row

    def frame(self) -> "pd.DataFrame":
        """All of them as a table."""
        rows = self._array()
        return table(self._kind, [rows[name] for name in self._kind._fields])


class Recorder:
    """Rows of every table, in order.

    Args:
        domains: names, indexed by the requests' ``domain``.
        block: positions of a full block, the anchor counted.
        rounds: take every request of every round down.
    """

    def __init__(self, domains: Sequence[str], block: int, *, rounds: bool = False) -> None:
        self.domains = domains
        self.steps = Rows(StepRecord)
        self.events: list[EventRecord] = []
        self.rounds = Rounds() if rounds else None
        self._gaps = Rows(GapRecord)
        self._shape = (len(domains), block + 1, block)
        self._blocks: dict[int, IntArray] = {}  # by drafter version
        self.draft_version = 0
        self._kernels = kernels()
        self._found, self._counts = np.empty(0), np.empty(0, dtype=np.int64)
        self.last_arrival_s = 0.0

    @property
    def draft_version(self) -> int:
        """Of the drafter in use."""
        return self._version

    @draft_version.setter
    def draft_version(self, version: int) -> None:
        if version not in self._blocks:
            self._blocks[version] = np.zeros(self._shape, dtype=np.int64)
        # how often a verified block had so many accepted: by domain, verify_len, accepted
        self.blocks, self._version = self._blocks[version], version

    def gaps(self, gaps_s: FloatArray) -> None:
        """Time since each request's last chunk, [n]."""
        n, step = len(gaps_s), len(self.steps)
        if n > len(self._found):
            self._found, self._counts = np.empty(2 * n), np.empty(2 * n, dtype=np.int64)
        known = self._kernels.distinct(gaps_s, self._found, self._counts)
        found = zip(self._found[:known].tolist(), self._counts[:known].tolist(), strict=True)
        self._gaps.extend([(step, gap_s, chunks) for gap_s, chunks in found])

    def counted_gaps(self, gaps: Sequence[tuple[int, float, int]]) -> None:
        """Step, time since the last chunk, and how many requests had to wait so long in it; in rising order."""
        self._gaps.extend(gaps)

    def records(self, lives: Lives) -> Records:
        """All tables."""
        domains, status = np.array(self.domains, dtype=object), np.array(STATUS, dtype=object)
        requests = [
            np.arange(len(lives)), domains[lives.domain], status[lives.status], lives.prompt, lives.output,
            lives.arrival_s, lives.admitted_s, lives.first_token_s, lives.finish_s, lives.done, lives.rounds,
            lives.drafts, lives.verified, lives.accepted, lives.evictions, lives.cached, lives.draft_version,
        ]  # fmt: skip
        blocks = [
            BlockRecord(self.domains[d], v, a, int(counts[d, v, a]), version)
            for version, counts in self._blocks.items()
            for d, v, a in np.argwhere(counts).tolist()
        ]
        return Records(
            self.steps.frame(),
            table(RequestRecord, requests),
            frame(BlockRecord, blocks),
            self._gaps.frame(),
            frame(EventRecord, self.events),
            self.last_arrival_s,
            rounds=None if self.rounds is None else self.rounds.frame(self.domains),
        )  # fmt: skip
