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
from multiprocessing import forkserver, get_all_start_methods, get_context
from pathlib import Path
from subprocess import DEVNULL, run
from typing import Any

import pandas as pd

from adasim import __version__, adaptation, metrics
from adasim.errors import InputError
from adasim.files import to_json, write_atomic
from adasim.plan import Plan, Trial
from adasim.trace_events import trace_events

LIBRARIES = ("numpy", "pandas", "pyarrow", "pydantic", "scipy", "seaborn", "simpy")
TRIALS = "trials"
OVERLOADED = 0.2  # share of an open loop's requests left over at its end


class Interrupted(Exception):
    """Ctrl-C: finished trials are on disk."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A trial that could not be completed."""

    trial: Trial
    error: str
    bad_input: bool = False


def prepare(plan: Plan, out: Path, *, resume: bool, overwrite: bool, trace: bool = False) -> list[Trial]:
    """Make the output folder ready; returns the trials still to run (with ``trace``, also those that lack one).

    Raises:
        InputError: the folder cannot be written, or holds something else's results.
    """
    try:
        if out.exists() and not out.is_dir():
            raise InputError(f"--out {out}: is a file")
        ours = _is_ours(out / "manifest.json")
        if ours and not (resume or overwrite):
            raise InputError(f"--out {out}: holds results; use --resume, --overwrite or another folder")
        if not ours and out.is_dir() and any(out.iterdir()):
            raise InputError(f"--out {out}: is not empty and holds no results of adasim; use another folder")
        if overwrite:
            for name in (TRIALS, "tables", "figures"):
                shutil.rmtree(out / name, ignore_errors=True)
            for name in ("report.html", "report.md"):
                (out / name).unlink(missing_ok=True)
        for name in (TRIALS, "tables", "figures"):
            (out / name).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
        old = [p for p in (out / TRIALS).iterdir() if not p.name.startswith(".")]
    except OSError as error:
        raise InputError(f"--out {out}: cannot be written: {error.strerror}") from error
    keys = {t.key for t in plan.trials}
    foreign = sorted(p.name for p in old if p.name not in keys)
    if foreign:
        raise InputError(
            f"--out {out}: holds {len(foreign)} trials of another scenario, input file or version; use --overwrite"
        )
    for half_written in (out / TRIALS).glob(".*"):  # a killed run left it
        shutil.rmtree(half_written, ignore_errors=True)
    write_manifest(plan, out, finished=False)
    done = {p.name for p in old if not trace or (p / "trace.json").is_file()}
    return [t for t in plan.trials if t.key not in done]


