"""The command line. Heavy imports wait until a command needs them."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adasim import __version__

if TYPE_CHECKING:
    from adasim.scenario import Plan
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


@app.command(name="run")
def run_command(
    scenario: Annotated[str, typer.Argument(help="A YAML file, or the name of a packaged scenario.")],
    out: Annotated[Path | None, typer.Option(help="Output folder. Default: reports/NAME.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Override a field; repeatable.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes. Default: one per CPU.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep finished trials, run the rest.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Discard what the folder holds.")] = False,
    trace: Annotated[bool, typer.Option("--trace", help="Write a Perfetto trace of every trial.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False,
) -> None:
    """Simulate every policy over the sweep and all seeds, and write a report."""
    from adasim.errors import InputError
    from adasim.experiment import Interrupted, prepare, run_trials, write_manifest
    from adasim.scenario import load
    from adasim.screen import progress_bar

    if resume and overwrite:
        raise InputError("--resume and --overwrite exclude each other")
    plan = load(scenario, settings or [])
    out = out or Path("reports") / plan.scenario.name
    todo = prepare(plan, out, resume=resume, overwrite=overwrite)
    done = len(plan.trials) - len(todo)
    try:
        with progress_bar(len(plan.trials), done, quiet=as_json) as advance:
            failed = run_trials(todo, out, workers=workers or _cpus(), trace=trace, progress=lambda _: advance())
    except Interrupted:
        _write(plan, out, [])
        typer.echo(f"interrupted; the finished trials are in {out}. Go on with --resume", err=True)
        raise typer.Exit(INTERRUPTED) from None
    errors = [f"{f.trial.policy} {f.trial.point or ''} seed {f.trial.seed}: {f.error}" for f in failed]
    tables = _write(plan, out, errors)
    if not failed:
        write_manifest(plan, out, finished=True)
    _show(plan, out, tables, errors, as_json=as_json)
    if failed:
        raise typer.Exit(FAILED)


@app.command(name="report")
def report_command(
    scenario: Annotated[str, typer.Argument(help="The scenario that was run.")],
    out: Annotated[Path | None, typer.Option(help="The folder that holds its trials.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="As it was run.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False,
) -> None:
    """Write the report of finished trials anew, without running any."""
    from adasim.errors import InputError
    from adasim.scenario import load

    plan = load(scenario, settings or [])
    out = out or Path("reports") / plan.scenario.name
    tables = _write(plan, out, [])
    if tables is None:
        raise InputError(f"--out {out}: holds no finished trial of this scenario")
    _show(plan, out, tables, [], as_json=as_json)


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
    from adasim.experiment import collect
    from adasim.story import tell

    trials, notes = collect(plan, out)
    if trials.empty:
        return None
    return report.write(trials, tell(plan, len(trials), [*plan.notes, *notes, *errors]), out)


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
