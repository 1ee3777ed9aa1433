"""Runs trials and writes their records; the only writer besides the report."""

import json
import os
import platform
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from multiprocessing import get_all_start_methods, get_context
from pathlib import Path
from subprocess import DEVNULL, run
from typing import Any

import pandas as pd

from adasim import __version__, metrics
from adasim.errors import InputError
from adasim.files import write_atomic
from adasim.scenario import Plan, Trial
from adasim.trace_events import trace_events

LIBRARIES = ("numpy", "pandas", "pyarrow", "pydantic", "scipy", "seaborn", "simpy")
TRIALS = "trials"


class Interrupted(Exception):
    """Ctrl-C: finished trials are on disk."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A trial that could not be completed."""

    trial: Trial
    error: str


def prepare(plan: Plan, out: Path, *, resume: bool, overwrite: bool) -> list[Trial]:
    """Make the output folder ready; returns the trials still to run.

    Raises:
        InputError: the folder cannot be written, or holds something else's results.
    """
    problem = f"--out {out}: cannot be written"
    manifest = out / "manifest.json"
    try:
        if out.exists() and not out.is_dir():
            raise InputError(f"--out {out}: is a file")
        if manifest.is_file() and not (resume or overwrite):
            raise InputError(f"--out {out}: holds results; use --resume, --overwrite or another folder")
        if out.is_dir() and any(out.iterdir()) and not manifest.is_file():
            raise InputError(f"--out {out}: is not empty and holds no results of adasim; use another folder")
        if overwrite:
            shutil.rmtree(out / TRIALS, ignore_errors=True)
        (out / TRIALS).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise InputError(f"{problem}: {error.strerror}") from error
    keys = {t.key for t in plan.trials}
    for old in (out / TRIALS).iterdir():
        if old.name not in keys:
            if resume and not old.name.startswith("."):
                raise InputError(
                    f"--out {out}: holds trials of a different scenario or version ({old.name}); use --overwrite"
                )
            shutil.rmtree(old, ignore_errors=True)  # half-written: a killed run left it
    write_manifest(plan, out, finished=False)
    return [t for t in plan.trials if not (out / TRIALS / t.key).is_dir()]


def run_trials(
    trials: list[Trial], out: Path, *, workers: int, trace: bool, progress: Callable[[Trial], None]
) -> list[Failure]:
    """Run trials in ``workers`` processes; each finished one is on disk when ``progress`` is called.

    Raises:
        Interrupted: by Ctrl-C; finished trials stay usable.
    """
    failures: list[Failure] = []
    try:
        if workers == 1 or len(trials) <= 1:
            for trial in trials:
                error = run_trial(trial, out, trace)
                failures += [Failure(trial, error)] if error else []
                progress(trial)
            return failures
        with _pool(min(workers, len(trials))) as pool:
            futures: dict[Future[str | None], Trial] = {pool.submit(run_trial, t, out, trace): t for t in trials}
            for future in as_completed(futures):
                error = str(future.exception()) if future.exception() else future.result()
                failures += [Failure(futures[future], error)] if error else []
                progress(futures[future])
    except KeyboardInterrupt as error:
        raise Interrupted from error
    return failures


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    # a fork server: workers inherit no thread or lock of this process, and imports are paid once
    context = get_context("forkserver" if "forkserver" in get_all_start_methods() else "spawn")
    context.set_forkserver_preload(["adasim.experiment"])
    pool = ProcessPoolExecutor(workers, context, initializer=_ignore_interrupts)
    try:
        yield pool
    except BaseException:
        for process in list((pool._processes or {}).values()):
            process.terminate()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle


def run_trial(trial: Trial, out: Path, trace: bool = False) -> str | None:
    """Run one trial and write its folder whole or not at all; returns what went wrong, if anything did."""
    scratch = Path(tempfile.mkdtemp(dir=out / TRIALS, prefix="."))
    try:
        scenario = trial.scenario()
        records = scenario.backend.run(scenario.workload, scenario.policies[0], trial.seed)
        part = metrics.window(records, scenario.warmup_requests, until_last_arrival=scenario.until_last_arrival)
        if part.seconds <= 0:
            finished = int(records.requests["finish_s"].notna().sum())
            return (
                f"nothing to measure: the window closes before it opens ({finished} requests finished, "
                f"{scenario.warmup_requests} are warm-up); raise workload.requests or lower measure.warmup_requests"
            )
        row = {"policy": trial.policy, "seed": trial.seed, **trial.point}
        row |= metrics.summary(records, part, scenario.slo)
        records.write(scratch)
        if trace:
            write_atomic(scratch / "trace.json", trace_events(records))
        facts = {
            "key": trial.key,
            "window": [part.start_s, part.end_s],
            "notes": records.notes,
            "metrics": row,
        }
        write_atomic(scratch / "trial.json", json.dumps(facts, indent=1) + "\n")
        scratch.chmod(0o755)
        scratch.rename(out / TRIALS / trial.key)
    except KeyboardInterrupt:
        raise
    except Exception as error:  # one bad trial must not take the others with it; the caller reports it
        return f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return None


def collect(plan: Plan, out: Path) -> tuple[pd.DataFrame, list[str]]:
    """Metrics of all finished trials in the plan's order, and what their models want said."""
    rows: list[dict[str, Any]] = []
    notes: dict[str, None] = {}
    for trial in plan.trials:
        path = out / TRIALS / trial.key / "trial.json"
        if path.is_file():
            facts = json.loads(path.read_text())
            rows.append(facts["metrics"])
            for note in facts["notes"]:
                notes[note if note.startswith("cost ") else f"{trial.policy}: {note}"] = None
    return pd.DataFrame(rows), list(notes)


def write_manifest(plan: Plan, out: Path, *, finished: bool) -> None:
    """What was run, with what, where."""
    manifest = {
        "scenario": plan.scenario.model_dump(mode="json"),
        "trials": [{"key": t.key, "policy": t.policy, "seed": t.seed, "point": t.point} for t in plan.trials],
        "finished": finished,
        "notes": plan.notes,
        "files": plan.files,
        "versions": {"adasim": __version__, "python": platform.python_version()}
        | {name: version(name) for name in LIBRARIES},
        "git": _git_sha(),
        "host": {
            "machine": platform.machine(),
            "system": platform.platform(),
            "cpus": os.cpu_count(),
            "command": sys.argv,
        },
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    write_atomic(out / "manifest.json", json.dumps(manifest, indent=1, default=str) + "\n")


def _git_sha() -> str | None:
    """Commit of the checkout that adasim runs from, "+" when it was changed; None when installed."""
    here = Path(__file__).parent
    if not (here.parent / ".git").exists():
        return None
    ask = ["git", "-C", str(here)]
    sha = run([*ask, "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    dirty = run([*ask, "diff", "--quiet", "HEAD"], check=False, stdout=DEVNULL, stderr=DEVNULL).returncode
    return f"{sha}{'+' if dirty else ''}" if sha else None
