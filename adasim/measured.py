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
from adasim.blocks import Block
from adasim.errors import InputError
from adasim.experiment import TRIALS
from adasim.metrics import Window
from adasim.plan import Plan, Trial
from adasim.records import Records
from adasim.scenario import Scenario

RATIOS = {"throughput": "output_tok_s", "tpot_p50": "tpot_p50_ms", "tpot_p95": "tpot_p95_ms"}  # over plain decoding
PLAIN = (
    "output_tok_s", "tpot_p50_ms", "tpot_p95_ms", "ttft_p50_ms", "ttft_p95_ms", "itl_p50_ms", "itl_p95_ms", "itl_p99_ms",
    "tau", "verify_tokens_per_round",
)  # fmt: skip
TABLES = ("steps", "requests", "blocks", "gaps", "events")


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
            InputError: what is missing there.
        """
        lacking = [f"{name}.parquet" for name in TABLES if not (folder / f"{name}.parquet").is_file()]
        if lacking:
            raise InputError(f"{folder}: has no {', '.join(lacking)}")
        facts = json.loads((folder / "trial.json").read_text())
        start, end = facts.get("clock") or (nan, nan)
        first, last = facts["window"]
        window = Window(first, last, "arrival" if trial.scenario().workload.clients is None else "finish")
        return cls(trial, folder, (start + end) / 2, window, facts.get("engine"), tuple(facts.get("notes", ())))

    def records(self) -> Records:
        """Its tables, those that are optional where they are."""
        steps, requests, blocks, gaps, events = (pd.read_parquet(self.folder / f"{name}.parquet") for name in TABLES)
        path = self.folder / "rounds.parquet"
        rounds = pd.read_parquet(path) if path.is_file() else None
        last_s = float(requests["arrival_s"].max())
        return Records(steps, requests, blocks, gaps, events, last_s, rounds=rounds)

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


def runs_recorded(folder: Path, plan: Plan, blocks: Sequence[Block]) -> list[Run]:
    """What a folder of ``adasim record`` or ``validate`` holds of a plan: by policy, point and seed.

    Raises:
        InputError: no such records, none of this scenario, or made with other settings than the scenario states.
    """
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        rows = {_name(row): row for row in manifest["trials"]}
        recorded = manifest["scenario"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"--records {folder}: holds no records of adasim ({error})") from error
    differ = [line for part in ("workload", "backend", "measure") for line in _differ(recorded, plan, part)]
    if differ:
        raise InputError(*(f"--records {folder}: was made with {line}" for line in differ))
    repeats = sorted({row.get("repeat") for row in rows.values()}, key=lambda r: -1 if r is None else r)
    found = []
    for block in blocks:
        wanted = [replace(block.reference, repeat=r) for r in repeats]
        for trial in (*wanted, *block.trials):
            asked = {"policy": trial.policy, "point": trial.point, "seed": trial.seed, "repeat": trial.repeat}
            row = rows.get(_name(asked))
            if row is not None and (folder / TRIALS / row["key"] / "trial.json").is_file():
                found.append(Run.read(trial, folder / TRIALS / row["key"]))
    if not found:
        raise InputError(f"--records {folder}: holds no finished trial with a policy, point and seed of this scenario")
    return found


def _name(row: dict[str, Any]) -> str:
    return json.dumps([row["policy"], row["point"], row["seed"], row.get("repeat")])


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
