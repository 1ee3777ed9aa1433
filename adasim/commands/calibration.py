"""Commands that measure a real engine, fit the simulator to it, and check its predictions."""

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from adasim.options import Json, Name, Out, Overwrite, Resume, Settings, exit_on, failed_lines, interrupted

if TYPE_CHECKING:
    from adasim.profiling.campaign import Campaign
    from adasim.profiling.points import Profiled

UNITS_S = {"s": 1, "m": 60, "h": 3600}


def profile_command(
    scenario: Name,
    budget: Annotated[str, typer.Option(help="Wall-clock time to spend: 90s, 5m, 1h.")] = "5m",
    out: Out = None,
    settings: Settings = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Measure what steps of a scenario's real engine cost, over batches, contexts and lengths.

    Acceptance is forced, so that cost is told from luck. The most informative runs come first; what the budget leaves out
    is named, and --resume goes on. `profile:` in the scenario (or --set profile.batches=[1,8]) replaces the derived grid.
    """
    began_s, budget_s = time.monotonic(), seconds_of(budget)
    from adasim.plan import load
    from adasim.profiling.campaign import Campaign
    from adasim.profiling.design import design
    from adasim.profiling.report import ready, write
    from adasim.screen import budget_bar

    found = design(load(scenario, settings or []))
    found.engine.identity()  # an engine that is not there is refused before anything is written
    folder = out or Path("reports") / f"{found.plan.scenario.name}-profile"
    with budget_bar(budget_s, quiet=as_json) as say:
        campaign = Campaign(found, folder, budget_s, say, began_s=began_s)
        ready(campaign, resume=resume, overwrite=overwrite)
        campaign.measure()
    tables = write(campaign)
    if campaign.interrupted:
        interrupted(folder, finished=tables is not None)
    _show(campaign, tables, as_json=as_json)


def calibrate_command(
    folders: Annotated[
        list[Path],
        typer.Argument(help="Folders that `adasim profile` and `adasim record` left; with --from-throughput any files."),
    ],
    out: Annotated[Path, typer.Option(help="The profile to write, a .yaml file.")],
    report: Annotated[Path | None, typer.Option(help="Folder for the report. Default: NAME-report.")] = None,
    acceptance: Annotated[
        str, typer.Option(metavar="KIND", help="curves, or recorded: replay the texts of full-block runs as they were.")
    ] = "curves",
    throughput: Annotated[
        bool,
        typer.Option("--from-throughput", help="Fit tokens per second alone, of files or folders of `adasim import`."),
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="With --from-throughput: only=TEXT (runs whose label, model or data set holds it), concurrency=N (of "
            "runs that do not tell it), one_pass=true (the drafter fills its block in one pass), and of the profile "
            "source, hardware, model, engine, date.",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=VALUES",
            help="Fit these natural runs only, like policy=[off,head] or concurrency=[1,4]; several hold together. The "
            "others are left to `adasim validate --records`.",
        ),
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Fit a profile to recorded runs: cost, overheads, acceptance, heads, learning, each with its uncertainty.

    All folders must be of one engine on one machine. Runs with forced acceptance tell of times only. With
    --from-throughput as little as plain decoding at three loads and one speculative run is enough.
    """
    from adasim.errors import InputError

    if throughput:
        from adasim.commands.from_throughput import from_throughput

        if report is not None or acceptance != "curves" or only:
            raise InputError("--report, --acceptance and --only have no effect with --from-throughput")
        from_throughput(folders, out, settings or [], overwrite=overwrite, as_json=as_json)
        return
    if settings:
        raise InputError("--set has no effect without --from-throughput")
    from adasim.calibrate import calibrate, write
    from adasim.calibrate_report import in_the_way, tables_of, write_report
    from adasim.recorded import load_all
    from adasim.recorded_part import part_of
    from adasim.screen import show_answer, show_errors

    folder = report or out.with_name(f"{out.stem}-report")
    problems = [f"--out {out}: must end in .yaml"] * (out.suffix not in {".yaml", ".yml"})
    problems += [f"--out {out}: exists; use --overwrite or another name"] * (out.exists() and not overwrite)
    kinds = ("curves", "recorded")
    problems += [f"--acceptance {acceptance}: unknown; allowed: {', '.join(kinds)}"] * (acceptance not in kinds)
    problems += in_the_way(folder, overwrite=overwrite)
    try:
        found = part_of(load_all(folders), only or [])
    except InputError as error:
        raise InputError(*problems, *error.problems) from None
    if problems:
        raise InputError(*problems)
    made = calibrate(found, out.stem, acceptance=acceptance)
    write(made, out)
    says = write_report(made, out, folder)
    show_answer(out.stem, folder, [f"Profile: {out}", *says], tables_of(made), [], as_json=as_json)
    show_errors(made.profile.notes, "note")


def seconds_of(text: str) -> float:
    """Seconds of a time like 90s, 5m or 1.5h.

    Raises:
        InputError: it has another form, or is nothing.
    """
    from adasim.errors import InputError

    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if found is None or float(found[1]) == 0:
        raise InputError(f"--budget {text}: expected a time above 0 like 90s, 5m or 1h")
    return float(found[1]) * UNITS_S[found[2]]


def _show(campaign: "Campaign", tables: "Profiled | None", *, as_json: bool) -> None:
    """The answer, and the exit code: 1 when the profile is too thin to be used or a run failed."""
    from adasim.profiling.report import answer, too_thin
    from adasim.screen import show_answer, show_errors

    errors = failed_lines(campaign.failures)
    missing = too_thin(campaign)
    says = answer(campaign, tables, most=4)
    shown = {} if tables is None else {n: t for n, t in tables._asdict().items() if n != "follows"}
    name = campaign.design.plan.scenario.name
    show_answer(name, campaign.out, says, shown, [*errors, *missing], as_json=as_json, report="report.md")
    show_errors([*errors, *missing])
    exit_on(campaign.failures)
    if missing:
        raise typer.Exit(1)
