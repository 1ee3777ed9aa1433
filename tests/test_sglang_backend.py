"""SGLang as a backend, against a made-up server: no SGLang is needed."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from adasim.cli import main
from adasim.errors import InputError
from adasim.experiment import run_trial
from adasim.plan import expand, load
from adasim.policies.fixed import Fixed
from adasim.policies.head import Head
from adasim.policies.off import Off
from adasim.policies.smartspec import SmartSpec
from adasim.profiling.campaign import Campaign
from adasim.profiling.design import design
from adasim.profiling.report import ready, write
from adasim.real.sampling import Forced
from adasim.real.sglang_client import collector, process
from adasim.real.sglang_client.api import Api
from adasim.real.sglang_client.backend import SglangBackend
from adasim.real.sglang_client.counters import counters, others
from adasim.real.sglang_client.launching import launch_of
from adasim.real.sglang_client.tables import Replay
from adasim.real.sglang_plugin.decider import Decider, Moments
from adasim.real.sglang_plugin.orders import Orders, Play, read_orders
from adasim.real.sglang_plugin.player import Player
from adasim.real.sglang_plugin.rounds import Prefill, Round, RoundLog
from adasim.real.sglang_plugin.settings import ServedOpd, Settings
from adasim.recorded import check
from adasim.recorded import load as load_recorded
from adasim.records import CutShort
from adasim.scenario import validate
from adasim.types import DraftView, EngineCaps, Request
from adasim.workload import Closed, Poisson
from tests.sglang_fake import FakeServer, fields, read_bytes, target_in

OUT = 12


@pytest.fixture(autouse=True)
def _texts(monkeypatch: pytest.MonkeyPatch) -> None:
    read_bytes(monkeypatch)


@pytest.fixture
def target(tmp_path: Path) -> str:
    return target_in(tmp_path)


def backend(target: str, **changed: Any) -> SglangBackend:
    return SglangBackend.model_validate(fields(target, **changed))


@contextmanager
def served(target: str, changed: dict[str, Any] | None = None, **fake: Any) -> Iterator[tuple[FakeServer, SglangBackend]]:
    """A made-up server, and a backend that is attached to it; ``changed`` fields are the scenario's alone."""
    with FakeServer(backend(target), **fake) as server:
        yield server, backend(target, url=server.url, **(changed or {}))


def closed(requests: int = 6, clients: int = 3, **more: Any) -> Closed:
    lengths = {"prompt_len": {"kind": "fixed", "tokens": 20}, "output_len": {"kind": "fixed", "tokens": OUT}}
    given = {"concurrency": clients, "requests": requests, "domains": {"code": 1.0}}
    return Closed.model_validate(lengths | given | more)


@pytest.mark.parametrize("policy", [Off(), Fixed(verify_len=4), Head()], ids=lambda p: p.kind)
def test_every_token_of_a_closed_loop_is_recorded(policy: Any, target: str) -> None:
    with served(target) as (_, attached):
        records = attached.run(closed(), policy, 0)
    requests, steps, rounds = records.requests, records.steps, records.rounds
    assert check(records, "x") == []
    assert requests["status"].tolist() == ["finished"] * 6
    assert requests["tokens"].tolist() == [OUT] * 6
    assert steps["emitted"].sum() + steps["first_tokens"].sum() == 6 * OUT
    assert rounds is not None
    counted = (records.blocks["accepted"] * records.blocks["blocks"]).sum()
    assert rounds["accepted"].sum() == requests["accepted"].sum() == counted
    assert steps["decoding"].max() <= 3
    assert (requests["arrival_s"] <= requests["first_token_s"]).all()
    assert (requests["admitted_s"] <= requests["first_token_s"]).all()
    later = requests["arrival_s"].sort_values().iloc[3:].to_numpy()
    assert (later >= requests["finish_s"].sort_values().iloc[:3].to_numpy()).all()  # a client waits for its answer
    if policy.kind == "off":
        assert set(rounds["draft_len"]) == {0}
        assert set(requests["rounds"]) == {OUT - 1}
    if policy.kind == "head":
        assert set(rounds["accept_len"]) == {3.2}
        assert set(rounds["verify_len"]) == {3}
    (note,) = records.notes
    assert "was not started here" in note


