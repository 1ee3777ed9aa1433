"""Admission by latency objectives."""

from typing import Literal

import numpy as np
from pydantic import Field, PrivateAttr

from adasim.policies.scheduler.base import Scheduler, in_order
from adasim.types import EngineCaps, IntArray, QueueView, RunningView, StepOutcome


class SloAdmission(Scheduler):
    """Those who can still make it first, and no more of them than the running ones can bear.

    Requests that have waited longer than ``ttft_ms`` have missed their first-token limit already: they go behind the
    others, who have not. Time per output token of the running requests, an average that each round enters with
    ``weight``, bounds their number: above ``tpot_ms`` nobody is admitted; below, by as many as keep it if it grew in
    proportion to the batch (at least one, at most as many as run). Null = no limit.
    """

    kind: Literal["slo"] = "slo"
    ttft_ms: float | None = Field(default=1000.0, gt=0)
    tpot_ms: float | None = Field(default=50.0, gt=0)
    weight: float = Field(default=0.2, gt=0, le=1)
    _tpot_s: float = PrivateAttr(default=0.0)

    @property
    def sees_whole_queue(self) -> bool:
        """The first who can make it may be anywhere."""
        return True

    def start(self, caps: EngineCaps) -> None:
        """Forget the average."""
        self._tpot_s = 0.0

    def admit(self, queue: QueueView, running: RunningView, kv_free: int, caps: EngineCaps) -> IntArray:
        """The hopeful, then the late, as far as memory, the engine's limit and the time per token allow."""
        runs = len(running.request_ids)
        late = np.zeros(len(queue.request_ids), dtype=bool)
        if self.ttft_ms is not None:
            late = queue.now_s - queue.arrival_s > self.ttft_ms / 1e3
        places = min(caps.max_running_requests - runs, self._more(runs))
        return in_order(queue, kv_free, places, np.argsort(late, kind="stable"))

    def _more(self, runs: int) -> int:
        """Requests that may join ``runs`` others."""
        if not runs:
            return 1
        if self.tpot_ms is None:
            return runs
        limit_s = self.tpot_ms / 1e3
        if self._tpot_s > limit_s:
            return 0
        bearable = runs if not self._tpot_s else int(runs * (limit_s / self._tpot_s - 1))
        return min(max(bearable, 1), runs)

    def observe(self, outcome: StepOutcome) -> None:
        """Update the time per token."""
        emitted = int(outcome.emitted.sum())
        if not emitted:
            return
        tpot_s = outcome.seconds * len(outcome) / emitted
        self._tpot_s += (self.weight if self._tpot_s else 1.0) * (tpot_s - self._tpot_s)