def _is_ours(manifest: Path) -> bool:
    """Whether a folder's manifest was written by adasim."""
    try:
        return "adasim" in json.loads(manifest.read_text())["versions"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


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
                failures += run_trial(trial, out, trace)
                progress(trial)
            return failures
        with _pool(min(workers, len(trials))) as pool:
            futures: dict[Future[list[Failure]], Trial] = {pool.submit(run_trial, t, out, trace): t for t in trials}
            for future in as_completed(futures):
                error = future.exception()
                failures += [Failure(futures[future], str(error))] if error else future.result()
                progress(futures[future])
    except KeyboardInterrupt as error:
        raise Interrupted from error
    return failures


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    # A fork server: workers inherit no thread or lock of this process, and imports are paid once. It starts with
    # Ctrl-C ignored, and so do its workers: interrupts are this process's to handle.
    context = get_context("forkserver" if "forkserver" in get_all_start_methods() else "spawn")
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload(["adasim.experiment"])
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            forkserver.ensure_running()
        finally:
            signal.signal(signal.SIGINT, before)
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def run_trial(trial: Trial, out: Path, trace: bool = False) -> list[Failure]:
    """Run one trial and write its folder whole or not at all; returns what went wrong, if anything did."""
    scratch: Path | None = None
    try:
        scratch = Path(tempfile.mkdtemp(dir=out / TRIALS, prefix="."))
        _run(trial, scratch, trace)
        scratch.chmod(0o755)
        shutil.rmtree(out / TRIALS / trial.key, ignore_errors=True)
        scratch.rename(out / TRIALS / trial.key)
    except InputError as error:
        return [Failure(trial, str(error), bad_input=True)]
    except Exception as error:  # one bad trial must not take the others with it; the caller reports it
        return [Failure(trial, f"{type(error).__name__}: {error}")]
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
    return []


def _run(trial: Trial, folder: Path, trace: bool) -> None:
    scenario = trial.scenario()
    records = scenario.backend.run(scenario.workload, scenario.policies[0], trial.seed)
    part = metrics.window(
        records,
        scenario.warmup_requests,
        open_loop=scenario.workload.clients is None,
        until_last_arrival=scenario.measure.until_last_arrival,
    )
    if part.seconds <= 0:
        finished = int(records.requests["finish_s"].notna().sum())
        raise InputError(
            f"nothing to measure: the window closes before it opens ({finished} requests finished, "
            f"{scenario.warmup_requests} are warm-up); raise the number of requests or lower measure.warmup_requests"
        )
    row: dict[str, Any] = {
        "policy": trial.policy,
        "seed": trial.seed,
        "backend": scenario.backend.kind,
        **trial.point,
    }
    row |= metrics.summary(records, part, scenario.slo)
    row |= adaptation.summary(records)
    notes = list(records.notes)
    if part.by == "arrival" and row["backlog"] > OVERLOADED:
        notes.append(
            "overloaded: a fifth or more of the requests had not finished when the last arrived; the queue grows, and "
            "latencies depend on how long the trace is"
        )
    records.write(folder)
    if trace:
        write_atomic(folder / "trace.json", trace_events(records))
    facts = {"key": trial.key, "window": [part.start_s, part.end_s], "notes": notes, "metrics": row}
    write_atomic(folder / "trial.json", to_json(facts))


def collect(plan: Plan, out: Path) -> tuple[pd.DataFrame, list[str]]:
    """Metrics of all finished trials in the plan's order, and what their models want said."""
    rows: list[dict[str, Any]] = []
    said: dict[str, dict[str, dict[str, None]]] = {}  # note -> point -> policies
    for trial in plan.trials:
        path = out / TRIALS / trial.key / "trial.json"
        if path.is_file():
            facts = json.loads(path.read_text())
            rows.append(facts["metrics"])
            place = ", ".join(f"{k.rsplit('.', 1)[-1]} {v}" for k, v in trial.point.items())
            for note in facts["notes"]:
                said.setdefault(note, {}).setdefault(place, {})[trial.policy] = None
    notes = [f"{note}{_where(plan, places)}" for note, places in said.items()]
    table = pd.DataFrame(rows)
    swept = plan.trials[0].point if plan.trials else {}
    numbers = [c for c in table.columns if c not in {"policy", "seed", "backend", *swept}]
    return table.astype(dict.fromkeys(numbers, float)), notes


def timelines(plan: Plan, out: Path) -> list[adaptation.Timeline]:
    """tau over time where drafter or traffic are watched: of every policy and point, the first seed."""
    found = []
    for trial in plan.trials:
        folder = out / TRIALS / trial.key
        if trial.seed == plan.scenario.seeds[0] and (folder / "events.parquet").is_file():
            place = ", ".join(f"{k.rsplit('.', 1)[-1]} {v}" for k, v in trial.point.items())
            requests = pd.read_parquet(folder / "requests.parquet")
            events = pd.read_parquet(folder / "events.parquet")
            if events.empty:
                continue
            found.append(adaptation.timeline(requests, trial.policy, place, events))
    return found


def _where(plan: Plan, places: dict[str, dict[str, None]]) -> str:
    """At which points and under which policies a note was made; nothing when always."""
    policies, points = {t.policy for t in plan.trials}, {str(t.point) for t in plan.trials}
    everywhere = all(set(p) == policies for p in places.values())
    if everywhere and len(places) == len(points):
        return ""
    parts = [
        f"{f'at {place}, ' if place else ''}{'all policies' if set(at) == policies else ', '.join(at)}"
        for place, at in places.items()
    ]
    return f" ({'; '.join(parts)})"


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
            "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        },
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    write_atomic(out / "manifest.json", to_json(manifest))


def _git_sha() -> str | None:
    """Commit of the checkout that adasim runs from, "+" when it was changed; None when installed."""
    here = Path(__file__).parent
    if not (here.parent / ".git").exists():
        return None
    ask = ["git", "-C", str(here)]
    sha = run([*ask, "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    dirty = run([*ask, "diff", "--quiet", "HEAD"], check=False, stdout=DEVNULL, stderr=DEVNULL).returncode
    return f"{sha}{'+' if dirty else ''}" if sha else None
