"""Measured runs on disk."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any

from adasim.calibration.estimate.recording import RecordedTrial
from adasim.errors import InputError
from adasim.experiment import TRIALS
from adasim.identity import EngineIdentity
from adasim.metrics import Window
from adasim.plan import Trial
from adasim.recorded import check, choice_of, read_records
from adasim.records import Records
from adasim.validation.blocks import Block

FORCED = "acceptance was forced"


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
