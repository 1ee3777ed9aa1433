"""adasim validate from the command line: what it writes, how it ends, what it refuses."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from adasim.calibration.fitted_on import FittedRun, cell_of
from adasim.cli import main
from adasim.experiment import Failure, run_trial
from adasim.identity import EngineIdentity
from adasim.validation.study import check_engine, fitted_cells
from tests.validating import COST, measured, plan, profile, raw

SMALL = {"sweep": {"workload.concurrency": [1, 4]}, "seeds": [0, 1], "validation": {"luck": 2}}
LOOSE = {"throughput_mae": 0.5, "throughput_worst": 0.9, "tau": 0.5, "tpot_p50": 0.9, "tpot_p95": 0.9}


def adasim(*arguments: str | Path) -> int:
    try:
        main([str(a) for a in arguments])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def files(folder: Path, *, predicts: dict[str, Any] | None = None, **fields: Any) -> list[str | Path]:
    """Arguments that validate a small scenario into ``folder``/out."""
    (folder / "s.yaml").write_text(yaml.safe_dump(raw(**(SMALL | fields))))
    known = profile(**(predicts or {})).model_dump(mode="json", exclude_none=True)
    (folder / "p.yaml").write_text(yaml.safe_dump(known))
    return ["validate", folder / "s.yaml", "--profile", folder / "p.yaml", "--out", folder / "out"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str | Path], int]:
    folder = tmp_path_factory.mktemp("ran")
    arguments = files(folder, validation={"luck": 2, "tolerances": LOOSE | {"ranking": False}})
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
    arguments = files(tmp_path, validation={"luck": 2, "tolerances": LOOSE, "pair": 1})
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
        (["--records", "nowhere", "--budget", "1m"], "--budget and --resume have no effect"),
        (["--budget", "soon"], "expected a time"),
        (["--watch", "nowhere", "--once"], "nowhere: holds no records of adasim"),
        (["--floor", "nowhere", "there"], "nowhere: holds no records of adasim"),
        (["--set", "validation.tolerances.throuput_mae=0.1"], "did you mean throughput_mae"),
        (["--set", "policies=[{kind: head}]"], "needs one of kind off"),
    ],
)
def test_what_it_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    given = files(tmp_path)
    assert adasim(*(["validate"] if not arguments else [*given, *arguments])) == 2
    assert says in capsys.readouterr().err


def test_other_settings_than_the_scenario_states_are_refused(ran: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder, arguments, _ = ran
    assert adasim(*arguments, "--records", folder / "out", "--overwrite", "--set", "backend.max_running_requests=9") == 2
    assert "was made with backend.max_running_requests 16, the scenario says 9" in capsys.readouterr().err


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


def test_a_profile_of_another_engine_is_refused_unless_forced() -> None:
    here = EngineIdentity(
        engine="torch", engine_version="2", hardware="x", device="cpu", dtype="float32", threads=1, target="t",
        target_sha256="0", python="3",
    )  # fmt: skip
    other = profile(identity=here.model_copy(update={"hardware": "y"}))
    assert check_engine([here], profile(identity=here), force=False) == []
    with pytest.raises(ValueError, match="hardware: x, not y"):
        check_engine([here], other, force=False)
    assert "hardware: x, not y" in check_engine([here], other, force=True)[0]
    assert "does not say which engine" in check_engine([here], profile(), force=False)[0]
