"""The command that gives advice."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adasim.commands.calibration import seconds_of
from adasim.options import Json, Out, Overwrite, Resume, Settings, Workers, exit_on, failed_lines, interrupted

if TYPE_CHECKING:
    from adasim.advice.known import Known
    from adasim.advice.memory import Memory
    from adasim.advice.money import Money
    from adasim.advice.study import Asked, Findings
    from adasim.advice.traffic import Traffic
    from adasim.plan import Plan
    from adasim.session import Session

DATA, TRAFFIC, GPUS, EFFORT = "Data", "Traffic", "GPUs and money", "Effort"


def advise_command(
    data: Annotated[
        list[str] | None,
        typer.Argument(
            help="A profile (.yaml, or a packaged one), or benchmark files, logs, tables, and folders of "
            "`adasim import`. None: --hardware and --model are priced from specifications."
        ),
    ] = None,
    scenario: Annotated[
        str | None, typer.Option(help="Traffic, limits and SLO of this scenario.", rich_help_panel=TRAFFIC)
    ] = None,
    settings: Settings = None,
    concurrency: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Closed loops: requests at a time.", rich_help_panel=TRAFFIC)
    ] = None,
    rate: Annotated[
        str | None, typer.Option(metavar="R,R,...", help="Open loops: requests per second.", rich_help_panel=TRAFFIC)
    ] = None,
    input_len: Annotated[
        float | None, typer.Option(min=1, help="Mean prompt, tokens. Default: 512.", rich_help_panel=TRAFFIC)
    ] = None,
    output_len: Annotated[
        float | None, typer.Option(min=2, help="Mean answer, tokens. Default: 256.", rich_help_panel=TRAFFIC)
    ] = None,
    length_cv: Annotated[
        float | None,
        typer.Option(min=0, max=5, help="How lengths vary: deviation over mean. Default: 0.5.", rich_help_panel=TRAFFIC),
    ] = None,
    domain: Annotated[
        list[str] | None, typer.Option(metavar="NAME=WEIGHT", help="Domain mix; repeatable.", rich_help_panel=TRAFFIC)
    ] = None,
    slo_ttft_ms: Annotated[
        float | None, typer.Option(min=0.001, help="A request must start within.", rich_help_panel=TRAFFIC)
    ] = None,
    slo_tpot_ms: Annotated[
        float | None, typer.Option(min=0.001, help="And take no more per token.", rich_help_panel=TRAFFIC)
    ] = None,
    hardware: Annotated[
        str | None, typer.Option(help="GPU, of `adasim list hardware`: for memory.", rich_help_panel=GPUS)
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model, of `adasim list models`: for memory.", rich_help_panel=GPUS)
    ] = None,
    draft_layers: Annotated[
        int | None, typer.Option(min=1, help="Drafter's layers of the model's shape.", rich_help_panel=GPUS)
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of the engine (tensor parallel).", rich_help_panel=GPUS)] = 1,
    memory_fraction: Annotated[
        float, typer.Option(min=0.05, max=0.99, help="Of each GPU, for weights and KV cache.", rich_help_panel=GPUS)
    ] = 0.88,
    usd_per_gpu_hour: Annotated[
        float | None, typer.Option(min=0, help="Adds cost per million output tokens.", rich_help_panel=GPUS)
    ] = None,
    trainer_gpus: Annotated[
        float, typer.Option(min=0, help="GPUs that train the drafter, per engine.", rich_help_panel=GPUS)
    ] = 0.0,
    accept_len: Annotated[
        float | None,
        typer.Option(min=1, help="Without data: tokens per round of a full block.", rich_help_panel=DATA),
    ] = None,
    kernels: Annotated[
        bool,
        typer.Option(
            "--kernels", help="Without data: kernel times of aiconfigurator-core (extra: kernels).", rich_help_panel=DATA
        ),
    ] = False,
    max_draft: Annotated[
        int | None, typer.Option(min=1, max=127, help="Drafts of a full block.", rich_help_panel=DATA)
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="Fit runs whose label, model or data set holds this.", rich_help_panel=DATA)
    ] = None,
    fit_concurrency: Annotated[
        int | None, typer.Option(min=1, help="Of fitted runs that do not tell theirs.", rich_help_panel=DATA)
    ] = None,
    one_pass: Annotated[
        bool, typer.Option("--one-pass", help="The fitted drafter fills its block in one pass.", rich_help_panel=DATA)
    ] = False,
    extrapolate: Annotated[
        bool, typer.Option("--extrapolate", help="Go on beyond what was measured.", rich_help_panel=DATA)
    ] = False,
    validation: Annotated[
        Path | None, typer.Option(help="Folder of `adasim validate`: its error counts.", rich_help_panel=DATA)
    ] = None,
    seeds: Annotated[int, typer.Option(min=2, max=50, help="Of every run.", rich_help_panel=EFFORT)] = 4,
    budget: Annotated[
        str, typer.Option(help="Time for simulations; what it leaves out is said.", rich_help_panel=EFFORT)
    ] = "60s",
    workers: Workers = None,
    out: Out = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Does speculation pay at your load, with which policy, and how sure is that?

    Memory is looked at first. Policies are then simulated in closed and open loops; gains are held against noise, the
    uncertainty of the inputs, and the error of a validation: what is smaller is "cannot tell".
    """
    from adasim.advice.doubt import validated
    from adasim.advice.known import known_of
    from adasim.advice.memory import memory_of
    from adasim.advice.money import Money
    from adasim.advice.study import Asked
    from adasim.errors import InputError

    problems: list[str] = []

    def tried(make: Any) -> Any:
        """What ``make`` makes, or None and its problems kept."""
        try:
            return make()
        except InputError as error:
            problems.extend(error.problems)
            return None

    known = tried(
        lambda: known_of(
            data or [],
            hardware=hardware,
            model=model,
            accept_len=accept_len,
            draft_layers=draft_layers,
            kernels=kernels,
            max_draft_len=max_draft,
            only=only,
            concurrency=fit_concurrency,
            one_pass=one_pass,
        )
    )
    errors = tried(lambda: validated(validation)) if validation else {}
    budget_s = tried(lambda: seconds_of(budget))
    given = {"--input-len": input_len, "--output-len": output_len, "--length-cv": length_cv, "--domain": domain or None}
    traffic = tried(
        lambda: _traffic(
            scenario,
            settings or [],
            given,
            {"--concurrency": concurrency, "--rate": rate},
            (slo_ttft_ms, slo_tpot_ms),
            known.domains if known else None,
        )
    )
    problems += ["--trainer-gpus has no effect without --usd-per-gpu-hour"] * (
        trainer_gpus > 0 and usd_per_gpu_hour is None
    )
    problems += ["--kernels prices one GPU: not with --gpus"] * (kernels and gpus > 1)
    one = "--hardware and --model go together: memory needs both"
    problems += [one] * (bool(data) and (hardware is None) != (model is None))
    memory = None
    if known is not None and not problems:
        memory = tried(
            lambda: memory_of(
                known,
                hardware=hardware,
                model=model,
                draft_layers=draft_layers,
                gpus=gpus,
                fraction=memory_fraction,
            )
        )
    if problems:
        raise InputError(*problems)
    asked = Asked(gpus, seeds, budget_s, extrapolate, errors)
    money = None if usd_per_gpu_hour is None else Money(usd_per_gpu_hour, gpus, trainer_gpus)
    _advise(known, traffic, asked, memory, money, out, workers, (resume, overwrite), as_json=as_json)


