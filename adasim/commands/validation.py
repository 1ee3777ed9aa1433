"""The command that holds predictions against real runs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adasim.commands.calibration import seconds_of
from adasim.options import (
    NOT_VALID,
    Json,
    Out,
    Overwrite,
    Resume,
    Settings,
    exit_on,
    failed_lines,
    interrupted,
)

if TYPE_CHECKING:
    from adasim.calibration.profile import Profile
    from adasim.page import Story
    from adasim.plan import Plan
    from adasim.validation.blocks import Block
    from adasim.validation.measured import Run
    from adasim.validation.report import Findings


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
    poll: Annotated[float, typer.Option(min=0.1, help="With --watch: seconds between looks.")] = 10.0,
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

    if floor is not None:
        _floor(*floor, out, as_json=as_json)
        return
    if scenario is None or profile is None:
        raise InputError("validate: give a scenario and --profile P.yaml, or --floor A B")
    if watch is not None:
        _watch(watch, scenario, profile, settings or [], once=once, poll_s=poll, force=force, as_json=as_json)
        return
    if records is not None and (budget or resume):
        raise InputError("--records: nothing is measured, so --budget and --resume have no effect")
    limit = None if budget is None else seconds_of(budget)
    plan, knows = plan_of(scenario, settings or [], profile)
    folder = out or Path("reports") / f"{plan.scenario.name}-validate"
    _validate(plan, knows, folder, records, limit, force=force, keep=(resume, overwrite), as_json=as_json)


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
    believed = cost.model_dump(mode="json")  # its values, not the profile's name: the same cost keeps all runs

    def believe(config: dict[str, Any]) -> None:
        backend = config.get("backend")
        if isinstance(backend, dict) and backend.get("kind") == "torch" and backend.get("profile") is None:
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


def _validate(
    plan: "Plan", profile: "Profile", out: Path, records: Path | None, budget_s: float | None, *, force: bool,
    keep: tuple[bool, bool], as_json: bool,
) -> None:  # fmt: skip
    from adasim.experiment import open_folder, write_manifest
    from adasim.identity import EngineIdentity
    from adasim.validation.blocks import blocks_of, missing
    from adasim.validation.measured import runs_in, runs_recorded
    from adasim.validation.study import check_engine, examine, fitted_cells

    blocks = blocks_of(plan)
    fitted = fitted_cells(blocks, profile)
    lines: list[str] = []
    here = plan.scenario.backend.identity() if records is None else None
    notes = check_engine([here] if here else [], profile, force=force)
    open_folder(out, resume=keep[0], overwrite=keep[1], command="validate")
    if records is None:
        lines, more = _measure(plan, blocks, out, budget_s, as_json=as_json)
        notes += more
        runs, left = runs_in(out, blocks), sum(len(missing(b, out)) for b in blocks)
    else:
        runs = runs_recorded(records, plan)
        keys = {(r.trial.policy, *r.place) for r in runs}
        left = sum((t.policy, *t.point.values(), t.seed) not in keys for b in blocks for t in b.trials)
        engines = [EngineIdentity.model_validate(r.engine) for r in runs if r.engine is not None]
        notes += check_engine(engines, profile, force=force)
    found = examine(plan, runs, profile, fitted, missing=left, progress=_progress(quiet=as_json))
    story = _story(plan, profile, runs, left, [*notes, *lines])
    _show(found, story, plan, profile, out, lines, as_json=as_json)
    if records is None:
        _manifest(plan, blocks, out, finished=not left)
    else:
        taken = replace(plan, trials=[], notes=[*plan.notes, f"measured runs were taken from {records}"])
        write_manifest(taken, out, finished=not left, command="validate")
    if not found.passed:
        raise typer.Exit(NOT_VALID)


def _measure(
    plan: "Plan", blocks: "Sequence[Block]", out: Path, budget_s: float | None, *, as_json: bool
) -> tuple[list[str], list[str]]:
    """Run what is missing; returns lines on what failed, and notes."""
    from adasim.executors import Interrupted
    from adasim.screen import progress_bar
    from adasim.validation.blocks import Measuring, missing

    total = sum(len(b.trials) for b in blocks)
    todo = sum(len(missing(b, out)) for b in blocks)
    _manifest(plan, blocks, out, finished=False)
    with progress_bar(total, total - todo, quiet=as_json, what="measuring") as advance:
        measuring = Measuring(out, plan.scenario.validation, budget_s, advance)
        try:
            left = measuring.run(blocks)
        except Interrupted:
            _manifest(plan, blocks, out, finished=False)
            interrupted(out, finished=left_some(blocks, out))
    lines = failed_lines(measuring.outcome.failures)
    if left == total:
        exit_on(measuring.outcome.failures)
    notes = list(measuring.outcome.notes)
    if left and budget_s is not None:
        notes.append(f"the budget is used up: {left} of {total} runs are missing; go on with --resume")
    return lines, notes


def left_some(blocks: "Sequence[Block]", out: Path) -> bool:
    """Whether any run is on disk."""
    from adasim.validation.blocks import missing

    return any(len(missing(b, out)) < len(b.trials) for b in blocks)


def _manifest(plan: "Plan", blocks: "Sequence[Block]", out: Path, *, finished: bool) -> None:
    """The manifest lists policies' runs and every run of a reference."""
    from adasim.experiment import write_manifest

    trials = [t for b in blocks for t in (*b.references(out), *b.trials)]
    write_manifest(replace(plan, trials=trials), out, finished=finished, command="validate")


