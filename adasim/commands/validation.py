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
    from adasim.experiment import Failure
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
        _validate(plan, knows, folder, limit, force=force, keep=(resume, overwrite), as_json=as_json)
    else:
        _compare(plan, knows, folder, records, force=force, overwrite=overwrite, as_json=as_json)


POLL_S = 10.0
COMMON = {"a scenario", "--profile", "--set", "--force"}
EFFECTIVE = {
    "": COMMON | {"--out", "--budget", "--resume", "--overwrite"},
    "--records": COMMON | {"--records", "--out", "--overwrite"},
    "--watch": COMMON | {"--watch", "--once", "--poll"},
    "--floor": {"--floor", "--out"},
}  # what each way to call the command listens to


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
    plan: "Plan", profile: "Profile", out: Path, budget_s: float | None, *, force: bool, keep: tuple[bool, bool],
    as_json: bool,
) -> None:  # fmt: skip
    """Measure what is missing, and hold predictions against all that was measured."""
    from adasim.errors import InputError
    from adasim.experiment import open_folder
    from adasim.validation.blocks import blocks_of, missing
    from adasim.validation.measured import runs_in, sound, strangers
    from adasim.validation.study import check_engine, check_runs, fitted_cells

    blocks, here = blocks_of(plan), plan.scenario.backend.identity()
    fitted_cells(blocks, profile)
    notes = check_engine([here] if here else [], profile, force=force)
    kept = open_folder(out, resume=keep[0], overwrite=keep[1], command="validate")
    believed, others = strangers(out, kept if keep[0] else [], blocks)
    if others:
        raise InputError(f"--out {out}: holds {others} runs of another scenario, input file or version; use --overwrite")
    notes += [f"{believed} runs of policies that believed another cost lie in {out} and are not used"] * bool(believed)
    check_runs(runs_in(out, blocks), here, force=force)
    failures, more = _measure(plan, blocks, out, budget_s, as_json=as_json)
    runs, problems = sound(runs_in(out, blocks))
    notes += [*more, *check_runs(runs, here, force=force), *(f"left out: {line}" for line in problems)]
    usable = {r.folder.name for r in runs}
    left = sum(t.key not in usable for b in blocks for t in b.trials)
    lines = failed_lines(failures)
    passed = _judge(plan, profile, blocks, runs, left, out, [*notes, *lines], lines, as_json=as_json)
    _manifest(plan, blocks, out, finished=not any(missing(b, out) for b in blocks))
    exit_on(failures)
    if not passed:
        raise typer.Exit(NOT_VALID)


def _compare(
    plan: "Plan", profile: "Profile", out: Path, records: Path, *, force: bool, overwrite: bool, as_json: bool
) -> None:
    """Hold predictions against runs that were recorded before."""
    from adasim.errors import InputError
    from adasim.experiment import open_folder, write_manifest
    from adasim.validation.blocks import blocks_of
    from adasim.validation.measured import runs_recorded, sound
    from adasim.validation.study import check_engine, check_runs

    if out.resolve() == records.resolve():
        raise InputError(f"--out {out}: is the folder of --records, and would be replaced; give another")
    blocks = blocks_of(plan)
    runs, problems = sound(runs_recorded(records, plan))
    if problems:
        raise InputError(*problems)
    notes = check_engine([r.engine for r in runs if r.engine is not None], profile, force=force)
    notes += check_runs(runs, None, force=force)
    open_folder(out, resume=False, overwrite=overwrite, command="validate")
    keys = {(r.trial.policy, *r.place) for r in runs}
    left = sum((t.policy, *t.point.values(), t.seed) not in keys for b in blocks for t in b.trials)
    passed = _judge(plan, profile, blocks, runs, left, out, notes, [], as_json=as_json)
    taken = replace(plan, trials=[], notes=[*plan.notes, f"measured runs were taken from {records}"])
    write_manifest(taken, out, finished=not left, command="validate")
    if not passed:
        raise typer.Exit(NOT_VALID)


def _judge(
    plan: "Plan", profile: "Profile", blocks: "Sequence[Block]", runs: "Sequence[Run]", left: int, out: Path,
    notes: list[str], lines: list[str], *, as_json: bool,
) -> bool:  # fmt: skip
    """Examine runs, write and show the report; says whether they pass."""
    from adasim.validation.study import examine, fitted_cells

    fitted = fitted_cells(blocks, profile)
    found = examine(plan, runs, profile, fitted, missing=left, progress=_progress(quiet=as_json))
    _show(found, _story(plan, profile, runs, left, [*notes, *found.notes]), plan, profile, out, lines, as_json=as_json)
    return found.passed


def _measure(
    plan: "Plan", blocks: "Sequence[Block]", out: Path, budget_s: float | None, *, as_json: bool
) -> "tuple[list[Failure], list[str]]":
    """Run what is missing; returns what failed, and notes."""
    from adasim.executors import Interrupted
    from adasim.screen import progress_bar, show_errors
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
    if left == total:
        show_errors(failed_lines(measuring.outcome.failures))
        exit_on(measuring.outcome.failures)
    notes = list(measuring.outcome.notes)
    if left and budget_s is not None:
        notes.append(f"the budget is used up: {left} of {total} runs are missing; go on with --resume")
    return measuring.outcome.failures, notes


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
    story.notes += [f"profile {profile.name}: {mark}" for mark in profile.marks]
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
    from adasim.validation.measured import runs_recorded
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
