"""Advice in worlds whose truth is known."""

import json
from dataclasses import replace
from math import inf, isnan, nan
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from adasim.advice.choice import Loop, choose, crossover, half, told
from adasim.advice.doubt import DRAWS, input_parts, total, validated
from adasim.advice.known import Known, known_of
from adasim.advice.measure import Measure
from adasim.advice.memory import Memory, memory_of
from adasim.advice.money import Money
from adasim.advice.sharpen import remaining
from adasim.advice.steady import World, best_lengths
from adasim.advice.traffic import Traffic, mix_of, numbers
from adasim.calibration.acceptance import CurveAcceptance
from adasim.calibration.cost import LinearDraft
from adasim.calibration.formula import FormulaCost
from adasim.calibration.from_throughput import fit_throughput_table
from adasim.calibration.kernel_tables import BATCHES, kernel_cost
from adasim.calibration.specs import MODELS
from adasim.calibration.survival import AnyCurve, Geometric
from adasim.calibration.throughput_table import Row
from adasim.errors import InputError
from adasim.story import design
from adasim.tables import GOODPUT, summarise, with_speedup
from tests.build import adasim, closed, plan
from tests.recordings import ENGINE

BASE, TOKEN, DRAFT, ALPHA = 10.0, 0.5, 1.0, 0.6
CROSSES = (ALPHA * BASE - DRAFT) / (TOKEN * (1 - ALPHA))  # one draft: tau (BASE + n t) = BASE + DRAFT + 2 n t; n = 25
TIGHT = dict.fromkeys(("verify", "draft", "acceptance"), 0.01) | {"correlation": 0.0}
SMALL = [
    "--input-len",
    "32",
    "--output-len",
    "32",
    "--length-cv",
    "0",
    "--workers",
    "1",
    "--seeds",
    "3",
    "--budget",
    "20m",
]
CPU = Path(__file__).parents[1] / "reports" / "cpu_validation" / "profile.yaml"
BENCH = "batch,k,tok_s,accept_length\n1,0,100,\n8,0,700,\n64,0,3600,\n1,3,210,2.6\n8,3,1150,2.6\n"


def profile(tmp_path: Path, name: str = "hand", **changes: Any) -> Path:
    """A profile of one draft a round: 10 ms a pass, half a millisecond a token, a draft of 1 ms, accepted in 60 %."""
    raw: dict[str, Any] = {
        "name": name,
        "provenance": dict.fromkeys(("source", "hardware", "model", "engine", "date", "how"), "by hand")
        | {"inputs": ["made up"]},
        "cost": {
            "kind": "formula",
            "base_ms": BASE,
            "per_token_ms": TOKEN,
            "draft": {"kind": "linear", "base_ms": DRAFT, "autoregressive": True},
        },
        "acceptance": {"kind": "curves", "curves": {"default": {"kind": "geometric", "alpha": ALPHA}}},
        "uncertainty": TIGHT,
    }
    path = tmp_path / f"{name}.yaml"
    path.write_text(yaml.safe_dump(raw | changes, sort_keys=False))
    return path


