"""adasim calibrate from end to end: a profile that runs, that knows its origin, and that refuses what does not fit."""

import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from typer.testing import CliRunner

from adasim.calibrate import calibrate
from adasim.calibration.acceptance import CurveAcceptance, RecordedAcceptance
from adasim.calibration.fitted_on import cell_of
from adasim.calibration.pass_cost import PassCost
from adasim.calibration.profile import Profile, packaged
from adasim.cli import app, main
from adasim.errors import InputError
from adasim.policies.fixed import Fixed
from adasim.recorded import load
from tests.build import closed, config
from tests.recordings import ENGINE, record

FIXED = {"kind": "fixed", "verify_len": 6}
POLICIES = [{"kind": "off"}, FIXED, {"kind": "fixed", "verify_len": 3}, {"kind": "head"}, {"kind": "dspark"}]
COST = {
    "kind": "pass", "base_ms": 20.0, "per_token_ms": 2.0, "per_request_ms": 1.0,
    "prefill": {"base_ms": 5.0, "per_token_ms": 0.2},
    "draft": {"kind": "linear", "base_ms": 3.0}, "overhead": {"round_ms": 1.0},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = {"kind": "curves", "curves": {d: {"kind": "geometric", "alpha": a} for d, a in (("chat", 0.6), ("code", 0.8))}}
    return record(
        tmp_path_factory.mktemp("recorded") / "run",
        identity=ENGINE,
        backend={"kind": "sim", "cost": COST, "acceptance": text, "rounds": True, "max_draft_len": 5},
        policies=POLICIES,
        workload=closed(requests=24, domains={"chat": 0.5, "code": 0.5}),
        sweep={"workload.concurrency": [2, 4, 8]},
        measure={"warmup_requests": 0, "until_last_arrival": False},
        seeds=[0],
    )


@pytest.fixture(scope="module")
def made(folder: Path) -> Path:
    """A profile, written by the command."""
    out = folder.parent / "mine.yaml"
    result = CliRunner().invoke(app, ["calibrate", str(folder), "--out", str(out), "--json"])
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)  # one document, whatever the notes say
    assert {"answer", "intervals", "residuals"} <= set(document)
    assert document["answer"][0] == f"Profile: {out}"
    return out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command that exits with code 2 says, on one line."""
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    assert caught.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def test_the_profile_says_where_and_how_well_it_was_measured(made: Path) -> None:
    profile = Profile.load(str(made))
    assert profile.identity == ENGINE
    assert not profile.edited
    assert isinstance(profile.cost, PassCost)
    assert profile.cost.verify_s(4, 8, 100) == pytest.approx(0.040, rel=0.01)
    assert isinstance(profile.acceptance, CurveAcceptance)
    assert set(profile.acceptance.curves) == {"chat", "code"}
    confidence = profile.acceptance.head.confidence
    assert confidence is not None
    assert set(confidence) == {"chat", "code"}
    assert confidence["code"].bias == profile.intervals["confidence.bias.code"].value
    assert profile.fitted["batch"] == [1.0, 8.0]
    assert profile.intervals["acceptance.code.tau"].low < 1 + sum(0.8**k for k in range(1, 6))
    assert {r.part for r in profile.residuals} >= {"verify", "draft", "overhead", "prefill", "acceptance"}
    for name in ("verify", "draft", "overhead", "prefill", "acceptance", "correlation", "head_noise", "head_bias"):
        assert profile.uncertainty.limits(name) is not None, name
    assert "15 trials" in profile.provenance.inputs[0]


def test_the_same_records_give_the_same_bytes(folder: Path, made: Path, tmp_path: Path) -> None:
    calibrate(load(folder), "mine").profile.write(tmp_path / "mine.yaml")
    assert (tmp_path / "mine.yaml").read_bytes() == made.read_bytes()


def test_the_report_has_tables_and_pictures(made: Path) -> None:
    report = made.with_name("mine-report")
    text = (report / "report.md").read_text()
    for says in ("Verification is", "tau of full blocks in code", "verify.per_token_ms", "Kaplan-Meier", "a processor"):
        assert says in text
    pictures = {p.stem for p in report.glob("figures/*.png")}
    assert pictures >= {"verify", "residuals", "draft_prefill", "survival", "head", "confidence", "overhead", "tau"}
    assert len(pd.read_csv(report / "tables" / "intervals.csv")) == len(Profile.load(str(made)).intervals)


def test_a_scenario_runs_with_the_profile(made: Path, tmp_path: Path) -> None:
    raw = config(
        backend={"kind": "sim", "profile": str(made), "max_draft_len": 5},
        policies=[{"kind": "off"}, FIXED],
        workload=closed(domains={"chat": 0.5, "code": 0.5}, requests=16),
        seeds=[0],
    )
    path = tmp_path / "scenario.yaml"
    path.write_text(yaml.safe_dump(raw))
    result = CliRunner().invoke(app, ["run", str(path), "--out", str(tmp_path / "out"), "--workers", "1"])
    assert result.exit_code == 0, result.output
    text = (tmp_path / "out" / "report.md").read_text()
    assert "profile mine: verification: mean error on held-out cells" in text
    assert "edited by hand" not in text


def test_an_edited_profile_is_refused_until_it_says_so(made: Path, tmp_path: Path) -> None:
    edited = tmp_path / "edited.yaml"
    edited.write_text(made.read_text().replace("per_token_ms: ", "per_token_ms: 1", 1))
    with pytest.raises(InputError, match="was changed after adasim calibrate wrote it"):
        Profile.load(str(edited))
    lines = edited.read_text().splitlines(keepends=True)
    edited.write_text("".join(line for line in lines if not line.startswith("digest:")))
    profile = Profile.load(str(edited))
    assert profile.edited
    assert any("edited by hand" in mark for mark in profile.marks)


def test_layout_and_comments_are_no_edit(made: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.yaml"
    copy.write_text("# a note of mine\n" + made.read_text())
    assert Profile.load(str(copy)) == Profile.load(str(made))


def test_another_engine_is_refused_unless_forced(made: Path) -> None:
    profile = Profile.load(str(made))
    assert profile.refuse_other(ENGINE) == []
    other = ENGINE.model_copy(update={"hardware": "another", "dtype": "float32", "engine_version": "2.14.0"})
    with pytest.raises(InputError) as caught:
        profile.refuse_other(other)
    assert len(caught.value.problems) == 3
    assert "hardware: another, not a processor" in str(caught.value)
    assert len(profile.refuse_other(other, force=True)) == 3
    published = Profile.load(packaged()[0].stem)
    assert not published.edited
    with pytest.raises(InputError, match="does not say which engine was measured"):
        published.refuse_other(ENGINE)


def test_recorded_texts_can_be_replayed(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "replay.yaml"
    result = CliRunner().invoke(app, ["calibrate", str(folder), "--out", str(out), "--acceptance", "recorded"])
    assert result.exit_code == 0, result.output
    profile = Profile.load(str(out))
    assert isinstance(profile.acceptance, RecordedAcceptance)
    assert profile.acceptance.max_draft_len == 5
    profile.acceptance.check(["chat", "code"], 5)
    file = tmp_path / profile.acceptance.file
    rounds = pd.read_csv(file)
    whole = next(t for t in load(folder).trials if t.label == "fixed(verify_len=6)").records.rounds
    assert whole is not None
    assert rounds["accepted"].mean() == pytest.approx(whole["accepted"].mean(), rel=0.02)
    file.write_text(file.read_text() + "\n")
    with pytest.raises(InputError, match=r"replay\.\w+\.csv: was changed since it was written"):
        Profile.load(str(out))


def spoil(folder: Path, path: Path) -> Path:
    copy = shutil.copytree(folder, path)
    for at in sorted(copy.glob("trials/*/steps.parquet"))[:2]:
        steps = pd.read_parquet(at)
        steps["verify_s"] = -steps["verify_s"]
        steps.to_parquet(at)
    return copy


@pytest.mark.parametrize("as_json", [False, True])
def test_bad_input_is_named_all_at_once_with_exit_code_2(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    bad, text = spoil(folder, tmp_path / "bad"), tmp_path / "bad.txt"
    arguments = ["calibrate", str(bad), str(tmp_path / "nothing"), "--out", str(text), "--acceptance", "guessed"]
    said = refused(capsys, *arguments, *(["--json"] if as_json else []))
    for says in ("must end in .yaml", "--acceptance guessed: unknown", "verify_s is negative", "no recorded run"):
        assert says in said
    assert not text.exists()


def test_a_profile_is_not_overwritten_by_chance(folder: Path, made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "calibrate", str(folder), "--out", str(made))
    assert "exists; use --overwrite" in said
    assert "holds a report; use --overwrite" in said


def test_a_report_replaces_nothing_of_others(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "thesis" / "tables" / "results.csv"
    mine.parent.mkdir(parents=True)
    mine.write_text("years of work")
    where = ["--out", str(tmp_path / "p.yaml"), "--report", str(tmp_path / "thesis"), "--overwrite"]
    assert "holds no report of adasim calibrate" in refused(capsys, "calibrate", str(folder), *where)
    assert mine.read_text() == "years of work"


def test_cells_are_policies_under_a_load() -> None:
    work = closed(domains={"chat": 1.0})
    fixed = Fixed(verify_len=4)
    same = cell_of(fixed, work)
    assert cell_of(Fixed(verify_len=4, name="f"), work | {"requests": 13}) == same
    others = [cell_of(fixed, work | {"concurrency": 8}), cell_of(fixed, work | {"domains": {"code": 1.0}})]
    others += [cell_of(Fixed(verify_len=5), work), cell_of(fixed, work | {"output_len": {"kind": "fixed", "tokens": 9}})]
    assert len({same, *others}) == 5


def test_records_without_rounds_or_grid_say_what_is_missing(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "run")
    for path in copy.glob("trials/*/rounds.parquet"):
        path.unlink()
    keep = next(t.key for t in load(copy).trials if t.label == "off")
    for path in copy.glob("trials/*"):
        if path.name != keep:
            shutil.rmtree(path)
    with pytest.raises(InputError) as caught:
        calibrate(load(copy), "thin")
    text = str(caught.value)
    assert "the grid is too thin" in text
    assert "rounds.parquet is missing" in text
