"""What a server is started with, what fits its memory, and a prediction with its error."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from adasim.calibration.memory import GpuMemory
from adasim.calibration.parallel import Split
from adasim.calibration.specs import HARDWARE, MODELS
from adasim.deploy.launch import launch
from adasim.deploy.memory import needs, specs_of
from adasim.deploy.prediction import RATIO, predict
from adasim.errors import InputError
from adasim.exports.source import Asked, Source, read_source
from adasim.policies.fixed import Fixed
from adasim.real.sglang_plugin.settings import read_settings
from tests.build import adasim, backend, config

POLICIES = [{"kind": "off"}, {"kind": "fixed", "verify_len": 4}, {"kind": "head", "name": "head"}]


def run(*arguments: object) -> int:
    return adasim("deploy", *arguments)


def written(folder: Path, **fields: Any) -> str:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(config(**({"policies": POLICIES} | fields))))
    return str(path)


def source(folder: Path, **fields: Any) -> Source:
    return read_source(written(folder, **fields), Asked())


def test_everything_a_server_needs_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ADASIM_POLICY", raising=False)
    out = tmp_path / "served"
    assert run(written(tmp_path), "--policy", "head", "--target", "a target", "--out", out) == 0
    assert sorted(p.name for p in out.iterdir()) == [
        *("adasim_policy.about.json", "adasim_policy.json", "deployment.json", "launch.sh", "sps_table.json")
    ]
    assert read_settings(str(out)).policy.kind == "head"
    facts = json.loads((out / "deployment.json").read_text())
    assert facts["max_running_requests"] == 8
    assert facts["flags"]["--speculative-num-draft-tokens"] == "16"
    assert facts["environment"]["SGLANG_RAGGED_VERIFY_MODE"] == "compact"
    assert [row["policy"] for row in facts["prediction"]] == ["plain decoding", "head"]
    assert facts["prediction"][1]["throughput_ratio"] > 1
    assert facts["error"]["of"].startswith("unknown")
    assert facts["memory_gib_per_gpu"]["size"] == 80


def test_the_script_starts_the_server_with_its_policy(tmp_path: Path) -> None:
    """From any folder; python is replaced by one that tells how it was called."""
    out = tmp_path / "served here"
    assert run(written(tmp_path), "--target", "a target", "--out", out) == 0
    fake = tmp_path / "python"
    fake.write_text(
        '#!/bin/sh\nfor a in "$@"; do echo "$a"; done\necho "$SGLANG_RAGGED_VERIFY_MODE"\necho "$ADASIM_POLICY"\n'
    )
    fake.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([out / "launch.sh"], cwd="/", env=environment, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[:4] == ["-m", "sglang.launch_server", "--model-path", "a target"]
    assert lines[lines.index("--speculative-algorithm") + 1] == "ADAFLASH"
    assert lines[-2:] == ["compact", str(out / "adasim_policy.json")]


def test_flags_follow_the_engine(tmp_path: Path) -> None:
    engine = backend(chunked_prefill=2048, kv={"blocks": 100, "block_tokens": 16, "prefix_cache": True}, max_draft_len=7)
    flags = launch(source(tmp_path, backend=engine), "t", "d", None).flags
    assert flags["--chunked-prefill-size"] == "2048"
    assert flags["--max-total-tokens"] == "1600"
    assert flags["--speculative-num-draft-tokens"] == "8"
    assert "--disable-radix-cache" not in flags
    assert "--mem-fraction-static" not in flags


def test_what_the_plugin_refuses_is_refused_here(tmp_path: Path) -> None:
    engine = backend(parallel={"tp": 2, "dp": 2}, scheduler={"kind": "ema"})
    with pytest.raises(InputError) as caught:
        launch(source(tmp_path, backend=engine), "t", "d", None)
    assert [p.split(":")[0] for p in caught.value.problems] == ["backend.parallel.dp", "backend.scheduler"]


def test_memory_by_hand(tmp_path: Path) -> None:
    """An H20 keeps 512 MB + 1.5 MB x 8,192 + 128 MB + 2 MB x 8 = 12.94 GB free, of a rule that is above its 10 GiB."""
    found = source(tmp_path)
    memory = GpuMemory(MODELS["qwen3-8b"], HARDWARE["h20"], Split(), 5)
    assert specs_of(found, "h20", "qwen3-8b", 5) == memory
    need = needs(memory, found, 8)
    assert need.reserved == pytest.approx((512 + 1.5 * 8192 + 128 + 2 * 8) / 1024)
    layer = 4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 12288  # parameters of attention and MLP
    assert need.drafter == pytest.approx(2 * 5 * layer / 2**30)
    assert need.weights == pytest.approx(2 * (36 * layer + 2 * 4096 * 151936) / 2**30)
    assert need.kv_gib_per_1k_tokens == pytest.approx(1000 * (36 + 5) * 2 * 8 * 128 * 2 / 2**30)
    left = 96 - need.reserved - need.weights - need.drafter
    assert need.kv_tokens == pytest.approx(1000 * left / need.kv_gib_per_1k_tokens, rel=1e-3)  # the fraction is rounded
    assert need.at_longest == need.kv_tokens // (128 + 16)
    assert need.fraction == pytest.approx(1 - need.reserved / 96, abs=1e-3)


def test_memory_that_does_not_suffice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = {"kind": "closed", "concurrency": 8, "prompt_len": {"kind": "fixed", "tokens": 40_000},
            "output_len": {"kind": "fixed", "tokens": 16}, "requests": 16}  # fmt: skip
    name = written(tmp_path, workload=long, policies=POLICIES[:2], seeds=[0])
    assert run(name, "--hardware", "l40s", "--model", "qwen3-8b") == 0
    assert "8 running requests do NOT fit: 2 do at the mean context" in " ".join(capsys.readouterr().out.split())
    assert run(name, "--hardware", "l40s") == 2
    assert "--hardware and --model go together" in capsys.readouterr().err


def test_errors_of_a_validation(tmp_path: Path) -> None:
    found = source(tmp_path, seeds=[0])
    tables = tmp_path / "v" / "tables"
    with pytest.raises(InputError, match=r"holds no tables/errors\.csv"):
        predict(found, Fixed(verify_len=4), tmp_path / "v")
    tables.mkdir(parents=True)
    (tables / "errors.csv").write_text(
        "metric,cells,mean_abs,bias,worst,worst_cell\nthroughput_ratio,72,0.05,0.04,-0.138,head\ntau,72,0.04,0.0,0.1,x\n"
    )
    predicted = predict(found, Fixed(verify_len=4), tmp_path / "v")
    assert predicted.errors[RATIO] == {"mean": 0.05, "worst": 0.138}
    assert list(predicted.table["policy"]) == ["plain decoding", "fixed(verify_len=4)"]


def test_intervals_of_a_profile_move_the_prediction(tmp_path: Path) -> None:
    """One input alone, verification, by 10 %: it is what plain decoding's time is made of, so tokens/s fall by 9.1 %."""
    profile = {
        "name": "p",
        "provenance": dict.fromkeys(("source", "hardware", "model", "engine", "date", "how"), "x") | {"inputs": ["x"]},
        "cost": {"kind": "formula", "base_ms": 10, "per_token_ms": 1},
        "acceptance": {"kind": "curves", "curves": {"default": {"kind": "geometric", "alpha": 0.8}}},
        "uncertainty": {"verify": 0.1},
    }
    path = tmp_path / "p.yaml"
    path.write_text(yaml.safe_dump(profile))
    alone = predict(read_source(str(path), Asked()), Fixed(verify_len=4), None)
    assert alone.errors["output_tok_s"]["interval"] == pytest.approx(0.0953, abs=1e-4)  # ln 1.1
    assert alone.errors[RATIO]["interval"] == pytest.approx(0.0, abs=1e-9)  # both slow down alike
    name = written(tmp_path, backend={"kind": "sim", "profile": "p.yaml", "max_running_requests": 8}, seeds=[0])
    served = predict(read_source(name, Asked()), Fixed(verify_len=4), None)
    assert served.errors["output_tok_s"]["interval"] == pytest.approx(0.0953, abs=1e-3)
    assert "not held against measurements" in served.how


def test_a_profile_without_traffic(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("adaflash_qwen3_8b", "--max-batch", 64, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert [row["batch"] for row in facts["prediction"]] == [1, 2, 4, 8, 16, 32, 64]
    assert any("no prefill, no queue" in note for note in facts["notes"])


def test_bad_input_is_refused_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = written(tmp_path)
    assert run() == 2
    assert "give a scenario or a profile, or --canary URL_A URL_B" in capsys.readouterr().err
    assert run(name, "--blocks", 4, "--clients", 2) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2
    assert run(name, "--canary", "a", "b", "--policy", "head", "--hardware", "h20") == 2
    assert len(capsys.readouterr().err.splitlines()) == 2
    assert run(name, "--policy", "nope", "--out", tmp_path / "a") == 2
    assert run("autospec_glm47", "--out", tmp_path / "a") == 2
    assert "drafts blocks in one pass" in capsys.readouterr().err
    assert run(name, "--validation", tmp_path, "--out", tmp_path / "a") == 2
    assert not (tmp_path / "a").exists()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x").write_text("")
    assert run(name, "--out", tmp_path / "b") == 2
    assert "holds something" in capsys.readouterr().err