def _traffic(
    scenario: str | None,
    settings: list[str],
    given: dict[str, Any],
    loads: dict[str, str | None],
    limits: tuple[float | None, float | None],
    domains: list[str] | None,
) -> "Traffic":
    """The traffic that is asked for, with its loads.

    Raises:
        InputError: everything that is wrong with it.
    """
    from dataclasses import replace

    from adasim.advice.traffic import from_options, from_plan, mix_of, numbers, slo_of, with_domains
    from adasim.errors import InputError
    from adasim.plan import load

    problems: list[str] = []
    rising: dict[str, tuple[float, ...]] = {}
    for option, text in loads.items():
        try:
            rising[option] = numbers(text, option, whole=option == "--concurrency") or ()
        except InputError as error:
            problems += error.problems
    slo = slo_of(*limits)
    notes: list[str] = []
    mix: dict[str, float] = {}
    if scenario is not None:
        problems += [
            f"{n} has no effect with --scenario; change it with --set" for n, v in given.items() if v is not None
        ]
    else:
        problems += ["--set has no effect without --scenario"] * bool(settings)
        try:
            mix, notes = mix_of(given["--domain"] or [], domains or [])
        except InputError as error:
            problems += error.problems
    try:
        plan = None if scenario is None else load(scenario, settings)
    except InputError as error:
        raise InputError(*problems, *error.problems) from None
    if plan is not None and plan.scenario.workload.kind == "trace" and rising.get("--concurrency"):
        problems.append("--concurrency has no effect on a trace, whose requests arrive when they did")
    if problems:
        raise InputError(*problems)
    if plan is not None:
        traffic = with_domains(from_plan(str(scenario), plan, slo), domains or [])
    else:
        traffic = from_options(given["--input-len"], given["--output-len"], given["--length-cv"], mix, slo)
    closed, rates = tuple(int(n) for n in rising["--concurrency"]), rising["--rate"]
    if closed or rates:
        traffic = replace(traffic, closed=closed, rates=rates)
    return replace(traffic, notes=traffic.notes + notes)


