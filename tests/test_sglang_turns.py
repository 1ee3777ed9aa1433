"""Servers of one machine take turns: one goes on while the others wait between steps, and no clock counts the waiting."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from adasim.experiment import open_folder
from adasim.plan import Trial
from adasim.real.sglang_client import backend as backend_file
from adasim.real.sglang_client import serving
from adasim.real.sglang_client.api import Api
from adasim.real.sglang_client.backend import SglangBackend
from adasim.real.sglang_client.process import Launch
from adasim.real.sglang_plugin.turn import Hold, Turn, own_seconds
from adasim.turns import run_in_turns, take_turns
from adasim.validation.blocks import rehearse
from tests.sglang_fake import FakeServer, fields, read_bytes, target_in
from tests.validating import plan

LOAD = {
    "kind": "closed", "concurrency": 2, "requests": 6, "prompt_len": {"kind": "fixed", "tokens": 20},
    "output_len": {"kind": "fixed", "tokens": 40}, "domains": {"code": 1.0},
}  # fmt: skip
POLICIES = [{"kind": "off"}, {"kind": "fixed", "verify_len": 4}, {"kind": "fixed", "name": "eight", "verify_len": 8}]


@pytest.fixture(autouse=True)
def _texts(monkeypatch: pytest.MonkeyPatch) -> None:
    read_bytes(monkeypatch)


@pytest.fixture
def target(tmp_path: Path) -> str:
    return target_in(tmp_path)


def trials(target: str, out: Path, **other: Any) -> list[Trial]:
    raw = {"backend": fields(target), "workload": LOAD, "policies": POLICIES, "sweep": {}, "seeds": [0]}
    open_folder(out, resume=False, overwrite=False)
    return plan(**(raw | other)).trials


@pytest.fixture
def servers(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeServer]]:
    """Those that were started, one a run that goes on at the same time; kept for the next."""
    started: list[FakeServer] = []
    busy: list[FakeServer] = []

    @contextmanager
    def leased(launch: Launch) -> Iterator[Any]:
        free = [s for s in started if s not in busy and not s.dead]
        if not free:
            made = FakeServer(SglangBackend.model_validate(fields(target)), turn=tmp_path / f"{len(started)}.turn")
            started.append(stack.enter_context(made))
            free = [made]
        busy.append(free[0])
        try:
            yield SimpleNamespace(api=Api(free[0].url), hold=free[0].hold)
        finally:
            busy.remove(free[0])

    monkeypatch.setattr(backend_file, "leased", leased)
    monkeypatch.setattr(backend_file, "kept", lambda launch: SimpleNamespace(api=Api(started[0].url)))
    monkeypatch.setattr(serving, "TURN_S", 0.01)
    monkeypatch.setattr("adasim.turns.TURN_S", 0.0)
    with ExitStack() as stack:
        yield started
    assert not busy
    assert not list(tmp_path.glob("*.turn")), "nobody is held in the end"


def test_time_that_was_held_is_nobodys() -> None:
    own = own_seconds([(10.0, 12.0), (20.0, 25.0)])
    assert [own(t) for t in (5.0, 10.0, 11.0, 12.0, 13.0, 20.0, 22.0, 25.0, 26.0)] == [
        5.0, 10.0, 10.0, 10.0, 11.0, 18.0, 18.0, 18.0, 19.0,
    ]  # fmt: skip
    assert own_seconds([])(7.0) == 7.0


def test_who_is_held_says_how_far_it_is_and_its_clock_stands_still(tmp_path: Path) -> None:
    turn, hold = Turn(tmp_path / "turn"), Hold(tmp_path / "turn", lambda: True)
    turn.wait(1)  # nobody holds it
    assert not turn.held
    taken: list[int | None] = []
    client = Thread(target=lambda: taken.append(hold.take(lambda: True)))
    client.start()
    while not (tmp_path / "turn").exists():
        time.sleep(0.001)
    before, real = turn.clock(), time.monotonic()
    waiting = Thread(target=lambda: turn.wait(17))
    waiting.start()
    client.join(5)
    time.sleep(0.1)
    hold.release()
    waiting.join(5)
    assert taken == [17]
    (held,) = turn.held
    assert held[1] - held[0] > 0.09
    assert time.monotonic() - real - (turn.clock() - before) == pytest.approx(held[1] - held[0], abs=1e-3)
    assert not list(tmp_path.iterdir())


def test_a_server_without_a_next_step_is_not_waited_for(tmp_path: Path) -> None:
    hold = Hold(tmp_path / "turn", lambda: True)
    assert hold.take(lambda: False) is None
    hold.clear()
    assert Hold(tmp_path / "turn", lambda: False).take(lambda: True) is None  # it died


def test_a_client_that_was_killed_holds_nobody(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], stdout=subprocess.PIPE, check=True)
    (tmp_path / "turn").write_bytes(done.stdout)
    Turn(tmp_path / "turn").wait(0)  # comes back


def test_turns_change_no_token_and_no_own_time(target: str, servers: list[FakeServer], tmp_path: Path) -> None:
    made = trials(target, tmp_path / "turns")
    assert run_in_turns(made, tmp_path / "turns") == [None] * 3
    assert len(servers) == 3
    moments = []
    for server, trial in zip(servers, made, strict=True):
        assert len(server.turn.held) > 3
        steps = pd.read_parquet(tmp_path / "turns" / "trials" / trial.key / "steps.parquet")
        asked = pd.read_parquet(tmp_path / "turns" / "trials" / trial.key / "requests.parquet")
        assert asked["tokens"].tolist() == [40] * 6
        gaps = (steps["start_s"] - steps["end_s"].shift()).dropna()
        assert (gaps > -1e-9).all()
        held_s = sum(end - begin for begin, end in server.turn.held)
        wall_s = server.turn.held[-1][1] - server.turn.held[0][0]
        assert steps["end_s"].max() < wall_s - held_s + 1.0
        assert held_s > wall_s / 3  # two others had their turns meanwhile
        moments += [(begin, end, server) for begin, end in server.turn.held]
    alone = trials(target, tmp_path / "alone", policies=POLICIES[:1])[0]
    assert run_in_turns([alone], tmp_path / "alone") == [None]
    columns = ["decoding", "emitted", "prefill_tokens", "verify_tokens"]
    both = [pd.read_parquet(tmp_path / n / "trials" / alone.key / "steps.parquet") for n in ("turns", "alone")]
    counts = [steps[columns].sum().tolist() for steps in both]
    assert counts[0] == counts[1]


def test_only_one_goes_on_at_a_time(
    target: str, servers: list[FakeServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[float, float, int]] = []
    step = FakeServer._round

    def watched(server: FakeServer) -> None:
        begin = time.monotonic()
        step(server)
        seen.append((begin, time.monotonic(), id(server)))

    monkeypatch.setattr(FakeServer, "_round", watched)
    made = trials(target, tmp_path / "out", policies=POLICIES[:2])
    assert run_in_turns(made, tmp_path / "out") == [None] * 2
    assert len({server for _, _, server in seen}) == 2
    ordered = sorted(seen)
    changes = [(a, b) for a, b in pairwise(ordered) if a[2] != b[2]]
    assert len(changes) > 6
    assert all(b[0] >= a[1] for a, b in changes)


def test_they_end_together(target: str, servers: list[FakeServer], tmp_path: Path) -> None:
    """Plain decoding takes several times the rounds: it gets several times the turns."""
    made = trials(target, tmp_path / "out", policies=POLICIES[::2])
    assert run_in_turns(made, tmp_path / "out") == [None] * 2
    ends = [server.turn.held[-1][1] for server in servers]
    began = min(server.turn.held[0][0] for server in servers)
    assert abs(np.diff(ends)[0]) < 0.3 * (max(ends) - began)


def test_a_server_that_dies_leaves_the_others(
    target: str, servers: list[FakeServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = FakeServer._finish

    def dies(server: FakeServer, r: Any) -> None:
        finish(server, r)
        if server is servers[1] and server.finished == 2:
            server._die()

    monkeypatch.setattr(FakeServer, "_finish", dies)
    made = trials(target, tmp_path / "out")
    first, second, third = run_in_turns(made, tmp_path / "out")
    assert first is third is None
    assert second is not None
    assert second.again
    assert "of 6 requests had finished" in second.error
    assert len(list((tmp_path / "out" / "lost").iterdir())) == 1


def test_ctrl_c_ends_every_run_and_holds_nobody(
    target: str, servers: list[FakeServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, count = Hold.take, [0]

    def interrupted(hold: Hold, busy: Any) -> int | None:
        count[0] += 1
        if count[0] == 5:
            raise KeyboardInterrupt
        return take(hold, busy)

    monkeypatch.setattr(Hold, "take", interrupted)
    made = trials(target, tmp_path / "out", policies=POLICIES[:2])
    with pytest.raises(KeyboardInterrupt):
        run_in_turns(made, tmp_path / "out")
    for server in servers:
        until = time.monotonic() + 5
        while (server.running or server.waiting) and time.monotonic() < until:
            time.sleep(0.01)
        assert not server.running
    assert not list((tmp_path / "out" / "trials").iterdir())


def test_a_rehearsal_starts_a_server_for_each(target: str, servers: list[FakeServer], tmp_path: Path) -> None:
    rehearse(trials(target, tmp_path / "out"))
    assert len(servers) == 3


@pytest.mark.parametrize(
    ("changed", "load"),
    [
        ({"url": "http://127.0.0.1:1"}, {}),
        ({"device": "cuda", "dtype": "bfloat16"}, {}),
        ({"opd": {}}, {}),
        ({}, {"kind": "poisson", "rate_rps": 5.0}),
    ],
    ids=["somebody else's", "on a GPU", "with a trainer", "arrivals"],
)
def test_who_cannot_wait_runs_alone(changed: dict[str, Any], load: dict[str, Any], target: str, tmp_path: Path) -> None:
    whole = {k: v for k, v in LOAD.items() if k != "concurrency" or not load} | load
    assert take_turns(trials(target, tmp_path / "a"))
    assert not take_turns(trials(target, tmp_path / "b", backend=fields(target, **changed), workload=whole))
