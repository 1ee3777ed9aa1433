"""Has a machine or its traffic moved away from a profile? New runs are held against what it says of them."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log
from typing import Literal

import numpy as np
import pandas as pd
from scipy.special import ndtri

from adasim.calibration.adjust import DEFAULTS
from adasim.calibration.alarm import Alarm
from adasim.calibration.cost import CostModel
from adasim.calibration.estimate.recording import RecordedTrial
from adasim.calibration.profile import Profile
from adasim.records import Records
from adasim.tolerances import Validation
from adasim.types import FloatArray
from adasim.validation.parts import SMALL_S, TIMES, measured_parts
from adasim.validation.run import Run
from adasim.validation.twin import Twin, farthest, luck_seeds

Direction = Literal["rose", "fell"]
LUCK = 4  # simulated runs that a measured one is ranked among
SIGNS: dict[Direction, float] = {"rose": 1.0, "fell": -1.0}
LEAST_SHARE = 0.002  # of a run's time; less is not watched


@dataclass(slots=True)
class Cusum:
    """A one-sided cumulative sum of scores whose mean is at most 0 while nothing has moved; it alarms once.

    Attributes:
        slack: what every value pays, standard deviations.
        threshold: sum at which it alarms.
    """

    slack: float
    threshold: float
    sum: float = 0.0
    alarmed: bool = False
    measured: float = 0.0  # sums since it last was 0, where a change is likeliest to have begun
    expected: float = 0.0

    def take(self, score: float, measured: float, expected: float) -> bool:
        """Take a value in; tells when it alarms."""
        self.sum = max(0.0, self.sum + score - self.slack)
        if not self.sum and not self.alarmed:
            self.measured = self.expected = 0.0
            return False
        self.measured += measured
        self.expected += expected
        first = self.sum > self.threshold and not self.alarmed
        self.alarmed |= first
        return first

    @property
    def by(self) -> float:
        """Measured over expected, - 1, since the change began."""
        return self.measured / self.expected - 1


@dataclass(frozen=True, slots=True)
class Moved:
    """Something left its interval."""

    what: str  # verify, draft, overhead, prefill, or acceptance of a domain
    direction: Direction
    since: Cusum  # what was seen since it began
    run: str  # in which the sum became too large
    interval: float  # relative half-width that the profile allows

    @property
    def by(self) -> float:
        """How far, relative."""
        return self.since.by

    def __str__(self) -> str:
        unit = "tokens per request and round" if self.what.startswith("acceptance") else "seconds"
        return (
            f"{self.what} {self.direction}: {unit} {self.by:+.1%} against the profile, whose interval is "
            f"± {self.interval:.1%} (noticed in {self.run})"
        )


class Watcher:
    """Takes runs one by one.

    A run's seconds of each part are divided by what the profile says of the same steps; the logarithm of the median,
    beyond the profile's interval and in units of half of it, is a score. A finished request's tau is ranked among those
    of simulated twins at the upper and at the lower end of the interval; the normal quantile of the rank is its score,
    whatever the distribution. While the truth is inside its interval, each stream alarms falsely at most once in the
    stated number of runs or requests (Siegmund 1985), where runs scatter by at most half the interval and requests as
    the twins do.

    A text counts once: runs of one seed answer the same requests, whatever the policy and the load.
    """

    def __init__(self, profile: Profile, settings: Validation) -> None:
        self.profile = profile
        alarms = {
            "runs": Alarm(false_alarm_requests=settings.false_alarm_runs),
            "requests": Alarm(false_alarm_requests=settings.false_alarm_requests),
        }
        self._cost = defaultdict[tuple[str, Direction], Cusum](lambda: _cusum(alarms["runs"]))
        self._luck = defaultdict[tuple[str, Direction], Cusum](lambda: _cusum(alarms["requests"]))
        self._read = set[tuple[int, str, int]]()  # seed, domain and number of the requests whose text has counted
        self.runs = self.requests = 0

    def take(self, run: Run) -> list[Moved]:
        """Hold a run against the profile; returns what is found to have moved for the first time."""
        trial = run.recorded()
        records = trial.records
        twin = Twin.of(run.trial.scenario(), self.profile, records.requests, records.events)
        twin.check()
        self.runs += 1
        moved = self._costs(replace(trial, policy=twin.policy), twin, run.name)
        if not trial.forced and (records.steps["draft_tokens"] > 0).any():
            moved += self._acceptance(records, twin, run.trial.seed, run.name)
        return moved

    def interval(self, name: str) -> float:
        """The profile's relative half-width of an input, a rule of thumb where it states none."""
        return float(getattr(self.profile.uncertainty, name) or getattr(DEFAULTS, name))

    def _costs(self, trial: RecordedTrial, twin: Twin, name: str) -> list[Moved]:
        parts = measured_parts(trial, _without_pauses(twin.backend.calibrated_cost), self.profile)
        measured, says = parts.measured, parts.modelled
        total, moved = float(measured.to_numpy().sum()), list[Moved]()
        for part in TIMES:
            here = measured[part]
            active = (says[part] > SMALL_S) & (here > SMALL_S)
            if min(says[part].sum(), here.sum()) < LEAST_SHARE * total or not active.any():
                continue
            width = log(1 + self.interval(part))
            ratios = (here[active] / says[part][active]).to_numpy(dtype=np.float64)
            off = float(np.median(np.log(ratios)))  # steps that something held up count little
            for direction, sign in SIGNS.items():
                chart = self._cost[part, direction]
                if chart.take((sign * off - width) / (width / 2), exp(off), 1.0):
                    moved.append(Moved(f"cost of {part}", direction, chart, name, self.interval(part)))
        return moved

    def _acceptance(self, records: Records, twin: Twin, seed: int, name: str) -> list[Moved]:
        width, moved = self.interval("acceptance"), list[Moved]()
        done = _decoded(records.requests)
        fresh = [(seed, str(r.domain), int(r.Index)) not in self._read for r in done.itertuples()]  # type: ignore[arg-type]
        done = done[fresh]
        if done.empty:
            return moved
        self._read |= {(seed, str(domain), int(i)) for i, domain in zip(done.index, done["domain"], strict=True)}
        self.requests += len(done)
        low, middle, high = (_simulated(twin, factor, seed) for factor in (1 - width, 1.0, 1 + width))
        for domain, value in zip(done["domain"], done["tau"], strict=True):
            scores = {"rose": _score(value, high[domain]), "fell": -_score(value, low[domain])}
            for direction in SIGNS:
                chart = self._luck[domain, direction]
                if chart.take(scores[direction], value, float(middle[domain].mean())):
                    moved.append(Moved(f"acceptance of {domain}", direction, chart, name, width))
        return moved


