"""The command that holds predictions against real runs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adasim.commands.calibration import seconds_of
from adasim.commands.judge import judge_measured, judge_recorded
from adasim.options import NOT_VALID, Json, Out, Overwrite, Resume, Settings

if TYPE_CHECKING:
    from adasim.calibration.profile import Profile
    from adasim.plan import Plan

POLL_S = 10.0
COMMON = {"a scenario", "--profile", "--set", "--force"}
EFFECTIVE = {
    "": COMMON | {"--out", "--budget", "--resume", "--overwrite"},
    "--records": COMMON | {"--records", "--out", "--overwrite"},
    "--watch": COMMON | {"--watch", "--once", "--poll"},
    "--floor": {"--floor", "--out"},
}  # what each way to call the command listens to


def validate_command(
    scenario: Annotated[str | None, typer.Argument(help="A YAML file, or the name of a packaged scenario.")] = None,
    profile: Annotated[str | None, typer.Option(help="What predicts: a calibrated profile, by name or path.")] = None,
    out: Out = None,
    settings: Settings = None,
    records: Annotated[
        Path | None, typer.Option(help="Take these recorded runs (of record or validate) instead of measuring.")
    ] = None,
    budget: Annotated[str | None, typer.Option(help="Measure no longer than this, like 40m; --resume goes on.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Accept a profile of another engine, and say so.")] = False,
    watch: Annotated[Path | None, typer.Option(help="Watch a folder of records for drift of cost or acceptance.")] = None,
    once: Annotated[bool, typer.Option("--once", help="With --watch: check what is there, and end.")] = False,
    poll: Annotated[float | None, typer.Option(min=0.1, help="With --watch: seconds between looks. Default: 10.")] = None,
    floor: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Two measured folders of one scenario: how much reality moves.")
    ] = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Measure a scenario on its real engine, predict the same runs, and say how far off the prediction was.

    Exit code 3: a tolerance of the scenario (section validation) is missed, the measurement is not finished, or, with
    --watch, something drifted.
    """
    from adasim.errors import InputError

    given = {
        "a scenario": scenario, "--profile": profile, "--out": out, "--set": settings, "--records": records,
        "--budget": budget, "--force": force, "--watch": watch, "--once": once, "--poll": poll, "--floor": floor,
        "--resume": resume, "--overwrite": overwrite,
    }  # fmt: skip
    _refuse_without_effect([name for name, value in given.items() if value is not None and value is not False])
    if floor is not None:
        _floor(*floor, out, as_json=as_json)
        return
    if scenario is None or profile is None:
        raise InputError("validate: give a scenario and --profile P.yaml, or --floor A B")
    if watch is not None:
        poll_s = None if once else poll or POLL_S
        _watch(watch, scenario, profile, settings or [], poll_s, force=force, as_json=as_json)
        return
    limit = None if budget is None else seconds_of(budget)
    plan, knows = plan_of(scenario, settings or [], profile)
    folder = out or Path("reports") / f"{plan.scenario.name}-validate"
    if records is None:
        judge_measured(plan, knows, folder, limit, force=force, keep=(resume, overwrite), as_json=as_json)
    else:
        judge_recorded(plan, knows, folder, records, force=force, overwrite=overwrite, as_json=as_json)


def _refuse_without_effect(given: Sequence[str]) -> None:
    """Nothing is ignored in silence."""
    from adasim.errors import InputError

    modes = [mode for mode in EFFECTIVE if mode in given] or [""]
    if len(modes) > 1:
        raise InputError(f"{' and '.join(modes)} exclude each other")
    mode = modes[0]
    idle = [name for name in given if name not in EFFECTIVE[mode]]
    problems = [f"{name} has no effect {f'with {mode}' if mode else 'without --watch'}" for name in idle]
    if {"--once", "--poll"} <= set(given) and mode == "--watch":
        problems.append("--poll has no effect with --once")
    if problems:
        raise InputError(*problems)


