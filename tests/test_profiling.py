"""Profiles find the costs that an engine has, whatever the machine does meanwhile, within their budget."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

torch = pytest.importorskip("torch")

from adasim.calibration.cost import LinearDraft, LinearPrefill, Overhead  # noqa: E402
from adasim.calibration.formula import FormulaCost  # noqa: E402
from adasim.errors import InputError  # noqa: E402
from adasim.plan import Plan, load  # noqa: E402
from adasim.policies.base import Policy  # noqa: E402
from adasim.profiling.campaign import Campaign  # noqa: E402
from adasim.profiling.design import design  # noqa: E402
from adasim.profiling.points import KEYS, Profiled  # noqa: E402
from adasim.profiling.report import left_out, ready, too_thin, write  # noqa: E402
from adasim.profiling.visit import ACCEPTED  # noqa: E402
from adasim.real.backend import TorchBackend  # noqa: E402
from adasim.real.checkpoint import Checkpoint, save_checkpoint  # noqa: E402
from adasim.real.drafter import DrafterShape  # noqa: E402
from adasim.real.length_head import make_head  # noqa: E402
from adasim.real.weights import RANDOM  # noqa: E402
from adasim.records import Records  # noqa: E402
from adasim.scenario import validate  # noqa: E402
from adasim.workload import Workload  # noqa: E402
from tests.build import adasim, config  # noqa: E402

BLOCK = 8
KNOWN = FormulaCost(
    base_ms=100.0,
    per_request_ms=5.0,
    per_token_ms=2.5,
    draft=LinearDraft(base_ms=20.0, per_request_ms=1.0, per_position_ms=0.5),
    prefill=LinearPrefill(base_ms=10.0, per_token_ms=5.0),
    overhead=Overhead(round_ms=5.0, idle_drafter_ms=7.5),
)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, arch = tmp_path_factory.mktemp("drafter"), RANDOM["random-tiny"]
    shape = DrafterShape(replace(arch, layers=1, qk_norm=True), (0, 2), arch.layers, BLOCK, 0)
    head = dict(make_head("paper", arch.hidden).state_dict())
    save_checkpoint(folder, Checkpoint(shape, shape.fresh(0), torch.arange(0, arch.vocab, 2), head))
    return folder


@pytest.fixture
def scenario_file(drafter: Path, tmp_path: Path) -> Path:
    raw = config(
        name="tiny",
        workload={
            "kind": "closed", "concurrency": 1, "requests": 12, "output_len": {"kind": "fixed", "tokens": 40},
            "domains": {"code": 1.0},
        },
        backend={"kind": "torch", "target": "random-tiny", "drafter": str(drafter), "max_running_requests": 8},
        policies=[{"kind": "off"}, {"kind": "fixed", "verify_len": 4}, {"kind": "head"}],
        sweep={"workload.concurrency": [1, 4]},
        seeds=[0],
        profile={"batches": [1, 4], "contexts": [64, 256], "repeats": 3},
    )  # fmt: skip
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(raw).replace("kind: off", 'kind: "off"'))
    return path


class World:
    """A machine with a clock of its own, whose engine costs ``KNOWN``.

    Attributes:
        now_s: the time.
        noise: relative standard deviation of every part of a step.
        strange: share of verifications that take five times as long.
        fickle: how many times longer references take at most, for reasons that nothing else shares.
        drift: how many times slower everything gets in a minute.
    """

    def __init__(self) -> None:
        self.now_s, self.noise, self.strange, self.drift, self.fickle = 0.0, 0.0, 0.0, 0.0, 1.0
        self.runs = 0
        self.stop_after: int | None = None
        self.rng = np.random.default_rng(0)

    def slow(self) -> float:
        return 1 + self.drift * self.now_s / 60

    def run(self, backend: TorchBackend, workload: Workload, policy: Policy, seed: int) -> Records:
        if self.stop_after is not None and self.runs >= self.stop_after:
            raise KeyboardInterrupt
        self.runs += 1
        unlucky = self.rng.uniform(1, self.fickle) if policy.label == "reference" else 1.0
        (domain,) = workload.domain_names
        assert backend.forced is not None
        assert backend.forced.lengths == [ACCEPTED]
        curve = {"kind": "measured", "values": [1.0] * ACCEPTED + [0.0] * (BLOCK - 1 - ACCEPTED)}
        fields = {
            "kind": "sim", "cost": KNOWN.model_dump(), "acceptance": {"kind": "curves", "curves": {domain: curve},
            "head": {"noise": 0.05}}, "max_draft_len": BLOCK - 1, "max_running_requests": backend.max_running_requests,
            "rounds": True,
        }  # fmt: skip
        records = validate(config(workload=workload.model_dump(), backend=fields)).backend.run(workload, policy, seed)
        steps, slow = records.steps, self.slow() * unlucky
        for part in ("draft_s", "verify_s", "overhead_s", "prefill_s", "start_s", "end_s"):
            steps[part] *= slow
            if self.noise and part not in {"start_s", "end_s"}:
                steps[part] *= self.rng.normal(1, self.noise, len(steps)).clip(0.5)
        odd = self.rng.random(len(steps)) < self.strange
        steps.loc[odd, "verify_s"] *= 5
        self.now_s += float(steps["end_s"].iloc[-1])
        return records


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()

    def run(backend: TorchBackend, workload: Workload, policy: Policy, seed: int) -> Records:
        return made.run(backend, workload, policy, seed)

    monkeypatch.setattr(TorchBackend, "run", run)
    monkeypatch.setattr("adasim.experiment.time.time", lambda: made.now_s)
    return made


def plan(path: Path, *settings: str) -> Plan:
    return load(str(path), settings)


def campaign(plan: Plan, out: Path, world: World, budget_s: float = 1e6, *, resume: bool = False) -> Campaign:
    made = Campaign(design(plan), out, budget_s, lambda what, done: None, clock=lambda: world.now_s)
    ready(made, resume=resume, overwrite=False)
    made.measure()
    return made


def profiled(path: Path, out: Path, world: World) -> Profiled:
    tables = write(campaign(plan(path), out, world))
    assert tables is not None
    return tables


def expected_ms(what: str, row: Any) -> float:
    """What ``KNOWN`` says of a point."""
    if what == "verify":
        return 1e3 * KNOWN.verify_s(int(row.batch), round(row.tokens), 0)
    if what == "draft":
        return 1e3 * KNOWN.draft_s(int(row.batch), round(row.tokens), int(row.draft_len), 0)
    if what == "prefill":
        return 1e3 * KNOWN.prefill_s(int(row.tokens), 0, 0)
    positions = int(row.batch * (row.draft_len + 1)) if row.draft_len else 0
    return 1e3 * KNOWN.overhead.seconds(positions, round(row.tokens), False, row.drafter)


def worst(points: pd.DataFrame, column: str) -> float:
    """Largest relative error over all points with a known cost."""
    known = points[points["what"] != "between"]
    found = [row[column] / expected_ms(row["what"], row) - 1 for _, row in known.iterrows()]
    return float(np.abs(found).max())


def test_a_quiet_machine_gives_the_costs_themselves(scenario_file: Path, tmp_path: Path, world: World) -> None:
    tables = profiled(scenario_file, tmp_path / "out", world)
    points = tables.points
    ragged = points["ragged"].eq(True)
    assert worst(points[~ragged], "median_ms") < 1e-6
    assert worst(points[ragged], "median_ms") < 0.05  # their tokens vary, and the mean is not the median
    assert (points["steady_ms"] == points["median_ms"]).all()
    assert tables.outliers.empty
    assert set(points["what"]) == set(KEYS)
    assert set(points[points["what"] == "verify"]["batch"]) == {1, 4}
    verify = points[(points["what"] == "verify") & ~points["ragged"].astype(bool)]
    assert set(verify["verify_len"]) == {1, 2, 3, 4, 6, 8}
    assert set(verify["context"]) == {64, 256}
    assert set(points[points["what"] == "verify"]["ragged"]) == {False, True}
    assert set(points[points["what"] == "overhead"]["drafter"]) == {False, True}
    assert set(points[points["what"] == "draft"]["reads"]) == {"", "accept_len"}
    assert set(points[points["what"] == "draft"]["draft_len"]) >= {1, 2, 3, 5, 7}


def test_outliers_and_drift_do_not_move_the_medians(scenario_file: Path, tmp_path: Path, world: World) -> None:
    world.noise, world.strange, world.drift = 0.01, 0.03, 0.5
    tables = profiled(scenario_file, tmp_path / "out", world)
    assert world.slow() > 1.5
    assert tables.follows >= 0.9
    points = tables.points
    well = points[points["n"] >= 8]  # a point of few values has no robust median
    scale = world_speed(well)
    assert worst(well.assign(steady_ms=well["steady_ms"] / scale), "steady_ms") < 0.05
    assert worst(well.assign(median_ms=well["median_ms"] / scale), "median_ms") > 0.2
    assert points["steady_spread"].median() < points["spread"].median() / 2
    assert tables.reference["speed"].max() / tables.reference["speed"].min() > 1.5
    assert set(tables.outliers["what"]) == {"verify"}
    assert tables.outliers["times"].between(3, 8).all()
    assert len(tables.outliers) == pytest.approx(0.03 * points[points["what"] == "verify"]["n"].sum(), rel=0.5)


def test_references_that_tell_nothing_correct_nothing(scenario_file: Path, tmp_path: Path, world: World) -> None:
    world.noise = 0.05
    world.fickle = 3.0
    tables = profiled(scenario_file, tmp_path / "out", world)
    assert tables.reference["speed"].max() / tables.reference["speed"].min() > 2
    assert tables.follows <= 0.1
    assert tables.points["steady_spread"].median() == pytest.approx(tables.points["spread"].median(), rel=0.2)


def world_speed(points: pd.DataFrame) -> float:
    """Corrected times are those of the median reference; what that was in the world's own."""
    verify = points[points["what"] == "verify"]
    return float(np.median([row["steady_ms"] / expected_ms("verify", row) for _, row in verify.iterrows()]))


