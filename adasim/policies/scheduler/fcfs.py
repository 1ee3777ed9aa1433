"""First come, first served."""

from typing import Literal

from adasim.policies.scheduler.base import Scheduler, in_order
from adasim.types import EngineCaps, IntArray, QueueView, RunningView


class Fcfs(Scheduler):
    """First come, first served: admit in order while memory and ``max_running_requests`` allow."""

    kind: Literal["fcfs"] = "fcfs"

    def admit(self, queue: QueueView, running: RunningView, kv_free: int, caps: EngineCaps) -> IntArray:
        """The head of the queue, as far as it fits."""
        return in_order(queue, kv_free, caps.max_running_requests - len(running.request_ids))
