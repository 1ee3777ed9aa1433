"""Two servers under the same traffic: the faster one wins, and what is unfair or broken is said."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from adasim.deploy import canary as canaries
from adasim.deploy.blocks import Half, order_of
from adasim.deploy.canary import Canary
from adasim.deploy.client import Ask, Reply, Server
from adasim.deploy.traffic import of_file, of_scenario
from adasim.errors import InputError
from adasim.scenario import validate
from tests.build import adasim, backend, closed, config
from tests.fake_server import Fake, serving

FAST, SLOW = 0.05, 0.3  # far apart, and far above what a busy machine adds
QUICK = ("--blocks", 5, "--block-size", 2, "--clients", 2, "--tokens", 5)


def run(*arguments: object) -> int:
    return adasim("deploy", *arguments)


def compared(capsys: pytest.CaptureFixture[str], a: Fake, b: Fake, *more: object) -> tuple[int, dict[str, Any]]:
    with serving(a) as url_a, serving(b) as url_b:
        code = run(*more, "--canary", url_a, url_b, *QUICK, "--json")
    return code, json.loads(capsys.readouterr().out)


def half(side: str, block: int, tokens: int, seconds: float, error: str = "", text: str = "same text") -> Half:
    reply = Reply(0.0, [0.1, seconds], text, tokens, tokens // 2, error)
    return Half(side, block, [reply], seconds)


def canary(halves: list[Half]) -> Canary:
    servers = Server("http://a", "sglang", "m"), Server("http://b", "sglang", "m")
    return Canary(servers, "output_tok_s", halves)


def test_the_faster_server_is_better(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    a, b = Fake(round_s=SLOW), Fake(round_s=FAST)
    code, facts = compared(capsys, a, b, "--out", tmp_path)
    assert code == 0
    assert facts["verdict"].startswith("B is better than A: +")
    found = {m["metric"]: m for m in facts["metrics"]}
    assert found["output_tok_s"]["low"] > 0
    assert found["tpot_p50_ms"]["verdict"] == "better"
    assert found["tau"]["A"] == pytest.approx(2.0)  # 4 tokens after the first in 2 rounds
    assert found["itl_p50_ms"]["A"] > 800 * SLOW
    assert facts["warnings"] == []
    assert facts["outputs_alike"] == 1.0
    asked = [[sorted(body["text"] for body in f.asked[i : i + 2]) for i in range(0, 12, 2)] for f in (a, b)]
    assert asked[0] == asked[1]  # block by block; the two clients of one are in no order
    blocks = pd.read_csv(tmp_path / "blocks.csv")
    assert list(blocks["side"]) == ["A", "B", "B", "A", "A", "B", "B", "A", "A", "B", "B", "A"]
    assert json.loads((tmp_path / "canary.json").read_text())["verdict"] == facts["verdict"]


def test_the_slower_server_is_worse_and_apis_may_differ(capsys: pytest.CaptureFixture[str]) -> None:
    code, facts = compared(capsys, Fake(round_s=FAST), Fake(api="openai", round_s=SLOW))
    assert code == 0
    assert facts["verdict"].startswith("B is worse than A: -")
    assert [s["api"] for s in facts["servers"].values()] == ["sglang", "openai"]
    assert "tau" not in {m["metric"] for m in facts["metrics"]}  # B does not tell


def test_another_model_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    code, facts = compared(capsys, Fake(), Fake(model="another", words="else"))
    assert code == 0
    assert facts["warnings"][0] == "the servers say that they serve different models: a-model, another"
    assert facts["warnings"][1].startswith("outputs differ from the start in 100% of the requests")


def test_a_dying_server_leaves_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    code, facts = compared(capsys, Fake(), Fake(dies_after=5))  # in its third block
    assert code == 1
    assert facts["verdict"].startswith("cannot tell: 1 blocks were finished by both servers, 3 are needed")
    assert "B answered no request of block 3" in facts["verdict"]
    assert facts["failed"] == {"A": 0, "B": 3}
    assert any(w.startswith("B: 3 requests failed, like: ") for w in facts["warnings"])


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Fake()) as url:
        assert run("--canary", url, "http://127.0.0.1:9", *QUICK) == 2
        assert "http://127.0.0.1:9: no SGLang or OpenAI-compatible server answers" in capsys.readouterr().err
        assert run("--canary", url, url + "/", *QUICK) == 2
        assert "is not compared with itself" in capsys.readouterr().err


def test_traffic_of_a_scenario(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    acceptance = {"kind": "curves", "curves": {"code": {"kind": "geometric", "alpha": 0.8}}}
    raw = config(workload=closed(domains={"code": 1}, output_len={"kind": "fixed", "tokens": 5}),
                 backend=backend(acceptance=acceptance))  # fmt: skip
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(raw))
    b = Fake()
    with serving(Fake()) as url_a, serving(b) as url_b:
        assert run(path, "--canary", url_a, url_b, "--blocks", 3, "--clients", 2) == 0
    assert "Verdict: " in capsys.readouterr().out
    assert len(b.asked) == 4 * 16  # at least 16 a block, three blocks beside the warm-up
    assert {body["sampling_params"]["max_new_tokens"] for body in b.asked} == {5}
    with pytest.raises(InputError, match="no prompts for default2"):
        of_scenario(
            validate(config(workload=closed(domains={"default2": 1}), backend=backend(
                acceptance={"kind": "curves", "curves": {"default2": {"kind": "geometric", "alpha": 0.8}}}))),
            None, 2, 4,
        )  # fmt: skip


def test_an_open_loop_keeps_its_arrivals(tmp_path: Path) -> None:
    prompts = tmp_path / "default.jsonl"
    prompts.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    workload = {"kind": "poisson", "rate_rps": 10, "requests": 8}
    scenario = validate(config(workload=workload))
    blocks = of_scenario(scenario, str(tmp_path), 2, 4)
    assert [b[0].at_s for b in blocks] == [0.0, 0.0]
    arrivals = [r.arrival_s for r in scenario.workload.requests_of(0)]
    assert [a.at_s for a in blocks[1]] == pytest.approx(np.array(arrivals[4:]) - arrivals[4])
    with pytest.raises(InputError, match="8 requests; 3 blocks of 4 need 12"):
        of_scenario(scenario, str(tmp_path), 3, 4)
    assert {a.text for b in of_file(prompts, 7, 3, 2) for a in b} == {"one", "two"}


def test_paired_blocks_by_hand() -> None:
    """B is 1.5 times as fast in every block, whatever the machine does meanwhile: the interval has no width."""
    halves = [
        half(side, n, 100, s) for n, pace in enumerate([9, 1, 2, 4]) for side, s in (("A", 3.0 * pace), ("B", 2.0 * pace))
    ]
    found = canary(halves)
    assert len(found.pairs) == 3
    goal = found.compared[0]
    assert [goal.a, goal.b] == pytest.approx([100 / 6, 25.0])
    assert list(goal.gain) == pytest.approx([0.5, 0.5, 0.5])
    assert found.verdict == "B is better than A: +50.0% (+50.0% to +50.0%) in output tokens/s, 3 paired blocks"


def test_a_large_gain_with_much_noise_is_one() -> None:
    """Three or twelve times as fast: the interval is wider than the gain, and above 0."""
    times = [(1, 1), *((3, 1), (12, 1)) * 3]
    halves = [half(side, n, 100, float(s)) for n, t in enumerate(times) for side, s in zip("AB", t, strict=True)]
    goal = canary(halves).compared[0]
    assert goal.gain.low > 0
    assert goal.gain.half_width > goal.gain.estimate
    assert goal.verdict == "better"


def test_noise_is_not_a_difference() -> None:
    seconds = {"A": [1, 1.0, 1.1, 0.9, 1.0], "B": [1, 1.1, 0.9, 1.0, 1.05]}
    found = canary([half(side, n, 100, s) for side, times in seconds.items() for n, s in enumerate(times)])
    assert found.verdict.startswith("cannot tell: ")


def test_blocks_with_failures_do_not_count() -> None:
    halves = [half(side, n, 100, 1.0, error="gone" if (side, n) == ("B", 2) else "") for n in range(4) for side in "AB"]
    found = canary(halves)
    assert [a.block for a, _ in found.pairs] == [1, 3]
    assert found.verdict.startswith("cannot tell: 2 blocks")
    assert found.warnings == ["B: 1 requests failed, like: gone; their blocks do not count"]


def test_ctrl_c_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    halves = iter([half(side, n, 100, 1.0) for n in range(4) for side in "AB"])

    def until_interrupted(*_: object) -> Half:
        for found in halves:
            return found
        raise KeyboardInterrupt

    monkeypatch.setattr(canaries, "run_half", until_interrupted)
    found = canary([])
    canaries.run(found, [[Ask("x", 1)]] * 9, 1, 1.0)
    assert found.stopped == "interrupted in block 3"
    assert len(found.pairs) == 3


def test_order_alternates() -> None:
    assert [order_of(n) for n in range(4)] == [(0, 1), (1, 0), (0, 1), (1, 0)]
