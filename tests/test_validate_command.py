"""adasim validate from the command line: what it writes, how it ends, what it refuses."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from adasim.calibration.fitted_on import FittedRun, cell_of
from adasim.errors import InputError
from adasim.experiment import Failure, run_trial
from adasim.identity import EngineIdentity
from adasim.plan import Trial
from adasim.validation.measured import table_of
from adasim.validation.run import runs_of
from adasim.validation.study import check_engine, check_runs, examine, fitted_cells
from tests.build import adasim
from tests.validating import COST, measured, plan, profile, raw

SMALL = {"sweep": {"workload.concurrency": [1, 4]}, "seeds": [0, 1], "validation": {"replications": 2}}
LOOSE = {"throughput_mae": 0.5, "throughput_worst": 0.9, "tau": 0.5, "tpot_p50": 0.9, "tpot_p95": 0.9}


def files(folder: Path, *, predicts: dict[str, Any] | None = None, **fields: Any) -> list[str | Path]:
    """Arguments that validate a small scenario into ``folder``/out."""
    (folder / "s.yaml").write_text(yaml.safe_dump(raw(**(SMALL | fields))))
    known = profile(**(predicts or {})).model_dump(mode="json", exclude_none=True)
    (folder / "p.yaml").write_text(yaml.safe_dump(known))
    return ["validate", folder / "s.yaml", "--profile", folder / "p.yaml", "--out", folder / "out"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str | Path], int]:
    folder = tmp_path_factory.mktemp("ran")
    arguments = files(
        folder,
        predicts={"notes": ["what was left out"]},
        validation={"replications": 2, "tolerances": LOOSE | {"ranking": False}},
    )
    return folder, arguments, adasim(*arguments)


def test_a_good_prediction_passes_and_leaves_a_report(ran: Any) -> None:
    folder, _, code = ran
    assert code == 0
    page = (folder / "out" / "report.md").read_text()
    assert "limits that can be judged are met" in page
    assert "a rehearsal: the «measured» side is itself simulated" in page
    tables = {p.stem: pd.read_csv(p) for p in (folder / "out" / "tables").glob("*.csv") if p.stat().st_size > 1}
    assert {"cells", "errors", "bars", "ranking", "crossover", "attribution", "measured", "simulated"} <= set(tables)
    assert set(tables["bars"]["verdict"]) <= {"met", "cannot tell"}
    assert "cells exceed it" in tables["bars"]["why"][0]
    assert "profile p: what was left out" in page
    cells = tables["cells"]
    assert len(cells) == 3 * 2
    assert (cells.loc[cells["reference"], "predicted_throughput_ratio"] == 1).all()
    assert {p.stem for p in (folder / "out" / "figures").iterdir()} == {"scatter", "errors", "crossover", "attribution"}
    manifest = json.loads((folder / "out" / "manifest.json").read_text())
    assert manifest["made_by"] == "validate"
    assert manifest["finished"]
    assert sum("repeat" in t for t in manifest["trials"]) == 2 * 2 * 2


def test_a_bad_prediction_exits_with_3(ran: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same measurement, held against a profile that takes drafting for slow."""
    folder = ran[0]
    slow = {"cost": COST | {"draft": {"kind": "linear", "base_ms": 9.0}}}
    wrong = [*files(tmp_path, predicts=slow), "--records", folder / "out", "--json"]
    assert adasim(*wrong) == 3
    told = json.loads(capsys.readouterr().out)
    assert any("limits are missed" in line for line in told["answer"])
    assert told["attribution"][0]["part"] == "draft"
    assert not list((tmp_path / "out" / "trials").iterdir())
    assert adasim(*wrong, "--overwrite") == 3