def test_the_budget_is_kept_and_what_is_left_out_is_named(scenario_file: Path, tmp_path: Path, world: World) -> None:
    whole = campaign(plan(scenario_file), tmp_path / "whole", world)
    needed_s = world.now_s
    assert left_out(whole) == []
    world.now_s = 0.0
    half = campaign(plan(scenario_file), tmp_path / "half", world, needed_s / 2)
    assert 0.35 * needed_s < world.now_s <= needed_s / 2
    assert too_thin(half) == []
    assert "Left out by the budget" in left_out(half)[0]
    tiers = {v.tier for v, _ in half.made()}
    assert 0 in tiers
    made = {v for v, _ in half.made()}
    assert {v for v in whole.design.visits if v.tier == 0} <= made  # the most informative first


def test_a_budget_too_short_says_how_much_is_missing(scenario_file: Path, tmp_path: Path, world: World) -> None:
    short = campaign(plan(scenario_file), tmp_path / "out", world, 1.0)
    (says,) = too_thin(short)
    assert "the profile is too thin: not measured: " in says
    assert "go on with --resume" in says
    (shown,) = left_out(short, most=2)
    assert shown.endswith(f"and {len(short.never()) - 2} more visits")
    assert all(v.place in left_out(short)[0] for v in short.never())


