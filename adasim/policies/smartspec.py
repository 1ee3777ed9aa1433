"""SmartSpec, also known as TurboSpec."""

from typing import Literal

import numpy as np
from pydantic import Field, PrivateAttr

from adasim.policies.acceptance_rate import AcceptanceRate, expected_tokens
from adasim.policies.one_length import OneLength
from adasim.policies.step_times import StepTimes
from adasim.types import BatchView, EngineCaps, StepOutcome


class SmartSpec(OneLength):
    """The k with the most goodput: N (1 - a^(k+1)) / (1 - a) / seconds(N, k), k = 0..K.

    One acceptance rate a for all requests and positions, estimated online from a ``prior`` with ``weight`` for each
    new round; seconds from the engine's cost model. k = 0 scores ``off_bonus`` times its goodput, as in the released
    code. Source: SmartSpec / TurboSpec (arXiv 2406.14066).

    A round without drafts teaches nothing, so a rate that once led to k = 0 stays until the load changes: a trap
    that any estimator without exploration has. See ``draft_block`` in :class:`OneLength`.
    """

    kind: Literal["smartspec"] = "smartspec"
    prior: float = Field(default=0.7, gt=0, lt=1)
    weight: float = Field(default=0.05, gt=0, le=1)
    off_bonus: float = Field(default=1.1, gt=0)
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
        """The first k that maximises goodput."""
        goodput = expected_tokens(self._rate.value, batch.caps.max_draft_len)
        goodput /= self._times.by_drafts(batch, self.draft_block)
        goodput[0] *= self.off_bonus
        return int(np.argmax(goodput))

    def observe(self, outcome: StepOutcome) -> None:
        """Update the rate."""
        self._rate.observe(outcome)
