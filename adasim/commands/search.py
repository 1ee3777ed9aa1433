"""Commands that run a scenario in many forms: the best policy, and what would change the answer."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adasim.options import (
    Address,
    ExecutorKind,
    Json,
    Keep,
    Name,
    Out,
    Overwrite,
    Resume,
    Settings,
    Workers,
    executor_of,
    exit_on,
    failed_lines,
    interrupted,
    simulated,
)

if TYPE_CHECKING:
    import pandas as pd

    from adasim.executors import Executor
    from adasim.page import Story
    from adasim.plan import Plan
    from adasim.search import Tune
    from adasim.session import Session


def tune_command(
    scenario: Name,
    search: Annotated[
        list[str] | None,
        typer.Option(
            metavar="POLICY.FIELD=RANGE", help="Search a field: 0.8..1.6, 2..16..2, log:0.01..1, or [2, 4]. Repeatable."
        ),
    ] = None,
    goal: Annotated[str | None, typer.Option(help="Metric to go for. Default: goodput with an SLO, else speed.")] = None,
    limit: Annotated[
        list[str] | None, typer.Option(metavar="METRIC=VALUE", help="A limit, like tpot_p99_ms=20. Repeatable.")
    ] = None,
    candidates: Annotated[int | None, typer.Option(min=2, help="Values of one ranged policy. Default: 12.")] = None,
    seeds: Annotated[int | None, typer.Option(min=3, help="Seeds of the last rung. Default: 9.")] = None,
    out: Out = None,
    settings: Settings = None,
    workers: Workers = None,
    executor: ExecutorKind = "local",
    address: Address = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Find the best policy, or the best parameters of policies, at every point of the sweep.

    By successive halving over paired runs: many candidates on few seeds, few candidates on many. Parameters to search
    come from --search or the scenario's own tune.search.
    """
    from adasim.plan import load

    given = {"goal": goal, "candidates": candidates, "seeds": seeds}
    asked: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
    asked |= {"search": _pairs(search, "--search"), "limits": _pairs(limit, "--limit")}
    plan = simulated(load(scenario, settings or [], partial(_with_tune, asked=asked)))
    assert plan.scenario.tune is not None
    runner = executor_of(executor, workers, address)
    _tune(plan, plan.scenario.tune, runner, _folder(plan, out, "tune"), Keep(resume, overwrite), as_json=as_json)


