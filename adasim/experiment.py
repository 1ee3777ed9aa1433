"""Runs trials and writes their records; the only writer besides the report."""

import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from math import nan
from pathlib import Path
from subprocess import run
from typing import Any

import pandas as pd

from adasim import __version__, adaptation, metrics
from adasim.errors import InputError, PolicyError
from adasim.files import to_json, write_atomic
from adasim.identity import EngineIdentity
from adasim.plan import Plan, Trial
from adasim.records import CutShort, Records
from adasim.scenario import Scenario
from adasim.trace_events import trace_events

LIBRARIES = ("numpy", "pandas", "pyarrow", "pydantic", "scipy", "seaborn", "simpy")
TRIALS = "trials"
LOST = "lost"  # what runs that were cut short had recorded
OVERLOADED = 0.2  # share of an open loop's requests left over at its end


@dataclass(frozen=True, slots=True)
class Failure:
    """A trial that could not be completed."""

    trial: Trial
    error: str
    bad_input: bool = False
    again: bool = False  # another try may succeed


def prepare(plan: Plan, out: Path, *, resume: bool, overwrite: bool, trace: bool = False) -> list[Trial]:
    """Make the output folder ready; returns the trials still to run (with ``trace``, also those that lack one).

    Raises:
        InputError: the folder cannot be written, or holds something else's results.
    """
    kept = open_folder(out, resume=resume, overwrite=overwrite)
    keys = {t.key for t in plan.trials}
    foreign = sorted(name for name in kept if name not in keys)
    if foreign:
        raise InputError(
            f"--out {out}: holds {len(foreign)} trials of another scenario, input file or version; use --overwrite"
        )
    write_manifest(plan, out, finished=False)
    return unfinished(plan.trials, out, trace=trace)


def open_folder(out: Path, *, resume: bool, overwrite: bool, command: str = "run") -> list[str]:
    """Make an output folder ready for a command; returns the keys of the trials it holds.

    Raises:
        InputError: the folder cannot be written, or holds something else's results.
    """
    if resume and overwrite:
        raise InputError("--resume and --overwrite exclude each other")
    try:
        if out.exists() and not out.is_dir():
            raise InputError(f"--out {out}: is a file")
        made_by = _made_by(out / "manifest.json")
        if made_by is not None and not (resume or overwrite):
            raise InputError(f"--out {out}: holds results; use --resume, --overwrite or another folder")
        if made_by is None and out.is_dir() and any(out.iterdir()):
            raise InputError(f"--out {out}: is not empty and holds no results of adasim; use another folder")
        if resume and made_by not in {None, command}:
            raise InputError(f"--out {out}: holds results of adasim {made_by}; use --overwrite or another folder")
        if overwrite:
            for name in (TRIALS, LOST, "tables", "figures"):
                shutil.rmtree(out / name, ignore_errors=True)
            for name in ("report.html", "report.md"):
                (out / name).unlink(missing_ok=True)
        for name in (TRIALS, "tables", "figures"):
            (out / name).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
        kept = [p.name for p in (out / TRIALS).iterdir() if not p.name.startswith(".")]
    except OSError as error:
        raise InputError(f"--out {out}: cannot be written: {error.strerror}") from error
    tidy(out)
    return kept


def tidy(out: Path) -> None:
    """Remove what killed runs and workers left half-written; nobody may be writing."""
    for half_written in (out / TRIALS).glob(".*"):
        shutil.rmtree(half_written, ignore_errors=True)


def unfinished(trials: Sequence[Trial], out: Path, *, trace: bool = False) -> list[Trial]:
    """Trials without a result in ``out`` (with ``trace``: or without a trace)."""
    needed = "trace.json" if trace else "trial.json"
    return [t for t in trials if not (out / TRIALS / t.key / needed).is_file()]


