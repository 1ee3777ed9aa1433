"""Measured and modelled seconds are divided into parts in the same way."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adasim.calibration.estimate.recording import RecordedTrial
from adasim.calibration.interval import Estimate
from adasim.calibration.profile import Profile
from adasim.tolerances import Validation
from adasim.validation.parts import TIMES, measured_parts, together
from adasim.validation.run import Run
from adasim.validation.watch import Watcher
from tests.validating import COST, acceptance, measured, plan, profile, raw

BESIDE = {"drafter_ms": 0.6, "drafter_per_request_ms": 0.05}  # verification's, beside a loaded drafter
HEAD = {"head_ms": 0.3, "head_per_request_ms": 0.02}  # drafting's, of policies that read a head


def runs(folder: Path, **backend: Any) -> list[Run]:
    made = plan(policies=[{"kind": "off"}, {"kind": "head"}], sweep={}, seeds=[0], backend=raw()["backend"] | backend)
    return measured(made, folder)[1]


def drafting(folder: Path, **backend: Any) -> RecordedTrial:
    return next(r for r in runs(folder, **backend) if not r.is_reference).recorded()


def calibrated() -> Profile:
    """What is true, as calibration writes it: these times stand as overhead."""
    both, each = BESIDE.values()
    overhead = {"round_ms": 1.0, "speculative_ms": both, "idle_drafter_ms": both, "drafter_per_request_ms": each} | HEAD
    times = {f"verify.{name}": ms for name, ms in BESIDE.items()} | {f"draft.{name}": ms for name, ms in HEAD.items()}
    told = {name: Estimate(value=ms, low=0.0, high=2 * ms, how="known") for name, ms in times.items()}
    return profile(cost=COST | {"overhead": overhead}, intervals=told)


def longer(trial: RecordedTrial) -> RecordedTrial:
    """The run of an engine that takes these times where they are measured, all else being equal."""
    steps = trial.records.steps
    more_s = {
        part: 1e-3 * (both + each * steps["decoding"]) * (steps["decoding"] > 0)
        for part, (both, each) in {"verify_s": BESIDE.values(), "draft_s": HEAD.values()}.items()
    }
    late_s = (more_s["verify_s"] + more_s["draft_s"]).cumsum()
    start_s = steps["start_s"] + late_s.shift(fill_value=0.0)
    moved = {part: steps[part] + seconds for part, seconds in more_s.items()}
    moved |= {"start_s": start_s, "end_s": steps["end_s"] + late_s}
    return replace(trial, records=replace(trial.records, steps=steps.assign(**moved)))


def test_a_level_is_measured_over_modelled_seconds(tmp_path: Path) -> None:
    """Verification twice as long, drafting half: the model's form is kept, its level is found exactly."""
    trial = drafting(tmp_path, adjust={"verify": 2.0, "draft": 0.5})
    parts = measured_parts(trial, profile().cost, profile())
    own = parts.levels()
    assert (own.verify, own.draft, own.overhead) == pytest.approx((2.0, 0.5, 1.0), rel=1e-6)
    assert parts.levels(speed=2.0).verify == pytest.approx(1.0, rel=1e-6)


def test_a_right_profile_is_right_in_every_part(tmp_path: Path) -> None:
    """Calibration moved a millisecond from verification and drafting into overhead: both sides are divided alike."""
    trial, knows = longer(drafting(tmp_path)), calibrated()
    parts = measured_parts(trial, knows.cost, knows)
    for part in TIMES:
        assert parts.measured[part].to_numpy() == pytest.approx(parts.modelled[part].to_numpy(), rel=1e-3, abs=1e-9)
    own = parts.levels()
    assert [getattr(own, part) for part in TIMES] == pytest.approx([1.0] * 4, rel=1e-3)


@pytest.mark.parametrize("speed", [1.0, 1.7])
def test_levels_give_the_time_that_was_measured(tmp_path: Path, speed: float) -> None:
    """Whatever is wrong, all levels together make up the run's seconds."""
    trial, knows = longer(drafting(tmp_path, adjust={"verify": 1.3, "overhead": 0.7})), calibrated()
    parts = measured_parts(trial, knows.cost, knows)
    again = measured_parts(trial, parts.levels(speed).cost(knows.cost), profile())
    assert again.modelled.to_numpy().sum() == pytest.approx(parts.measured.to_numpy().sum() / speed, rel=1e-6)


def test_a_pause_is_overhead_of_a_round_and_prefill_of_a_prefill(tmp_path: Path) -> None:
    """A millisecond before every step but the first, while requests are there."""
    trial = drafting(tmp_path)
    steps, requests = trial.records.steps, trial.records.requests
    late_s = 1e-3 * steps["step"]
    moved = steps.assign(start_s=steps["start_s"] + late_s, end_s=steps["end_s"] + late_s)
    records = replace(trial.records, steps=moved, requests=requests.assign(finish_s=requests["finish_s"] + 1.0))
    parts = measured_parts(replace(trial, records=records), profile().cost, profile())
    more = parts.measured - measured_parts(trial, profile().cost, profile()).measured
    alone, pause = steps["decoding"] == 0, 1e-3 * (steps["step"] > 0)
    assert 0 < alone[1:].sum() < len(alone) - 1
    assert more["prefill"].to_numpy() == pytest.approx((pause * alone).to_numpy(), abs=1e-9)
    assert more["overhead"].to_numpy() == pytest.approx((pause * ~alone).to_numpy(), abs=1e-9)
    assert more[["verify", "draft"]].to_numpy() == pytest.approx(0)


def test_runs_add_up(tmp_path: Path) -> None:
    found = [measured_parts(r.recorded(), profile().cost, profile()) for r in runs(tmp_path)]
    both = together(found)
    assert both.speed == pytest.approx(1.0, rel=1e-3)
    assert len(both.measured) == sum(len(p.measured) for p in found)


def test_watching_a_right_profile_is_quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same engine: without dividing alike, verification would seem to have risen, and overhead to have fallen."""
    found = runs(tmp_path, acceptance=acceptance())
    real = Run.recorded
    monkeypatch.setattr(Run, "recorded", lambda run: real(run) if run.is_reference else longer(real(run)))
    watcher = Watcher(calibrated(), Validation())
    assert [moved for _ in range(20) for run in found for moved in watcher.take(run)] == []
