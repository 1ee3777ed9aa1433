"""The command line. Heavy imports wait until a command needs them."""

import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adasim import __version__
from adasim.commands.advise import advise_command
from adasim.commands.calibration import calibrate_command, profile_command
from adasim.commands.deploy import deploy_command
from adasim.commands.export import export_command
from adasim.commands.imports import import_command
from adasim.commands.search import sensitivity_command, tune_command
from adasim.commands.training import train_server_command
from adasim.commands.validation import validate_command
from adasim.options import (
    BAD_INPUT,
    INTERRUPTED,
    Address,
    ExecutorKind,
    Json,
    Keep,
    Name,
    NoReport,
    Out,
    Overwrite,
    Resume,
    Settings,
    Trace,
    Workers,
    executor_of,
    exit_on,
    failed_lines,
    interrupted,
    simulated,
)

if TYPE_CHECKING:
    from adasim.executors import Executor
    from adasim.plan import Plan
    from adasim.tables import Tables

COLLECT = 500_000, 20, 100  # start-up makes 200,000 objects that stay: looking through them once is a tenth of it

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


@app.command(name="run")
def run_command(
    scenario: Name,
    out: Out = None,
    settings: Settings = None,
    workers: Workers = None,
    executor: ExecutorKind = "local",
    address: Address = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    trace: Trace = False,
    no_report: NoReport = False,
    as_json: Json = False,
) -> None:
    """Simulate every policy over the sweep and all seeds, and write a report."""
    from adasim.plan import load

    plan = simulated(load(scenario, settings or []))
    runner = executor_of(executor, workers, address)
    _experiment(plan, out, runner, Keep(resume, overwrite, trace, report=not no_report), as_json=as_json)


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
    from adasim.executors import Local
    from adasim.plan import load

    plan = load(scenario, settings or [])
    if plan.scenario.backend.mark != "measured":
        raise InputError(f"backend: kind {plan.scenario.backend.kind} is a simulation; use adasim run")
    plan.scenario.backend.identity()  # an engine that is not there is refused before anything is written
    _experiment(plan, out, Local(1), Keep(resume, overwrite, trace), as_json=as_json)


def _experiment(plan: "Plan", out: Path | None, runner: "Executor", keep: Keep, *, as_json: bool) -> None:
    """Run what is left of a plan, write the report, show it."""
    from adasim.executors import Interrupted
    from adasim.experiment import prepare, write_manifest
    from adasim.screen import progress_bar, show_errors

    out = out or Path("reports") / plan.scenario.name
    todo = prepare(plan, out, resume=keep.resume, overwrite=keep.overwrite, trace=keep.trace)
    if plan.scenario.backend.mark == "measured":  # what is compared runs close together in time
        todo.sort(key=lambda t: (t.seed, str(t.point)))
    done = len(plan.trials) - len(todo)
    try:
        with progress_bar(len(plan.trials), done, quiet=as_json) as advance:
            outcome = runner.run(todo, out, trace=keep.trace, progress=lambda _: advance())
    except Interrupted:
        finished = _write(plan, out, []) is not None
        interrupted(out, finished=finished)
    lines = failed_lines(outcome.failures)
    tables = _write(plan, out, lines) if keep.report else None
    if not outcome.failures:
        write_manifest(plan, out, finished=True, notes=outcome.notes)
    _show(plan, out, tables, lines, as_json=as_json)
    show_errors(outcome.notes, "note")
    exit_on(outcome.failures)


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


app.command(name="advise")(advise_command)
app.command(name="tune")(tune_command)
app.command(name="sensitivity")(sensitivity_command)
app.command(name="validate")(validate_command)
app.command(name="profile")(profile_command)
app.command(name="calibrate")(calibrate_command)
app.command(name="import")(import_command)
app.command(name="export")(export_command)
app.command(name="deploy")(deploy_command)

train_app = typer.Typer(
    no_args_is_help=True, help="Train a drafter and length head for a target (needs the extra: real)."
)
app.add_typer(train_app, name="train")
train_app.command(name="server")(train_server_command)

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


def _write(plan: "Plan", out: Path, errors: list[str]) -> "Tables | None":
    from adasim import report
    from adasim.experiment import collect, collect_batches, timelines
    from adasim.story import tell

    trials, notes = collect(plan, out)
    if trials.empty:
        return None
    story = tell(plan, len(trials), [*plan.notes, *notes, *errors])
    story.timelines = timelines(plan, out)
    batches = collect_batches(plan, out) if len(plan.scenario.seeds) == 1 else None
    return report.write(trials, story, out, batches)


def _show(plan: "Plan", out: Path, tables: "Tables | None", errors: list[str], *, as_json: bool) -> None:
    from adasim.screen import show_errors, show_json, show_tables

    if as_json:
        show_json(plan, out, tables, errors)
    elif tables is not None:
        from adasim.story import tell

        show_tables(tell(plan, len(tables.trials), []), tables, out)
    show_errors(errors)


def main(arguments: list[str] | None = None) -> Any:
    """Entry point. Exit codes: 0 done, 2 bad input, 1 failure, 3 not valid (validate), 130 interrupted."""
    from adasim.errors import InputError

    gc.set_threshold(*COLLECT)
    try:
        return app(arguments)
    except InputError as error:
        for problem in error.problems:
            typer.echo(f"error: {problem}", err=True)
        sys.exit(BAD_INPUT)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    finally:
        gc.freeze()  # the interpreter looks through all that is left when it ends: a third of the time of a short run