def _made_by(manifest: Path) -> str | None:
    """Which command of adasim wrote a folder's manifest; None: none did."""
    try:
        facts = json.loads(manifest.read_text())
        return str(facts.get("made_by", "run")) if "adasim" in facts["versions"] else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def run_trial(trial: Trial, out: Path, trace: bool = False) -> Failure | None:
    """Run one trial and write its folder whole or not at all; returns what went wrong, if anything did."""
    try:
        with trial_folder(trial, out) as folder:
            execute(trial, trial.scenario(), folder, trace=trace)
    except Exception as error:  # one bad trial must not take the others with it; the caller reports it
        return failure(trial, error, out)
    return None


@contextmanager
def trial_folder(trial: Trial, out: Path) -> Iterator[Path]:
    """A scratch folder that becomes the trial's when all went well."""
    scratch = Path(tempfile.mkdtemp(dir=out / TRIALS, prefix="."))
    try:
        yield scratch
        scratch.chmod(0o755)
        shutil.rmtree(out / TRIALS / trial.key, ignore_errors=True)
        scratch.rename(out / TRIALS / trial.key)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def keep_lost(trial: Trial, records: Records, out: Path) -> Path:
    """Write the records of a run that was cut short; returns their folder, a new one each time."""
    count = len(list((out / LOST).glob(f"{trial.key}-*")))
    folder = out / LOST / f"{trial.key}-{count}"
    folder.mkdir(parents=True)
    records.write(folder)
    write_atomic(folder / "lost.json", to_json({"key": trial.key, "policy": trial.policy, "notes": records.notes}))
    return folder


def failure(trial: Trial, error: Exception, out: Path | None = None) -> Failure:
    """What an exception means for a trial: bad input and bad policies fail again, anything else may not.

    Records of a run that was cut short go beside the trials of ``out``, for a person to look at: nothing else reads them.
    """
    if isinstance(error, CutShort) and out is not None:
        return Failure(trial, f"{error} (in {keep_lost(trial, error.records, out)})", again=error.again)
    if isinstance(error, InputError):
        return Failure(trial, str(error), bad_input=True)
    says = f"{type(error).__name__}: {error}"
    return Failure(trial, says, again=not isinstance(error, PolicyError))


def execute(trial: Trial, scenario: Scenario, folder: Path, *, trace: bool) -> None:
    """Run a trial, whose scenario is ``scenario``, and write its records and metrics into ``folder``."""
    began_s = time.time()
    records = scenario.backend.run(scenario.workload, scenario.policies[0], trial.seed)
    write_results(trial, scenario, records, (began_s, time.time()), folder, trace=trace)


def write_results(
    trial: Trial, scenario: Scenario, records: Records, wall_s: tuple[float, float], folder: Path, *, trace: bool
) -> None:
    """Write a run's records and metrics; ``wall_s``: Unix seconds of its begin and end.

    Raises:
        InputError: no part of it is left to be measured.
    """
    part, warmup, found = window_of(records, scenario)
    if part.seconds <= 0:
        finished = int(records.requests["finish_s"].notna().sum())
        raise InputError(
            f"nothing to measure: the window closes before it opens ({finished} requests finished, "
            f"{warmup} are warm-up); raise the number of requests or lower measure.warmup_requests"
        )
    row: dict[str, Any] = {
        "policy": trial.policy,
        "seed": trial.seed,
        "backend": scenario.backend.kind,
        **trial.point,
    }
    row |= metrics.summary(records, part, scenario.slo)
    row |= adaptation.summary(records)
    row |= {"warmup_requests": float(warmup), "warmup_mser5": nan if found is None else float(found)}
    notes = list(records.notes)
    if part.by == "arrival" and row["backlog"] > OVERLOADED:
        notes.append(
            "overloaded: a fifth or more of the requests had not finished when the last arrived; the queue grows, and "
            "latencies depend on how long the trace is"
        )
    records.write(folder)
    if trace:
        write_atomic(folder / "trace.json", trace_events(records))
    batches = metrics.batches(records, part, scenario.slo)
    window = [part.start_s, part.end_s]
    facts: dict[str, Any] = {"key": trial.key, "window": window, "notes": notes, "metrics": row, "batches": batches}
    parts = {"policy": scenario.policies[0], "workload": scenario.workload, "backend": scenario.backend}
    facts["config"] = {name: part.model_dump(mode="json") for name, part in parts.items()}
    if (engine := _identity(scenario)) is not None:
        facts |= {"engine": engine, "began_s": wall_s[0], "ended_s": wall_s[1]}  # what ran beside it?
    write_atomic(folder / "trial.json", to_json(facts))