def test_resuming_measures_nothing_twice(ran: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("a trial was run again")

    monkeypatch.setattr("adasim.executors.run_trial", never)
    folder, arguments, _ = ran
    before = (folder / "out" / "tables" / "cells.csv").read_bytes()
    assert adasim(*arguments, "--resume") == 0
    assert (folder / "out" / "tables" / "cells.csv").read_bytes() == before
    assert adasim(*arguments) == 2  # it holds results


def test_an_unfinished_measurement_decides_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = files(tmp_path, validation={"replications": 2, "tolerances": LOOSE, "pair": 1})
    assert adasim(*arguments, "--budget", "0.001s") == 3
    says = capsys.readouterr().out
    assert "Not finished: 7 runs are missing" in says
    assert "7 of 8 runs are missing; go on with --resume" in (tmp_path / "out" / "report.md").read_text()
    assert adasim(*arguments, "--resume") in {0, 3}
    assert "Not finished" not in capsys.readouterr().out


def test_ctrl_c_keeps_what_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, count = run_trial, 0

    def stopping(*arguments: Any) -> Failure | None:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr("adasim.executors.run_trial", stopping)
    arguments = files(tmp_path)
    assert adasim(*arguments) == 130
    assert len(list((tmp_path / "out" / "trials").iterdir())) == 2
    assert adasim(*arguments, "--resume") in {0, 3}


def test_watching_and_the_floor(ran: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, arguments, _ = ran
    watch = [*arguments[:4], "--watch", folder / "out", "--once"]
    assert adasim(*watch) == 0
    assert "nothing moved in 16 runs" in " ".join(capsys.readouterr().out.split())
    slow = files(tmp_path, predicts={"cost": COST | {"draft": {"kind": "linear", "base_ms": 2.0}}})
    assert adasim(*slow[:4], "--watch", folder / "out", "--once", "--json") == 3
    assert "cost of draft fell" in json.loads(capsys.readouterr().out)["answer"][0]
    assert adasim("validate", "--floor", folder / "out", folder / "out", "--json", "--out", tmp_path / "floor") == 0
    told = json.loads(capsys.readouterr().out)
    assert {r["mean_abs"] for r in told["floor"]} == {0.0}
    assert (tmp_path / "floor" / "floor_cells.csv").is_file()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give a scenario and --profile"),
        (["--records", "nowhere"], "nowhere: holds no records of adasim"),
        (["--records", "nowhere", "--budget", "1m"], "--budget has no effect with --records"),
        (["--records", "nowhere", "--resume"], "--resume has no effect with --records"),
        (["--poll", "3"], "--poll has no effect without --watch"),
        (["--watch", "nowhere"], "--out has no effect with --watch"),
        (["--watch", "nowhere", "--floor", "a", "b"], "--watch and --floor exclude each other"),
        (["--budget", "soon"], "expected a time"),
        (["--set", "validation.tolerances.throuput_mae=0.1"], "did you mean throughput_mae"),
        (["--set", "policies=[{kind: head}]"], "needs one of kind off"),
    ],
)
def test_what_it_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    given = files(tmp_path)
    assert adasim(*(["validate"] if not arguments else [*given, *arguments])) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--floor", "nowhere", "there"], "nowhere: holds no records of adasim"),
        (["x.yaml", "--floor", "a", "b"], "a scenario has no effect with --floor"),
        (["s.yaml", "--profile", "p.yaml", "--watch", "nowhere", "--once"], "nowhere: holds no records of adasim"),
        (["s.yaml", "--profile", "p.yaml", "--watch", "nowhere", "--once", "--poll", "2"], "no effect with --once"),
    ],
)
def test_what_the_other_ways_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    files(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert adasim("validate", *arguments) == 2
    assert says in capsys.readouterr().err


def keys(out: Path) -> set[str]:
    return {p.name for p in (out / "trials").iterdir()}


def test_measurements_survive_being_taken_for_records(ran: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder, arguments, _ = ran
    before = keys(folder / "out")
    assert adasim(*arguments, "--records", folder / "out", "--overwrite") == 2
    assert "is the folder of --records, and would be replaced" in capsys.readouterr().err
    assert keys(folder / "out") == before
    assert len(before) == 16


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("backend.max_running_requests=9", "backend.max_running_requests 16, the scenario says 9"),
        ("policies.fixed 6.verify_len=5", "policies.fixed 6.verify_len 6, the scenario says 5 (fixed 6"),
        ("workload.domains={chat: 1.0}", "workload.domains.chat None, the scenario says 1.0"),
        ("measure.until_last_arrival=true", "measure.until_last_arrival False, the scenario says True"),
        ("backend.cost.overhead.round_ms=7", "backend.cost.overhead.round_ms 1.0, the scenario says 7.0"),
    ],
)
@pytest.mark.parametrize("way", ["--records", "--watch"])
def test_other_settings_than_the_scenario_states_are_refused(
    ran: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], way: str, setting: str, says: str
) -> None:
    folder, arguments, _ = ran
    more = ["--once"] if way == "--watch" else ["--out", tmp_path / "new"]
    before = keys(folder / "out")
    assert adasim(*arguments[:4], way, folder / "out", *more, "--set", setting) == 2
    assert f"was made with {says}" in capsys.readouterr().err
    assert keys(folder / "out") == before
    assert not (tmp_path / "new").exists()


