"""What bandits over chain lengths share."""

from abc import abstractmethod
from typing import NamedTuple

from pydantic import Field, PrivateAttr

from adasim.policies.one_length import OneLength, floors
from adasim.policies.schedule import Drafts, Size, at_least
from adasim.types import BatchView, EngineCaps, StepOutcome


class Pull(NamedTuple):
    """One choice of an arm; lasts some rounds."""

    size: int  # lower bound of the batch sizes it was made for
    arm: int
    chance: float  # with which it was made


class Bandit(OneLength):
    """Learns which k gives the most tokens per second, apart for each range of batch sizes.

    Arms are ``arms``, contexts the ranges that begin at ``sizes``. An arm is kept for ``hold`` rounds in a row, so that
    its reward is not one round's luck and graphs are not switched every round. The reward of a round is its tokens per
    second, over the most seen in that range. Without an arm 0 it can never switch off. Unloading the drafter is not
    modelled.
    """

    arms: list[Drafts] = Field(default=[0, 1, 3, 5, 7], min_length=1)
    sizes: list[Size] = Field(default=[1, 2, 4, 8, 16, 32, 64, 128], min_length=1)
    hold: int = Field(default=4, ge=1)
    _floors: list[int] = PrivateAttr()
    _pulls: dict[int, tuple[Pull, int]] = PrivateAttr()  # by range: the arm in use, rounds left
    _open: dict[int, Pull] = PrivateAttr()  # by step, until the outcome is known
    _most: dict[int, float] = PrivateAttr()  # by range: tokens per second of the best round so far

    def start(self, caps: EngineCaps) -> None:
        """Forget all rewards."""
        self.check_drafts(self.arms, caps)
        self._floors = floors(dict.fromkeys(self.sizes), "sizes", self.label)
        self._pulls, self._open, self._most = {}, {}, {}

    @abstractmethod
    def pull(self, size: int) -> Pull:
        """Choose an arm for a range of batch sizes."""

    @abstractmethod
    def learn(self, pull: Pull, tokens_per_s: float, most: float) -> None:
        """One round of that arm gave ``tokens_per_s``; the best of its range so far ``most``."""

    def choose(self, batch: BatchView) -> int:
        """k of the arm in use for this batch size."""
        size = at_least(self._floors, len(batch))
        now, left = self._pulls.get(size, (None, 0))
        if now is None or not left:
            now, left = self.pull(size), self.hold
        self._pulls[size] = now, left - 1
        self._open[batch.step] = now
        return self.arms[now.arm]

    def observe(self, outcome: StepOutcome) -> None:
        """Credit the arm that made this round."""
        pull = self._open.pop(outcome.step, None)
        if pull is None or not outcome.seconds or not outcome.emitted.any():
            return
        tokens_per_s = float(outcome.emitted.sum()) / outcome.seconds
        self._most[pull.size] = max(self._most.get(pull.size, 0.0), tokens_per_s)
        self.learn(pull, tokens_per_s, self._most[pull.size])
