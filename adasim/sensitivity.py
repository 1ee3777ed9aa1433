"""Does the answer survive its inputs? Each calibrated input is moved by its uncertainty, with the same seeds."""

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, replace
from math import isnan, nan
from typing import Any

import numpy as np
import pandas as pd

from adasim.calibration.acceptance import CurveAcceptance
from adasim.calibration.adjust import DEFAULTS, Adjust
from adasim.errors import InputError
from adasim.files import parse_yaml
from adasim.plan import Plan, Trial, assign
from adasim.scenario import Value
from adasim.simulator.backend import SimBackend
from adasim.statistics import Interval, ratio_interval
from adasim.story import design as design_of
from adasim.tables import Design, paired_gain, summarise, verdict, with_speedup
from adasim.types import HEAD_OUTPUTS, FloatArray

ADJUST = "backend.adjust."
HOLDS, UNSURE, FLIPS = "holds", "cannot tell", "flips"
REACH = 3.0
Run = Callable[[list[Trial], str], pd.DataFrame]


@dataclass(frozen=True, slots=True)
class Move:
    """An input and the values it is moved to."""

    name: str  # of the input
    field: str  # dotted, of the scenario
    neutral: float | None  # value that changes nothing; None: what the scenario says
    values: tuple[Value, ...]
    source: str  # who says how far: the profile, a default, or the command line


@dataclass(frozen=True, slots=True)
class Contest:
    """Who leads at a point as calibrated, and whom it must beat."""

    leader: str
    rival: str
    contenders: tuple[str, ...]  # close enough to be watched, leader and rival among them


def moves_of(plan: Plan, given: Iterable[str] = ()) -> tuple[list[Move], list[str]]:
    """The inputs to move, and notes on those that cannot matter.

    Args:
        plan: of a simulated backend.
        given: ``NAME=LOW..HIGH`` or ``NAME=[values]``: a field of ``backend.adjust``, or any dotted field of the
            scenario. They replace what profile or defaults say.

    Raises:
        InputError: not of that form.
    """
    backend = plan.scenario.backend
    assert isinstance(backend, SimBackend)
    chosen: dict[str, tuple[Value, ...]] = {}
    problems: list[str] = []
    for text in given:
        name, sep, spec = text.partition("=")
        try:
            values = _values(spec, name)
        except InputError as error:
            problems += error.problems
            continue
        if not sep or not name or (name not in Adjust.model_fields and "." not in name):
            known = ", ".join(Adjust.model_fields)
            problems.append(f"--move {text}: expected NAME=LOW..HIGH; names: {known}, or a dotted field of the scenario")
        else:
            chosen[name] = values
    if problems:
        raise InputError(*problems)
    if len(plan.scenario.seeds) < 2:
        raise InputError("sensitivity: needs two seeds or more: --set 'seeds=[0, 1, 2]'")
    idle = _idle(plan, backend)
    moves: list[Move] = []
    notes: list[str] = []
    for name, field in Adjust.model_fields.items():
        neutral = getattr(backend.adjust, name) if backend.adjust else field.default
        if name in chosen:
            moves.append(Move(name, ADJUST + name, neutral, chosen.pop(name), "command line"))
        elif name in idle:
            notes.append(f"{name} was not moved: {idle[name]}")
        else:
            stated = backend.calibration.uncertainty.limits(name) if backend.calibration else None
            limits = stated or DEFAULTS.limits(name)
            assert limits is not None
            values = tuple(neutral + v if field.default == 0 else neutral * v for v in limits)
            moves.append(Move(name, ADJUST + name, neutral, values, "profile" if stated else "default"))
    moves += [Move(name, name, None, values, "command line") for name, values in chosen.items()]
    return [_checked(_possible(m, backend), plan, notes) for m in moves], notes


def _checked(move: Move, plan: Plan, notes: list[str]) -> Move:
    """The move without values that the scenario cannot have, which are noted; those that the user gave are refused."""
    if move.field in plan.trials[0].point:
        raise InputError(f"--move {move.name}: is swept already")
    possible = []
    for value in move.values:
        try:
            scenario = replace(plan.trials[0], config=_assigned(plan.trials[0].config, move, value)).scenario()
            scenario.backend.check_workload(scenario.workload, scenario.seeds[0])
            possible.append(value)
        except InputError as error:
            if move.source == "command line":
                raise InputError(*(f"--move {move.name}: {p}" for p in error.problems)) from error
            notes.append(f"{move.name} was not moved to {_shown(value)}: {'; '.join(error.problems)}")
    return replace(move, values=tuple(possible))