def damaged(source: Path, into: Path) -> Path:
    """A copy in which one run's clock goes back."""
    shutil.copytree(source, into)
    path = next(into.glob("trials/*/steps.parquet"))
    steps = pd.read_parquet(path)
    steps.assign(start_s=steps["start_s"].mask(steps["step"] == 5, -1.0)).to_parquet(path)
    return into


def test_records_whose_clock_goes_back_are_refused(ran: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, arguments, _ = ran
    bad = damaged(folder / "out", tmp_path / "bad")
    ways: list[list[str | Path]] = [["--records", bad, "--out", tmp_path / "new"], ["--watch", bad, "--once"]]
    for way in ways:
        assert adasim(*arguments[:4], *way) == 2
        assert "the clock went back" in capsys.readouterr().err
    assert adasim("validate", "--floor", folder / "out", bad) == 2


def test_a_bad_run_does_not_end_watching(
    ran: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", stop)
    folder, arguments, _ = ran
    assert adasim(*arguments[:4], "--watch", damaged(folder / "out", tmp_path / "bad")) == 130
    assert "the clock went back" in " ".join(capsys.readouterr().err.split())


def test_a_damaged_measurement_is_left_out_and_decides_nothing(
    ran: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, arguments, _ = ran
    bad = damaged(folder / "out", tmp_path / "bad")
    assert adasim(*arguments[:4], "--out", bad, "--resume") in {0, 3}
    assert "left out: " in (bad / "report.md").read_text()


def test_runs_of_another_scenario_are_not_resumed(ran: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, arguments, _ = ran
    copy = shutil.copytree(folder / "out", tmp_path / "copy")
    assert adasim(*arguments[:4], "--out", copy, "--resume", "--set", "policies.head.gamma=1.4") == 2
    assert "holds 4 runs of another scenario, input file or version" in capsys.readouterr().err
    assert keys(copy) == keys(folder / "out")


def test_a_failed_run_ends_with_its_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the report, which says what is missing."""

    def failing(trial: Trial, *rest: Any) -> Failure | None:
        return Failure(trial, "it broke") if trial.policy == "head" else run_trial(trial, *rest)

    monkeypatch.setattr("adasim.executors.run_trial", failing)
    assert adasim(*files(tmp_path)) == 1
    assert "it broke" in (tmp_path / "out" / "report.md").read_text()


def test_references_that_no_manifest_lists_yet_are_found(
    ran: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """While a measurement runs, its manifest is as old as its beginning."""
    folder, arguments, _ = ran
    copy = shutil.copytree(folder / "out", tmp_path / "copy")
    manifest = json.loads((copy / "manifest.json").read_text())
    trials = [row for row in manifest["trials"] if "repeat" not in row]
    assert len(trials) == 8
    (copy / "manifest.json").write_text(json.dumps(manifest | {"trials": trials}))
    for source, out in ((folder / "out", "one"), (copy, "other")):
        assert adasim(*arguments[:4], "--records", source, "--out", tmp_path / out) == 0
    one, other = (pd.read_csv(tmp_path / out / "tables" / "cells.csv").sort_values("cell") for out in ("one", "other"))
    pd.testing.assert_frame_equal(one.reset_index(drop=True), other.reset_index(drop=True))


def test_records_of_another_machine_are_said_to_be_its_own(ran: Any, tmp_path: Path) -> None:
    """Their engine need not be here."""
    folder, arguments, _ = ran
    copy = shutil.copytree(folder / "out", tmp_path / "copy")
    there = HERE.model_dump()
    for path in copy.glob("trials/*/trial.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"engine": there}))
    assert adasim(*arguments[:4], "--records", copy, "--out", tmp_path / "out", "--force") == 0
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["engine"] == there


def test_the_floor_compares_what_both_hold(ran: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One seed of head is gone: only the other counts, and the cells are no further apart."""
    folder, _, _ = ran
    copy = shutil.copytree(folder / "out", tmp_path / "copy")
    facts = {p.parent: json.loads(p.read_text()) for p in copy.glob("trials/*/trial.json")}
    shutil.rmtree(next(p for p, f in facts.items() if (f["metrics"]["policy"], f["metrics"]["seed"]) == ("head", 1)))
    assert adasim("validate", "--floor", folder / "out", copy, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert {r["mean_abs"] for r in told["floor"]} == {0.0}
    assert any("1 runs of" in line and "left out" in line for line in told["answer"])
    for path, found in facts.items():
        if found["metrics"]["policy"] == "head" and path.exists():
            found["config"]["policy"]["gamma"] = 1.4
            (path / "trial.json").write_text(json.dumps(found))
    assert adasim("validate", "--floor", folder / "out", copy) == 2
    assert "policy.gamma 1.0, the other says 1.4" in " ".join(capsys.readouterr().err.split())
    (tmp_path / "file").write_text("")
    assert adasim("validate", "--floor", folder / "out", folder / "out", "--out", tmp_path / "file") == 2


def test_fitted_cells_are_known_whatever_they_are_called(tmp_path: Path) -> None:
    """By policy and workload: the label, the seed and the rest of the scenario may differ."""
    made = plan(**SMALL)
    blocks, _ = measured(made, tmp_path)
    one = next(t for t in made.trials if t.policy == "head" and t.point["workload.concurrency"] == 4).scenario()
    ran_as = one.policies[0].model_copy(update={"name": "another name"})
    known = FittedRun(key="k", policy="another name", cell=cell_of(ran_as, one.workload.model_dump(mode="json")))
    assert fitted_cells(blocks, profile(fitted_on=[known])) == {("head", 4)}
    assert fitted_cells(blocks, profile()) == set()


def test_nothing_held_out_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = plan(**SMALL)
    what = [(t.scenario().policies[0], t.scenario().workload.model_dump(mode="json")) for t in made.trials]
    runs = [FittedRun(key="k", policy="p", cell=cell_of(*w)).model_dump() for w in what]
    assert adasim(*files(tmp_path, predicts={"fitted_on": runs})) == 2
    assert "nothing is held out to predict" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


HERE = EngineIdentity(
    engine="torch", engine_version="2", hardware="x", device="cpu", dtype="float32", threads=1, target="t",
    target_sha256="0", python="3",
)  # fmt: skip


def test_a_profile_of_another_engine_is_refused_unless_forced() -> None:
    other = profile(identity=HERE.model_copy(update={"hardware": "y"}))
    assert check_engine([HERE], profile(identity=HERE), force=False) == []
    with pytest.raises(InputError, match="hardware: x, not y"):
        check_engine([HERE], other, force=False)
    assert "hardware: x, not y" in check_engine([HERE], other, force=True)[0]
    with pytest.raises(InputError, match="does not say which engine"):
        check_engine([HERE], profile(), force=False)
    assert "does not say which engine" in check_engine([HERE], profile(), force=True)[0]


def test_runs_of_two_engines_do_not_mix_unless_forced(ran: Any) -> None:
    folder, _, _ = ran
    found = [replace(run, engine=HERE) for run in runs_of(folder / "out")]
    assert check_runs(found, HERE, force=False) == check_runs(found, None, force=False) == []
    found[3] = replace(found[3], engine=HERE.model_copy(update={"threads": 2}))
    with pytest.raises(InputError, match="1 of 16 runs were measured on another engine: threads: 2, not 1"):
        check_runs(found, HERE, force=False)
    assert "threads: 2, not 1" in check_runs(found, None, force=True)[0]
    found[3] = replace(found[3], engine=None)
    with pytest.raises(InputError, match="simulated and measured runs do not mix"):
        check_runs(found, HERE, force=False)


def test_a_stale_reference_is_listed_and_not_judged(ran: Any) -> None:
    folder, _, _ = ran
    runs = [replace(run, at_s=0.0 if run.is_reference else 400.0 + i) for i, run in enumerate(runs_of(folder / "out"))]
    old = next(i for i, run in enumerate(runs) if run.trial.policy == "head")
    runs[old] = replace(runs[old], at_s=999.0)
    table = table_of(runs, 500.0)
    assert table.index[~table["judged"]].tolist() == [old]
    made = plan(**(SMALL | {"validation": {"replications": 2, "reference_age_s": 500.0}}))
    found = examine(made, runs, profile(), set())
    assert "1 runs lie more than 500 s from their reference and are not judged: head" in " ".join(found.notes)
    assert found.cells["repeats"].sum() == 3 * 2 * 2 - 1
