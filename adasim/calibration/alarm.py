"""Drift alarms: has tau moved, or is it noise?"""

from bisect import bisect_left, bisect_right, insort
from math import exp
from typing import Literal

from pydantic import Field, PrivateAttr

from adasim.types import Component

Direction = Literal["fell", "rose"]


def run_length(shift: float, reference: float, threshold: float) -> float:
    """Mean requests until a one-sided CUSUM alarms, by Siegmund's approximation (Sequential Analysis, 1985).

    Args:
        shift: of the mean, in standard deviations, towards the alarm (0 = false alarms).
        reference: the slack k that every request pays.
        threshold: h.
    """
    drift, reach = shift - reference, threshold + 1.166
    if abs(drift) < 1e-9:
        return reach**2
    return (exp(-2 * drift * reach) + 2 * drift * reach - 1) / (2 * drift**2)


class Alarm(Component):
    """A two-sided CUSUM on sequential ranks of the tau of finished requests (McDonald 1990).

    Each request gives one value, 1 + accepted drafts per round of its own (what its end cuts off included, so that short
    requests do not look bad); requests are independent where rounds are not. Its score is the normal quantile of its rank
    among all since the last alarm: no warm-up, no known mean, and the same false alarms whatever the distribution of
    tau, whose tails are long and which a mix of domains gives several modes.

    Attributes:
        shift: change worth an alarm, in standard deviations of a request's tau.
        false_alarm_requests: mean requests between false alarms of one watched stream.
        watch: "all" = requests of every domain together, which a change of mix moves too; "domain" = each alone;
            "both".
    """

    shift: float = Field(default=1.0, gt=0, le=5)
    false_alarm_requests: float = Field(default=5000.0, ge=10)
    watch: Literal["all", "domain", "both"] = "both"
    _threshold: float | None = PrivateAttr(default=None)

    @property
    def threshold(self) -> float:
        """h: both sides together alarm falsely once in ``false_alarm_requests``."""
        if self._threshold is None:
            from scipy.optimize import brentq  # slow to import, not always needed

            wanted = 2 * self.false_alarm_requests
            self._threshold = float(brentq(lambda h: run_length(0, self.shift / 2, h) - wanted, -1.1, 500))
        return self._threshold

    @property
    def delay_requests(self) -> float:
        """Expected requests from a change of ``shift`` to its alarm, where the mean before was well known."""
        return run_length(self.shift, self.shift / 2, self.threshold)

    def chart(self) -> "Chart":
        """A chart that knows nothing yet."""
        return Chart(self.shift / 2, self.threshold)


class Chart:
    """One monitored stream of values."""

    def __init__(self, reference: float, threshold: float) -> None:
        self.reference, self.threshold = reference, threshold
        self._restart()

    def _restart(self) -> None:
        self.sorted: list[float] = []
        self.high, self.low = 0.0, 0.0

    def __call__(self, value: float) -> Direction | None:
        """Take a value in; says which way the values went when it alarms, and starts anew."""
        from scipy.special import ndtri  # slow to import, not always needed

        insort(self.sorted, value)
        below, upto = bisect_left(self.sorted, value), bisect_right(self.sorted, value)
        score = float(ndtri((below + upto) / 2 / len(self.sorted)))
        self.high = max(0.0, self.high + score - self.reference)
        self.low = max(0.0, self.low - score - self.reference)
        if max(self.high, self.low) <= self.threshold:
            return None
        direction: Direction = "rose" if self.high > self.low else "fell"
        self._restart()
        return direction