def _advise(
    known: "Known",
    traffic: "Traffic",
    asked: "Asked",
    memory: "Memory | None",
    money: "Money | None",
    out: Path | None,
    workers: int | None,
    keep: tuple[bool, bool],
    *,
    as_json: bool,
) -> None:
    """Run the study into a folder, write its report, show the answer."""
    import shutil

    from adasim.advice.report import show, write
    from adasim.advice.study import study
    from adasim.executors import Interrupted
    from adasim.experiment import open_folder, unfinished
    from adasim.screen import show_errors

    folder = out or Path("reports") / f"{known.profile.name}-advise"
    fresh = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    open_folder(folder, resume=keep[0], overwrite=keep[1], command="advise")
    sessions: list[Session] = []
    try:
        found = study(
            known, traffic, asked, memory, folder, lambda plan: _begin(plan, folder, workers, sessions, as_json)
        )
    except Interrupted:
        trials = [t for s in sessions for t in s.trials.values()]
        interrupted(folder, finished=len(unfinished(trials, folder)) < len(trials))
    except Exception:
        if fresh and not sessions:
            shutil.rmtree(folder)
        raise
    advice = write(found, money, folder)
    failures = [f for s in sessions for f in s.failures if not f.bad_input]
    lines = failed_lines(failures)
    _manifest(found, sessions, folder, finished=not lines)
    show(advice, folder, as_json=as_json)
    show_errors(lines)
    exit_on(failures)


def _begin(plan: "Plan", out: Path, workers: int | None, sessions: "list[Session]", quiet: bool) -> "Session":
    """A session for one more loop; the folder can be resumed from then on."""
    from adasim.executors import Local, cpus
    from adasim.experiment import write_manifest
    from adasim.screen import progress_bar
    from adasim.session import Session

    def bar(what: str, total: int, done: int) -> Any:
        return progress_bar(total, done, quiet=quiet or done == total, what=what)

    write_manifest(plan, out, finished=False, command="advise")
    sessions.append(Session(plan, out, Local(workers or cpus()), bar, "advise"))
    return sessions[-1]


def _manifest(found: "Findings", sessions: "list[Session]", out: Path, *, finished: bool) -> None:
    """One manifest for all loops: the first one's scenario, the trials and files of all; a mark where nothing ran."""
    from dataclasses import replace

    from adasim import __version__
    from adasim.experiment import write_manifest
    from adasim.files import to_json, write_atomic

    if not sessions:
        mark = {"made_by": "advise", "finished": True, "notes": found.notes, "versions": {"adasim": __version__}}
        write_atomic(out / "manifest.json", to_json(mark))
        return
    trials = [t for s in sessions for t in s.trials.values()]
    files = {name: digest for s in sessions for name, digest in s.plan.files.items()}
    plan = replace(sessions[0].plan, trials=trials, files=files)
    write_manifest(plan, out, finished=finished, command="advise", notes=found.notes)
