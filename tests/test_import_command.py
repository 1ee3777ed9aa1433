"""``adasim import`` as a user meets it."""

import json
from pathlib import Path

import pandas as pd
import pytest

from adasim.traces import read_trace
from tests import import_samples as samples
from tests.build import adasim


def run(*arguments: object) -> int:
    return adasim("import", *arguments)


def test_what_was_found_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    files = [samples.write(tmp_path, name) for name in ("vllm", "sglang_plain", "throughput")]
    assert run(*files) == 0
    shown = capsys.readouterr().out
    assert all(kind in shown for kind in ("vllm-bench", "sglang-bench", "throughput"))
    assert "0.80 0.50 0.20" in shown
    assert "! " in shown
    assert "average since its start" in shown


def test_tables_and_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [samples.write(tmp_path, name) for name in ("vllm_details", "vllm_log", "mooncake", "cost")]
    out = tmp_path / "new" / "out"
    assert run(*files, "--out", out, "--json") == 0
    assert sorted(p.name for p in out.iterdir()) == [
        *(
            "acceptance.csv",
            "costs.csv",
            "manifest.json",
            "requests.parquet",
            "runs.csv",
            "steps.parquet",
            "workload.jsonl",
        )
    ]
    runs = pd.read_csv(out / "runs.csv")
    assert list(runs["tau"]) == [2.5, 2.35]
    requests = pd.read_parquet(out / "requests.parquet")
    assert list(requests["chunks"].dropna()) == [7, 3]
    assert len(pd.read_parquet(out / "steps.parquet")) == 2
    assert read_trace(str(out / "workload.jsonl")) == read_trace(str(files[2]), "mooncake")
    manifest = json.loads((out / "manifest.json").read_text())
    assert [f["kind"] for f in manifest["files"]] == ["vllm-bench", "vllm-log", "mooncake", "cost"]
    assert all(len(f["sha256"]) == 64 for f in manifest["files"])
    assert manifest["files"][1]["engines"] == ["vllm 0.14.0"]
    assert manifest["files"][0]["rows"] == {"runs": 1, "requests": 3, "acceptance": 3}
    printed = json.loads(capsys.readouterr().out)
    assert printed["files"] == manifest["files"]
    assert printed["runs"][0]["k"] == 3
    assert [a["survival"] for a in printed["acceptance"]][:3] == [0.8, 0.5, 0.2]


def test_the_same_files_make_the_same_bytes(tmp_path: Path) -> None:
    files = [samples.write(tmp_path, name) for name in ("vllm_details", "aiperf", "sglang_log")]
    for name in ("a", "b"):
        assert run(*files, "--out", tmp_path / name) == 0
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_a_bad_line_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x"
    path.write_text(samples.THROUGHPUT + "2,3,1,4,1.0,100,9.9\n")
    before = sorted(tmp_path.iterdir())
    assert run(path, "--out", tmp_path / "out") == 2
    assert f"error: {path}:5: accept length 9.9 is impossible" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before
    assert run(path, "--out", tmp_path / "out", "--keep-going") == 0
    assert f"skipped: {path}:5" in capsys.readouterr().out
    (found,) = json.loads((tmp_path / "out" / "manifest.json").read_text())["files"]
    assert (found["skipped"], len(found["problems"]), found["rows"]) == (1, 1, {"runs": 3})


def test_only_an_earlier_import_is_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = samples.write(tmp_path, "throughput"), tmp_path / "out"
    assert run(path, "--out", out) == 0
    assert run(path, "--out", out) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert run(samples.write(tmp_path, "cost"), "--out", out, "--overwrite") == 0
    assert sorted(p.name for p in out.iterdir()) == ["costs.csv", "manifest.json"]
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("x")
    assert run(path, "--out", mine, "--overwrite") == 2
    assert (mine / "thesis.tex").exists()


def test_kind_can_be_forced_and_must_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = samples.write(tmp_path, "vllm_log")
    assert run(path, "--as", "vllm-log") == 0
    assert run(path, "--as", "tgi") == 2
    assert "--as tgi: unknown; allowed: sglang-bench, " in capsys.readouterr().err
    assert run(path, "--as", "sps", "--keep-going") == 0
    assert "nothing of kind sps was found" in capsys.readouterr().out
