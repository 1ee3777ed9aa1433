"""What every scheduler answers."""

from abc import ABC, abstractmethod

import numpy as np

from adasim.policies.needs import check_needs
from adasim.types import Component, EngineCaps, IntArray, QueueView, RunningView, StepOutcome


class Scheduler(Component, ABC):
    """Admission and eviction; one object for simulator and real engines."""

    kind: str

    @property
    def needs(self) -> frozenset[str]:
        """What the engine must provide: "predicted_len" or nothing."""
        return frozenset()

    @property
    def sees_whole_queue(self) -> bool:
        """Whether ``admit`` is shown everybody who waits, or only as many of the first as there are places."""
        return False

    def check(self, caps: EngineCaps) -> None:
        """Refuse an engine that lacks what this scheduler needs.

        Raises:
            InputError: what is missing.
        """
        check_needs(f"scheduler {self.kind}", self.needs, caps)

    def start(self, caps: EngineCaps) -> None:
        """Forget everything; a new run begins."""

    @abstractmethod
    def admit(self, queue: QueueView, running: RunningView, kv_free: int, caps: EngineCaps) -> IntArray:
        """Ids to admit now, in order; somebody who fits, if nobody runs.

        Args:
            queue: waiting requests, the longest-waiting first.
            running: requests that hold KV memory.
            kv_free: KV blocks that are free or can be freed from the prefix cache.
            caps: the engine's limits.
        """

    def evict(self, running: RunningView, need: int) -> IntArray:
        """Ids to send back to the queue so that ``need`` KV blocks become free: the youngest first."""
        freed = np.cumsum(running.blocks[::-1])
        count = int(np.searchsorted(freed, need)) + 1
        return running.request_ids[::-1][:count]

    def observe(self, outcome: StepOutcome) -> None:
        """Feedback of one round."""


def in_order(queue: QueueView, kv_free: int, places: int, order: IntArray | None = None) -> IntArray:
    """Ids that fit ``kv_free`` blocks and ``places`` running slots: the first ones of the queue, or of ``order``.

    Nobody overtakes the first who does not fit.
    """
    ids, blocks = queue.request_ids, queue.blocks
    if order is not None:
        ids, blocks = ids[order], blocks[order]
    if int(blocks.sum()) > kv_free:
        places = min(int(np.searchsorted(np.cumsum(blocks), kv_free, side="right")), places)
    return ids[: max(places, 0)]