def test_a_servers_own_clock_is_taken_out(target: str) -> None:
    with served(target, offset_s=1e6) as (_, attached):
        records = attached.run(closed(), Fixed(verify_len=4), 0)
    assert records.requests["finish_s"].between(0, 60).all()
    assert (records.requests["arrival_s"] <= records.requests["admitted_s"] + 0.05).all()


def test_an_open_loop_sends_on_time(target: str) -> None:
    load = Poisson.model_validate(
        {"rate_rps": 40.0, "requests": 8, "output_len": {"kind": "fixed", "tokens": OUT}, "domains": {"code": 1.0}}
    )
    with served(target) as (_, attached):
        records = attached.run(load, Fixed(verify_len=4), 0)
    asked = np.array([r.arrival_s for r in load.generate(0)])
    assert records.requests["arrival_s"].to_numpy() == pytest.approx(asked, abs=1.0)
    assert (records.requests["arrival_s"].to_numpy() >= asked).all()
    assert records.requests["tokens"].tolist() == [OUT] * 8
    assert records.last_arrival_s == records.requests["arrival_s"].max()


def test_without_drain_all_ends_when_the_last_was_sent(target: str) -> None:
    with served(target) as (_, attached):
        records = attached.run(closed(drain=False, output_len={"kind": "fixed", "tokens": 400}), Off(), 0)
    states = records.requests["status"].tolist()
    assert states.count("finished") < 6
    assert records.requests["arrival_s"].notna().all()
    unfinished = records.requests[records.requests["status"] != "finished"]
    assert (unfinished["tokens"] < 400).all()
    assert not any("cut short" in note for note in records.notes)


def test_all_differences_are_told_at_once(target: str) -> None:
    wrong = {
        "max_running_requests": 8,
        "captured_tokens": [16, 32],
        "dtype": "bfloat16",
        "kv_tokens": 1000,
        "page_size": 4,
    }
    info = {"chunked_prefill_size": 512, "disable_radix_cache": False}
    with served(target, facts=wrong, info=info) as (_, attached), pytest.raises(InputError) as caught:
        attached.run(closed(), Off(), 0)
    assert caught.value.problems == (
        "backend.max_running_requests: 4, the server has 8",
        "backend.kv.block_tokens: 1, the server has 4",
        "backend.kv.blocks: 4096, the server has 250",
        "backend.captured_tokens: [], the server has [16, 32]",
        "backend.dtype: float32, the server has bfloat16",
        "backend.max_prefill_tokens: 2048, the server has 512",
        "backend.prefix cache: False, the server has True",
    )


def test_what_was_resolved_is_part_of_the_identity(target: str) -> None:
    with served(target) as (_, attached):
        identity = attached.identity()
    assert (identity.engine, identity.engine_version, identity.hardware) == ("sglang", "0.5.23", "made up")
    assert identity.resolved is not None
    assert identity.resolved["kv_tokens"] == 4096
    other = identity.model_copy(update={"resolved": identity.resolved | {"kv_tokens": 1}})
    assert identity.differs(other) == ["resolved.kv_tokens: 4096, not 1"]
    assert identity.differs(identity.model_copy(update={"resolved": None})) == []


def test_a_server_that_others_use_is_refused(target: str) -> None:
    with served(target) as (server, attached):
        server.player.obey(Orders(play=Play(policy=Off(), together=2)), 0)  # so that the request of others waits
        from threading import Thread

        busy = Thread(
            target=server.generate, args=({"rid": "x", "input_ids": [1], "sampling_params": {"max_new_tokens": 2}},)
        )
        busy.start()
        while not server.waiting:
            pass
        with pytest.raises(InputError, match="1 requests"):
            attached.run(closed(), Off(), 0)
        server.abort("x")
        busy.join()


