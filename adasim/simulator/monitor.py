"""Watches the tau of finished requests and notes when it has moved."""

from collections.abc import Sequence
from math import nan

from adasim.calibration.alarm import Alarm
from adasim.records import EventRecord
from adasim.serving.admission import Life
from adasim.simulator.trainer import Trainer

ALL = -1


class Monitor:
    """Drift alarms of one run.

    Args:
        alarm: when to alarm.
        lives: of all requests.
        domains: names.
        trainer: whose version an alarm is noted with.
    """

    def __init__(self, alarm: Alarm, lives: Sequence[Life], domains: Sequence[str], trainer: Trainer | None) -> None:
        self.alarm, self.lives, self.domains, self.trainer = alarm, lives, domains, trainer
        watched = {"all": [ALL], "domain": list(range(len(domains))), "both": [ALL, *range(len(domains))]}[alarm.watch]
        if alarm.watch == "both" and len(domains) == 1:
            watched = [ALL]
        self.charts = {d: alarm.chart() for d in watched}
        self.events: list[EventRecord] = []
        self.finished = 0

    def on_finish(self, index: int) -> None:
        """A request is done."""
        life = self.lives[index]
        self.finished += 1
        if not life.rounds:
            return
        for domain in (ALL, life.request.domain):
            if domain not in self.charts:
                continue
            direction = self.charts[domain](1 + life.accepted / life.rounds)
            if direction is not None:
                name = "" if domain == ALL else self.domains[domain]
                version = 0 if self.trainer is None else self.trainer.in_use.number
                says = f"tau{f' of {name}' if name else ''} {direction}"
                self.events.append(EventRecord(life.finish_s, "alarm", version, name, self.finished, nan, says))