def window_of(records: Records, scenario: Scenario) -> tuple[metrics.Window, int, int | None]:
    """The measured part of a run by its scenario's rules, its warm-up requests, and how many MSER-5 finds."""
    open_loop, rule = scenario.workload.clients is None, scenario.measure
    found = metrics.warmup_by_mser5(records, open_loop=open_loop, until_last_arrival=rule.until_last_arrival)
    warmup = scenario.warmup_requests
    if rule.warmup_requests == "mser5" and found is not None:
        warmup = found
    part = metrics.window(records, warmup, open_loop=open_loop, until_last_arrival=rule.until_last_arrival)
    return part, warmup, found


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
            blocks = pd.read_parquet(folder / "blocks.parquet")
            found.append(adaptation.timeline(requests, trial.policy, place, events, blocks))
    return found


def collect_batches(plan: Plan, out: Path) -> pd.DataFrame:
    """The parts of every finished trial: policy, point, seed, batch and metrics; see ``metrics.batches``."""
    rows: list[dict[str, Any]] = []
    for trial in plan.trials:
        path = out / TRIALS / trial.key / "trial.json"
        if path.is_file():
            parts = json.loads(path.read_text()).get("batches", {})  # absent: written before there were any
            where = {"policy": trial.policy, "seed": trial.seed, **trial.point}
            for i, values in enumerate(zip(*parts.values(), strict=True)):
                rows.append(
                    where | {"part": i} | {m: nan if v is None else v for m, v in zip(parts, values, strict=True)}
                )
    return pd.DataFrame(rows)


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


def write_manifest(
    plan: Plan,
    out: Path,
    *,
    finished: bool,
    command: str = "run",
    notes: Sequence[str] = (),
    engine: EngineIdentity | None = None,
) -> None:
    """What was run by which command, with what, where.

    Args:
        notes: about this run alone.
        engine: where measured numbers come from; None = the scenario's backend on this machine, at the first point of
            the sweep. Every trial holds its own.
    """
    manifest = {
        "made_by": command,
        "scenario": plan.scenario.model_dump(mode="json"),
        "trials": [
            {"key": t.key, "policy": t.policy, "seed": t.seed, "point": t.point}
            | ({} if t.repeat is None else {"repeat": t.repeat})
            for t in plan.trials
        ],
        "finished": finished,
        "notes": [*plan.notes, *notes],
        "files": plan.files,
        "engine": _identity(plan.scenario) if engine is None else engine.model_dump(),
        "versions": {"adasim": __version__, "python": platform.python_version()} | _library_versions(),
        "git": _git_sha(),
        "host": {
            "machine": platform.machine(),
            "system": f"{platform.system()} {platform.release()}",
            "cpus": os.cpu_count(),
            "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        },
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    write_atomic(out / "manifest.json", to_json(manifest))


def _identity(scenario: Scenario) -> dict[str, Any] | None:
    """Where a measured backend's numbers come from; a simulation's have no such place."""
    identity = scenario.backend.identity()
    return None if identity is None else identity.model_dump()


@cache
def _library_versions() -> dict[str, str]:
    return {name: version(name) for name in LIBRARIES}


@cache
def _git_sha() -> str | None:
    """Commit of the checkout that adasim runs from, "+" when it was changed; None when installed. As it was at first."""
    here = Path(__file__).parent
    if not (here.parent / ".git").exists():
        return None
    ask = ["git", "-C", str(here), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    return run(ask, capture_output=True, text=True, check=False).stdout.strip() or None
