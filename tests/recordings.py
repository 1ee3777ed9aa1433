"""Recorded run folders for tests: simulated with known parameters."""

import json
from pathlib import Path
from typing import Any

from adasim import experiment
from adasim.calibration.estimate.recording import Recording
from adasim.files import to_json
from adasim.identity import EngineIdentity
from adasim.recorded import load
from tests.build import backend, plan

ENGINE = EngineIdentity(
    engine="torch", engine_version="2.13.0", hardware="a processor", device="cpu", dtype="bfloat16", threads=1,
    target="small", target_sha256="a" * 64, drafter="small", drafter_sha256="b" * 64, python="3.11.7",
)  # fmt: skip


def record(folder: Path, *, identity: EngineIdentity | None = None, **fields: Any) -> Path:
    """Simulate a scenario into a folder that says it was measured by ``identity``."""
    fields.setdefault("backend", backend(rounds=True))
    made = plan(**fields)
    for trial in experiment.prepare(made, folder, resume=False, overwrite=False):
        failed = experiment.run_trial(trial, folder)
        assert failed is None, failed
    experiment.write_manifest(made, folder, finished=True, command="record")
    if identity is not None:
        mark(folder, identity)
    return folder


def mark(folder: Path, identity: EngineIdentity) -> None:
    """Say that ``identity`` made a folder's trials."""
    for path in [folder / "manifest.json", *folder.glob("trials/*/trial.json")]:
        facts = json.loads(path.read_text())
        path.write_text(to_json(facts | {"engine": identity.model_dump()}))


def recording(folder: Path, **fields: Any) -> Recording:
    """The same, loaded."""
    return load(record(folder, **fields))