def test_resume_goes_on_and_ends_with_the_same_runs(scenario_file: Path, tmp_path: Path, world: World) -> None:
    whole = campaign(plan(scenario_file), tmp_path / "whole", world)
    runs = {(v, r) for v, r in whole.made() if v.kind != "reference"}
    world.runs, world.stop_after = 0, 10  # one of them a rehearsal
    first = campaign(plan(scenario_file), tmp_path / "parts", world)
    assert first.interrupted
    assert len(first.made()) == 9
    assert write(first) is not None
    world.stop_after = None
    second = campaign(plan(scenario_file), tmp_path / "parts", world, resume=True)
    assert {(v, r) for v, r in second.made() if v.kind != "reference"} == runs
    write(second)
    manifest = json.loads((tmp_path / "parts" / "manifest.json").read_text())
    assert manifest["finished"] is True
    assert manifest["made_by"] == "profile"
    assert manifest["engine"]["target"] == "random-tiny"
    assert {t["key"] for t in manifest["trials"]} == {p.name for p in (tmp_path / "parts" / "trials").iterdir()}


def test_a_folder_of_another_engine_or_grid_is_refused(scenario_file: Path, tmp_path: Path, world: World) -> None:
    out = tmp_path / "out"
    assert campaign(plan(scenario_file), out, world, 20.0).made()
    with pytest.raises(InputError, match=r"another engine \(dtype: float32, not bfloat16"):
        campaign(plan(scenario_file, "backend.dtype=float32"), out, world, resume=True)
    with pytest.raises(InputError, match="runs of another scenario, grid or version"):
        campaign(plan(scenario_file, "profile.contexts=[99]"), out, world, resume=True)
    with pytest.raises(InputError, match="holds results; use --resume"):
        campaign(plan(scenario_file), out, world)