def _cusum(alarm: Alarm) -> Cusum:
    return Cusum(alarm.shift / 2, alarm.threshold)


def _without_pauses(cost: CostModel) -> CostModel:
    """The cost without the share of time that is lost now and then: medians of steps do not show it."""
    return cost.model_copy(update={"overhead": cost.overhead.model_copy(update={"time_share": 0.0})})


def _decoded(requests: pd.DataFrame) -> pd.DataFrame:
    """Finished requests in the order of finish, by number: domain, and tau = 1 + accepted drafts per round."""
    done = requests[(requests["status"] == "finished") & (requests["rounds"] > 0)].sort_values("finish_s", kind="stable")
    return done.assign(tau=1 + done["accepted"] / done["rounds"]).set_index("request")[["domain", "tau"]]


def _simulated(twin: Twin, factor: float, seed: int) -> dict[str, FloatArray]:
    """The same of several lucks, with tau of full blocks times ``factor``, or as near to it as it can be."""
    if factor != 1:
        moved = farthest(lambda to: _checked(twin.moved("acceptance", to)), 1.0, factor)
        twin = twin if moved is None else moved[0]
    found = pd.concat([_decoded(twin.run(luck).requests) for luck in luck_seeds(seed, LUCK)])
    return {str(d): np.sort(part["tau"].to_numpy(dtype=np.float64)) for d, part in found.groupby("domain")}


def _checked(twin: Twin) -> Twin:
    twin.check()
    return twin


def _score(value: float, among: FloatArray) -> float:
    """Normal quantile of a value's rank, equals counted half."""
    below, upto = np.searchsorted(among, value, "left"), np.searchsorted(among, value, "right")
    return float(ndtri(((below + upto) / 2 + 0.5) / (len(among) + 1)))


def in_words(moved: Sequence[Moved]) -> list[str]:
    """Alarms as lines; costs that moved alike are the machine's speed."""
    costs = [m for m in moved if m.what.startswith("cost")]
    lines = [str(m) for m in moved]
    if len(costs) > 2 and max(m.by for m in costs) - min(m.by for m in costs) < 0.1:
        lines.append("all costs moved alike: the machine's speed, or its clock")
    return lines
