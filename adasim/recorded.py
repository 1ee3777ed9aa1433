"""Reads the folders that `adasim record` and `adasim profile` leave, and refuses what no fit should rest on."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pydantic import TypeAdapter, ValidationError

from adasim.calibration.estimate.recording import Choice, RecordedTrial, Recording
from adasim.errors import InputError
from adasim.identity import EngineIdentity
from adasim.policies import AnyPolicy
from adasim.policies.base import Policy
from adasim.records import OPTIONAL, TABLES, Records

PARTS = ("draft_s", "verify_s", "overhead_s", "prefill_s")
LONGEST_PAUSE_S, PAUSE_IN_STEPS = 60.0, 100.0  # with requests running; longer: the clock jumped, or the machine slept
MAX_PROBLEMS = 20


def load(folder: Path) -> Recording:
    """The recorded runs of one folder.

    Raises:
        InputError: everything that is wrong with it.
    """
    return load_all([folder])


def load_all(folders: Sequence[Path]) -> Recording:
    """The recorded runs of several folders, which must be of one engine on one machine.

    Raises:
        InputError: everything that is wrong, in all folders.
    """
    problems: list[str] = []
    found: list[Recording] = []
    if len({Path(f).resolve() for f in folders}) < len(folders):
        problems.append("a folder is named twice: its runs would count twice")
    for folder in folders:
        try:
            found.append(_load(Path(folder)))
        except InputError as error:
            problems += error.problems
    trials = [t for r in found for t in r.trials]
    problems += _mixed(folders, found)
    if problems:
        more = len(problems) - MAX_PROBLEMS
        raise InputError(*problems[:MAX_PROBLEMS], *([f"and {more} more"] if more > 0 else []))
    notes = [note for r in found for note in r.notes]
    return Recording(found[0].identity, found[0].scenario, trials, [s for r in found for s in r.sources], notes)


def _mixed(folders: Sequence[Path], found: Sequence[Recording]) -> list[str]:
    """Engines that differ from the first one."""
    if len(found) < len(folders):
        return []
    first, problems = found[0].identity, []
    for folder, recording in zip(folders[1:], found[1:], strict=True):
        if (first is None) != (recording.identity is None):
            problems.append(f"{folder}: simulated and measured runs do not mix ({folders[0]})")
        elif first is not None and recording.identity is not None:
            problems += [f"{folder}: another engine than {folders[0]}: {d}" for d in recording.identity.differs(first)]
    return problems


def _load(folder: Path) -> Recording:
    manifest = _json(folder / "manifest.json", folder)
    scenario, planned = manifest.get("scenario"), manifest.get("trials")
    if not isinstance(scenario, dict) or not isinstance(planned, list) or "adasim" not in manifest.get("versions", {}):
        raise InputError(f"{folder}: manifest.json is not one of adasim's")
    problems: list[str] = []
    trials: list[RecordedTrial] = []
    missing = 0
    by_key = {str(entry.get("key")): entry for entry in reversed(planned)}  # points that are alike share a run
    for entry in reversed(by_key.values()):
        at = folder / "trials" / str(entry.get("key"))
        if not (at / "trial.json").is_file():
            missing += 1
            continue
        try:
            trials.append(_trial(at, entry))
        except InputError as error:
            problems += error.problems
    if not trials and not problems:
        problems.append(f"{folder}: holds no finished trial")
    for trial in trials[1:]:
        if trial.identity is not None and trials[0].identity is not None:
            differs = trial.identity.differs(trials[0].identity)
            problems += [f"{folder}: trial {trial.key}: another engine than trial {trials[0].key}: {d}" for d in differs]
    if problems:
        raise InputError(*problems)
    notes = [f"{folder.name}: {missing} of {len(by_key)} trials are unfinished and left out"] if missing else []
    return Recording(trials[0].identity, scenario, trials, [_source(folder, manifest, trials)], notes)


def _source(folder: Path, manifest: dict[str, Any], trials: Sequence[RecordedTrial]) -> str:
    """What a folder holds, for the profile's provenance."""
    steps = sum(len(t.records.steps) for t in trials)
    seconds = sum(float(t.records.steps["end_s"].iloc[-1]) for t in trials if len(t.records.steps))
    forced = sum(t.forced for t in trials)
    return (
        f"{folder.name}: {len(trials)} trials ({forced} with acceptance by decree), {steps} steps, {seconds:.0f} s, "
        f"written {manifest.get('time', 'at an unknown time')} by adasim {manifest['versions']['adasim']} "
        f"{manifest.get('made_by', 'run')}"
    )


