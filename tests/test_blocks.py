"""Policies are measured in alternation with plain decoding, resumably, within a budget."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from adasim.errors import InputError
from adasim.executors import Interrupted
from adasim.experiment import Failure, open_folder
from adasim.plan import Trial
from adasim.tolerances import Validation
from adasim.validation.blocks import Block, Measuring, blocks_of, missing
from tests.validating import measured, plan

FOUR = [{"kind": "off"}, *({"kind": "fixed", "name": f"fixed {v}", "verify_len": v} for v in (2, 3, 4, 5))]


class Log:
    """Takes down what is run in which order; every run takes 10 s on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stop: Callable[[int], bool] = lambda count: False) -> None:
        self.now, self.order, self.stop = 1000.0, list[str](), stop
        monkeypatch.setattr("adasim.executors.run_trial", self.run)

    def run(self, trial: Trial, out: Path, trace: bool = False) -> Failure | None:
        if self.stop(len(self.order)):
            raise KeyboardInterrupt
        self.now += 10
        folder = out / "trials" / trial.key
        folder.mkdir()
        (folder / "trial.json").write_text(json.dumps({"began_s": self.now - 10, "ended_s": self.now}))
        self.order.append("ref" if trial.policy == "off" else trial.policy[-1])
        return None


def start(tmp_path: Path, **fields: object) -> tuple[list[Block], Path]:
    blocks = blocks_of(plan(policies=FOUR, **({"sweep": {}, "seeds": [0, 1]} | fields)))
    open_folder(tmp_path, resume=False, overwrite=False, command="validate")
    return blocks, tmp_path


def test_every_policy_stands_between_two_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(monkeypatch)
    blocks, out = start(tmp_path)
    assert Measuring(out, Validation(), clock=lambda: log.now).run(blocks) == 0
    assert " ".join(log.order) == "ref 2 3 ref 4 5 ref ref 3 4 ref 5 2 ref"
    assert [t.repeat for t in blocks[0].references(out)] == [0, 1, 2]
    assert len({t.key for b in blocks for t in b.references(out)}) == 6


def test_every_point_comes_once_before_any_comes_twice(tmp_path: Path) -> None:
    blocks, _ = start(tmp_path, sweep={"workload.concurrency": [1, 2, 4]}, seeds=[5, 7, 6])
    places = [(b.reference.seed, b.reference.point["workload.concurrency"]) for b in blocks]
    assert places == [(s, c) for s in (5, 7, 6) for c in (1, 2, 4)]


def test_a_repeat_has_a_folder_of_its_own_and_changes_no_other() -> None:
    trial = plan().trials[0]
    assert len({trial.key, replace(trial, repeat=0).key, replace(trial, repeat=1).key}) == 3


def test_the_budget_stops_before_a_part_that_would_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part takes 30 or 40 s. After 40 + 30 s another would end at 110 s."""
    log = Log(monkeypatch)
    blocks, out = start(tmp_path)
    assert Measuring(out, Validation(), budget_s=100.0, clock=lambda: log.now).run(blocks) == 4
    assert " ".join(log.order) == "ref 2 3 ref 4 5 ref"
    assert Measuring(out, Validation(), clock=lambda: log.now).run(blocks) == 0
    assert " ".join(log.order[7:]) == "ref 3 4 ref 5 2 ref"


def test_after_ctrl_c_a_part_goes_on_with_a_young_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(monkeypatch, stop=lambda count: count == 5)
    blocks, out = start(tmp_path, seeds=[0])
    measuring = Measuring(out, Validation(), clock=lambda: log.now)
    with pytest.raises(Interrupted):
        measuring.run(blocks)
    assert [t.policy for t in missing(blocks[0], out)] == ["fixed 5"]
    log.stop = lambda count: False
    log.now += 3600
    assert Measuring(out, Validation(), clock=lambda: log.now).run(blocks) == 0
    assert " ".join(log.order) == "ref 2 3 ref 4 ref 5 ref"  # the old reference says nothing an hour later


def test_plain_decoding_and_another_policy_are_needed() -> None:
    for policies in ([{"kind": "off"}], FOUR[1:]):
        with pytest.raises(InputError, match="validate needs one of kind off"):
            blocks_of(plan(policies=policies))


def test_a_real_engine_rehearses_before_anything_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request a client of the reference and of the policies beside it, into a folder that is thrown away."""
    engine = {"kind": "torch", "target": "random-tiny", "drafter": "smollm2-135m"}
    load = {"kind": "closed", "concurrency": 2, "requests": 9, "domains": {"code": 1.0}}
    blocks, out = start(tmp_path, backend=engine, workload=load, sweep={}, seeds=[0])
    seen: list[tuple[str, int, Path]] = []

    def log(trial: Trial, folder: Path, trace: bool = False) -> Failure | None:
        seen.append((trial.policy, trial.config["workload"]["requests"], folder))
        return None

    def log_turns(trials: list[Trial], folder: Path) -> list[Failure | None]:
        return [log(t, folder) for t in trials]

    monkeypatch.setattr("adasim.validation.blocks.run_in_turns", log_turns)
    Measuring(out, Validation()).run(blocks)
    assert [s[:2] for s in seen[:4]] == [("off", 2), ("fixed 2", 2), ("fixed 3", 2), ("off", 9)]
    assert seen[0][2] == seen[2][2] != out == seen[3][2]
    assert not seen[0][2].exists()


def test_real_trials_are_run_and_read(tmp_path: Path) -> None:
    blocks, runs = measured(plan(seeds=[0]), tmp_path)
    assert len(runs) == sum(len(b.references(tmp_path)) + len(b.trials) for b in blocks) == 4 * (2 + 2)
    assert all(len(r.records().steps) for r in runs)
