"""The command line. Heavy imports wait until a command needs them."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adasim import __version__

if TYPE_CHECKING:
    from adasim.plan import Plan
    from adasim.tables import Tables

BAD_INPUT, FAILED, INTERRUPTED = 2, 1, 130

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Which speculative-decoding policy pays, at which load, and how sure are we?",
)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"adasim {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options of every command."""


Name = Annotated[str, typer.Argument(help="A YAML file, or the name of a packaged scenario.")]
Out = Annotated[Path | None, typer.Option(help="Output folder. Default: reports/NAME.")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Override a field; repeatable.")]
Resume = Annotated[bool, typer.Option("--resume", help="Keep finished trials, run the rest.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Discard what the folder holds.")]
Trace = Annotated[bool, typer.Option("--trace", help="Write a Perfetto trace of every trial.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]


@app.command(name="run")
def run_command(
    scenario: Name,
    out: Out = None,
    settings: Settings = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes. Default: one per CPU.")] = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    trace: Trace = False,
    as_json: Json = False,
) -> None:
    """Simulate every policy over the sweep and all seeds, and write a report."""
    from adasim.errors import InputError
    from adasim.plan import load

    plan = load(scenario, settings or [])
    if plan.scenario.backend.mark != "simulated":
        raise InputError(f"backend: kind {plan.scenario.backend.kind} is a real engine; use adasim record")
    _experiment(plan, out, workers or _cpus(), resume=resume, overwrite=overwrite, trace=trace, as_json=as_json)


@app.command(name="record")
def record_command(
    scenario: Name,
    out: Out = None,
    settings: Settings = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    trace: Trace = False,
    as_json: Json = False,
) -> None:
    """Run a scenario on a real engine, one trial after the other, and write the same records and report."""
    from adasim.errors import InputError
    from adasim.plan import load

    plan = load(scenario, settings or [])
    if plan.scenario.backend.mark != "measured":
        raise InputError(f"backend: kind {plan.scenario.backend.kind} is a simulation; use adasim run")
    _experiment(plan, out, 1, resume=resume, overwrite=overwrite, trace=trace, as_json=as_json)


def _experiment(
    plan: "Plan", out: Path | None, workers: int, *, resume: bool, overwrite: bool, trace: bool, as_json: bool
) -> None:
    """Run what is left of a plan, write the report, show it."""
    from adasim.errors import InputError
    from adasim.experiment import Interrupted, prepare, run_trials, write_manifest
    from adasim.screen import progress_bar

    if resume and overwrite:
        raise InputError("--resume and --overwrite exclude each other")
    out = out or Path("reports") / plan.scenario.name
    todo = prepare(plan, out, resume=resume, overwrite=overwrite, trace=trace)
    if plan.scenario.backend.mark == "measured":  # what is compared runs close together in time
        todo.sort(key=lambda t: (t.seed, str(t.point)))
    done = len(plan.trials) - len(todo)
    try:
        with progress_bar(len(plan.trials), done, quiet=as_json) as advance:
            failed = run_trials(todo, out, workers=workers, trace=trace, progress=lambda _: advance())
    except Interrupted:
        finished = _write(plan, out, []) is not None
        says = f"the finished trials are in {out}" if finished else "no trial had finished"
        typer.echo(f"interrupted; {says}. Go on with --resume", err=True)
        raise typer.Exit(INTERRUPTED) from None
    errors: dict[str, str] = {}  # what went wrong -> the first trial it happened to
    for f in failed:
        errors.setdefault(f.error, f"{f.trial.policy} {f.trial.point or ''} seed {f.trial.seed}")
    lines = [f"{place}: {error}" for error, place in errors.items()]
    tables = _write(plan, out, lines)
    if not failed:
        write_manifest(plan, out, finished=True)
    _show(plan, out, tables, lines, as_json=as_json)
    if failed:
        raise typer.Exit(BAD_INPUT if all(f.bad_input for f in failed) else FAILED)


@app.command(name="report")
def report_command(scenario: Name, out: Out = None, settings: Settings = None, as_json: Json = False) -> None:
    """Write the report of finished trials anew, without running any."""
    from adasim.errors import InputError
    from adasim.plan import load

    plan = load(scenario, settings or [])
    out = out or Path("reports") / plan.scenario.name
    tables = _write(plan, out, [])
    if tables is None:
        raise InputError(f"--out {out}: holds no finished trial of this scenario")
    _show(plan, out, tables, [], as_json=as_json)


train_app = typer.Typer(
    no_args_is_help=True, help="Train a drafter and length head for a target (needs the extra: real)."
)
app.add_typer(train_app, name="train")

Work = Annotated[Path, typer.Option(help="Folder that holds text, features and training state; resumable.")]
Threads = Annotated[int, typer.Option(min=1, help="CPU threads; one is best beside other busy processes.")]


@train_app.command(name="text")
def train_text_command(
    work: Work,
    prompts: Annotated[Path, typer.Option(help="Folder of DOMAIN*.jsonl; rows 0-149 train, 150-199 are held out.")],
    first: Annotated[int, typer.Option(min=0, help="First training prompt.")] = 0,
    last: Annotated[int, typer.Option(min=1, help="Last training prompt + 1.")] = 20000,
    threads: Threads = 1,
) -> None:
    """Let the target answer prompts, and keep what the drafter must see and hit. Stop it any time."""
    torch = _torch(threads)
    from adasim.real.pipeline import make_text

    with torch.inference_mode():
        for line in make_text(work, prompts, range(first, last)):
            typer.echo(line)


@train_app.command(name="drafter")
def train_drafter_command(
    work: Work,
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps in all, those of earlier calls included.")],
    layers: Annotated[int, typer.Option(min=1, help="Draft layers.")] = 3,
    threads: Threads = 1,
) -> None:
    """Train the drafter on that text; goes on where it was stopped, and picks up text made meanwhile."""
    _torch(threads)
    from adasim.real.pipeline import make_trainer
    from adasim.real.train_drafter import DrafterTraining

    trainer = make_trainer(work, work / "drafter", DrafterTraining(), layers)
    for entry in trainer.run(steps):
        taus = ", ".join(f"{d} {facts['tau']:.2f}" for d, facts in entry["held_out"].items())
        typer.echo(f"step {entry['step']}: loss {entry['loss']:.3f}; tau on held-out prompts: {taus}")


@train_app.command(name="ship")
def train_ship_command(
    work: Work,
    out: Annotated[Path, typer.Option(help="Folder for the checkpoint and its card.")],
    limits: Annotated[str, typer.Option(help="A sentence for the card: what it cannot do.")] = "none stated.",
    layers: Annotated[int, typer.Option(min=1, help="Draft layers, as trained.")] = 3,
    threads: Threads = 1,
) -> None:
    """Fit the length head to the trained drafter, and write both in the public DFlash layout."""
    _torch(threads)
    from adasim.files import to_json, write_atomic
    from adasim.real.card import card, read_log
    from adasim.real.pipeline import make_trainer, ship
    from adasim.real.train_drafter import DrafterTraining

    facts = ship(make_trainer(work, work / "drafter", DrafterTraining(), layers, 20), out)
    write_atomic(out / "facts.json", to_json(facts))
    write_atomic(out / "README.md", card(facts, read_log(work / "drafter" / "log.jsonl"), limits))
    typer.echo(f"{out}: step {facts['step']}, SHA-256 {facts['sha256'][:16]}")


@train_app.command(name="opd")
def train_opd_command(
    kept: Annotated[Path, typer.Argument(help="Folder of one run under backend.opd.keep.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change a setting of the run; repeatable.")
    ] = None,
    hold: Annotated[int, typer.Option(min=1, help="Last buffers that are never trained on and judge.")] = 1,
    threads: Threads = 1,
    as_json: Json = False,
) -> None:
    """Replay distillation on the buffers a run kept: what would another loss have made of the same traffic?"""
    _torch(threads)
    from dataclasses import asdict

    from adasim.files import to_json
    from adasim.plan import changed
    from adasim.real.opd import Opd
    from adasim.real.replay import kept_settings, replay

    opd = changed(Opd, kept_settings(kept)[1]["opd"], settings or [])
    for tried in replay(kept, opd, hold):
        if as_json:
            typer.echo(to_json(asdict(tried)), nl=False)
        else:
            taus = ", ".join(f"{d} {t.tau:.3f}" for d, t in tried.tau.items())
            loss = f"loss {tried.progress.losses[-1]:.3f}; " if tried.progress else ""
            typer.echo(
                f"after buffer {tried.buffer}: {loss}tau on held-out requests: {taus}; trained {tried.train_s:.0f} s"
            )


def _torch(threads: int) -> Any:
    from adasim.errors import InputError

    try:
        import torch
    except ImportError:
        raise InputError("train needs torch: pip install 'adasim[real]'") from None
    torch.set_num_threads(threads)
    return torch


@app.command(name="list")
def list_command(
    what: Annotated[str, typer.Argument(help="scenarios, profiles, policies, schedulers, workloads, costs, ...")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what there is: packaged scenarios and profiles, and every kind of component with its fields."""
    from adasim.catalogue import catalogue
    from adasim.screen import show_list

    show_list(what, catalogue(what), as_json=as_json)


def _cpus() -> int:
    import os

    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _write(plan: "Plan", out: Path, errors: list[str]) -> "Tables | None":
    from adasim import report
    from adasim.experiment import collect, timelines
    from adasim.story import tell

    trials, notes = collect(plan, out)
    if trials.empty:
        return None
    story = tell(plan, len(trials), [*plan.notes, *notes, *errors])
    story.timelines = timelines(plan, out)
    return report.write(trials, story, out)


def _show(plan: "Plan", out: Path, tables: "Tables | None", errors: list[str], *, as_json: bool) -> None:
    from adasim.screen import show_errors, show_json, show_tables
    from adasim.story import tell

    if as_json:
        show_json(plan, out, tables, errors)
    elif tables is not None:
        show_tables(tell(plan, len(tables.trials), []), tables, out)
    show_errors(errors)


def main(arguments: list[str] | None = None) -> Any:
    """Entry point. Exit codes: 0 done, 2 bad input, 1 failure, 130 interrupted."""
    from adasim.errors import InputError

    try:
        return app(arguments)
    except InputError as error:
        for problem in error.problems:
            typer.echo(f"error: {problem}", err=True)
        sys.exit(BAD_INPUT)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
