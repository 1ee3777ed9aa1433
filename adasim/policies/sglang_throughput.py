"""SGLang's throughput-aware steps."""

from collections import deque
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, PrivateAttr

from adasim.policies.one_length import OneLength
from adasim.policies.step_times import StepTimes
from adasim.types import BatchView, EngineCaps, FloatArray, StepOutcome


class SGLangThroughput(OneLength):
    """The candidate k with the most expected tokens per second: (1 + S_1 + ... + S_k) / seconds(N, k).

    S_j is the mean, over the last ``window`` rounds that verified position j, of the share of requests that accepted j
    drafts or more. When k falls, the windows beyond it are cleared; positions without a window go on geometrically from
    the known ones (with one known: flat, so a fall to k = 1 invites the next rise). Decided every ``interval`` rounds;
    ``candidates`` null = 1..K. The largest comes first, 0 is not among them: this rule never switches off. Source: SGLang
    PR 28045, which profiles seconds at start-up; here the engine's cost model answers, tabled by batch size and context.
    See ``draft_block`` in :class:`OneLength`.
    """

    kind: Literal["sglang_throughput"] = "sglang_throughput"
    candidates: list[Annotated[int, Field(ge=1)]] | None = Field(default=None, min_length=1)
    window: int = Field(default=20, ge=1)
    interval: int = Field(default=5, ge=1)
    _candidates: list[int] = PrivateAttr()
    _windows: list[deque[float]] = PrivateAttr()
    _times: StepTimes = PrivateAttr()
    _current: int = PrivateAttr(default=0)
    _rounds: int = PrivateAttr(default=0)

    @property
    def needs(self) -> frozenset[str]:
        """A cost model."""
        return frozenset({"cost"})

    def start(self, caps: EngineCaps) -> None:
        """Empty windows, the largest candidate."""
        self.check_drafts(self.candidates or [], caps)
        self._candidates = sorted(set(self.candidates or range(1, caps.block)))
        self._windows = [deque(maxlen=self.window) for _ in range(caps.max_draft_len)]
        self._times, self._current, self._rounds = StepTimes(caps), self._candidates[-1], 0

    def choose(self, batch: BatchView) -> int:
        """The best candidate as of the last decision."""
        if self._rounds % self.interval == 0 and self._windows[0]:
            before = self._current
            tokens = np.concatenate([[1.0], 1 + np.cumsum(self.survival())])
            per_s = (tokens / self._times.by_drafts(batch, self.draft_block))[self._candidates]
            self._current = self._candidates[int(np.argmax(per_s))]
            for window in self._windows[self._current :] if self._current < before else []:
                window.clear()
        self._rounds += 1
        return self._current

    def survival(self) -> FloatArray:
        """S_1..S_K, [max_draft_len]; the first position must have been seen."""
        known = [sum(w) / len(w) for w in self._windows if w]
        ratio = (known[-1] / known[0]) ** (1 / (len(known) - 1)) if len(known) > 1 and known[0] else 1.0
        beyond = np.arange(1, len(self._windows) - len(known) + 1)
        return np.concatenate([known, known[-1] * ratio**beyond])

    def observe(self, outcome: StepOutcome) -> None:
        """Share of requests that got as far, at every position that all verified."""
        if not len(outcome):
            return
        exactly = np.bincount(outcome.accepted, minlength=len(self._windows) + 1)
        at_least = np.cumsum(exactly[::-1])[::-1] / len(outcome)
        verified_by_all = int(outcome.verify_lens.min()) - 1
        for window, share in zip(self._windows, at_least[1 : verified_by_all + 1].tolist(), strict=False):
            window.append(share)
