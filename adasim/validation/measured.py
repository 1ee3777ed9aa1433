"""Measured runs, each beside the plain decoding that ran next to it in time."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, inf, log, nan
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from adasim import experiment, metrics
from adasim.calibration.estimate.recording import RecordedTrial
from adasim.errors import InputError
from adasim.experiment import TRIALS
from adasim.identity import EngineIdentity
from adasim.metrics import Window
from adasim.plan import Plan, Trial
from adasim.recorded import check, choice_of, read_records
from adasim.records import Records
from adasim.scenario import Scenario
from adasim.validation.blocks import Block

RATIOS = {"throughput": "output_tok_s", "tpot_p50": "tpot_p50_ms", "tpot_p95": "tpot_p95_ms"}  # over plain decoding
PLAIN = (
    "output_tok_s", "tpot_p50_ms", "tpot_p95_ms", "ttft_p50_ms", "ttft_p95_ms", "itl_p50_ms", "itl_p95_ms", "itl_p99_ms",
    "tau", "verify_tokens_per_round",
)  # fmt: skip
METRICS = (*PLAIN, *(f"{name}_ratio" for name in RATIOS))
BELIEFS = {"cost", "profile"}  # what policies of a real engine know of time
FORCED = "acceptance was forced"


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
    return experiment.window_of(records, scenario)[0]


@dataclass(frozen=True, slots=True)
class Run:
    """One measured run on disk."""

    trial: Trial
    folder: Path
    at_s: float  # Unix seconds of its middle; NaN: nobody wrote it down
    window: Window
    engine: EngineIdentity | None  # where its numbers come from; None: simulated
    notes: tuple[str, ...] = ()
    config: Mapping[str, Any] | None = None  # policy, workload and backend as they ran; None: nobody wrote it down

    @classmethod
    def read(cls, trial: Trial, folder: Path) -> "Run":
        """The run of ``trial`` that lies in ``folder``.

        Raises:
            InputError: it cannot be read.
        """
        try:
            facts = json.loads((folder / "trial.json").read_text())
            start, end = (float(facts.get(name, nan)) for name in ("began_s", "ended_s"))
            engine = facts.get("engine")
            identity = None if engine is None else EngineIdentity.model_validate_json(json.dumps(engine))
            first, last = facts["window"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{folder}: trial.json cannot be read ({error})") from error
        window = Window(first, last, "finish" if trial.config["workload"]["kind"] == "closed" else "arrival")
        notes = tuple(facts.get("notes", ()))
        return cls(trial, folder, (start + end) / 2, window, identity, notes, facts.get("config"))

    def records(self) -> Records:
        """Its tables.

        Raises:
            InputError: which tables or columns are missing, or what is wrong with their times and counts.
        """
        records = read_records(self.folder)
        if problems := check(records, str(self.folder)):
            raise InputError(*problems)
        return records

    def recorded(self) -> RecordedTrial:
        """The run as estimators see it.

        Raises:
            InputError: it cannot be read.
        """
        scenario = self.trial.scenario()
        policy = scenario.policies[0]
        return RecordedTrial(
            key=self.folder.name,
            policy=policy,
            label=self.trial.policy,
            choice=choice_of(policy),
            point=self.trial.point,
            seed=self.trial.seed,
            workload=scenario.workload.model_dump(mode="json"),
            backend=scenario.backend.model_dump(mode="json"),
            forced=any(note.startswith(FORCED) for note in self.notes),
            records=self.records(),
            window=(self.window.start_s, self.window.end_s),
            identity=self.engine,
        )

    @property
    def name(self) -> str:
        """For people."""
        place = [f"{field.rsplit('.', 1)[-1]} {value}" for field, value in self.trial.point.items()]
        return ", ".join([self.trial.policy, *place, f"seed {self.trial.seed}"])

    @property
    def is_reference(self) -> bool:
        """Whether it decoded plainly."""
        return any(p["name"] == self.trial.policy and p["kind"] == "off" for p in self.trial.config["policies"])

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


def runs_recorded(folder: Path, plan: Plan, known: Collection[str] = ()) -> list[Run]:
    """What a folder of ``adasim record`` or ``validate`` holds of a plan, by policy, point and seed; in order of time.

    A policy that asks for a cost is taken to believe what it believed when it ran, not what the plan says.

    Args:
        folder: where to look.
        plan: of the scenario.
        known: keys of runs to leave out.

    Raises:
        InputError: no such records, or made with other settings than the scenario states.
    """
    manifest = read_manifest(folder)
    rules = manifest["scenario"].get("measure"), plan.scenario.measure.model_dump(mode="json")
    problems = {f"measure{line}": "" for line in differing(*rules)}
    trials = {_name(t.policy, t.point, t.seed): t for t in plan.trials}
    found = []
    for row in manifest["trials"]:
        trial, place = trials.get(_name(row["policy"], row["point"], row["seed"])), folder / TRIALS / row["key"]
        if trial is None or row["key"] in known or not (place / "trial.json").is_file():
            continue
        run = Run.read(replace(trial, repeat=row.get("repeat")), place)
        problems |= {line: run.name for line in differences(run.config, trial) if line not in problems}
        found.append(_believing(run))
    if problems:
        raise InputError(*(f"{folder}: was made with {line}" + f" ({at})" * bool(at) for line, at in problems.items()))
    return sorted(found, key=lambda run: 0.0 if np.isnan(run.at_s) else run.at_s)


def strangers(out: Path, kept: Iterable[str], blocks: Sequence[Block]) -> tuple[int, int]:
    """Runs in a folder that are none of ``blocks``: those of policies that believed another cost, and all others.

    Args:
        out: of ``adasim validate``.
        kept: keys of its runs.
        blocks: of the scenario.
    """
    trials = [t for block in blocks for t in (*block.references(out), *block.trials)]
    believed, others = 0, 0
    for key in set(kept) - {t.key for t in trials}:
        facts = json.loads((out / TRIALS / key / "trial.json").read_text())
        ran = facts["metrics"]
        same = (
            t
            for t in trials
            if t.repeat is None and {"policy": t.policy, "seed": t.seed, **t.point}.items() <= ran.items()
        )
        trial = next(same, None)
        asks = trial is not None and "cost" in trial.scenario().policies[0].needs
        if trial is not None and asks and not differences(facts.get("config"), trial):
            believed += 1
        else:
            others += 1
    return believed, others


def differences(config: Mapping[str, Any] | None, trial: Trial) -> list[str]:
    """How a run, by the ``config`` in its trial.json, differs from what ``trial`` would run; beliefs about time aside."""
    if config is None:
        return ["no configuration in trial.json (an older adasim): measure it again"]
    scenario = trial.scenario()
    real = scenario.backend.mark == "measured"
    mine = {
        f"policies.{trial.policy}": scenario.policies[0].model_dump(mode="json", exclude={"name"}),
        "workload": scenario.workload.model_dump(mode="json"),
        "backend": scenario.backend.model_dump(mode="json", exclude=BELIEFS if real else set()),
    }
    theirs = dict(zip(mine, (dict(config[part]) for part in ("policy", "workload", "backend")), strict=True))
    theirs[f"policies.{trial.policy}"].pop("name", None)
    for name in BELIEFS if real else ():
        theirs["backend"].pop(name, None)
    return [f"{part}{line}" for part in mine for line in differing(theirs[part], mine[part])]


def _believing(run: Run) -> Run:
    """The run with a trial whose policy believes of time what it believed then; a simulation's beliefs were compared."""
    raw, then = run.trial.config["backend"], (run.config or {}).get("backend", {})
    if raw["kind"] == "sim":
        return run
    backend = {k: v for k, v in raw.items() if k not in BELIEFS} | {k: then[k] for k in BELIEFS & set(then)}
    return replace(run, trial=replace(run.trial, config=run.trial.config | {"backend": backend}))


