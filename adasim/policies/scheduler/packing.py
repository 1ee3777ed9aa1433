"""As many requests as one verification pass should hold."""

from typing import Literal

from pydantic import Field, PrivateAttr

from adasim.policies.scheduler.base import Scheduler, in_order
from adasim.types import EngineCaps, IntArray, QueueView, RunningView, StepOutcome


class VerifyPacking(Scheduler):
    """Admit, in order, while the next verification is expected to stay within ``verify_tokens``.

    Expected tokens = requests x mean verify length, an average that each round enters with ``weight`` (at first: full
    blocks). The budget is where verification stops being cheap: a captured graph's size, or the knee of the cost
    curve. A rule that verifies less makes room for more requests, and one that verifies more for fewer.
    """

    kind: Literal["packing"] = "packing"
    verify_tokens: int = Field(default=256, ge=1)
    weight: float = Field(default=0.1, gt=0, le=1)
    _verify_len: float = PrivateAttr(default=1.0)

    def start(self, caps: EngineCaps) -> None:
        """Expect full blocks."""
        self._verify_len = float(caps.block)

    def admit(self, queue: QueueView, running: RunningView, kv_free: int, caps: EngineCaps) -> IntArray:
        """The head of the queue, as far as memory, the engine's limit and the budget allow; one runs in any case."""
        limit = min(caps.max_running_requests, max(int(self.verify_tokens / self._verify_len), 1))
        return in_order(queue, kv_free, limit - len(running.request_ids))

    def observe(self, outcome: StepOutcome) -> None:
        """Update the mean verify length."""
        if len(outcome):
            self._verify_len += self.weight * (float(outcome.verify_lens.mean()) - self._verify_len)
