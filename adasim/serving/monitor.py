"""Watches the tau of finished requests and notes when it has moved."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

from adasim.calibration.alarm import Alarm
from adasim.records import EventRecord
from adasim.serving.lives import Lives

ALL = -1


class Finished(NamedTuple):
    """What there is to know of a request that is done."""

    request: int
    domain: int
    tokens: int  # prompt and output
    rounds: int
    accepted: int  # drafts, what its end cut off included
    finish_s: float

    @classmethod
    def of(cls, lives: Lives, index: int) -> Self:
        """A request that has just left."""
        columns = lives.domain, lives.context, lives.rounds, lives.accepted
        domain, tokens, rounds, accepted = (int(column[index]) for column in columns)
        return cls(index, domain, tokens, rounds, accepted, float(lives.finish_s[index]))

    @property
    def tau(self) -> float:
        """Tokens per round, what its end cut off included."""
        return 1 + self.accepted / self.rounds


class Monitor:
    """Drift alarms of one run.

    Args:
        alarm: when to alarm.
        domains: names.
        version: says which drafter version is in use.
        events: where to note alarms.
    """

    def __init__(
        self, alarm: Alarm, domains: Sequence[str], version: Callable[[], int], events: list[EventRecord]
    ) -> None:
        self.domains, self.version = domains, version
        each = list(range(len(domains)))
        watched = {"all": [ALL], "domain": each, "both": [ALL, *each] if len(each) > 1 else [ALL]}[alarm.watch]
        self.charts = {d: alarm.chart() for d in watched}
        self.events = events
        self.events.append(EventRecord(0.0, "watch", 0, 0.0, f"tau of {alarm.watch}, CUSUM at {alarm.threshold:.2f}"))
        self._finished = 0

    def on_finish(self, done: Finished) -> None:
        """A request is done."""
        self._finished += 1
        if not done.rounds:
            return
        for domain in (ALL, done.domain):
            direction = self.charts[domain](done.tau) if domain in self.charts else None
            if direction is not None:
                name = "" if domain == ALL else self.domains[domain]
                says = f"tau{f' of {name}' if name else ''} {direction}"
                self.events.append(EventRecord(done.finish_s, "alarm", self.version(), 0.0, says, name, self._finished))