def _json(path: Path, folder: Path) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{folder}: no recorded run: {path.name} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{path}: is not JSON: {error}") from error
    if not isinstance(facts, dict):
        raise InputError(f"{path}: must hold keys and values")
    return facts


def policy_of(raw: object, folder: Path) -> Policy:
    """A policy from its written form, where the keys of tables are text.

    Raises:
        InputError: what is wrong with it, in which folder.
    """
    read: TypeAdapter[Policy] = TypeAdapter(AnyPolicy)
    try:
        return read.validate_json(json.dumps(raw))
    except ValidationError as error:
        lines = [": ".join([*map(str, e["loc"]), e["msg"]]) for e in error.errors()]
        raise InputError(*(f"{folder}: trial.json: config.policy: {line}" for line in lines)) from error


def choice_of(policy: Policy) -> Choice:
    """How a policy comes to its verify lengths."""
    if policy.needs & {"survival", "accept_len", "margin", "truth"}:
        return "informed"
    return "fixed" if policy.kind in {"fixed", "off"} else "adaptive"


def _trial(folder: Path, entry: dict[str, Any]) -> RecordedTrial:
    facts = _json(folder / "trial.json", folder)
    label, point = str(entry.get("policy")), dict(entry.get("point") or {})
    config = facts.get("config")
    if not isinstance(config, dict) or not {"policy", "workload", "backend"} <= set(config):
        raise InputError(f"{folder}: trial.json holds no config of policy, workload and backend; record it anew")
    policy = policy_of(config["policy"], folder)
    records = read_records(folder)
    if problems := check(records, str(folder)):
        raise InputError(*problems)
    engine, window = facts.get("engine"), facts.get("window") or [0.0, 0.0]
    try:
        identity = None if engine is None else EngineIdentity.model_validate_json(json.dumps(engine))
    except ValidationError as error:
        raise InputError(f"{folder}: trial.json: engine: {error.errors()[0]['msg']}") from error
    records.notes = [str(note) for note in facts.get("notes", [])]
    backend: dict[str, Any] = config["backend"]
    began = facts.get("began_s")
    return RecordedTrial(
        key=folder.name,
        policy=policy,
        label=label,
        choice=choice_of(policy),
        point=point,
        seed=int(entry.get("seed", 0)),
        workload=config["workload"],
        backend=backend,
        forced=backend.get("forced") is not None or any(n.startswith("acceptance was forced") for n in records.notes),
        records=records,
        window=(float(window[0]), float(window[1])),
        identity=identity,
        began_s=None if began is None else float(began),
    )