def test_traffic_of_others_is_noticed_by_the_counters(target: str) -> None:
    with served(target) as (server, attached):
        assert server.counters is not None
        server.counters["generation_tokens"] = 100  # before: not the run's
        real = server.metrics
        server.metrics = lambda: (real() or "").replace("prompt_tokens_total", "other_total")  # type: ignore[method-assign]
        quiet = attached.run(closed(), Off(), 0).notes
    assert not any("counted" in note for note in quiet)
    before, after = 'sglang:generation_tokens_total{a="1"} 5\n', 'sglang:generation_tokens_total{a="1"} 25\n'
    own = {"sglang:generation_tokens_total": 12, "sglang:prompt_tokens_total": 3}
    assert others(before, after, own) == ["the server counted 20 output tokens, of this run are 12: others used it too"]
    assert others(None, after, own) == [
        "the server keeps no metrics (--enable-metrics): traffic of others would not have been noticed"
    ]


def test_counters_are_summed_over_labels_and_gauges_left_out() -> None:
    text = '# HELP x\nsglang:a_total{r="0"} 2.0\nsglang:a_total{r="1"} 3.0\nsglang:gen_throughput 9.0\nother_total 1\n'
    assert counters(text) == {"sglang:a_total": 5.0}


def test_a_server_that_dies_leaves_what_it_had_done(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "POLL_S", 0.01)
    long = closed(output_len={"kind": "fixed", "tokens": 100})
    with served(target, dies_after=2) as (_, attached), pytest.raises(CutShort) as caught:
        attached.run(long, Off(), 0)
    said = str(caught.value)
    assert "the server was lost: http" in said
    found = caught.value.records
    assert re.search(
        r"[1-3] of 6 requests had finished, \d in flight are lost, \d were never sent; \d+ steps are kept", said
    )
    assert not caught.value.again
    assert (found.requests["status"] != "dropped").sum() >= 3
    assert len(found.steps) > 2

    with FakeServer(backend(target), dies_after=2) as server:
        trial = load_trial(target, url=server.url)
        out = tmp_path / "out"
        (out / "trials").mkdir(parents=True)
        failed = run_trial(trial, out)
    assert failed is not None
    assert "had finished" in failed.error
    (kept,) = (out / "lost").iterdir()
    assert (kept / "requests.parquet").is_file()
    assert "cut short" in json.loads((kept / "lost.json").read_text())["notes"][-1]
    assert not list((out / "trials").iterdir())


def test_steps_that_were_lost_are_noticed(target: str) -> None:
    settings = Settings(policy=Off(), experiments=True, kept_rounds=5)
    with (
        served(target, settings=settings) as (_, attached),
        pytest.raises(CutShort, match=r"steps were lost.*kept_rounds"),
    ):
        attached.run(closed(), Off(), 0)


def test_decrees_are_refused_where_the_server_was_not_started_for_them(target: str) -> None:
    settings, forced = Settings(policy=Off()), {"lengths": [1], "prompts": "random"}
    with served(target, {"forced": forced}, settings=settings) as (_, attached), pytest.raises(InputError) as caught:
        attached.run(closed(), Fixed(verify_len=4), 0)
    (line,) = caught.value.problems
    assert 'refused: forced, together: this server takes none; start it with "experiments": true' in line


def test_forced_requests_stay_in_step(target: str) -> None:
    forced = {"lengths": [1], "prompts": "random"}
    with served(target, {"forced": forced}) as (_, attached):
        records = attached.run(closed(6, 3), Fixed(verify_len=4), 0)
    rounds = records.steps[records.steps["decoding"] > 0]
    assert set(rounds["decoding"]) == {3}
    assert set(rounds["accepted"]) == {3}
    assert any("acceptance was forced to [1]" in note for note in records.notes)


