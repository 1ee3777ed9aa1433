"""Measures a scenario or takes its records, holds predictions against them, and writes and shows the report."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from adasim.options import NOT_VALID, exit_on, failed_lines, interrupted

if TYPE_CHECKING:
    from adasim.calibration.profile import Profile
    from adasim.experiment import Failure
    from adasim.page import Story
    from adasim.plan import Plan
    from adasim.validation.blocks import Block
    from adasim.validation.report import Findings
    from adasim.validation.run import Run
    from adasim.validation.study import Cell


def judge_measured(
    plan: "Plan", profile: "Profile", out: Path, budget_s: float | None, *, force: bool, keep: tuple[bool, bool],
    as_json: bool,
) -> None:  # fmt: skip
    """Measure what is missing, and hold predictions against all that was measured."""
    from adasim.errors import InputError
    from adasim.experiment import open_folder
    from adasim.validation.blocks import blocks_of, missing
    from adasim.validation.recorded_runs import strangers
    from adasim.validation.run import runs_in, sound
    from adasim.validation.study import check_engine, check_runs, fitted_cells

    blocks, here = blocks_of(plan), plan.scenario.backend.identity()
    fitted = fitted_cells(blocks, profile)
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
    passed = _judge(plan, profile, fitted, runs, left, out, [*notes, *lines], lines, as_json=as_json)
    _manifest(plan, blocks, out, finished=not any(missing(b, out) for b in blocks))
    exit_on(failures)
    if not passed:
        raise typer.Exit(NOT_VALID)


def judge_recorded(
    plan: "Plan", profile: "Profile", out: Path, records: Path, *, force: bool, overwrite: bool, as_json: bool
) -> None:
    """Hold predictions against runs that were recorded before."""
    from adasim.errors import InputError
    from adasim.experiment import open_folder, write_manifest
    from adasim.validation.blocks import blocks_of
    from adasim.validation.recorded_runs import beliefs, runs_recorded
    from adasim.validation.run import sound
    from adasim.validation.study import check_engine, check_runs, fitted_cells

    if out.resolve() == records.resolve():
        raise InputError(f"--out {out}: is the folder of --records, and would be replaced; give another")
    blocks = blocks_of(plan)
    fitted = fitted_cells(blocks, profile)
    runs, problems = sound(runs_recorded(records, plan))
    if problems:
        raise InputError(*problems)
    notes = check_engine([r.engine for r in runs if r.engine is not None], profile, force=force)
    notes += [*check_runs(runs, None, force=force), *beliefs(runs, plan)]
    open_folder(out, resume=False, overwrite=overwrite, command="validate")
    keys = {(r.trial.policy, *r.place) for r in runs}
    left = sum((t.policy, *t.point.values(), t.seed) not in keys for b in blocks for t in b.trials)
    passed = _judge(plan, profile, fitted, runs, left, out, notes, [], as_json=as_json)
    taken = replace(plan, trials=[], notes=[*plan.notes, f"measured runs were taken from {records}"])
    engine = next((r.engine for r in runs if r.engine is not None), None)  # it need not be on this machine
    write_manifest(taken, out, finished=not left, command="validate", engine=engine)
    if not passed:
        raise typer.Exit(NOT_VALID)


def _judge(
    plan: "Plan", profile: "Profile", fitted: "set[Cell]", runs: "Sequence[Run]", left: int, out: Path,
    notes: list[str], lines: list[str], *, as_json: bool,
) -> bool:  # fmt: skip
    """Examine runs, write and show the report; says whether they pass."""
    from adasim.validation.study import examine

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

        def done() -> None:
            advance()
            _manifest(plan, blocks, out, finished=False)  # whoever kills this leaves records that can be read

        measuring = Measuring(out, plan.scenario.validation, budget_s, done)
        try:
            left = measuring.run(blocks)
        except Interrupted:
            _manifest(plan, blocks, out, finished=False)
            interrupted(out, finished=_left_some(blocks, out))
    if left == total:
        show_errors(failed_lines(measuring.outcome.failures))
        exit_on(measuring.outcome.failures)
    notes = list(measuring.outcome.notes)
    if left and budget_s is not None:
        notes.append(f"the budget is used up: {left} of {total} runs are missing; go on with --resume")
    return measuring.outcome.failures, notes


def _left_some(blocks: "Sequence[Block]", out: Path) -> bool:
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

    policies = sum(not r.is_reference for r in runs)
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
