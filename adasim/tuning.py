"""The best policy at every point of a sweep, by successive halving over paired runs."""

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import ceil, inf, isnan, log, nan
from typing import Any

import numpy as np
import pandas as pd

from adasim.plan import Plan, Trial
from adasim.scenario import Value
from adasim.search import METRICS, Tune
from adasim.statistics import simultaneous, t_interval
from adasim.story import design as design_of
from adasim.tables import GOODPUT, Design, Goal, paired_gain, verdict

Run = Callable[[list[Trial], str], pd.DataFrame]  # trials, what they are for -> metrics of those that finished
BEST, ALIKE, WORSE, DROPPED, OVER, FAILED = "best", "cannot tell", "worse", "dropped", "over a limit", "failed"
NEAR = 0.05  # what cannot be told from the leader and is this close on average, or within the model's error, is its equal
LEAST_SEEDS = 3  # with two, an interval over seeds is too wide to say anything
LEAST_MEASURED = 20  # requests of a shortened run beyond its warm-up


@dataclass(frozen=True, slots=True)
class Candidate:
    """A policy as the search sees it; ``order`` sorts the simplest first."""

    label: str
    family: str  # its group, or itself
    order: tuple[int, int, int]  # what it needs to know, fields that are not at their default, place in the scenario


@dataclass(frozen=True, slots=True)
class Rung:
    """What every candidate of a round gets, and how many go on."""

    seeds: tuple[int, ...]
    share: float  # of the requests
    keep: int


@dataclass(slots=True)
class Standing:
    """Where a candidate ended at a point."""

    candidate: Candidate
    rung: int
    rungs: Rung
    values: dict[str, float]  # metric -> mean over the rung's seeds
    widths: dict[str, float]  # metric -> half-width
    limits: str = "met"  # or "cannot tell", "missed"
    status: str = DROPPED
    behind: float = nan  # gain of the leader of its rung over it
    behind_hw: float = nan
    near: bool = False  # one of the best as far as can be told, and nearly so on average


@dataclass(slots=True)
class Point:
    """The outcome at a point of the sweep: standings, near-equal best ones first, the simplest of them leading."""

    point: dict[str, Value]
    standings: list[Standing] = field(default_factory=list)

    @property
    def advised(self) -> Standing | None:
        """What to use: the simplest of the near-equal best ones; None when none meets the limits."""
        return next((s for s in self.standings if s.near), None)


def goal_of(plan: Plan, tune: Tune) -> Goal:
    """What the search goes for."""
    if tune.goal is not None:
        return Goal(tune.goal, tune.goal, lower_is_better=METRICS[tune.goal])
    return GOODPUT if plan.scenario.slo is not None else design_of(plan).goal


def candidates_of(plan: Plan) -> list[Candidate]:
    """Every policy but those that know the truth."""
    family = {label: group for group, labels in plan.groups.items() for label in labels}
    found = []
    for i, p in enumerate(plan.scenario.policies):
        if "truth" not in p.needs:
            changed = {
                k for k in p.model_fields_set - {"kind", "name"} if getattr(p, k) != type(p).model_fields[k].default
            }
            found.append(Candidate(p.label, family.get(p.label, p.label), (len(p.needs), len(changed), i)))
    return found


def ladder(candidates: int, tune: Tune, seeds: Sequence[int]) -> list[Rung]:
    """Rungs that end with few candidates on all ``seeds``; each gives ``eta`` times the runs of the one before.

    Seeds are saved first, down to the three that an interval needs, then requests.
    """
    count = 1 + max(0, ceil(log(candidates / tune.eta) / log(tune.eta) - 1e-9))
    rungs = []
    for r in range(count):
        part = tune.eta ** (r + 1 - count)
        some = max(LEAST_SEEDS, round(part * len(seeds)))
        keep = max(2, ceil(candidates / tune.eta ** (r + 1)))
        rungs.append(Rung(tuple(seeds[:some]), min(1.0, part * len(seeds) / some), keep))
    return rungs


def seeds_of(plan: Plan, tune: Tune) -> list[int]:
    """The scenario's seeds, as many as the last rung needs, made up by the numbers that follow."""
    seeds = list(plan.scenario.seeds)[: tune.seeds]
    more = (s for s in range(tune.seeds + max(seeds) + 1) if s not in seeds)
    return seeds + [next(more) for _ in range(tune.seeds - len(seeds))]


def halve(plan: Plan, tune: Tune, run: Run, *, error: float) -> list[Point]:
    """Search every point of the plan's sweep.

    At each rung the best ``keep`` candidates go on, and with them the best of every family that is not told worse than
    the leader: a simple policy is not lost to noise. Limits come before the goal.

    Args:
        plan: candidates at points; its seeds are not used.
        tune: goal, limits, resources.
        run: runs trials; those of a rung come together, of all points.
        error: known relative error of the model, for the last verdict.
    """
    candidates, goal = candidates_of(plan), goal_of(plan, tune)
    design = replace(design_of(plan), goal=goal)
    rungs = ladder(len(candidates), tune, seeds_of(plan, tune))
    trials = {(t.policy, _key(t.point)): t for t in plan.trials}
    points = {_key(t.point): Point(t.point) for t in plan.trials}
    left = {key: list(candidates) for key in points}
    for r, rung in enumerate(rungs):
        asked = [t for key in points for c in left[key] for t in _trials(trials[c.label, key], rung)]
        metrics = run(asked, f"rung {r + 1} of {len(rungs)}")
        for key, point in points.items():
            here = metrics
            for name, value in point.point.items():
                here = here[here[name] == value]
            ranked = _rank(here, left[key], r, rung, tune, design)
            last = r == len(rungs) - 1
            _judge(here, ranked, rung, design, error if last else nan)
            on = ranked if last else _survivors(ranked, rung)
            point.standings += [s for s in ranked if last or s not in on]
            left[key] = [s.candidate for s in on]
    for point in points.values():
        point.standings.sort(key=_place)
    return list(points.values())