def sensitivity_command(
    scenario: Name,
    move: Annotated[
        list[str] | None,
        typer.Option(metavar="INPUT=LOW..HIGH", help="How far an input is moved; any dotted field is one. Repeatable."),
    ] = None,
    only: Annotated[bool, typer.Option("--only", help="Move what --move names, and nothing else.")] = False,
    within: Annotated[float, typer.Option(min=0, help="Watch policies this far behind the leader, relative.")] = 0.1,
    out: Out = None,
    settings: Settings = None,
    workers: Workers = None,
    executor: ExecutorKind = "local",
    address: Address = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Move each calibrated input by its uncertainty, and see which would change the ranking of policies.

    Inputs: verify, draft, overhead, prefill (times), acceptance (tau), correlation, range_tokens, head_noise, head_bias.
    """
    from adasim.errors import InputError
    from adasim.plan import load
    from adasim.sensitivity import moves_of, study
    from adasim.sensitivity_report import write

    plan = simulated(load(scenario, settings or []))
    runner = executor_of(executor, workers, address)
    moves, notes = moves_of(plan, move or [])
    if only:
        moves = [m for m in moves if m.source == "command line"]
    if not any(m.values for m in moves):
        raise InputError("sensitivity: nothing to move" + (": --only needs --move" if only and not move else ""))
    folder = _folder(plan, out, "sensitivity")
    session = _session(plan, folder, runner, Keep(resume, overwrite), "sensitivity", as_json=as_json)
    metrics, rows = _guarded(session, partial(study, plan, moves, session.run, within=within))
    lines = failed_lines(session.failures)
    story = _story(session, "What would change the answer", [*notes, *lines])
    table, says = write(rows, metrics, story, folder, within=within)
    _finish(session, says, {"sensitivity": table}, lines, as_json=as_json)


def _pairs(given: list[str] | None, option: str) -> dict[str, Any]:
    """``NAME=VALUE`` options as a mapping; a value that starts like a list or number is read as one."""
    from adasim.errors import InputError
    from adasim.files import parse_yaml

    pairs: dict[str, Any] = {}
    for text in given or []:
        name, sep, value = text.partition("=")
        if not sep or not name or not value:
            raise InputError(f"{option} {text}: expected NAME=VALUE")
        parsed = parse_yaml(value, f"{option} {name}")
        pairs[name] = float(parsed) if option == "--limit" and isinstance(parsed, int) else parsed
    return pairs


def _with_tune(config: dict[str, Any], asked: dict[str, Any]) -> None:
    """Merge what the command line asks into the scenario's ``tune``, and expand its search into policies."""
    from pydantic import ValidationError

    from adasim.errors import InputError
    from adasim.explain import explain
    from adasim.search import Tune, add_search

    own = config.get("tune") or {}
    if not isinstance(own, dict):
        raise InputError("tune: must hold keys and values")
    merged = {**own, **asked}
    merged |= {key: {**(own.get(key) or {}), **asked[key]} for key in ("search", "limits")}
    try:
        tune = Tune.model_validate(merged)
    except ValidationError as error:
        raise InputError(
            *(f"tune.{line}" if not line.startswith("tune") else line for line in explain(error, Tune))
        ) from error
    config["tune"] = merged
    add_search(config, tune.search, tune.candidates)


def _tune(plan: "Plan", tune: "Tune", runner: "Executor", out: Path, keep: Keep, *, as_json: bool) -> None:
    from math import nan

    from adasim.errors import InputError
    from adasim.tuning import candidates_of, goal_of, halve
    from adasim.tuning_report import answer, write

    if len(candidates_of(plan)) < 2:
        raise InputError("tune: needs two candidates; search a field with --search POLICY.FIELD=LOW..HIGH")
    goal = goal_of(plan, tune)
    if plan.scenario.slo is None and {"goodput_rps", "slo_met"} & {goal.metric, *tune.limits}:
        raise InputError("tune: goodput_rps and slo_met need an slo in the scenario")
    error = plan.scenario.reference.mean_abs_error if plan.scenario.reference else nan
    session = _session(plan, out, runner, keep, "tune", as_json=as_json)
    points = _guarded(session, partial(halve, plan, tune, session.run, error=error))
    lines = failed_lines(session.failures)
    story = _story(session, "Best policy", lines)
    trials = session.run(list(session.trials.values()), "finished")
    table = write(points, goal, tune, story, trials, out, error)
    _finish(session, answer(points, goal, tune), {"candidates": table}, lines, as_json=as_json)


def _folder(plan: "Plan", out: Path | None, command: str) -> Path:
    return out or Path("reports") / f"{plan.scenario.name}-{command}"


def _session(plan: "Plan", out: Path, runner: "Executor", keep: Keep, command: str, *, as_json: bool) -> "Session":
    """A session whose folder is ready."""
    from adasim.experiment import open_folder, write_manifest
    from adasim.screen import progress_bar
    from adasim.session import Session

    open_folder(out, resume=keep.resume, overwrite=keep.overwrite, command=command)
    write_manifest(plan, out, finished=False, command=command)

    def bar(what: str, total: int, done: int) -> Any:
        return progress_bar(total, done, quiet=as_json or done == total, what=what)

    return Session(plan, out, runner, bar, command)


def _guarded(session: "Session", work: Any) -> Any:
    """The result of a search, or the way out that Ctrl-C takes."""
    from adasim.executors import Interrupted
    from adasim.experiment import unfinished

    try:
        return work()
    except Interrupted:
        known = list(session.trials.values())
        interrupted(session.out, finished=len(unfinished(known, session.out)) < len(known))


def _story(session: "Session", title: str, lines: list[str]) -> "Story":
    from dataclasses import replace

    from adasim.experiment import unfinished
    from adasim.story import tell

    count = len(session.trials)
    story = tell(session.plan, 0, [*session.plan.notes, *session.notes, *lines])
    finished = count - len(unfinished(list(session.trials.values()), session.out))
    return replace(story, title=f"{title}: {story.title}", trials=(finished, count))


def _finish(
    session: "Session", says: list[str], tables: "dict[str, pd.DataFrame]", lines: list[str], *, as_json: bool
) -> None:
    """Mark the folder finished, show the answer, leave with the right code."""
    from adasim.experiment import write_manifest
    from adasim.screen import show_answer, show_errors

    notes = session.outcome.notes
    write_manifest(session.plan, session.out, finished=not lines, command=session.command, notes=notes)
    show_answer(session.plan.scenario.name, session.out, says, tables, lines, as_json=as_json)
    show_errors(lines)
    show_errors(notes, "note")
    exit_on(session.failures)