def test_a_profile_of_a_server_has_points(target: str, tmp_path: Path) -> None:
    """The probes' rounds are those that were planned, one by one: the tables join them by order."""
    with FakeServer(backend(target)) as server:
        grid = {"batches": [1, 2], "contexts": [16], "verify_lens": [1, 4], "prefill_tokens": [32], "repeats": 1}
        config = scenario(target, url=server.url) | {"profile": grid, "policies": [{"kind": "off"}, {"kind": "head"}]}
        path = tmp_path / "mine.yaml"
        path.write_text(json.dumps(config))
        campaign = Campaign(design(load(str(path))), tmp_path / "p", 60.0, lambda what, done: None)
        ready(campaign, resume=False, overwrite=False)
        campaign.measure()
        assert [f.error for f in campaign.failures] == []
        found = write(campaign)
    assert found is not None
    points = found.points
    assert set(points["what"]) == {"verify", "draft", "overhead", "between", "prefill"}
    assert set(points.loc[points["what"] == "verify", "batch"]) == {1, 2}
    recorded = load_recorded(tmp_path / "p")
    assert all(t.forced for t in recorded.trials)
    assert {t.drafter_loaded for t in recorded.trials} == {False, True}


def scenario(target: str, **changed: Any) -> dict[str, Any]:
    load = closed().model_dump(mode="json", exclude_none=True)
    return {
        "name": "mine", "title": "t", "workload": load, "backend": fields(target, **changed),
        "policies": [{"kind": "fixed", "verify_len": 4}], "seeds": [0], "measure": {"warmup_requests": 0},
    }  # fmt: skip


def load_trial(target: str, **changed: Any) -> Any:
    return expand(scenario(target, **changed), Path()).trials[0]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kv": {}}, "kv.blocks: is missing"),
        ({"kv": {"blocks": 9, "prefix_cache": True}}, "kv.prefix_cache: real prompts"),
        ({"scheduler": {"kind": "ema"}}, "scheduler: SGLang admits by itself, ema"),
        ({"arguments": {"page_size": 4}}, "arguments.page_size: backend.kv.block_tokens decides it"),
        ({"arguments": {"port": 4}}, "arguments.port: it is decided already"),
        ({"url": "http://x:1", "arguments": {"a": 1}}, "arguments: are for a server that is started"),
        ({"lag_steps": 2}, "lag_steps"),
    ],
)
def test_impossible_fields_are_refused(changed: dict[str, Any], message: str, target: str) -> None:
    with pytest.raises(InputError) as caught:
        validate(scenario(target, **changed))
    assert any(message in line for line in caught.value.problems)


def test_requests_that_cannot_be_served_are_refused(target: str) -> None:
    attached = backend(target, url="http://127.0.0.1:1")
    with pytest.raises(InputError, match="takes 2048 in all"):
        attached.run(closed(output_len={"kind": "fixed", "tokens": 2048}), Off(), 0)
    with pytest.raises(InputError, match=r"in chunks of backend.max_prefill_tokens 10"):
        backend(target, url="http://127.0.0.1:1", max_prefill_tokens=10).run(closed(), Off(), 0)
    with pytest.raises(InputError, match=r"no server answers: http://127.0.0.1:1/server_info"):
        attached.run(closed(), Off(), 0)
    with pytest.raises(InputError, match=r"backend.url: 'localhost:3'"):
        Api("localhost:3")


def test_a_policy_that_asks_for_a_cost_needs_one(target: str) -> None:
    with pytest.raises(InputError, match=r"smartspec.* needs cost"):
        backend(target).check_policy(SmartSpec())
    cost = {"kind": "pass", "base_ms": 1.0, "per_token_ms": 0.1}
    with served(target, {"cost": cost}) as (server, attached):
        attached.check_policy(SmartSpec())
        attached.run(closed(), SmartSpec(), 0)
        assert server.decider.caps.cost is not None
        attached.run(closed(), Off(), 0)
        assert server.decider.caps.cost is None


