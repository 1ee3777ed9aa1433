"""Measurements know where they come from, and say what differs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from adasim.errors import InputError
from adasim.identity import EngineIdentity, fingerprint


def identity(**fields: Any) -> EngineIdentity:
    same: dict[str, Any] = {
        "engine": "torch", "engine_version": "2.13.0", "hardware": "a CPU", "device": "cpu", "dtype": "bfloat16",
        "threads": 1, "target": "tiny", "target_sha256": "a" * 64, "drafter": "d", "drafter_sha256": "d" * 64,
        "python": "3.12.1", "adasim": "1.0",
    }  # fmt: skip
    return EngineIdentity(**(same | fields))


def model(folder: Path, config: str = "{}", weights: bytes = b"w") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config)
    (folder / "model.safetensors").write_bytes(weights)
    return folder


@pytest.mark.parametrize("field", [f for f in EngineIdentity.model_fields if f not in {"target", "drafter", "resolved"}])
def test_every_field_that_differs_is_named(field: str) -> None:
    other: Any = {"threads": 2, "device": "cuda"}.get(field, "other")
    assert [line.split(":")[0] for line in identity().differs(identity(**{field: other}))] == [field]
    assert identity().differs(identity()) == []


def test_the_same_weights_under_another_name_are_the_same() -> None:
    assert identity().differs(identity(target="/elsewhere/tiny")) == []
    found = identity().differs(identity(drafter=None, drafter_sha256=None))
    assert found == ["drafter: d, not None", "drafter_sha256: dddddddddddd, not None"]


def test_what_does_not_matter_or_is_unknown_is_no_difference() -> None:
    assert identity().differs(identity(python="3.12.9")) == []
    assert identity().differs(identity(python="3.13.1")) == ["python: 3.12.1, not 3.13.1"]
    assert identity().differs(identity(adasim=None)) == identity(adasim=None).differs(identity()) == []
    assert identity().differs(identity(adasim="1.1")) == ["adasim: 1.0, not 1.1"]


def test_identity_survives_json() -> None:
    assert EngineIdentity.model_validate(json.loads(identity().model_dump_json())) == identity()


def test_fingerprint_follows_content_not_place(tmp_path: Path) -> None:
    first = fingerprint(model(tmp_path / "a"))
    assert fingerprint(model(tmp_path / "b")) == first
    assert fingerprint(model(tmp_path / "b", config='{"layers": 2}')) != first
    assert fingerprint(model(tmp_path / "c", weights=b"other")) != first
    with pytest.raises(InputError, match="must hold"):
        fingerprint(tmp_path)


def test_importing_identity_loads_no_torch() -> None:
    code = "import sys, adasim.identity; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
