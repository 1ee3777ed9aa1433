"""SGLang's adaptive steps: an average of accepted drafts, with hysteresis, by tier of batch size."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, PrivateAttr

from adasim.policies.one_length import OneLength, floors
from adasim.policies.schedule import Drafts, Size, at_least
from adasim.types import BatchView, EngineCaps, StepOutcome


@dataclass(slots=True)
class Tier:
    """State of one range of batch sizes."""

    lengths: list[int]  # candidates, rising
    at: int  # which one is in use
    ema: float  # accepted drafts per request and round
    rounds: int = 0


class SGLangEma(OneLength):
    """One candidate k up or down by an average of accepted drafts, apart for each tier of batch sizes.

    ema <- (1 - ``weight``) ema + ``weight`` * (mean accepted drafts of the round). Every ``interval`` rounds of a tier: a
    step down when ema <= next smaller k - ``drop``, else a step up when ema > k - ``rise``. ``candidates`` is {from this
    batch on: [k, ...]}; a tier starts at the middle one with ema = max(k - 1, 0). Source: SGLang PRs 21599 and 24055.

    Knows no cost: what a step costs is in the tiers. With these thresholds a tier leaves k = 0 at its first decision
    (0 > 0 - rise) and can never step down to it (ema >= 0 > 0 - drop): listed beside others, 0 is never used for
    long. See ``draft_block`` in :class:`OneLength`; with it and [3, 7, 11, 15] this is SGLang PR 24596 for DFlash.
    """

    kind: Literal["sglang_ema"] = "sglang_ema"
    candidates: dict[Size, Annotated[list[Drafts], Field(min_length=1)]] = Field(
        default={1: [1, 3, 5, 7], 8: [0, 1, 3], 32: [0, 1], 64: [0]}, min_length=1
    )
    weight: float = Field(default=0.2, gt=0, le=1)
    interval: int = Field(default=5, ge=1)
    drop: float = 0.75
    rise: float = 0.5
    _floors: list[int] = PrivateAttr()
    _tiers: dict[int, Tier] = PrivateAttr()

    def start(self, caps: EngineCaps) -> None:
        """Every tier back to its middle candidate."""
        self._floors = floors(dict(self.candidates), "candidates", self.label)
        self.check_drafts([k for lengths in self.candidates.values() for k in lengths], caps)
        self._tiers = {}
        for size, given in self.candidates.items():
            lengths = sorted(set(given))
            middle = len(lengths) // 2
            self._tiers[size] = Tier(lengths, middle, float(max(lengths[middle] - 1, 0)))

    def choose(self, batch: BatchView) -> int:
        """What the tier of this batch is at."""
        tier = self._tier(len(batch))
        return tier.lengths[tier.at]

    def observe(self, outcome: StepOutcome) -> None:
        """Average, and decide every ``interval`` rounds."""
        if not len(outcome):
            return
        tier = self._tier(len(outcome))
        tier.ema += self.weight * (float(outcome.accepted.mean()) - tier.ema)
        tier.rounds += 1
        if tier.rounds % self.interval:
            return
        if tier.at > 0 and tier.ema <= tier.lengths[tier.at - 1] - self.drop:
            tier.at -= 1
        elif tier.at + 1 < len(tier.lengths) and tier.ema > tier.lengths[tier.at] - self.rise:
            tier.at += 1

    def _tier(self, size: int) -> Tier:
        return self._tiers[at_least(self._floors, size)]
