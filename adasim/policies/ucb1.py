"""UCB1 over chain lengths."""

from typing import Literal

import numpy as np
from pydantic import Field, PrivateAttr

from adasim.policies.bandit import Bandit, Pull
from adasim.types import EngineCaps, FloatArray


class Ucb1(Bandit):
    """Optimism: the arm with the largest mean reward + ``exploration`` * sqrt(2 ln t / rounds of the arm).

    t counts the rounds of that range of batch sizes; arms never tried come first, in order. Textbook UCB1 has an
    exploration of 1, sized for rewards that fill 0..1; tokens per second of neighbouring k differ by a few per cent, and
    with 1 it would still be trying everything after thousands of rounds. Source: BanditSpec (arXiv 2505.15141), TapOut
    and Nightjar use bandits of this kind. ``arms``, ``sizes``, ``hold``: see :class:`Bandit`; ``draft_block``:
    :class:`OneLength`.
    """

    kind: Literal["ucb1"] = "ucb1"
    exploration: float = Field(default=0.2, ge=0)
    _sums: dict[int, FloatArray] = PrivateAttr()  # tokens per second
    _counts: dict[int, FloatArray] = PrivateAttr()

    def start(self, caps: EngineCaps) -> None:
        """Forget all rewards."""
        super().start(caps)
        self._sums = {s: np.zeros(len(self.arms)) for s in self.sizes}
        self._counts = {s: np.zeros(len(self.arms)) for s in self.sizes}

    def pull(self, size: int) -> Pull:
        """The arm with the highest upper bound."""
        counts = self._counts[size]
        untried = np.flatnonzero(counts == 0)
        if len(untried):
            return Pull(size, int(untried[0]), 1.0)
        reward = self._sums[size] / counts / self._most[size]
        bound = reward + self.exploration * np.sqrt(2 * np.log(counts.sum()) / counts)
        return Pull(size, int(np.argmax(bound)), 1.0)

    def learn(self, pull: Pull, tokens_per_s: float, most: float) -> None:
        """Average it in; divided by the best only when arms are compared, so that early rounds get no bonus."""
        self._sums[pull.size][pull.arm] += tokens_per_s
        self._counts[pull.size][pull.arm] += 1
