"""Recorded run folders: what is read back, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from adasim.calibration.estimate.recording import max_draft_len, rounds_of
from adasim.errors import InputError
from adasim.policies.fixed import Fixed
from adasim.recorded import load, load_all
from tests.build import backend
from tests.recordings import ENGINE, mark, record


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fixed = {"kind": "fixed", "verify_len": 4, "name": "f"}
    policies = [{"kind": "off"}, fixed, {"kind": "head", "gamma": {1: 1.0}}]
    sweep = {"workload.concurrency": [2, 4], "policies.f.verify_len": [4, 6]}
    return record(tmp_path_factory.mktemp("made") / "run", policies=policies, sweep=sweep, seeds=[0])


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "run")


def steps_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("trials/*/steps.parquet"))


def test_trials_come_back_with_their_own_policy_point_and_tables(made: Path) -> None:
    found = load(made)
    assert found.identity is None
    assert len(found.trials) == 8  # off and head do not care about the fixed length: a run is counted once
    assert {t.choice for t in found.trials} == {"fixed", "informed"}
    for trial in found.trials:
        assert trial.workload["concurrency"] == trial.point["workload.concurrency"]
        assert trial.records.steps["decoding"].max() == trial.workload["concurrency"]
        if trial.label == "f":
            assert isinstance(trial.policy, Fixed)
            assert trial.policy.verify_len == trial.point["policies.f.verify_len"]
            assert set(trial.records.blocks["verify_len"]) == {trial.policy.verify_len}
    assert max_draft_len(found.trials) == 15
    rounds = rounds_of(found.trials)
    assert set(rounds["fixed_len"]) == {4, 6}
    assert rounds.groupby("life")["request"].nunique().max() == 1


def test_several_folders_are_one_recording(made: Path, tmp_path: Path) -> None:
    other = record(tmp_path / "other", seeds=[7])
    assert len(load_all([made, other]).trials) == 10
    with pytest.raises(InputError, match="named twice"):
        load_all([made, made])


def test_engines_do_not_mix(made: Path, tmp_path: Path) -> None:
    old, new = [record(tmp_path / name, seeds=[0]) for name in ("old", "new")]
    mark(old, ENGINE)
    with pytest.raises(InputError, match="simulated and measured runs do not mix"):
        load_all([made, old])
    mark(new, ENGINE.model_copy(update={"engine_version": "2.14.0", "dtype": "float32"}))
    with pytest.raises(InputError) as caught:
        load_all([old, new])
    text = str(caught.value)
    assert "engine_version: 2.14.0, not 2.13.0" in text
    assert "dtype: float32, not bfloat16" in text
    one = next(new.glob("trials/*/trial.json"))
    one.write_text(json.dumps(json.loads(one.read_text()) | {"engine": ENGINE.model_dump()}))
    with pytest.raises(InputError, match="another engine than trial"):
        load(new)


def backwards(steps: pd.DataFrame) -> None:
    steps["start_s"] = np.where(steps["step"] == 5, steps["start_s"].iloc[3], steps["start_s"])


def negative(steps: pd.DataFrame) -> None:
    steps["verify_s"] = np.where(steps["step"] == 4, -0.001, steps["verify_s"])


def upside_down(steps: pd.DataFrame) -> None:
    steps["end_s"] = np.where(steps["step"] == 4, steps["start_s"] - 0.001, steps["end_s"])


def jump(steps: pd.DataFrame) -> None:
    steps[["start_s", "end_s"]] += 3600 * (steps[["step"]].to_numpy() >= 6)


def absent(steps: pd.DataFrame) -> None:
    steps["draft_s"] = steps["draft_s"].where(steps["step"] != 2)


def too_long(steps: pd.DataFrame) -> None:
    steps["verify_s"] += 1.0 * (steps["step"] == 2)


def column(steps: pd.DataFrame) -> None:
    del steps["verify_tokens"]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (backwards, "step 5 starts before the one before ends: the clock went back"),
        (negative, r"step 4: verify_s is negative \(1 such\)"),
        (upside_down, "step 4 ends before it starts"),
        (jump, "3600 s pass before step 6 while requests run: the clock jumped"),
        (absent, "step 2: a time is missing"),
        (too_long, "step 2: its parts take longer than itself"),
        (column, "column verify_tokens is missing"),
    ],
)
def test_bad_times_are_refused(copy: Path, spoil: Callable[[pd.DataFrame], None], says: str) -> None:
    path = steps_of(copy)[0]
    steps = pd.read_parquet(path)
    spoil(steps)
    steps.to_parquet(path)
    with pytest.raises(InputError, match=says) as caught:
        load(copy)
    assert path.parent.name in str(caught.value)


def test_all_problems_are_named_at_once(copy: Path, tmp_path: Path) -> None:
    for path, spoil in zip(steps_of(copy), (negative, jump), strict=False):
        steps = pd.read_parquet(path)
        spoil(steps)
        steps.to_parquet(path)
    next(copy.glob("trials/*/gaps.parquet")).unlink()
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError) as caught:
        load_all([copy, tmp_path / "empty"])
    text = str(caught.value)
    for says in ("is negative", "the clock jumped", "gaps.parquet is missing", "no recorded run"):
        assert says in text


def test_unfinished_trials_are_left_out_and_told(copy: Path) -> None:
    next(copy.glob("trials/*/trial.json")).unlink()
    found = load(copy)
    assert len(found.trials) == 7
    assert found.notes == ["run: 1 of 8 trials are unfinished and left out"]
    shutil.rmtree(copy / "trials")
    with pytest.raises(InputError, match="holds no finished trial"):
        load(copy)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (None, r"trial.json holds no config of policy, workload and backend; record it anew"),
        ({"policy": {"kind": "off"}}, "holds no config"),
        ({"policy": {"kind": "fixed", "verify_len": 0}, "workload": {}, "backend": {}}, "config.policy: .*verify_len"),
        ({"policy": {"kind": "guess"}, "workload": {}, "backend": {}}, "config.policy: .*guess"),
    ],
)
def test_trials_that_do_not_say_what_they_ran_are_refused(copy: Path, config: object, says: str) -> None:
    path = min(copy.glob("trials/*/trial.json"))
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "config"}))
    if config is not None:
        path.write_text(json.dumps(json.loads(path.read_text()) | {"config": config}))
    with pytest.raises(InputError, match=says) as caught:
        load(copy)
    assert path.parent.name in str(caught.value)


def test_impossible_rounds_are_refused(copy: Path) -> None:
    path = next(p for p in sorted(copy.glob("trials/*/rounds.parquet")) if len(pd.read_parquet(p)))
    rounds = pd.read_parquet(path)
    rounds["accepted"] = np.where(rounds.index == 0, rounds["verify_len"], rounds["accepted"])
    rounds.to_parquet(path)
    with pytest.raises(InputError, match=r"rounds.parquet: row 1: accepted < verify_len"):
        load(copy)


def test_older_tables_need_no_rounds(tmp_path: Path) -> None:
    found = load(record(tmp_path / "run", backend=backend()))
    assert all(t.records.rounds is None for t in found.trials)
    assert rounds_of(found.trials).empty