def _progress(*, quiet: bool) -> Callable[[str, int], Callable[[], None]]:
    """A line on standard error now and then."""
    from time import monotonic

    def begin(what: str, count: int) -> Callable[[], None]:
        done, said = 0, monotonic()

        def step() -> None:
            nonlocal done, said
            done += 1
            if not quiet and monotonic() - said > 10:
                said = monotonic()
                typer.echo(f"{what}: {done} of {count} runs", err=True)

        return step

    return begin


def _story(plan: "Plan", profile: "Profile", runs: "Sequence[Run]", left: int, notes: list[str]) -> "Story":
    from adasim.story import tell

    policies = sum(r.trial.repeat is None for r in runs)
    models = [f"{r.trial.policy}: {note}" for r in runs for note in r.notes]
    story = tell(plan, policies, [*plan.notes, *notes, *dict.fromkeys(models)])
    facts = profile.provenance
    story.title = f"Prediction against measurement: {story.title}"
    story.trials = (policies, policies + left)
    story.calibration += [("profile", profile.name), ("hardware", facts.hardware), ("model", facts.model)]
    story.calibration += [("engine", facts.engine), ("date", facts.date), ("fitted", facts.how)]
    story.inputs += facts.inputs
    story.assumptions += facts.assumptions
    if plan.scenario.backend.mark == "simulated":
        story.notes.insert(0, "a rehearsal: the «measured» side is itself simulated, by the scenario's own backend")
    return story


def _show(
    found: "Findings", story: "Story", plan: "Plan", profile: "Profile", out: Path, lines: list[str], *, as_json: bool
) -> None:
    from adasim.screen import show_answer, show_errors
    from adasim.validation.report import answer, bars_table, write

    counts = found.cells[~found.cells["reference"]]
    fitted = (
        f"The profile was fitted on {int(counts['fitted'].sum())} of {len(counts)} cells."
        if profile.fitted_on
        else "The profile names no runs that it was fitted on: all cells count as held out."
    )
    write(found, story, plan.scenario.validation, out, fitted=fitted)
    tables = {"bars": bars_table(found.bars), "errors": found.errors, "ranking": found.ranking}
    tables |= {"crossover": found.crossover, "attribution": found.attribution, "cells": found.cells}
    show_answer(plan.scenario.name, out, [*answer(found), fitted], tables, lines, as_json=as_json)
    show_errors(lines)


def _floor(first: Path, second: Path, out: Path | None, *, as_json: bool) -> None:
    from adasim.files import write_atomic
    from adasim.screen import show_facts
    from adasim.validation.floor import compare, says_of, summary_of

    moved, notes = compare(first, second)
    table = summary_of(moved)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        for name, part in (("floor", table), ("floor_cells", moved)):
            write_atomic(out / f"{name}.csv", part.to_csv(index=False, lineterminator="\n"))
    show_facts([*says_of(table), *notes], {"floor": table, "cells": moved}, as_json=as_json, shown="floor")


def _watch(
    folder: Path, scenario: str, profile: str, settings: list[str], *, once: bool, poll_s: float, force: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Hold every run of a folder against the profile as it appears; with ``once``, those that are there."""
    from time import sleep

    from adasim.identity import EngineIdentity
    from adasim.screen import show_facts
    from adasim.validation.measured import runs_recorded
    from adasim.validation.study import check_engine
    from adasim.validation.watch import Moved, Watcher, in_words

    plan, knows = plan_of(scenario, settings, profile)
    watcher, seen, moved = Watcher(knows, plan.scenario.validation), set[str](), list[Moved]()
    while True:
        for run in runs_recorded(folder, plan):
            if run.folder.name in seen:
                continue
            seen.add(run.folder.name)
            if run.engine is not None:
                check_engine([EngineIdentity.model_validate(run.engine)], knows, force=force)
            found = watcher.take(run)
            moved += found
            if found and not once:
                show_facts(in_words(found), {}, as_json=as_json)
        if once:
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
