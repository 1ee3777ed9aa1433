"""EXP3 over chain lengths."""

from typing import Literal

import numpy as np
from pydantic import Field, PrivateAttr

from adasim.policies.bandit import Bandit, Pull
from adasim.types import EngineCaps, FloatArray


class Exp3(Bandit):
    """Chance: arm i with p_i = (1 - ``mix``) w_i / sum w + ``mix`` / arms; then w_i *= exp(``mix`` reward / p_i / arms).

    Makes no assumption on how rewards come about, so it may follow drift that UCB1's means do not; the price is
    ``mix`` of all rounds for ever. Draws come from ``seed``. Source: Auer et al. 2002, as BanditSpec (arXiv 2505.15141)
    uses it. ``arms``, ``sizes``, ``hold``: see :class:`Bandit`; ``draft_block``: :class:`OneLength`.
    """

    kind: Literal["exp3"] = "exp3"
    mix: float = Field(default=0.1, gt=0, le=1)
    seed: int = Field(default=0, ge=0)
    _log_weights: dict[int, FloatArray] = PrivateAttr()
    _rng: np.random.Generator = PrivateAttr()

    def start(self, caps: EngineCaps) -> None:
        """Forget all rewards, and draw anew."""
        super().start(caps)
        self._log_weights = {s: np.zeros(len(self.arms)) for s in self.sizes}
        self._rng = np.random.default_rng(self.seed)

    def pull(self, size: int) -> Pull:
        """An arm by chance."""
        chances = self.chances(size)
        arm = int(np.searchsorted(np.cumsum(chances), self._rng.random() * chances.sum(), side="right"))
        return Pull(size, arm, float(chances[arm]))

    def learn(self, pull: Pull, tokens_per_s: float, most: float) -> None:
        """Raise the arm's weight by the reward over its chance."""
        self._log_weights[pull.size][pull.arm] += self.mix * tokens_per_s / most / pull.chance / len(self.arms)

    def chances(self, size: int) -> FloatArray:
        """Probabilities of the arms in a range of batch sizes."""
        logs = self._log_weights[size]
        weights = np.exp(logs - logs.max())
        return (1 - self.mix) * weights / weights.sum() + self.mix / len(self.arms)
