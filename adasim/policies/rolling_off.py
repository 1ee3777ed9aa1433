"""Switch speculation off when it stops paying, for good."""

from collections import deque
from typing import Literal

from pydantic import Field, PrivateAttr

from adasim.policies.one_length import OneLength
from adasim.types import BatchView, EngineCaps, StepOutcome


class RollingOff(OneLength):
    """k = ``drafts`` until the mean acceptance rate of the last ``window`` rounds falls below ``threshold``; then 0
    for ever.

    The rate is accepted / verified drafts, and a round that drafts counts once, whatever its batch. Source:
    TensorRT-LLM's acceptance_rate_window_size and acceptance_rate_threshold. A trap state: one bad stretch of text ends
    speculation for the life of the server, however well it would pay afterwards. See ``draft_block`` in
    :class:`OneLength`.
    """

    kind: Literal["rolling_off"] = "rolling_off"
    drafts: int = Field(default=7, ge=1)
    window: int = Field(default=100, ge=1)
    threshold: float = Field(default=0.3, ge=0, le=1)
    _rates: deque[float] = PrivateAttr()
    _off: bool = PrivateAttr(default=False)

    def start(self, caps: EngineCaps) -> None:
        """Speculate again."""
        self.check_drafts([self.drafts], caps)
        self._rates, self._off = deque(maxlen=self.window), False

    def choose(self, batch: BatchView) -> int:
        """``drafts``, or 0 once off."""
        return 0 if self._off else self.drafts

    def observe(self, outcome: StepOutcome) -> None:
        """Count one round; once the window is full, it decides."""
        drafted = int(outcome.verify_lens.sum()) - len(outcome)
        if not drafted:
            return
        self._rates.append(int(outcome.accepted.sum()) / drafted)
        if len(self._rates) == self.window and sum(self._rates) < self.threshold * self.window:
            self._off = True
