"""Runs of one engine take turns of seconds, begin and end together, and give what they give alone."""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from adasim.experiment import open_folder
from adasim.plan import Trial
from adasim.real.turns import Stopwatch, to_the_end
from adasim.turns import run_in_turns, take_turns
from tests.validating import plan

LOAD = {
    "kind": "closed", "concurrency": 2, "requests": 4, "prompt_len": {"kind": "fixed", "tokens": 9},
    "output_len": {"kind": "fixed", "tokens": 12}, "domains": {"code": 1.0},
}  # fmt: skip
SIMULATED = [{"kind": "off"}, {"kind": "fixed", "verify_len": 4}]


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def trials(tmp_path: Path, **fields: object) -> tuple[list[Trial], Path]:
    """Plain decoding of an untrained target, three seeds."""
    pytest.importorskip("torch")
    engine = {"kind": "torch", "target": "random-tiny", "dtype": "float32"}
    raw = {"backend": engine, "workload": LOAD, "policies": [{"kind": "off"}], "sweep": {}, "seeds": [0, 1, 2]}
    open_folder(tmp_path, resume=False, overwrite=False)
    return plan(**(raw | fields)).trials, tmp_path


def test_time_of_others_does_not_count() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    clock.now_s += 2
    assert watch() == 2
    watch.stop()
    clock.now_s += 50
    watch.go_on()
    clock.now_s += 1
    assert watch() == 3


def test_the_last_turn_gives_what_was_made() -> None:
    def run() -> Generator[float, None, str]:
        yield from (0.5, 1.0)
        return "records"

    assert to_the_end(run()) == "records"


def test_turns_change_no_token_and_no_own_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adasim.turns.TURN_S", 0.0)  # a step each
    made, out = trials(tmp_path / "turns")
    assert run_in_turns(made, out) == [None] * 3
    alone, beside = trials(tmp_path / "alone")
    assert [run_in_turns([t], beside) for t in alone] == [[None]] * 3
    for trial in made:
        tables = [pd.read_parquet(folder / "trials" / trial.key / "steps.parquet") for folder in (out, beside)]
        counts = ["decoding", "emitted", "prefill_tokens", "verify_tokens", "first_tokens"]
        pd.testing.assert_frame_equal(tables[0][counts], tables[1][counts])
        assert (tables[0]["start_s"].diff().dropna() >= 0).all()


def test_all_of_them_begin_and_end_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run that is least far takes the next turn, so that each meets the same moments."""
    monkeypatch.setattr("adasim.turns.TURN_S", 0.0)
    made, out = trials(tmp_path)
    order: list[int] = []
    scenarios = [t.scenario() for t in made]
    whole = type(scenarios[0].backend).turns  # type: ignore[union-attr]

    def turns(backend: object, workload: object, policy: object, seed: int) -> Generator[float, None, Any]:
        run = whole(backend, workload, policy, seed)  # type: ignore[arg-type]
        while True:
            order.append(seed)
            try:
                yield next(run)
            except StopIteration as end:
                return end.value

    monkeypatch.setattr(type(scenarios[0].backend), "turns", turns)
    assert run_in_turns(made, out) == [None] * 3
    for at in range(0, len(order) - 3, 3):
        assert len(set(order[at : at + 3])) == 3, "each once before any twice: their steps weigh the same"


def test_one_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, out = trials(tmp_path)
    kind = type(made[0].scenario().backend)
    whole = kind.turns  # type: ignore[union-attr]

    def turns(backend: object, workload: object, policy: object, seed: int) -> Generator[float, None, Any]:
        if seed == 1:
            raise RuntimeError("no room")
        return (yield from whole(backend, workload, policy, seed))  # type: ignore[arg-type]

    monkeypatch.setattr(kind, "turns", turns)
    failed = run_in_turns(made, out)
    assert [f.error if f else None for f in failed] == [None, "RuntimeError: no room", None]
    assert {p.name for p in (out / "trials").iterdir()} == {made[0].key, made[2].key}


def test_who_cannot_wait_runs_alone(tmp_path: Path) -> None:
    """Simulations need not, open loops cannot: requests arrive whoever's turn it is."""
    assert not take_turns(plan(policies=SIMULATED, sweep={}).trials)
    arrivals = LOAD | {"kind": "poisson", "rate_rps": 5.0}
    del arrivals["concurrency"]
    assert not take_turns(trials(tmp_path / "open", workload=arrivals)[0])
    simulated, out = plan(policies=SIMULATED, sweep={}, seeds=[0]).trials, tmp_path / "sim"
    open_folder(out, resume=False, overwrite=False)
    assert run_in_turns(simulated, out) == [None] * len(simulated)
