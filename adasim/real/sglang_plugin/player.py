"""Carries out orders: which policy plays, and what measurements need beside it."""

import random
from collections.abc import Callable, Sequence

from adasim.errors import InputError
from adasim.real.sampling import Forced
from adasim.real.sglang_plugin.decider import Decider
from adasim.real.sglang_plugin.orders import Orders, Play
from adasim.real.sglang_plugin.settings import ServedOpd, Settings


class Player:
    """How a worker's rounds are played.

    Args:
        show: shows a trainer what is served from now on, or refuses to.

    Attributes:
        refused: why the last orders were; "" = they were not.
        forced: acceptance by decree; None = by comparison.
        rng: draws for it, the same on all ranks.
    """

    def __init__(self, settings: Settings, decider: Decider, show: Callable[[ServedOpd], None]) -> None:
        self.settings, self.decider, self.show = settings, decider, show
        self.refused = ""
        self.forced: Forced | None = None
        self.rng = random.Random(0)
        self._together, self._let_in = 0, False

    @property
    def follows(self) -> bool:
        """Whether the drafter takes in what the target computes; plain decoding must not pay for that."""
        return self.decider.driver.policy.loads_drafter

    def obey(self, orders: Orders, busy: int) -> None:
        """Carry out what came from outside; ``busy``: requests that run or wait.

        Raises:
            InputError: it is not allowed, or the policy does not fit; everything stays as it was.
        """
        if orders.opd is not None:
            if problems := self._not_for_experiments(["opd"]):
                raise InputError(*problems)
            self.show(orders.opd)
        if orders.play is not None:
            self._play(orders.play, busy)
        if orders.forget is not None:
            self.decider.log.forget(orders.forget)

    def holds(self, waiting: int) -> bool:
        """Whether those that wait are kept waiting, so that they begin together: until there are enough of them."""
        if waiting >= self._together:
            self._let_in = True
        return waiting > 0 and not self._let_in

    def let_in(self, left: int) -> None:
        """Some were; ``left`` still wait. When nobody does, the next are gathered."""
        if not left:
            self._let_in = False

    def _play(self, play: Play, busy: int) -> None:
        problems = self._not_for_experiments(play.experimental)
        if busy and (play.experimental or self.forced is not None or self.follows != play.policy.loads_drafter):
            problems.append(f"{busy} requests run or wait; this changes only while there is none")
        if problems:
            raise InputError(*problems)
        before = self.decider.caps.cost
        self.decider.believe(play.cost or self.settings.cost)
        try:
            self.decider.use(play.policy)
        except InputError:
            self.decider.believe(before)
            raise
        self.forced, self.rng = play.forced, random.Random(0)
        self._together, self._let_in = play.together, False

    def _not_for_experiments(self, asked: Sequence[str]) -> list[str]:
        """Why orders are refused that only servers for measurements take."""
        if not asked or self.settings.experiments:
            return []
        return [f'{", ".join(asked)}: this server takes none; start it with "experiments": true in its settings']