def answer(out: Path, *arguments: object, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert adasim("advise", *map(str, arguments), *SMALL, "--out", out, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_known_crossover_is_found_within_its_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """25 by hand; on a line between 16 (1.067) and 64 (0.896) it is 27.5. The same call gives the same bytes."""
    arguments = [profile(tmp_path), "--max-draft", "1", "--concurrency", "4,16,64", "--usd-per-gpu-hour", "3.6"]
    found = answer(tmp_path / "a", *arguments, "--trainer-gpus", "1", capsys=capsys)
    (crossed,) = found["crossover"]
    assert crossed["low"] < CROSSES < crossed["high"]
    assert crossed["at"] == pytest.approx(27.5, rel=0.12)
    take = {row["load"]: row["take"] for row in found["choices"]}
    assert (take[4], take[64]) == ("k=1", "off")
    by = {(row["policy"], row["concurrency"]): row for row in found["policies_closed"]}
    expected = 1e3 * 4 * (1 + ALPHA) / (BASE + 2 * 4 * TOKEN + DRAFT)
    assert by["k=1", 4]["output_tok_s"] == pytest.approx(expected, rel=0.05)
    assert by["off", 4]["usd_per_million"] == pytest.approx(3.6 / 3600 * 1e6 / by["off", 4]["output_tok_s"])
    assert by["k=1", 4]["usd_per_million"] == pytest.approx(2 * 3.6 / 3600 * 1e6 / by["k=1", 4]["output_tok_s"])
    assert {row["batch"]: row["k"] for row in found["best_k"]} == {2**i: int(2**i < CROSSES) for i in range(9)}
    assert any("wins tokens per second and loses ITL" in line for line in found["answer"])
    answer(tmp_path / "b", *arguments, "--trainer-gpus", "1", capsys=capsys)
    for name in ("tables/choices.csv", "tables/policies_closed.csv", "figures/speedup_closed.png", "closed.yaml"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    capsys.readouterr()
    assert adasim(*found["deploy"].split()[1:], "--json") == 0
    assert '"k": 1' in capsys.readouterr().out
    page = (tmp_path / "a" / "report.html").read_text()
    assert "What to take" in page
    assert "Run next" in page


def test_a_gain_below_its_error_cannot_be_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At 16 the gain is 6.7 % by hand: (1.6 x 18) / 27 - 1. Told when inputs are known to 1 %, not at 20 % of tau."""
    tight = answer(tmp_path / "t", profile(tmp_path), "--max-draft", "1", "--concurrency", "16", capsys=capsys)
    wide = profile(tmp_path, "wide", uncertainty=TIGHT | {"acceptance": 0.2})
    loose = answer(tmp_path / "w", wide, "--max-draft", "1", "--concurrency", "16", capsys=capsys)
    (told_row,), (open_row,) = tight["choices"], loose["choices"]
    assert (told_row["take"], told_row["verdict"]) == ("k=1", "better")
    assert told_row["gain"] == pytest.approx(1.6 * 18 / 27 - 1, abs=0.03)
    assert (open_row["take"], open_row["best"]) == ("off", "k=1")
    assert open_row["error_acceptance"] == pytest.approx(-np.log(1 - 0.2), rel=0.1)
    assert any("whether speculation pays we cannot tell: k=1" in line for line in loose["answer"])
    assert loose["error"][0]["part"] == "acceptance"
    assert "sglang.bench_serving" in loose["next"][0]


def test_limits_may_choose_another_policy_than_tokens_per_second(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of the requests are code (tau 3.82: 7.6 ms a token), half chat (tau 1: 29 ms); plain decoding takes 22.

    Three drafts win tokens per second by 20 %, and miss 24 ms for chat, as one draft does (25 ms).
    """
    curves = {"code": {"kind": "geometric", "alpha": 0.97}, "chat": {"kind": "geometric", "alpha": 0.001}}
    cost = {"kind": "formula", "base_ms": 20.0, "per_token_ms": 0.25}
    cost["draft"] = {"kind": "linear", "base_ms": DRAFT, "autoregressive": True}
    path = profile(tmp_path, acceptance={"kind": "curves", "curves": curves}, cost=cost)
    arguments = [path, "--max-draft", "3", "--concurrency", "8", "--domain", "code", "--domain", "chat"]
    found = answer(tmp_path / "o", *arguments, "--slo-tpot-ms", "24", capsys=capsys)
    by = {row["policy"]: row for row in found["policies_closed"]}
    assert by["k=3"]["output_tok_s"] > 1.02 * by["off"]["output_tok_s"]
    assert by["off"]["slo_met"] == 1
    assert by["k=3"]["slo_met"] == pytest.approx(0.5, abs=0.15)
    (row,) = found["choices"]
    fast = max(by, key=lambda p: by[p]["output_tok_s"])
    assert by[fast]["goodput_rps"] < by["off"]["goodput_rps"]
    assert row["best"] != fast
    assert any(f"{fast} has the most tokens per second, but only" in line for line in found["answer"])


def test_what_does_not_fit_is_said_first_and_not_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(tmp_path / "o", "--hardware", "l40s", "--model", "qwen3-235b-a22b", capsys=capsys)
    assert found["answer"][0].startswith("Infeasible: weights take 437.8 GiB")
    assert found["answer"][1] == "Nothing was simulated."
    assert "choices" not in found
    assert not list((tmp_path / "o" / "trials").iterdir())
    assert found["memory"][0]["fits"] is False


def test_a_drafter_that_does_not_fit_leaves_plain_decoding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--hardware", "l40s", "--model", "qwen3-8b", "--draft-layers", "90", "--concurrency", "2"]
    found = answer(tmp_path / "o", *arguments, capsys=capsys)
    assert found["answer"][0].startswith("Infeasible with a drafter: weights and drafter take 47.6 GiB")
    assert {row["policy"] for row in found["policies_closed"]} == {"off"}
    assert found["numbers"] == "simulated from unmeasured inputs"
    assert any(line.startswith("UNMEASURED") for line in found["answer"])


def test_files_are_fitted_and_the_run_that_helps_most_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "bench.csv"
    table.write_text(BENCH)
    found = answer(tmp_path / "o", table, "--concurrency", "8", "--rate", "2", capsys=capsys)
    row = found["choices"][0]
    assert row["take"] == "k=3"
    assert row["gain"] == pytest.approx(1150 / 700 - 1, abs=3 * 0.05)
    assert row["error_fit"] > 0
    assert row["error_measurements"] > 0
    assert {r["loop"] for r in found["choices"]} == {"closed", "open"}
    assert "--max-concurrency" in found["next"][-2]
    assert found["next"][-1].startswith(f"adasim advise {table} k")
    assert (tmp_path / "o" / "profile.yaml").is_file()


def test_a_scenario_gives_loads_limits_and_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = {
        "name": "mine", "title": "t", "workload": closed(concurrency=2), "policies": [{"kind": "off"}],
        "backend": {"kind": "sim", "profile": str(profile(tmp_path)), "max_running_requests": 4},
        "sweep": {"workload.concurrency": [2, 4]}, "slo": {"tpot_ms": 50},
    }  # fmt: skip
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(raw))
    capsys.readouterr()
    arguments = ["--scenario", str(tmp_path / "mine.yaml"), "--max-draft", "1", "--seeds", "3", "--workers", "1"]
    assert adasim("advise", profile(tmp_path), *arguments, "--out", tmp_path / "o", "--budget", "20m", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    made = yaml.safe_load((tmp_path / "o" / "closed.yaml").read_text())
    assert [row["load"] for row in found["choices"]] == [2, 4]
    assert made["workload"]["output_len"] == {"kind": "fixed", "tokens": 64}
    assert made["backend"]["max_running_requests"] == 4
    assert made["slo"] == {"tpot_ms": 50.0}


BAD = [
    (["nonsense.csv"], ["no such file"]),
    ([], ["give a profile or benchmark files"]),
    (["dcut_h20", "x.csv"], ["one profile, or measurements to fit"]),
    (["dcut_h20", "--concurrency", "1,x", "--rate", "-1"], ["--concurrency 1,x", "--rate -1"]),
    (["dcut_h20", "--only", "x", "--budget", "1"], ["--only has no effect", "--budget 1"]),
    (["dcut_h20", "--domain", "math", "--domain", "a=0"], ["--domain math: the data hold no", "--domain a=0"]),
    (["--hardware", "h1", "--model", "m"], ["--hardware h1: unknown", "--model m: unknown"]),
    (
        ["dcut_h20", "--accept-len", "3", "--trainer-gpus", "1"],
        ["--accept-len has no effect", "--trainer-gpus has no effect"],
    ),
    (["dcut_h20", "--hardware", "h20", "--set", "a=1"], ["go together", "--set has no effect"]),
    (["dcut_h20", "--concurrency", "1"], ["concurrency"]),
    (["dcut_h20", "--rate", "1"], ["batch"]),
    (["dcut_h20", "--scenario", "smoke", "--input-len", "8"], ["--input-len has no effect with --scenario"]),
    ([str(CPU), "--scenario", "drift_opd"], ["no acceptance of math; there are chat, code"]),
    (["dcut_h20", "--kernels", "--gpus", "2"], ["--kernels has no effect", "--kernels prices one GPU"]),
    (["dcut_h20", "--validation", "nowhere"], ["--validation nowhere"]),
    (["--hardware", "h200", "--model", "qwen3-8b", "--accept-len", "17"], ["--accept-len 17"]),
]


@pytest.mark.parametrize(("arguments", "says"), BAD)
def test_bad_input_is_refused_at_once_and_leaves_nothing(
    arguments: list[str], says: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert adasim("advise", *arguments, "--out", tmp_path / "o") == 2
    errors = capsys.readouterr().err
    assert [s for s in says if s not in errors] == []
    assert not (tmp_path / "o").exists()


def test_best_lengths_by_hand() -> None:
    """Two drafts: tau 1, 1.6, 1.96. At batch 1 rounds take 10.5, 12, 13.5: k = 2; at 16 18, 27, 36: k = 1; at 64 none."""
    cost = FormulaCost(base_ms=BASE, per_token_ms=TOKEN, draft=LinearDraft(base_ms=DRAFT, autoregressive=True))
    world = World(cost, CurveAcceptance(curves={"a": Geometric(alpha=ALPHA)}), {"a": 1.0}, 2, one_pass=False)
    assert world.tok_s(16, 1.0) == pytest.approx([16e3 * t / ms for t, ms in ((1, 18), (1.6, 27), (1.96, 36))])
    table = best_lengths([world], [1, 16, 64], [1.0])
    assert table["k"].tolist() == [2, 1, 0]
    assert table["best_drafts"].tolist() == [2, 1, 1]
    assert table["gain"].tolist() == pytest.approx([1.96 * 10.5 / 13.5 - 1, 1.6 * 18 / 27 - 1, 0.0])


def test_domains_share_rounds_not_tokens() -> None:
    """tau 1 and 2, half of the tokens each: 1 / (.5 / 1 + .5 / 2) = 4 / 3."""
    curves: dict[str, AnyCurve] = {"a": Geometric(alpha=0.0), "b": Geometric(alpha=0.9999999)}
    world = World(FormulaCost(base_ms=1), CurveAcceptance(curves=curves), {"a": 1.0, "b": 1.0}, 1, one_pass=False)
    assert world.tau(1.0) == pytest.approx([1.0, 4 / 3], rel=1e-5)


def test_crossovers_by_hand() -> None:
    """Speed 2 at 1, 1 at 4, 0.5 at 16, on a line in log2; the band is a factor of 1.25 wide."""
    curve = pd.DataFrame({"load": [1.0, 4.0, 16.0], "speedup": [2.0, 1.0, 0.5]})
    curve["low"], curve["high"] = curve["speedup"] / 1.25, curve["speedup"] * 1.25
    found = crossover(curve)
    assert found is not None
    expected = [4.0, 2 ** (2 * 0.6 / 0.8), 2 ** (2 + 2 * 0.25 / 0.625), 1, 16]
    assert [found.at, found.low, found.high, found.first, found.last] == pytest.approx(expected)
    assert found.says() == "up to about 4 (2.83 to 6.96)"
    above = crossover(curve.assign(speedup=3.0, low=2.0, high=4.0))
    assert above is not None
    assert (above.at, above.says()) == (inf, "up to 16 and maybe beyond")
    below = crossover(curve.assign(speedup=0.9, low=0.8, high=1.1))
    assert below is not None
    assert below.says() == "nowhere from 1 on (below 1 to beyond 16)"
    assert crossover(curve.head(1)) is None


def test_parts_of_an_error_by_hand() -> None:
    assert total({"noise": 0.03, "verify": 0.04, "prefill": nan}) == pytest.approx(0.05)
    assert told(0.04, {"noise": 0.03, "verify": 0.04})[0] == "cannot tell"
    assert told(0.06, {"noise": 0.03, "verify": 0.04})[0] == "better"
    assert told(0.5, {"noise": nan, "verify": 0.04})[0].startswith("cannot tell")
    assert half(0.0, {"noise": inf}) == inf
    d = design(plan(policies=[{"kind": "off"}, {"kind": "fixed", "name": "k", "verify_len": 4}]))
    base = pd.DataFrame({"policy": ["off", "k"], "output_tok_s": [100.0, 150.0]})
    slow, none = base.assign(output_tok_s=[100.0, 135.0]), base.assign(output_tok_s=[100.0, 0.0])
    parts = input_parts(base, [("verify", slow), ("draft", none), ("x", base.head(1))], d, "k", "off")
    assert parts == {"verify": pytest.approx(-np.log(0.9)), "draft": inf}
    drawn = input_parts(base, [(DRAWS, slow)] * 4, d, "k", "off")
    assert drawn[DRAWS] == pytest.approx(-2.7764 * np.log(0.9), rel=1e-3)  # Student's t at 4


def loop(speeds: dict[str, float], kinds: list[dict[str, Any]]) -> Loop:
    """A loop of made-up speeds, no noise."""
    p = plan(policies=kinds, sweep={"workload.concurrency": [4]}, seeds=[0, 1])
    d = design(p)
    noise = {0: 0.999, 1: 1.001}
    rows = [
        {"policy": name, "seed": seed, "backend": "sim", "workload.concurrency": 4}
        | {
            "output_tok_s": speed * (noise[seed] if name != "off" else 1.0),
            "tpot_p50_ms": 1e3 / max(speed, 1),
            "itl_p99_ms": 1.0,
        }
        for name, speed in speeds.items()
        for seed in (0, 1)
    ]
    trials = with_speedup(pd.DataFrame(rows), d)
    return Loop("closed", p, d, trials, summarise(trials, d))


def test_the_simplest_that_cannot_be_told_from_the_best_is_taken() -> None:
    kinds: list[dict[str, Any]] = [
        {"kind": "off"}, {"kind": "fixed", "name": "k=3", "verify_len": 4}, {"kind": "head", "name": "head"},
    ]  # fmt: skip
    near = choose(loop({"off": 100, "k=3": 150, "head": 151}, kinds)).iloc[0]
    assert (near["best"], near["take"], near["alike"]) == ("head", "k=3", "")
    far = choose(loop({"off": 100, "k=3": 120, "head": 151}, kinds)).iloc[0]
    assert (far["best"], far["take"]) == ("head", "head")
    without = choose(loop({"k=3": 120, "head": 151}, kinds)).iloc[0]
    assert without["verdict"] == "plain decoding was not predicted"
    assert isnan(without["gain"])


def test_something_over_nothing_is_better_unless_an_input_may_turn_it() -> None:
    kinds: list[dict[str, Any]] = [{"kind": "off"}, {"kind": "fixed", "name": "k=3", "verify_len": 4}]
    fast = loop({"off": 100, "k=3": 150}, kinds)
    trials = fast.trials.assign(goodput_rps=np.where(fast.trials["policy"] == "off", 0.0, 3.0))
    limited = replace(fast.design, goal=GOODPUT)
    one = Loop("closed", fast.plan, limited, trials, summarise(trials, limited))
    row = choose(one).iloc[0]
    assert (row["take"], row["gain"], row["error"], row["verdict"]) == ("k=3", inf, 0.0, "better")
    one.moved = [("verify", trials.assign(goodput_rps=0.0))]  # neither meets the limits
    row = choose(one).iloc[0]
    assert (row["take"], row["best"], row["best_gain"], row["best_error"]) == ("off", "k=3", inf, inf)


def test_a_validations_error_counts(tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "errors.csv").write_text("metric,mean_abs\nthroughput_ratio,0.05\ntpot_p50_ratio,0.04\n")
    assert validated(tmp_path) == {"closed": 0.05, "open": 0.04}
    with pytest.raises(InputError, match="holds no errors"):
        validated(tmp_path / "tables")


def memory(**fields: Any) -> Memory:
    known = known_of([], hardware="h100", model="qwen3-8b")
    asked: dict[str, Any] = {"hardware": None, "model": None, "draft_layers": None, "gpus": 1, "fraction": 0.9} | fields
    found = memory_of(known, **asked)
    assert found is not None
    return found


def test_memory_by_hand() -> None:
    """Qwen3-8B: 36 layers of 192.9 M parameters, two matrices of 622 M, bf16; 147,456 bytes of KV a token."""
    m = memory()
    weights = 2 * (36 * (4096 * 128 * 80 + 3 * 4096 * 12288) + 2 * 4096 * 151936)
    assert m.plain.weight_bytes == weights
    assert m.kv_tokens(drafter=False) == int((0.9 * 80 * 2**30 - weights) / 147456)
    assert m.holds(1000, drafter=False) == m.kv_tokens(drafter=False) // 1001
    assert m.kv_tokens(drafter=True) < m.kv_tokens(drafter=False)
    width = 3 * 4096 + 48 * 128 + 2 * 12288
    assert m.buffers_gib(64, drafter=True) == pytest.approx(64 * 16 * (2 * width + 6 * 151936) / 2**30)
    assert m.misfits(1000, 64, drafter=True) == []
    assert "buffers" in m.misfits(1000, 2**14, drafter=True)[0]
    assert "no KV cache of a request" in m.misfits(1e7, 1, drafter=False)[0]
    with pytest.raises(InputError, match="do not divide"):
        memory(gpus=3)


def test_the_run_at_the_question_leaves_less_than_one_far_from_it() -> None:
    rows = [Row(1, 0, 100.0), Row(8, 0, 700.0), Row(64, 0, 3600.0), Row(1, 3, 210.0, 2.6), Row(8, 3, 1150.0, 2.6)]
    posterior = fit_throughput_table(rows, draws=100)
    near, far = remaining(posterior, [Row(64, 3), Row(64, 0)], [Row(64, 3), Row(1, 0)])
    assert 0 <= near < 0.5 < far <= 1


def test_kernel_tables_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product takes n / 1000 ms whatever its tokens, attention batch x context / 1e6 ms: all sums are known."""
    model = MODELS["qwen3-8b"]
    data = tmp_path / "aiconfigurator_core" / "systems" / "data" / "h200_sxm"
    for part, name in (("gemm", "gemm"), ("attention", "generation_attention")):
        folder = data / part / "sglang" / "0.5.14"
        folder.mkdir(parents=True)
        if part == "gemm":
            rows = [(m, n, k, n / 1000) for m in (1, 4096) for n in (1024, 16384, 65536) for k in (4096, 12288)]
            table = pd.DataFrame(rows, columns=["m", "n", "k", "latency"]).assign(gemm_dtype="bfloat16")
        else:
            cells = [(b, s, b * s / 1e6) for b in BATCHES for s in (1, 1024, 131072)]
            table = pd.DataFrame(cells, columns=["batch_size", "step", "latency"]).assign(
                kv_cache_dtype="bfloat16", attn_dtype="bfloat16", window_size=0, num_heads=32, num_key_value_heads=8,
                head_dim=128,
            )  # fmt: skip
        table.to_parquet(folder / f"{name}_perf.parquet")
    (data.parents[1] / ".." / "__init__.py").resolve().write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    cost, source = kernel_cost("h200", model, draft_layers=5, host_ms=1.2)
    layer = (6144 + 4096 + 2 * 12288 + 4096) / 1000
    passed = 36 * (layer + 8 * 1024 / 1e6) + 151936 / 1000
    assert 1e3 * cost.verify_s(8, 64, 1024.0) == pytest.approx(passed)
    assert 1e3 * cost.draft_s(1, 16, 15, 512.0) == pytest.approx(5 * layer + 151936 / 1000 + 5 * 512 / 1e6)
    assert source == "aiconfigurator_core: h200_sxm, SGLang 0.5.14, bfloat16"
    for hardware, spec, says in (("h20", model, "no tables of h20"), ("h200", MODELS["qwen3-30b-a3b"], "mixtures")):
        with pytest.raises(InputError, match=says):
            kernel_cost(hardware, spec, 5, 1.2)


def test_small_parts_by_hand() -> None:
    assert numbers("4,1,4", "--x", whole=True) == (1.0, 4.0)
    for bad in ("", "0", "1.5", "a", "1,"):
        with pytest.raises(InputError, match="--x"):
            numbers(bad, "--x", whole=True)
    assert mix_of([], ["a", "b"])[0] == {"a": 1.0, "b": 1.0}
    with pytest.raises(InputError, match="there are a, b"):
        mix_of(["c"], ["a", "b"])
    assert Money(3.6, 2, 0.5).per_million(1000.0, drafts=True) == pytest.approx(2.5 * 3.6 / 3.6)
    assert Money(3.6, 2, 0.5).per_million(0.0, drafts=False) == inf
    assert not known_of([], hardware="h200", model="qwen3-8b").measured
    known: Known = known_of(["dcut_h20"])
    assert (known.measured, known.has_head, known.batches, known.max_draft_len) == (True, True, (4, 64), 15)


@pytest.mark.parametrize(("engine", "own"), [("torch", True), ("sglang", True), ("vllm", False), (None, False)])
def test_engines_that_adasim_runs_are_measured_by_adasim(engine: str | None, own: bool, tmp_path: Path) -> None:
    identity = None if engine is None else ENGINE.model_copy(update={"engine": engine}).model_dump(mode="json")
    known = known_of([str(profile(tmp_path, identity=identity))])
    measure = Measure(known, Traffic({}, (4,), None, None, 32.0, 32.0, "made up", real_scenario="mine.yaml"))
    times, text = measure.times(4), measure.text(4)
    assert measure.own_engine == own
    if own:
        assert times[0].startswith("adasim profile mine.yaml --budget 10m --set 'profile.batches=[1, 2, 4, 8]'")
        assert text[0].startswith("adasim record mine.yaml --set")
    else:
        assert "bench" in times[0]
        assert times == text