def read_records(folder: Path) -> Records:
    """The tables of one trial.

    Raises:
        InputError: every table or column that is missing.
    """
    tables: dict[str, pd.DataFrame] = {}
    problems: list[str] = []
    for name, kind in (TABLES | OPTIONAL).items():
        path = folder / f"{name}.parquet"
        if not path.is_file():
            problems += [f"{folder}: {name}.parquet is missing"] if name in TABLES else []
            continue
        try:
            table = pd.read_parquet(path)
        except Exception as error:  # whatever the reader throws, the user needs the file's name
            problems.append(f"{path}: cannot be read as a table: {error}")
            continue
        lacks = [c for c in kind._fields if c not in table.columns and c not in kind._field_defaults]
        problems += [f"{path}: column {c} is missing" for c in lacks]
        defaults = {c: v for c, v in kind._field_defaults.items() if c not in table.columns}
        tables[name] = table.assign(**defaults) if defaults else table
    if problems:
        raise InputError(*problems)
    arrivals = tables["requests"]["arrival_s"].dropna()
    last_s = float(arrivals.max()) if len(arrivals) else 0.0
    return Records(
        tables["steps"], tables["requests"], tables["blocks"], tables["gaps"], tables["events"], last_s,
        versions=tables.get("versions"),
        prefills=tables.get("prefills"),
        rounds=tables.get("rounds"),
    )  # fmt: skip


def check(records: Records, where: str) -> list[str]:
    """What is wrong with the times and counts of one trial."""
    steps, problems = records.steps, list[str]()
    if steps.empty:
        return [f"{where}: steps.parquet holds no steps"]
    times = steps[["start_s", "end_s", *PARTS]].to_numpy(dtype=float)
    if not np.isfinite(times).all():
        return [f"{where}: steps.parquet: step {_first(~np.isfinite(times).all(axis=1), steps)}: a time is missing"]
    start, end = times[:, 0], times[:, 1]
    for name in PARTS:
        if (bad := steps[name].to_numpy() < -1e-9).any():
            problems.append(f"{where}: steps.parquet: step {_first(bad, steps)}: {name} is negative ({bad.sum()} such)")
    if (bad := end < start).any():
        problems.append(f"{where}: steps.parquet: step {_first(bad, steps)} ends before it starts ({bad.sum()} such)")
    if (bad := start[1:] < end[:-1] - 1e-6).any():
        step = _first(np.concatenate([[False], bad]), steps)
        problems.append(f"{where}: steps.parquet: step {step} starts before the one before ends: the clock went back")
    problems += [f"{where}: {line}" for line in _pauses(records, start, end)]
    spent = times[:, 2:].sum(axis=1)
    if (bad := spent > (end - start) * (1 + 1e-6) + 1e-6).any():
        problems.append(f"{where}: steps.parquet: step {_first(bad, steps)}: its parts take longer than itself")
    if (records.requests[["tokens", "rounds", "verify_tokens"]].to_numpy() < 0).any():
        problems.append(f"{where}: requests.parquet: a count is negative")
    rounds = records.rounds
    if rounds is not None and len(rounds):
        wrong = (rounds["accepted"] < 0) | (rounds["accepted"] >= rounds["verify_len"])
        wrong |= rounds["verify_len"] > rounds["draft_len"] + 1
        if wrong.any():
            problems.append(
                f"{where}: rounds.parquet: row {int(np.argmax(wrong.to_numpy())) + 1}: accepted < verify_len <= "
                f"draft_len + 1 does not hold ({int(wrong.sum())} such)"
            )
    return problems


def _pauses(records: Records, start: np.ndarray[Any, Any], end: np.ndarray[Any, Any]) -> list[str]:
    """Gaps between steps, while requests ran, that no engine makes."""
    gaps = start[1:] - end[:-1]
    limit = max(LONGEST_PAUSE_S, PAUSE_IN_STEPS * float(np.median(end - start)))
    long = np.flatnonzero(gaps > limit)
    requests = records.requests
    out = []
    for i in long:
        running = (requests["first_token_s"] <= end[i]) & ~(requests["finish_s"] <= end[i])
        if running.any():
            step = int(records.steps["step"].iloc[i + 1])
            out.append(f"steps.parquet: {gaps[i]:.0f} s pass before step {step} while requests run: the clock jumped")
    return out


def _first(bad: np.ndarray[Any, Any], steps: pd.DataFrame) -> int:
    return int(steps["step"].to_numpy()[int(np.argmax(bad))])
