"""Inputs moved until the answer changes: on runs whose truth is known, and in the simulator."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from adasim.errors import InputError
from adasim.plan import Plan, Trial
from adasim.sensitivity import FLIPS, HOLDS, UNSURE, Move, Run, break_even, moves_of, study
from adasim.sensitivity_report import answer, by_input
from tests.build import FREE_COST, adasim, backend, closed, plan

THREE = [{"kind": "off"}, {"kind": "fixed", "verify_len": 4}, {"kind": "head"}]


def runner(own: float = 0.001) -> Run:
    """off 500; fixed 1000 / verify; head 1100 / verify^3: equal at verify 1.1^(1/2) = 1.049."""

    def run(trials: list[Trial], what: str) -> pd.DataFrame:
        rows = []
        for t in trials:
            slow = (t.config["backend"].get("adjust") or {}).get("verify", 1.0)
            kind = next(p["kind"] for p in t.config["policies"] if p["name"] == t.policy)
            speed = {"off": 500.0, "fixed": 1000.0 / slow, "head": 1100.0 / slow**3}[kind]
            shared = np.random.default_rng(t.seed).normal(0, 0.3)
            mine = np.random.default_rng([t.seed, len(kind)]).normal(0, own)
            row = {"policy": t.policy, "seed": t.seed, "backend": "sim", **t.point}
            rows.append(row | {"output_tok_s": speed * np.exp(shared + mine), "tpot_p50_ms": 1e3 / speed})
        return pd.DataFrame(rows)

    return run


def verify(*values: float) -> Move:
    return Move("verify", "backend.adjust.verify", 1.0, values, "default")


def test_an_input_that_flips_the_ranking_is_found_through_common_noise() -> None:
    """Seeds differ by 30 %; the flip at +10 % (11 % behind) is told all the same, that at +5 % (0.2 %) is not."""
    p = plan(policies=THREE, seeds=[0, 1, 2])
    _, rows = study(p, [verify(0.95, 1.05, 1.1)], runner(), within=0.2)
    assert rows["ranking"].tolist() == [HOLDS, UNSURE, FLIPS]
    assert set(rows["leader"]) == {"head"}
    assert set(rows["rival"]) == {"fixed(verify_len=4)"}
    assert rows["moved_leader"].tolist() == ["head", "fixed(verify_len=4)", "fixed(verify_len=4)"]
    assert rows["gain"].tolist() == pytest.approx([0.1] * 3, abs=0.01)
    assert rows["moved_gain"].tolist() == pytest.approx([1.1 / v**2 - 1 for v in (0.95, 1.05, 1.1)], abs=0.01)


def test_only_contenders_are_run_again() -> None:
    p, log = plan(policies=THREE, seeds=[0, 1]), list[Trial]()
    run = runner()

    def logged(trials: list[Trial], what: str) -> pd.DataFrame:
        log.extend(trials)
        return run(trials, what)

    study(p, [verify(1.1)], logged, within=0.2)
    assert {t.policy for t in log if "adjust" in t.config["backend"]} == {"head", "fixed(verify_len=4)"}


def test_break_even_by_hand() -> None:
    """The gain falls from 10 % to 5 % over +0.05: nothing is left at 1.10. Nothing lowers it: no break-even."""
    rows = pd.DataFrame({"value": [0.95, 1.05], "neutral": 1.0, "gain": 0.10, "moved_gain": [0.14, 0.05]})
    assert break_even(rows) == pytest.approx(1.10)
    assert np.isnan(break_even(rows.assign(moved_gain=[0.1, 0.2])))
    assert np.isnan(break_even(rows.assign(moved_gain=[0.1, 0.099])))  # at 6, 100 moves away
    assert np.isnan(break_even(rows.assign(neutral=None)))


def test_the_table_puts_the_largest_swing_first_and_says_what_flips() -> None:
    p = plan(policies=THREE, seeds=[0, 1, 2])
    idle = Move("draft", "backend.adjust.draft", 1.0, (0.9, 1.1), "profile")
    _, rows = study(p, [idle, verify(0.9, 1.1)], runner(own=0.0), within=0.2)
    table = by_input(rows, [])
    assert table["input"].tolist() == ["verify", "draft"]
    assert table["ranking"].tolist() == [FLIPS, HOLDS]
    assert table["moved_to"].tolist() == ["x 0.9 / x 1.1"] * 2
    (says,) = answer(table, [])
    assert says.startswith("head leads fixed(verify_len=4) by +10.0% ± 0.0%; ")
    assert "the leader changes with verify (to fixed(verify_len=4))" in says


def simulated(**fields: Any) -> Plan:
    return plan(policies=THREE, **fields)


def test_moves_come_from_the_profile_the_defaults_or_the_command_line() -> None:
    p = simulated(backend=backend(adjust={"verify": 1.1}))
    moves, notes = moves_of(p, ["draft=0.5..2", "workload.concurrency=2..8", "head_bias=[1]"])
    found = {m.name: m for m in moves}
    assert found["verify"].values == pytest.approx((1.1 * 0.95, 1.1 * 1.05))
    assert found["verify"].source == "default"
    assert found["draft"].values == (0.5, 2.0)
    assert found["head_bias"].values == (1.0,)
    assert found["correlation"].values == (0.15,)  # it is 0, and cannot fall
    assert found["workload.concurrency"].field == "workload.concurrency"
    assert found["workload.concurrency"].values == (2, 8)
    assert "overhead" not in found
    assert notes == ["overhead was not moved: there is none", "range_tokens was not moved: acceptance is not correlated"]
    own = {"kind": "sim", "profile": "dcut_h20", "max_running_requests": 8}
    stated, _ = moves_of(simulated(backend=own, workload=closed(concurrency=8, drain=False)))
    assert {m.name: m.source for m in stated}["range_tokens"] == "profile"


def test_a_default_that_cannot_be_is_left_out_and_said() -> None:
    nearly_all = {"kind": "curves", "curves": {"default": {"kind": "geometric", "alpha": 0.995}}}
    moves, notes = moves_of(simulated(backend=backend(acceptance=nearly_all)))
    assert {m.name: m.values for m in moves}["acceptance"] == (0.95,)
    assert any(n.startswith("acceptance was not moved to 1.05: acceptance: a factor of 1.05 asks for tau") for n in notes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("verfy=1..2", r"--move verfy=1..2: expected NAME=LOW..HIGH; names: verify, draft"),
        ("verify", r"--move verify=: expected LOW..HIGH"),
        ("verify=[[1]]", r"expected LOW..HIGH or \[values\]"),
        ("verify=0..2", r"--move verify: backend.adjust.verify: got 0.0"),
        ("workload.concurency=1..2", r"unknown key; did you mean concurrency\?"),
    ],
)
def test_bad_moves_are_refused(given: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        moves_of(simulated(), [given])


def test_one_seed_is_too_few() -> None:
    with pytest.raises(InputError, match="needs two seeds"):
        moves_of(simulated(seeds=[0]))


def test_the_break_even_of_the_simulator_is_where_the_gain_vanishes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Drafting is moved to the break-even that the study found: fixed and plain decoding are then alike."""
    path = tmp_path / "mine.yaml"
    cost = FREE_COST | {"draft": {"kind": "linear", "base_ms": 12.0}}
    raw = {
        "name": "mine",
        "title": "Mine",
        "workload": closed(output_len={"kind": "fixed", "tokens": 40}),
        "backend": backend(cost=cost),
        "policies": [{"kind": "off"}, {"kind": "fixed", "verify_len": 4}],
        "seeds": [0, 1, 2],
    }
    path.write_text(json.dumps(raw))  # YAML too
    call: list[str | Path] = ["sensitivity", path, "--only", "--workers", "1", "--json"]
    assert adasim(*call, "--move", "draft=0.7..1.3", "--within", "2", "--out", tmp_path / "a") == 0
    (row,) = json.loads(capsys.readouterr().out)["sensitivity"]
    assert row["leader"] in {"off", "fixed(verify_len=4)"}
    even = row["break_even"]
    assert adasim(*call, "--move", f"draft=[{even}]", "--within", "2", "--out", tmp_path / "b") == 0
    (there,) = json.loads(capsys.readouterr().out)["sensitivity"]
    assert float(there["moved_gains"].rstrip("%")) == pytest.approx(0, abs=3)
    assert abs(row["gain"]) > 0.08


SMALL = ["--set", "sweep.workload.concurrency=[2]", "--set", "workload.requests=24", "--workers", "1"]


def test_the_command_writes_a_report_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    call = ["sensitivity", "smoke", *SMALL, "--only", "--move", "verify=0.9..1.1", "--move", "head_bias=[-1.0]"]
    assert adasim(*call, "--out", out) == 0
    assert "At concurrency 2: " in capsys.readouterr().out
    page = (out / "report.html").read_text()
    assert "Which input would change the answer" in page
    assert len(pd.read_csv(out / "tables" / "moves.csv")) == 3
    before = {p: p.stat().st_mtime_ns for p in (out / "trials").rglob("*")}
    assert adasim(*call, "--out", out, "--resume") == 0
    assert {p: p.stat().st_mtime_ns for p in (out / "trials").rglob("*")} == before
    assert (out / "report.html").read_text() == page
    assert adasim("run", "smoke", *SMALL, "--out", out, "--resume") == 2
    assert "holds results of adasim sensitivity" in capsys.readouterr().err


def test_moving_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert adasim("sensitivity", "smoke", *SMALL, "--only", "--out", tmp_path / "out") == 2
    assert "nothing to move: --only needs --move" in capsys.readouterr().err
