"""A run that stops after every step, so that others can take a step on the same machine in between."""

import time
from collections.abc import Callable, Generator
from typing import TypeVar

Made = TypeVar("Made")
Turns = Generator[float, None, Made]  # after each step: the share of the work that is done; in the end: what was made


class Stopwatch:
    """Seconds that a run has spent on its own steps. It runs from the start.

    Args:
        now: seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now, self._began, self._stopped = now, now(), 0.0

    def __call__(self) -> float:
        """Seconds so far, while it runs."""
        return self._now() - self._began

    def stop(self) -> None:
        """Somebody else's turn."""
        self._stopped = self._now()

    def go_on(self) -> None:
        """What passed since it was stopped does not count."""
        self._began += self._now() - self._stopped


def to_the_end(run: "Turns[Made]") -> Made:
    """What a run makes when nobody else takes a turn."""
    while True:
        try:
            next(run)
        except StopIteration as end:
            made: Made = end.value
            return made