def _shown(value: Value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _values(spec: str, name: str) -> tuple[Value, ...]:
    low, dots, high = spec.partition("..")
    value = [parse_yaml(v, f"--move {name}") for v in (low, high)] if dots else parse_yaml(spec, f"--move {name}")
    if not isinstance(value, list) or not value or any(isinstance(v, list | dict) for v in value):
        raise InputError(f"--move {name}={spec}: expected LOW..HIGH or [values]")
    return tuple(float(v) if name in Adjust.model_fields and isinstance(v, int) else v for v in value)


def _idle(plan: Plan, backend: SimBackend) -> dict[str, str]:
    """Inputs that cannot matter here, and why."""
    cost, luck = backend.calibrated_cost, backend.calibrated_acceptance
    idle = {}
    if not any(cost.overhead.model_dump().values()):
        idle["overhead"] = "there is none"
    if not cost.draft_s(1, 2, 1, 1.0):
        idle["draft"] = "drafting takes no time of its own here"
    if not cost.prefill_s(64, 32.0, 0):
        idle["prefill"] = "prefills take no time here"
    if not isinstance(luck, CurveAcceptance):
        idle |= dict.fromkeys(("acceptance", "correlation", "range_tokens"), "acceptance is a recording")
    elif not luck.correlation:
        idle["range_tokens"] = "acceptance is not correlated"
    if not any(p.needs & HEAD_OUTPUTS for p in plan.scenario.policies):
        idle |= dict.fromkeys(("head_noise", "head_bias"), "no policy reads a head")
    return idle


def _possible(move: Move, backend: SimBackend) -> Move:
    """The correlation stays between nothing and what the spread leaves."""
    luck = backend.calibrated_acceptance
    if move.name != "correlation" or move.source == "command line" or not isinstance(luck, CurveAcceptance):
        return move
    low, high = -luck.correlation, 0.98 - luck.spread - luck.correlation
    kept = (min(max(float(v), low), high) for v in move.values if isinstance(v, float))
    return replace(move, values=tuple(v for v in kept if v != move.neutral))


def contests(metrics: pd.DataFrame, plan: Plan, design: Design, within: float) -> dict[tuple[Value, ...], Contest]:
    """Leader, rival and contenders at every point, as calibrated.

    The rival is the best of the other role (static against adaptive), or the second best where there is none.
    Contenders are all whose goal is less than ``within`` behind the leader's.
    """
    role = {a.label: "adaptive" if a.role == "adaptive" else "static" for a in design.arms if a.role != "bound"}
    summary = summarise(with_speedup(metrics, design), design)
    summary = summary[summary["policy"].isin(list(role))]
    found: dict[tuple[Value, ...], Contest] = {}
    for point in _points(plan):
        at = summary
        for name, value in point.items():
            at = at[at[name] == value]
        best = design.goal.best(at)
        if best is None or len(at) < 2:
            continue
        leader = str(best["policy"])
        others = at[at["policy"] != leader]
        across = others[others["policy"].map(role) != role[leader]]
        second = design.goal.best(across if len(across) else others)
        if second is None:
            second = others.iloc[0]
        value = best[design.goal.metric]
        behind = design.goal.ratio(pd.Series(value, at.index), at[design.goal.metric]) - 1
        close = [str(p) for p in at.loc[behind <= within, "policy"]]
        rival = str(second["policy"])
        found[tuple(point.values())] = Contest(leader, rival, tuple(dict.fromkeys([leader, rival, *close])))
    return found


def _points(plan: Plan) -> list[dict[str, Value]]:
    return list({tuple(t.point.items()): t.point for t in plan.trials}.values())


def moved(plan: Plan, move: Move, value: Value, kept: dict[tuple[Value, ...], Contest]) -> list[Trial]:
    """The contenders' trials with one input moved."""
    trials = []
    for t in plan.trials:
        contest = kept.get(tuple(t.point.values()))
        if contest is not None and t.policy in contest.contenders:
            trials.append(replace(t, config=_assigned(t.config, move, value)))
    return trials


def _assigned(config: dict[str, Any], move: Move, value: Value) -> dict[str, Any]:
    changed = deepcopy(config)
    assign(changed, move.field, value)
    return changed


def study(plan: Plan, moves: list[Move], run: Run, *, within: float) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Run the scenario as calibrated, then its contenders with every input moved.

    Returns:
        The metrics as calibrated, and one row an input, value and point: leader and rival as calibrated, the gain of one
        over the other as calibrated and moved, who leads when moved, and whether the ranking holds.

    Raises:
        InputError: no policy can be compared.
    """
    design = design_of(plan)
    metrics = run(plan.trials, "as calibrated")
    kept = contests(metrics, plan, design, within) if len(metrics) else {}
    if not kept:
        raise InputError("sensitivity: needs two policies (those that know the truth excepted) that both finish")
    steps = [(m, v) for m in moves for v in m.values]
    jobs = [(m, v, moved(plan, m, v, kept)) for m, v in steps]
    run([t for _, _, trials in jobs for t in trials], "inputs moved")
    rows = []
    for move, value, trials in jobs:
        runs = run(trials, f"{move.name} {value}")
        for point in _points(plan):
            contest = kept.get(tuple(point.values()))
            if contest is None:
                continue
            row: dict[str, Any] = {"input": move.name, "value": value, "neutral": move.neutral, "source": move.source}
            base, now = _at(metrics, point), _at(runs, point)
            rows.append(row | point | _compare(base, now, contest, design))
    return metrics, pd.DataFrame(rows)


def _at(table: pd.DataFrame, point: dict[str, Value]) -> pd.DataFrame:
    for name, value in point.items():
        table = table[table[name] == value] if len(table) else table
    return table


def _compare(base: pd.DataFrame, now: pd.DataFrame, contest: Contest, design: Design) -> dict[str, Any]:
    """What a move does to a contest. Every interval stands for itself."""
    before = paired_gain(base, design, contest.leader, contest.rival)
    row: dict[str, Any] = {"leader": contest.leader, "rival": contest.rival}
    row |= {"gain": before.estimate, "gain_hw": before.half_width}
    if set(now["policy"] if len(now) else ()) < set(contest.contenders):
        return row | {
            "moved_gain": nan,
            "moved_gain_hw": nan,
            "change_hw": nan,
            "moved_leader": "",
            "ahead": nan,
            "ranking": "failed",
        }
    after = paired_gain(now, design, contest.leader, contest.rival)
    change = ratio_interval(_ratios(now, design, contest), _ratios(base, design, contest))
    best = design.goal.best(now.groupby("policy", as_index=False, sort=False).mean(numeric_only=True))
    first = contest.leader if best is None else str(best["policy"])
    ahead = paired_gain(now, design, first, contest.leader) if first != contest.leader else Interval(0.0, 0, 0)
    ranking = HOLDS
    if first != contest.leader:
        ranking = FLIPS if verdict(ahead.estimate, ahead.half_width, nan) == "better" else UNSURE
    row |= {"moved_gain": after.estimate, "moved_gain_hw": after.half_width, "change_hw": change.half_width}
    return row | {"moved_leader": first, "ahead": ahead.estimate, "ranking": ranking}


def _ratios(runs: pd.DataFrame, design: Design, contest: Contest) -> FloatArray:
    """How many times better the leader is than the rival, by seed."""
    by = runs.pivot(index="seed", columns="policy", values=design.goal.metric).sort_index()
    return np.asarray(design.goal.ratio(by[contest.leader], by[contest.rival]), dtype=np.float64)


def break_even(rows: pd.DataFrame) -> float:
    """Value of an input at which the leader's gain over the rival is nothing; NaN when no move lowers it.

    On a line through the neutral value and a move that lowers the gain: the one that gets there first. NaN too where that
    is more than ``REACH`` moves away, or the leader was not ahead: a line does not reach that far.

    Args:
        rows: of one input at one point, with numbers for values.
    """
    base, neutral = float(rows["gain"].iloc[0]), rows["neutral"].iloc[0]
    if neutral is None or isnan(float(neutral)):
        return nan
    found = []
    for _, r in rows.iterrows():
        fall = base - float(r["moved_gain"])
        if fall > 0 and base > 0:
            found.append(float(neutral) + (float(r["value"]) - float(neutral)) * base / fall)
    reach = REACH * max(abs(float(v) - float(neutral)) for v in rows["value"])
    found = [v for v in found if abs(v - float(neutral)) <= reach]
    return min(found, key=lambda v: abs(v - float(neutral)), default=nan)
