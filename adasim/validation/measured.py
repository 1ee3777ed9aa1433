"""Measured runs, each beside the plain decoding that ran next to it in time."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp, log, nan
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from adasim import metrics
from adasim.errors import InputError
from adasim.experiment import TRIALS
from adasim.metrics import Window
from adasim.plan import Plan, Trial
from adasim.recorded import read_records
from adasim.records import Records
from adasim.scenario import Scenario
from adasim.validation.blocks import Block

RATIOS = {"throughput": "output_tok_s", "tpot_p50": "tpot_p50_ms", "tpot_p95": "tpot_p95_ms"}  # over plain decoding
PLAIN = (
    "output_tok_s", "tpot_p50_ms", "tpot_p95_ms", "ttft_p50_ms", "ttft_p95_ms", "itl_p50_ms", "itl_p95_ms", "itl_p99_ms",
    "tau", "verify_tokens_per_round",
)  # fmt: skip


def measure(records: Records, part: Window) -> dict[str, float]:
    """What measured and simulated runs are compared by; the same code for both."""
    inside = metrics.cut(records, part)
    found = {"output_tok_s": metrics.output_tok_s(inside, part)}
    latencies = {"tpot": metrics.tpot_s(inside.requests), "ttft": metrics.ttft_s(inside.requests)}
    for name, values in latencies.items():
        found |= {f"{name}_p{q}_ms": 1e3 * metrics.percentile(values, q) for q in (50, 95)}
    found |= {f"itl_p{q}_ms": 1e3 * metrics.itl_s(inside.gaps, q) for q in (50, 95, 99)}
    found |= {"tau": metrics.tau(inside), "verify_tokens_per_round": metrics.verify_tokens_per_round(inside)}
    return found


def window_of(records: Records, scenario: Scenario) -> Window:
    """The part of a simulated run that counts, by the scenario's rules."""
    open_loop, rule = scenario.workload.clients is None, scenario.measure
    warmup = scenario.warmup_requests
    if rule.warmup_requests == "mser5":
        found = metrics.warmup_by_mser5(records, open_loop=open_loop, until_last_arrival=rule.until_last_arrival)
        warmup = warmup if found is None else found
    return metrics.window(records, warmup, open_loop=open_loop, until_last_arrival=rule.until_last_arrival)


@dataclass(frozen=True, slots=True)
class Run:
    """One measured run on disk."""

    trial: Trial
    folder: Path
    at_s: float  # Unix seconds of its middle; NaN: nobody wrote it down
    window: Window
    engine: dict[str, Any] | None  # where its numbers come from
    notes: tuple[str, ...] = ()

    @classmethod
    def read(cls, trial: Trial, folder: Path) -> "Run":
        """The run of ``trial`` that lies in ``folder``.

        Raises:
            InputError: it cannot be read.
        """
        facts = json.loads((folder / "trial.json").read_text())
        start, end = (float(facts.get(name, nan)) for name in ("began_s", "ended_s"))
        first, last = facts["window"]
        window = Window(first, last, "finish" if trial.config["workload"]["kind"] == "closed" else "arrival")
        return cls(trial, folder, (start + end) / 2, window, facts.get("engine"), tuple(facts.get("notes", ())))

    def records(self) -> Records:
        """Its tables.

        Raises:
            InputError: which tables or columns are missing.
        """
        return read_records(self.folder)

    @property
    def place(self) -> tuple[object, ...]:
        """Point and seed."""
        return (*self.trial.point.values(), self.trial.seed)


def runs_in(out: Path, blocks: Iterable[Block]) -> list[Run]:
    """What a folder of ``adasim validate`` holds of some blocks, references first in each."""
    found = []
    for block in blocks:
        for trial in (*block.references(out), *block.trials):
            if (folder := out / TRIALS / trial.key / "trial.json").is_file():
                found.append(Run.read(trial, folder.parent))
    return found


