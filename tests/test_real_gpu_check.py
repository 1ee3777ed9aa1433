"""The GPU script, tried on the CPU with a tiny target."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from adasim.errors import InputError
from adasim.real.gpu_check import main


def test_the_script_runs_through(tmp_path: Path) -> None:
    main(["--out", str(tmp_path), "--device", "cpu", "--small", "--minutes", "0.2", "--targets", "random-tiny"])
    report = json.loads((tmp_path / "check.json").read_text())
    assert set(report["lossless"]["random-tiny"].values()) == {True}
    rows = (tmp_path / "random-tiny.csv").read_text().splitlines()
    assert len(rows) == 1 + report["profiles"]["random-tiny"]["rows"] == 1 + 2 * 2 + 2


def test_a_missing_device_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(InputError, match="no CUDA device"):
        main(["--out", str(tmp_path)])