def test_a_launch_says_all_that_the_scenario_does(target: str) -> None:
    launch = launch_of(backend(target, arguments={"attention_backend": "fa3", "tp_size": 2}, lag_steps=1, device="cuda"))
    text, variables = " ".join(launch.arguments), dict(launch.environment)
    for part in (
        f"--model-path {target}", "--max-running-requests 4", "--max-total-tokens 4096", "--page-size 1",
        "--chunked-prefill-size 2048", "--disable-radix-cache", "--speculative-algorithm ADAFLASH",
        "--attention-backend fa3", "--tp-size 2", "--dtype float32",
    ):  # fmt: skip
        assert part in text
    assert "--disable-overlap-schedule" not in text
    assert variables["SGLANG_RAGGED_VERIFY_MODE"] == "compact"
    assert json.loads(variables["ADASIM_POLICY"])["experiments"] is True
    on_cpu = launch_of(backend(target))
    assert "--disable-overlap-schedule" in on_cpu.arguments
    assert dict(on_cpu.environment)["ADASIM_SGLANG_CPU"] == "1"


def test_without_sglang_the_extra_is_named(
    target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(process.PYTHON, raising=False)
    monkeypatch.setattr(process, "find_spec", lambda name: None)
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps(scenario(target)))
    with pytest.raises(SystemExit) as stop:
        main(["record", str(path), "--out", str(tmp_path / "out")])
    assert stop.value.code == 2
    assert "pip install adasim[sglang]" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    monkeypatch.setenv(process.PYTHON, str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match="nowhere: No such file"):
        process.versions(str(tmp_path / "nowhere"))


