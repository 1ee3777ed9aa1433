"""Calibrated inputs moved: each does what it says, and nothing else."""

from typing import Any

import numpy as np
import pytest

from adasim.calibration.acceptance import CurveAcceptance
from adasim.calibration.adjust import DEFAULTS, Adjust, Uncertainty
from adasim.calibration.cost import CostModel, LinearDraft, Overhead
from adasim.calibration.head_quality import HeadQuality
from adasim.calibration.profile import Profile
from adasim.calibration.roofline import RooflineCost
from adasim.calibration.survival import Geometric, tau
from adasim.errors import InputError
from tests.build import backend, config, plan, scenario, simulate

COST = RooflineCost(
    overhead=Overhead(round_ms=1.0, per_verified_ms=0.1, head_ms=0.2),
    draft=LinearDraft(base_ms=1.0),
    captured_tokens=[8, 16],
    eager_penalty_ms=2.0,
)
LUCK = CurveAcceptance(curves={"default": Geometric(alpha=0.8)}, correlation=0.3, spread=0.1, head=HeadQuality(bias=0.5))


def parts(model: CostModel) -> np.ndarray:
    """Draft, verify, overhead, prefill of a mixed step, within the graphs and beyond them."""
    steps = [model.step(4, 12, n, 100.0, longest_draft=2, prefill=3, reads_head=True) for n in (12, 40)]
    return np.array(steps)


@pytest.mark.parametrize(("name", "column"), [("draft", 0), ("verify", 1), ("overhead", 2), ("prefill", 3)])
def test_a_factor_scales_its_part_alone(name: str, column: int) -> None:
    factors = np.ones(4)
    factors[column] = 1.5
    assert parts(Adjust.model_validate({name: 1.5}).cost(COST)) == pytest.approx(parts(COST) * factors)


def test_nothing_moved_changes_nothing() -> None:
    assert Adjust().cost(COST) is COST
    assert Adjust().luck(LUCK) == LUCK


def test_policies_believe_the_moved_cost() -> None:
    moved = scenario(backend=backend(adjust={"verify": 2.0})).backend
    plain = scenario().backend
    costs = [b.caps().cost for b in (moved, plain)]
    assert costs[0] is not None
    assert costs[1] is not None
    assert costs[0].round_s(4, 0, 4, 64.0) == pytest.approx(2 * costs[1].round_s(4, 0, 4, 64.0))


def test_acceptance_scales_tau() -> None:
    moved = Adjust(acceptance=0.9).luck(LUCK)
    assert isinstance(moved, CurveAcceptance)
    assert tau(moved.survival("default", 15)) == pytest.approx(0.9 * tau(LUCK.survival("default", 15)))
    by_temperature = LUCK.model_copy(update={"temperature": 0.5, "tau_by_temperature": {0.0: 1.0, 1.0: 0.8}})
    twice = Adjust(acceptance=0.9).luck(by_temperature)
    assert isinstance(twice, CurveAcceptance)
    assert tau(twice.survival("default", 15)) == pytest.approx(0.9 * tau(by_temperature.survival("default", 15)))


def test_text_and_heads_move() -> None:
    moved = Adjust(correlation=0.2, range_tokens=2.0, head_noise=0.5, head_bias=-1.0).luck(LUCK)
    assert isinstance(moved, CurveAcceptance)
    assert (moved.correlation, moved.range_tokens) == (0.5, 6.0)
    assert moved.head == HeadQuality(noise=1.0, bias=-0.5)
    assert moved.curves == LUCK.curves


@pytest.mark.parametrize(
    ("adjust", "message"),
    [
        ({"correlation": 0.7}, r"backend.adjust.correlation: gives 1; allowed 0..0.9, exclusive"),
        ({"correlation": -0.4}, r"gives -0.1"),
        ({"acceptance": 10.0}, r"asks for tau"),
        ({"verify": 0.0}, r"backend.adjust.verify: got 0.0"),
    ],
)
def test_impossible_moves_are_refused(adjust: dict[str, float], message: str) -> None:
    raw: dict[str, Any] = LUCK.model_dump(mode="json")
    with pytest.raises(InputError, match=message):
        plan(backend=backend(acceptance=raw, adjust=adjust))


def test_a_recording_cannot_be_moved(tmp_path: Any) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("request,domain,position,accepted\n" + "".join(f"a,default,{i * 3},2\n" for i in range(30)))
    raw = config(backend=backend(acceptance={"kind": "recorded", "file": str(path)}, adjust={"acceptance": 0.9}))
    with pytest.raises(InputError, match="acceptance of kind recorded cannot be moved"):
        plan(**raw)


def test_slower_verification_is_slower() -> None:
    slow, plain = (simulate(backend=backend(**{"adjust": {"verify": f}})) for f in (1.2, 1.0))
    assert slow.steps["verify_s"].sum() == pytest.approx(1.2 * plain.steps["verify_s"].sum())
    assert slow.steps["accepted"].equals(plain.steps["accepted"])  # the same luck


def test_limits_of_an_uncertainty() -> None:
    u = Uncertainty(verify=0.1, correlation=0.2, range_tokens=4.0, head_bias=1.0)
    assert u.limits("verify") == pytest.approx((0.9, 1.1))
    assert u.limits("correlation") == (-0.2, 0.2)
    assert u.limits("range_tokens") == (0.25, 4.0)
    assert u.limits("draft") is None
    assert all(DEFAULTS.limits(name) for name in Adjust.model_fields)
    assert Profile.load("dcut_h20").uncertainty.limits("range_tokens") == pytest.approx((0.303, 3.3), rel=1e-2)
