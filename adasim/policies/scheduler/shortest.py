"""Shortest predicted first."""

from typing import Literal

import numpy as np
from pydantic import Field

from adasim.policies.scheduler.base import Scheduler, in_order
from adasim.types import EngineCaps, IntArray, QueueView, RunningView


class ShortestPredicted(Scheduler):
    """Admit whoever is predicted to need the fewest further output tokens.

    Predictions come from the engine, with its predictor's error (see ``serving.predictor``). Requests that have waited
    longer than ``patience_ms`` go first, in order of arrival (null: long ones may starve). Nobody who runs is
    interrupted.
    """

    kind: Literal["shortest"] = "shortest"
    patience_ms: float | None = Field(default=None, ge=0)

    @property
    def needs(self) -> frozenset[str]:
        """Predicted output lengths."""
        return frozenset({"predicted_len"})

    @property
    def sees_whole_queue(self) -> bool:
        """The shortest may be anywhere."""
        return True

    def admit(self, queue: QueueView, running: RunningView, kv_free: int, caps: EngineCaps) -> IntArray:
        """The impatient, then the shortest, as far as they fit."""
        assert queue.predicted_lens is not None
        lengths = queue.predicted_lens
        if self.patience_ms is not None:
            lengths = np.where(queue.now_s - queue.arrival_s > self.patience_ms / 1e3, -1.0, lengths)
        order = np.argsort(lengths, kind="stable")
        return in_order(queue, kv_free, caps.max_running_requests - len(running.request_ids), order)