def plan_of(scenario: str, settings: Sequence[str], profile: str) -> "tuple[Plan, Profile]":
    """The plan of a scenario whose policies believe the profile's cost, and the profile.

    Only trials whose policies ask for a cost depend on the profile, so that another one keeps the runs of all others.
    """
    from adasim.calibration.cost import TableCost
    from adasim.calibration.profile import Profile
    from adasim.plan import load

    knows = Profile.load(profile)
    given: list[bool] = []
    cost = knows.cost.inline() if isinstance(knows.cost, TableCost) else knows.cost
    # its values, not the profile's name: the same cost keeps all runs
    believed = _as_written(cost.model_dump(mode="json"), cost.model_dump(mode="json", exclude_unset=True))

    def believe(config: dict[str, Any]) -> None:
        backend = config.get("backend")
        if isinstance(backend, dict) and backend.get("kind") in {"torch", "sglang"} and backend.get("profile") is None:
            given.append(backend.pop("cost", None) is not None)
            backend["cost"] = believed

    plan = load(scenario, settings, believe)
    if not given:
        return plan, knows
    asks = {p.label for p in plan.scenario.policies if "cost" in p.needs}
    trials = []
    for trial in plan.trials:
        backend = {k: v for k, v in trial.config["backend"].items() if k != "cost" or trial.policy in asks}
        trials.append(replace(trial, config={**trial.config, "backend": backend}))
    notes = ["policies that ask for a cost were given the profile's, not backend.cost"] * given[0]
    return replace(plan, trials=trials, notes=plan.notes + notes), knows


def _as_written(every: dict[str, Any], written: dict[str, Any]) -> dict[str, Any]:
    """Fields that a file states, and nulls: defaults of fields that are newer than the file change no key."""
    return {
        name: _as_written(value, written[name]) if isinstance(value, dict) and name in written else value
        for name, value in every.items()
        if name in written or value is None
    }


def _floor(first: Path, second: Path, out: Path | None, *, as_json: bool) -> None:
    from adasim.errors import InputError
    from adasim.files import write_atomic
    from adasim.screen import show_facts
    from adasim.validation.floor import compare, says_of, summary_of

    moved, notes = compare(first, second)
    table = summary_of(moved)
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--out {out}: cannot be made: {error.strerror}") from error
        for name, part in (("floor", table), ("floor_cells", moved)):
            write_atomic(out / f"{name}.csv", part.to_csv(index=False, lineterminator="\n"))
    show_facts([*says_of(table), *notes], {"floor": table, "cells": moved}, as_json=as_json, shown="floor")


def _watch(
    folder: Path, scenario: str, profile: str, settings: list[str], poll_s: float | None, *, force: bool, as_json: bool
) -> None:
    """Hold every run of a folder against the profile as it appears; those that are there where ``poll_s`` is None."""
    from time import sleep

    from adasim.errors import InputError
    from adasim.screen import show_errors, show_facts
    from adasim.validation.recorded_runs import runs_recorded
    from adasim.validation.study import check_engine
    from adasim.validation.watch import Moved, Watcher, in_words

    plan, knows = plan_of(scenario, settings, profile)
    watcher, seen, moved = Watcher(knows, plan.scenario.validation), set[str](), list[Moved]()
    while True:
        for run in runs_recorded(folder, plan, seen):
            seen.add(run.folder.name)
            try:
                check_engine([] if run.engine is None else [run.engine], knows, force=force)
                found = watcher.take(run)
            except InputError as error:
                if poll_s is None:
                    raise
                show_errors([f"{run.name}: {line}" for line in error.problems])
                continue
            moved += found
            if found and poll_s is not None:
                show_facts(in_words(found), {}, as_json=as_json)
        if poll_s is None:
            break
        sleep(poll_s)
    rates = plan.scenario.validation
    quiet = (
        f"nothing moved in {watcher.runs} runs and {watcher.requests} requests (a false alarm of one part is due every "
        f"{rates.false_alarm_runs:g} runs at most, of one domain every {rates.false_alarm_requests:g} requests)"
    )
    show_facts(in_words(moved) or [quiet], {}, as_json=as_json)
    if moved:
        raise typer.Exit(NOT_VALID)
