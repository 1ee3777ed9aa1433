"""Who is admitted and who yields."""

from abc import ABC, abstractmethod
from math import ceil
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, PrivateAttr

from adasim.types import Component, EngineCaps, IntArray, QueueView, RunningView, StepOutcome


class Scheduler(Component, ABC):
    """Admission and eviction; one object for simulator and real engines."""

    kind: str

    def start(self, caps: EngineCaps) -> None:
        """Forget everything; a new run begins."""

    @abstractmethod
    def admit(self, queue: QueueView, running: RunningView, kv_free: int, caps: EngineCaps) -> IntArray:
        """Ids to admit now, in order.

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


def in_order(queue: QueueView, kv_free: int, places: int) -> IntArray:
    """The longest prefix of the queue that fits ``kv_free`` blocks and ``places`` running slots."""
    fits = np.searchsorted(np.cumsum(queue.blocks), kv_free, side="right")
    return queue.request_ids[: max(min(int(fits), places), 0)]


class Fcfs(Scheduler):
    """First come, first served: admit in order while memory and ``max_running_requests`` allow."""

    kind: Literal["fcfs"] = "fcfs"

    def admit(self, queue: QueueView, running: RunningView, kv_free: int, caps: EngineCaps) -> IntArray:
        """The head of the queue, as far as it fits."""
        return in_order(queue, kv_free, caps.max_running_requests - len(running.request_ids))


class EmaAdmission(Scheduler):
    """AdaFlash's admission: an EMA of the observed request count limits how many run.

    N_hat <- (1 - beta) N_hat + beta N, once a round, N = running + queued. At most ``ceil(N_hat) + headroom``
    requests run, so a burst is let in over about 1/beta rounds instead of at once, and the KV memory that
    their growing contexts will need is still there. The paper (arXiv 2607.19223) gives the average; what
    exactly it bounds is our reading.
    """

    kind: Literal["ema"] = "ema"
    beta: float = Field(default=0.3, gt=0, le=1)
    headroom: int = Field(default=1, ge=1)
    _n_hat: float = PrivateAttr(default=0.0)

    def start(self, caps: EngineCaps) -> None:
        """Forget the average."""
        self._n_hat = 0.0

    def admit(self, queue: QueueView, running: RunningView, kv_free: int, caps: EngineCaps) -> IntArray:
        """The head of the queue, as far as memory, the engine's limit and the average allow."""
        limit = min(caps.max_running_requests, ceil(self._n_hat) + self.headroom)
        return in_order(queue, kv_free, limit - len(running.request_ids))

    def observe(self, outcome: StepOutcome) -> None:
        """Update the average with the requests of this round."""
        self._n_hat += self.beta * (len(outcome) + outcome.queue_depth - self._n_hat)


AnyScheduler = Annotated[Fcfs | EmaAdmission, Field(discriminator="kind")]