def test_a_log_tells_why_a_server_ended(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("hello\nTraceback\nadasim.errors.InputError: ADAFLASH: one\nADAFLASH: two\n[2026] bye\n")
    assert process.reasons(log)[:2] == ["ADAFLASH: one", "ADAFLASH: two"]
    log.write_text("hello\nTraceback\nValueError: no memory\nbye\n")
    assert process.reasons(log)[0] == "ValueError: no memory"
    log.write_text("hello\nbye\n")
    assert process.reasons(log)[:2] == ["hello", "bye"]


def test_a_server_that_ends_at_the_start_says_why(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its interpreter here is one that lacks SGLang."""
    monkeypatch.setenv(process.PYTHON, sys.executable)
    monkeypatch.setattr(tempfile, "tempdir", str(Path(target).parent))  # where its log stays
    with (
        pytest.raises(InputError, match=r"SGLang did not start: .*sglang"),
        process.leased(process.Launch(("--x",), (("PYTHONPATH", ""),))),
    ):
        pass
    assert process.kept(process.Launch(("--x",), ())) is None


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_a_server_does_not_outlive_a_killed_parent() -> None:
    code = (
        "import os, subprocess; from adasim.real.sglang_client.process import end_with_parent\n"
        "child = subprocess.Popen(['sleep', '60'], preexec_fn=end_with_parent)\n"
        "print(child.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False)
    state = Path(f"/proc/{int(done.stdout)}/stat")
    for _ in range(100):
        if not state.is_file() or state.read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    os.kill(int(done.stdout), 9)
    raise AssertionError("it goes on")


def test_orders_travel_as_a_name() -> None:
    orders = Orders(play=Play(policy=Fixed(verify_len=4), forced=Forced(lengths=[1])), forget=7)
    assert read_orders(orders.name()) == orders
    with pytest.raises(InputError) as caught:
        read_orders('adasim {"play": {"policy": {"kind": "hed"}, "more": 1}}')
    assert len(caught.value.problems) == 2
    with pytest.raises(InputError, match="give play, forget or opd"):
        read_orders("adasim {}")


def nothing_shown(opd: ServedOpd) -> None:
    raise AssertionError(opd)


def test_a_busy_player_changes_no_more_than_the_policy() -> None:
    used: list[Any] = []
    driver = SimpleNamespace(policy=Fixed(verify_len=4))
    decider: Any = SimpleNamespace(
        driver=driver, caps=SimpleNamespace(cost=None), use=used.append, believe=lambda cost: None
    )
    player = Player(Settings(policy=Off(), experiments=True), decider, nothing_shown)
    player.obey(Orders(play=Play(policy=Head())), 3)
    assert used == [Head()]
    for play in (Play(policy=Off()), Play(policy=Head(), together=2), Play(policy=Head(), forced=Forced(lengths=[1]))):
        with pytest.raises(InputError, match="3 requests run or wait"):
            player.obey(Orders(play=play), 3)


def test_those_that_wait_are_gathered() -> None:
    decider: Any = SimpleNamespace(
        driver=SimpleNamespace(policy=Off()), caps=SimpleNamespace(cost=None), use=lambda policy: None,
        believe=lambda cost: None,
    )  # fmt: skip
    player = Player(Settings(policy=Off(), experiments=True), decider, nothing_shown)
    assert not player.holds(1)
    player.obey(Orders(play=Play(policy=Off(), together=3)), 0)
    assert [player.holds(n) for n in (0, 1, 2, 3)] == [False, True, True, False]
    player.let_in(1)
    assert not player.holds(1)  # the rest of a burst that did not fit into one step
    player.let_in(0)
    assert player.holds(1)  # of the next


def test_steps_are_written_in_order_once_the_device_has_come_that_far() -> None:
    reached = 0.0
    clock = SimpleNamespace(known=lambda mark: mark <= reached, seconds=lambda mark: 10 + mark)
    decider = Decider(Fixed(verify_len=3), EngineCaps(7, 4), RoundLog(8))
    decider.prefilled(["a"], [5], [5], Moments(0.0, 0.0, 0.0, 1.0, clock))
    decider.draft_lens(["a"], [6])
    decider.verify_lens(DraftView(np.array([2])))
    decider.timed(Moments(1.5, 1.75, 2.0, 2.5, clock))
    decider.accepted([1])
    assert decider.log.dump()["prefills"] == []
    reached = 1.0
    decider.settle()
    kept = decider.log.dump()
    assert Prefill(*kept["prefills"][0]) == Prefill(0, 10.0, 11.0, 0, [0], [5], [5])
    assert kept["rounds"] == []
    reached = 2.5
    decider.settle()
    found = Round(*decider.log.dump()["rounds"][0])
    assert (found.step, found.start_s, found.end_s, found.draft_s, found.verify_s) == (1, 11.5, 12.5, 0.25, 0.5)
    decider.log.forget(1)
    assert decider.log.dump()["prefills"] == []


def replay(*entries: Prefill | Round) -> Replay:
    """Two requests of 10 prompt tokens; the first is to get 4 tokens, the second 3."""
    found = Replay([Request(0, 0, 10, 4), Request(1, 0, 10, 3)], ["code"], 4, 16, 100.0)
    found.sent({0: 0.5, 1: 0.75}, {0: 4, 1: 3})
    for entry in entries:
        found.play(entry, {7: 0, 8: 1})
    return found


def test_a_replay_by_hand() -> None:
    found = replay(
        Prefill(0, 101.0, 101.5, 1, [7], [6], [6], 0),  # a chunk
        Prefill(1, 101.5, 102.0, 0, [7, 8], [4, 10], [10, 10], 20),
        Round(2, 102.0, 103.0, 0.25, 0.5, 0, [7, 8], [11, 11], [3, 3], [3, 2], [2, 0], [2.5, 1.5], 30, 0, [False, False]),
        Round(3, 103.0, 104.0, 0.25, 0.5, 0, [8, 7], [12, 14], [3, 3], [3, 2], [2, 1], None, 40, 2, [True, False]),
        Round(4, 104.0, 105.0, 0.0, 0.5, 0, [7, 9], [15, 3], [0, 0], [1, 1], [0, 0], None, 0, 2),  # 7 had finished
    )
    records = found.records()
    steps, requests = records.steps, records.requests
    assert steps["step"].tolist() == [0, 1, 2, 3]
    assert steps["start_s"].tolist() == [1.0, 1.5, 2.0, 3.0]
    assert steps["first_tokens"].tolist() == [0, 2, 0, 0]
    assert steps["prefill_tokens"].tolist() == [6, 14, 0, 0]
    assert steps["emitted"].tolist() == [0, 0, 4, 1]
    assert steps["accepted"].tolist() == [0, 0, 2, 2]
    assert steps["kv_blocks"].tolist() == [0, 2, 2, 3]
    assert steps["overhead_s"].tolist() == [0.0, 0.0, 0.25, 0.25]
    assert steps["context"].tolist() == [0.0, 0.0, 11.0, 13.0]
    assert requests["admitted_s"].tolist() == [1.0, 1.5]
    assert requests["first_token_s"].tolist() == [2.0, 2.0]
    assert requests["finish_s"].tolist() == [3.0, 4.0]
    assert requests["tokens"].tolist() == [4, 3]
    assert requests["rounds"].tolist() == [1, 2]
    assert requests["verify_tokens"].tolist() == [3, 5]
    assert found.strangers == 1
    assert records.rounds is not None
    assert records.rounds["position"].tolist() == [1, 1, 2]
    assert records.rounds["accept_len"].tolist()[:2] == [2.5, 1.5]
    assert records.rounds["whole"].tolist() == [False, False, True]
    assert records.rounds["draft_version"].tolist() == [0, 0, 2]
    assert steps["draft_version"].tolist() == [0, 0, 0, 2]
    assert requests["draft_version"].tolist() == [0, 2]
    counts = {(b.draft_version, b.verify_len, b.accepted): b.blocks for b in records.blocks.itertuples()}
    assert counts == {(0, 3, 2): 1, (0, 2, 0): 1, (2, 3, 2): 1}
    assert records.gaps[["gap_s", "chunks"]].values.tolist() == [[1.0, 2.0], [1.0, 1.0]]
    meta = {"completion_tokens": 4, "prompt_tokens": 10, "spec_verify_ct": 2, "spec_num_correct_drafts": 2}
    assert found.against({0: {"meta_info": meta}}) == ["request 0: SGLang counts 2 spec_verify_ct, its round records 1"]


def test_a_request_that_lost_its_memory_is_computed_again() -> None:
    found = replay(
        Prefill(0, 101.0, 102.0, 0, [7], [10], [10], 0),
        Round(1, 102.0, 103.0, 0.25, 0.5, 0, [7], [11], [3], [2], [0], None),
        Prefill(2, 103.0, 104.0, 0, [8], [10], [10], 0),
        Prefill(3, 105.0, 106.0, 0, [7], [12], [12], 0),
    )
    requests = found.records().requests
    assert requests["evictions"].tolist() == [1, 0]
    assert requests["tokens"].tolist() == [3, 1]
    assert requests["first_token_s"].tolist() == [2.0, 4.0]


def test_versions_of_the_drafter_and_whole_blocks_are_recorded() -> None:
    found = replay(
        Prefill(0, 101.0, 102.0, 0, [7, 8], [10, 10], [10, 10], 0),
        Round(1, 102.0, 103.0, 0.25, 0.5, 0, [7, 8], [11, 11], [3, 1], [4, 2], [0, 1], None, 0, 0, [True, False]),
        Round(2, 103.0, 104.0, 0.25, 0.5, 0, [7], [12], [1], [2], [1], None, 0, 3),
    )
    records = found.records()
    assert records.rounds is not None
    assert records.rounds["whole"].tolist() == [True, False, False]
    assert records.rounds["draft_version"].tolist() == [0, 0, 3]
    assert records.steps["draft_version"].tolist() == [0, 0, 3]
    assert records.requests["draft_version"].tolist() == [3, 0]
    counts = {(b.draft_version, b.verify_len, b.accepted): b.blocks for b in records.blocks.itertuples()}
    assert counts == {(0, 4, 0): 1, (0, 2, 1): 1, (3, 2, 1): 1}