def runs_recorded(folder: Path, plan: Plan) -> list[Run]:
    """What a folder of ``adasim record`` or ``validate`` holds of a plan, by policy, point and seed; in order of time.

    Raises:
        InputError: no such records, or made with other settings than the scenario states.
    """
    manifest = read_manifest(folder)
    differ = [line for part in ("workload", "backend", "measure") for line in _differ(manifest["scenario"], plan, part)]
    if differ:
        raise InputError(*(f"{folder}: was made with {line}" for line in differ))
    known = {_name(t.policy, t.point, t.seed): t for t in plan.trials}
    found = []
    for row in manifest["trials"]:
        trial, place = known.get(_name(row["policy"], row["point"], row["seed"])), folder / TRIALS / row["key"]
        if trial is not None and (place / "trial.json").is_file():
            found.append(Run.read(replace(trial, repeat=row.get("repeat")), place))
    return sorted(found, key=lambda run: 0.0 if np.isnan(run.at_s) else run.at_s)


def runs_of(folder: Path) -> list[Run]:
    """All finished runs of a folder, as its own manifest describes them.

    Raises:
        InputError: no such records.
    """
    manifest, found = read_manifest(folder), []
    for row in manifest["trials"]:
        place = folder / TRIALS / row["key"]
        if (place / "trial.json").is_file():
            at = row["policy"], row["point"], row["seed"], manifest["scenario"], folder
            found.append(Run.read(Trial(*at, repeat=row.get("repeat")), place))
    if not found:
        raise InputError(f"{folder}: holds no finished trial")
    return found


def read_manifest(folder: Path) -> dict[str, Any]:
    """What was run into a folder.

    Raises:
        InputError: it holds no records.
    """
    try:
        manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
        if not {"trials", "scenario", "versions"} <= set(manifest):
            raise ValueError("not a manifest")
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{folder}: holds no records of adasim ({error})") from error
    return manifest


def _name(policy: str, point: dict[str, Any], seed: int) -> str:
    return json.dumps([policy, point, seed])


def _differ(recorded: dict[str, Any], plan: Plan, part: str) -> list[str]:
    """Settings of a part that are not those of the plan; swept ones, and what policies believe of time, aside."""
    mine = plan.scenario.model_dump(mode="json")[part]
    theirs = recorded.get(part, {})
    return [
        f"{part}.{name} {theirs[name]!r}, the scenario says {mine[name]!r}"
        for name in sorted(set(mine) & set(theirs))
        if mine[name] != theirs[name]
        and name not in {"profile", "cost", "believed"}
        and not any(f == f"{part}.{name}" or f.startswith(f"{part}.{name}.") for f in plan.swept)
    ]


def table_of(runs: Sequence[Run]) -> pd.DataFrame:
    """One row a run: policy, point, seed, repeat, when, how far the next reference is, metrics, ratios to plain decoding.

    The reference is interpolated in time between the runs before and after, in logarithms. A reference itself is held
    against the others of its block: what is left is noise.
    """
    rows = []
    for run in runs:
        row: dict[str, Any] = {"policy": run.trial.policy, **run.trial.point, "seed": run.trial.seed}
        row |= {"repeat": run.trial.repeat, "at_s": run.at_s, "reference": _is_reference(run.trial)}
        rows.append(row | measure(run.records(), run.window))
    for run, row in zip(runs, rows, strict=True):
        beside = [r for r, other in zip(rows, runs, strict=True) if r["reference"] and other.place == run.place]
        beside = [r for r in beside if r is not row]
        ages = [abs(r["at_s"] - run.at_s) for r in beside]
        row["reference_age_s"] = min(ages, default=nan)
        for name, metric in RATIOS.items():
            row[f"{name}_ratio"] = row[metric] / at(run.at_s, [(r["at_s"], r[metric]) for r in beside])
    return pd.DataFrame(rows)


def at(when_s: float, known: Sequence[tuple[float, float]]) -> float:
    """A value at a time, from (time, value) pairs: linear in logarithms between neighbours; the mean without times."""
    if not known:
        return nan
    times, values = zip(*sorted(known), strict=True)
    logs = [log(v) for v in values]
    if np.isnan([when_s, *times]).any():
        return exp(float(np.mean(logs)))
    return exp(float(np.interp(when_s, times, logs)))


def _is_reference(trial: Trial) -> bool:
    return any(p["name"] == trial.policy and p["kind"] == "off" for p in trial.config["policies"])
