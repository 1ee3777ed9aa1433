"""AdaSpec: speculate as long as the latency objective allows."""

from typing import Literal

import numpy as np
from pydantic import Field, PrivateAttr

from adasim.policies.acceptance_rate import AcceptanceRate, expected_tokens
from adasim.policies.one_length import OneLength
from adasim.policies.step_times import StepTimes
from adasim.types import BatchView, EngineCaps, StepOutcome


class AdaSpec(OneLength):
    """The longest k whose time per output token keeps ``tpot_ms``; if none does, the one with the least.

    Time per token of k is seconds(N, k) / tokens: ``tokens`` says what is counted on. "expected" counts
    (1 - a^(k+1)) / (1 - a) with a rate a estimated online (``prior``, ``weight``); "sure" counts the one token that
    every round gives, so that no gap between chunks exceeds the limit. Source: AdaSpec (arXiv 2503.05096), of which
    this is the length rule only. It spends whatever the limit leaves: it does not maximise throughput. See
    ``draft_block`` in :class:`OneLength`.
    """

    kind: Literal["adaspec"] = "adaspec"
    tpot_ms: float = Field(default=30.0, gt=0)
    tokens: Literal["expected", "sure"] = "expected"
    prior: float = Field(default=0.7, gt=0, lt=1)
    weight: float = Field(default=0.05, gt=0, le=1)
    _rate: AcceptanceRate = PrivateAttr()
    _times: StepTimes = PrivateAttr()

    @property
    def needs(self) -> frozenset[str]:
        """A cost model."""
        return frozenset({"cost"})

    def start(self, caps: EngineCaps) -> None:
        """Back to the prior."""
        self._rate, self._times = AcceptanceRate(self.prior, self.weight), StepTimes(caps)

    def choose(self, batch: BatchView) -> int:
        """The longest k within the limit, else the quickest."""
        rate = self._rate.value if self.tokens == "expected" else 0.0
        tpot_s = self._times.by_drafts(batch, self.draft_block) / expected_tokens(rate, batch.caps.max_draft_len)
        within = np.flatnonzero(tpot_s <= self.tpot_ms / 1e3)
        return int(within[-1] if len(within) else np.argmin(tpot_s))

    def observe(self, outcome: StepOutcome) -> None:
        """Update the rate."""
        self._rate.observe(outcome)
