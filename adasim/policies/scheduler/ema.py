"""AdaFlash's admission."""

from math import ceil
from typing import Literal

from pydantic import Field, PrivateAttr

from adasim.policies.scheduler.base import Scheduler, in_order
from adasim.types import EngineCaps, IntArray, QueueView, RunningView, StepOutcome


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
