"""Options that commands share, and how commands end."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from adasim.executors import Executor
    from adasim.experiment import Failure
    from adasim.plan import Plan

BAD_INPUT, FAILED, NOT_VALID, INTERRUPTED = 2, 1, 3, 130  # NOT_VALID: a tolerance is missed, or something drifted

Name = Annotated[str, typer.Argument(help="A YAML file, or the name of a packaged scenario.")]
Out = Annotated[Path | None, typer.Option(help="Output folder. Default: reports/NAME, or reports/NAME-COMMAND.")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Override a field; repeatable.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Processes. Default: one per CPU.")]
ExecutorKind = Annotated[str, typer.Option("--executor", metavar="KIND", help="Who runs trials: local or ray.")]
Address = Annotated[str | None, typer.Option(help="A running Ray cluster. Default: one of this machine for this run.")]
Resume = Annotated[bool, typer.Option("--resume", help="Keep finished trials, run the rest.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Discard what the folder holds.")]
Trace = Annotated[bool, typer.Option("--trace", help="Write a Perfetto trace of every trial.")]
NoReport = Annotated[bool, typer.Option("--no-report", help="Write records only; `adasim report` makes the report.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]


@dataclass(frozen=True, slots=True)
class Keep:
    """What becomes of an output folder, and what is written beside its records."""

    resume: bool
    overwrite: bool
    trace: bool = False
    report: bool = True


def executor_of(kind: str, workers: int | None, address: str | None) -> "Executor":
    """The executor of that name.

    Raises:
        InputError: unknown, unavailable, or an option it does not take.
    """
    from importlib.util import find_spec

    from adasim.errors import InputError
    from adasim.executors import Local, cpus

    if kind == "local":
        if address is not None:
            raise InputError("--address has no effect without --executor ray")
        return Local(workers or cpus())
    if kind != "ray":
        raise InputError(f"--executor {kind}: unknown; allowed: local, ray")
    if find_spec("ray") is None:
        raise InputError("--executor ray needs Ray: pip install 'adasim[ray]'")
    if address is not None and workers is not None:
        raise InputError("--workers has no effect with --address: the cluster has as many as it has")
    from adasim.ray_executor import Ray

    return Ray(workers or cpus(), address)


def simulated(plan: "Plan") -> "Plan":
    """The plan, if its backend is a simulation.

    Raises:
        InputError: it is a real engine.
    """
    from adasim.errors import InputError

    if plan.scenario.backend.mark != "simulated":
        raise InputError(f"backend: kind {plan.scenario.backend.kind} is a real engine; use adasim record")
    return plan


def failed_lines(failures: "list[Failure]") -> list[str]:
    """A line for everything that went wrong, with the first trial it happened to."""
    errors: dict[str, str] = {}
    for f in failures:
        errors.setdefault(f.error, f"{f.trial.policy} {f.trial.point or ''} seed {f.trial.seed}")
    return [f"{place}: {error}" for error, place in errors.items()]


def interrupted(out: Path, *, finished: bool) -> NoReturn:
    """Say what Ctrl-C left, and leave."""
    says = f"the finished trials are in {out}" if finished else "no trial had finished"
    typer.echo(f"interrupted; {says}. Go on with --resume", err=True)
    raise typer.Exit(INTERRUPTED) from None


def exit_on(failures: "list[Failure]") -> None:
    """Leave with the exit code that failures mean; go on without any."""
    if failures:
        raise typer.Exit(BAD_INPUT if all(f.bad_input for f in failures) else FAILED)