def _key(point: dict[str, Value]) -> tuple[tuple[str, Value], ...]:
    return tuple(point.items())


def _trials(trial: Trial, rung: Rung) -> Iterable[Trial]:
    """A candidate's runs at a rung."""
    config = trial.config if rung.share == 1 else shortened(trial, rung.share)
    return [replace(trial, seed=seed, config=config) for seed in rung.seeds]


def shortened(trial: Trial, share: float) -> dict[str, Any]:
    """A trial's configuration with fewer requests, enough of them beyond the warm-up."""
    scenario = trial.scenario()
    count = len(scenario.workload.generate(trial.seed))
    config = deepcopy(trial.config)
    workload = config["workload"]
    workload.pop("requests_per_client", None)
    least = 2 * scenario.warmup_requests + LEAST_MEASURED
    workload["limit" if workload["kind"] == "trace" else "requests"] = min(count, max(ceil(share * count), least))
    return config


def _rank(
    metrics: pd.DataFrame, candidates: list[Candidate], r: int, rung: Rung, tune: Tune, design: Design
) -> list[Standing]:
    """Standings of a rung, the best first: those within the limits by the goal, then the others by how far beyond."""
    sign = -1 if design.goal.lower_is_better else 1
    ranked: list[tuple[tuple[float, float, float], Standing]] = []
    for c in candidates:
        runs = metrics[metrics["policy"] == c.label] if len(metrics) else metrics
        values = {m: t_interval(runs[m].to_numpy(dtype=float)) for m in METRICS if m in runs}
        standing = Standing(
            c, r, rung, {m: v.estimate for m, v in values.items()}, {m: v.half_width for m, v in values.items()}
        )
        reached = standing.values.get(design.goal.metric, nan)
        if len(runs) < len(rung.seeds) or isnan(reached):
            standing.status = FAILED
        beyond = [_excess(standing.values.get(m, nan), limit, METRICS[m]) for m, limit in tune.limits.items()]
        sides = [
            {_excess(standing.values[m] + side * standing.widths[m], limit, METRICS[m]) > 0 for side in (-1, 1)}
            for m, limit in tune.limits.items()
            if m in standing.values
        ]
        if len(sides) < len(tune.limits) or any(s == {True} for s in sides):
            standing.limits = "missed"
        elif any(len(s) == 2 for s in sides):
            standing.limits = "cannot tell"
        excess = inf if standing.status == FAILED else max([0.0, *beyond])
        tie = standing.values.get(design.goal.then_least or "", 0.0)
        ranked.append(((excess, inf if isnan(reached) else -sign * reached, tie), standing))
    return [standing for _, standing in sorted(ranked, key=lambda pair: pair[0])]


def _excess(value: float, limit: float, lower_is_better: bool) -> float:
    """How far beyond a limit, relative; at most 0 within. NaN is beyond."""
    if isnan(value):
        return inf
    return (value - limit if lower_is_better else limit - value) / (abs(limit) or 1.0)


def _judge(metrics: pd.DataFrame, ranked: list[Standing], rung: Rung, design: Design, error: float) -> None:
    """How far each stands behind the first, and whether that can be told; all intervals hold together."""
    for standing in ranked:
        if standing.status != FAILED and standing.limits == "missed":
            standing.status = OVER
    leader = ranked[0]
    if leader.status == FAILED:
        return
    confidence = simultaneous(len(ranked) - 1)
    for standing in ranked:
        if standing is leader or standing.status == FAILED:
            continue
        gain = paired_gain(metrics, design, leader.candidate.label, standing.candidate.label, confidence)
        standing.behind, standing.behind_hw = gain.estimate, gain.half_width
        if standing.status != OVER:
            told = verdict(gain.estimate, gain.half_width, error)
            standing.status = WORSE if told == "better" else ALIKE
            standing.near = standing.status == ALIKE and gain.estimate <= np.fmax(NEAR, error)
    leader.behind, leader.behind_hw = 0.0, 0.0
    if leader.status != OVER:
        leader.status, leader.near = BEST, True


def _survivors(ranked: list[Standing], rung: Rung) -> list[Standing]:
    """Who goes on; the others are marked."""
    able = [s for s in ranked if s.status != FAILED]
    on, families = able[: rung.keep], set[str]()
    for s in able:
        if s.candidate.family not in families and s.status in {BEST, ALIKE} and s not in on:
            on.append(s)
        families.add(s.candidate.family)
    for s in ranked:
        if s not in on and s.status in {BEST, ALIKE}:
            s.status, s.near = DROPPED, False
    return on


def _place(s: Standing) -> tuple[object, ...]:
    """Near-equal best ones by simplicity, then the others as they ended."""
    if s.near:
        return (0, s.candidate.order)
    excess = s.behind if not isnan(s.behind) else inf
    return (
        1,
        {BEST: 0, ALIKE: 0, WORSE: 0, DROPPED: 0, OVER: 1, FAILED: 2}[s.status],
        -s.rung,
        excess,
        s.candidate.order,
    )