def differing(theirs: object, mine: object, who: str = "the scenario says") -> Iterator[str]:
    """Leaves of two JSON values that are not the same, as " value, ``who`` value" after their path; what is not there is
    null."""
    if isinstance(theirs, Mapping) and isinstance(mine, Mapping):
        theirs, mine = ({str(k): v for k, v in part.items()} for part in (theirs, mine))
        for name in sorted(set(theirs) | set(mine)):
            yield from (f".{name}{line}" for line in differing(theirs.get(name), mine.get(name), who))
    elif theirs != mine:
        yield f" {theirs!r}, {who} {mine!r}"


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


def table_of(runs: Sequence[Run], oldest_s: float = inf) -> pd.DataFrame:
    """One row a run: policy, point, seed, repeat, when, how far the next reference is, metrics, ratios to plain decoding.

    The reference is interpolated in time between the runs before and after, in logarithms. A reference itself is held
    against the others of its block: what is left is noise. ``judged`` is false where the next reference lies more than
    ``oldest_s`` away.
    """
    rows = []
    for run in runs:
        row: dict[str, Any] = {"policy": run.trial.policy, **run.trial.point, "seed": run.trial.seed}
        row |= {"repeat": run.trial.repeat, "at_s": run.at_s, "reference": run.is_reference}
        rows.append(row | measure(run.records(), run.window))
    for run, row in zip(runs, rows, strict=True):
        beside = [r for r, other in zip(rows, runs, strict=True) if r["reference"] and other.place == run.place]
        beside = [r for r in beside if r is not row]
        age_s = min((abs(r["at_s"] - run.at_s) for r in beside), default=nan)
        row |= {"reference_age_s": age_s, "judged": run.is_reference or not age_s > oldest_s}
        for name, metric in RATIOS.items():
            row[f"{name}_ratio"] = row[metric] / at(run.at_s, [(r["at_s"], r[metric]) for r in beside])
    return pd.DataFrame(rows)


def sound(runs: Iterable[Run]) -> tuple[list[Run], list[str]]:
    """Runs whose records can be used, and what is wrong with the others."""
    kept, problems = [], list[str]()
    for run in runs:
        try:
            run.records()
            kept.append(run)
        except InputError as error:
            problems += error.problems
    return kept, problems


def at(when_s: float, known: Sequence[tuple[float, float]]) -> float:
    """A value at a time, from (time, value) pairs: linear in logarithms between neighbours; the mean without times."""
    if not known:
        return nan
    times, values = zip(*sorted(known), strict=True)
    logs = [log(v) for v in values]
    if np.isnan([when_s, *times]).any():
        return exp(float(np.mean(logs)))
    return exp(float(np.interp(when_s, times, logs)))