def test_failures_are_named_and_do_not_stop_the_others(
    scenario_file: Path, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = TorchBackend.run

    def run(backend: TorchBackend, workload: Workload, policy: Policy, seed: int) -> Records:
        if policy.label == "prefill" and workload.clients == 1:
            raise MemoryError("no room")
        return whole(backend, workload, policy, seed)

    monkeypatch.setattr(TorchBackend, "run", run)
    made = campaign(plan(scenario_file), tmp_path / "out", world)
    assert {(f.trial.policy, f.error) for f in made.failures} == {("prefill", "MemoryError: no room")}
    assert len(made.failures) == len({f.trial.point["workload.prompt_len.tokens"] for f in made.failures})  # once each
    assert "prefill, batch 1" in too_thin(made)[0]
    tables = write(made)
    assert tables is not None
    assert set(tables.points["what"]) == set(KEYS)
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["finished"] is False


def test_without_a_reference_nothing_is_measured(
    scenario_file: Path, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object) -> Records:
        raise RuntimeError("no engine")

    monkeypatch.setattr(TorchBackend, "run", run)
    made = campaign(plan(scenario_file), tmp_path / "out", world)
    assert [(f.trial.policy, f.error) for f in made.failures] == [("reference", "RuntimeError: no engine")]
    assert write(made) is None


def test_visits_take_turns(scenario_file: Path) -> None:
    made = design(plan(scenario_file))
    order = made.sequence()
    assert [r for _, r in order] == sorted(r for _, r in order)
    assert all(v.tier == 0 for v, r in order if r == 0)
    assert {v for v, r in order if r == 2} == set(made.visits)
    orders = [[v for v, r in order if r == repeat and v.tier == 0] for repeat in range(3)]
    assert orders[0] != orders[1]
    assert order == design(plan(scenario_file)).sequence()


def test_grids_are_derived_from_the_scenario(scenario_file: Path) -> None:
    made = design(plan(scenario_file, "profile=null", "sweep.workload.concurrency=[3, 6]"))
    probes = [v for v in made.visits if v.kind == "probe"]
    assert {v.batch for v in probes} == {1, 2, 3, 4, 6}
    backend = made.plan.scenario.backend
    assert isinstance(backend, TorchBackend)
    served = backend.served_requests(made.plan.scenario.workload, 0)
    assert min(v.context for v in probes) == min(r.prompt_len for r in served)
    assert max(v.context for v in probes) <= max(r.prompt_len + r.output_len for r in served)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["profile.batches=[1, 99]"], r"profile\.batches: 99; the engine runs 1\.\.8"),
        (["profile.verify_lens=[9]"], r"profile\.verify_lens: 9; allowed 1\.\.8"),
        (["profile.prefill_tokens=[4096]"], r"profile\.prefill_tokens: 4096; backend\.max_prefill_tokens is 2048"),
        (["backend.drafter=null", "policies=[{kind: off}]"], r"backend\.drafter: profile needs one"),
        (["sweep.backend.dtype=[float32]"], r"sweep\.backend\.dtype: profile measures one engine"),
        (["backend.kv.blocks=4"], "workload: request 0 needs|no batch fits"),
    ],
)
def test_grids_that_do_not_fit_are_refused(scenario_file: Path, settings: list[str], says: str) -> None:
    with pytest.raises(InputError, match=says):
        design(plan(scenario_file, *settings))


def test_a_thin_grid_is_a_stated_limit(scenario_file: Path) -> None:
    made = design(plan(scenario_file, "profile.batches=[2]", "profile.contexts=[64]"))
    assert [n.split(" (")[0] for n in made.notes] == ["thin: one batch size", "thin: one context"]


def test_command_line(scenario_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the engine itself, all the way: a few seconds of a tiny model."""
    out = tmp_path / "out"
    few = ["--set", "profile.repeats=1"]
    assert adasim("profile", scenario_file, "--out", out, *few, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["failed"] == []
    assert {row["what"] for row in document["points"]} == set(KEYS)
    for name in (
        "tables/profile_points.csv",
        "tables/reference.csv",
        "figures/verify.png",
        "figures/drift.png",
        "report.md",
    ):
        assert (out / name).stat().st_size > 50
    trial = next((out / "trials").glob("*/trial.json"))
    facts = json.loads(trial.read_text())
    assert facts["engine"]["engine"] == "torch"
    assert facts["began_s"] > 1e9
    assert any("forced" in note for note in facts["notes"])
    assert adasim("profile", scenario_file, "--out", out, *few) == 2
    assert "use --resume" in capsys.readouterr().err
    assert adasim("profile", scenario_file, "--out", out, *few, "--resume") == 0
    assert "Verification, batch 4" in capsys.readouterr().out


def test_too_little_time_is_a_failure(scenario_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert adasim("profile", scenario_file, "--out", tmp_path / "out", "--budget", "0.01s") == 1
    assert "the profile is too thin: not measured: probe" in capsys.readouterr().err
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["finished"] is False


@pytest.mark.parametrize("budget", ["5", "m", "0s", "-1m", "5 m", "1d"])
def test_bad_budgets_are_refused(
    scenario_file: Path, tmp_path: Path, budget: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert adasim("profile", scenario_file, "--out", tmp_path / "out", "--budget", budget) == 2
    assert "expected a time above 0 like 90s, 5m or 1h" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_simulations_are_not_profiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert adasim("profile", "smoke", "--out", tmp_path / "out") == 2
    assert "kind sim is a simulation; profile measures a real engine" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
