"""Closed forms that the simulator must meet."""

import numpy as np
import pytest

from adasim import metrics
from adasim.calibration.specs import MODELS
from adasim.calibration.survival import Anchored, Geometric, tau
from adasim.policies.fixed import Fixed
from tests.build import OFF, backend, closed, simulate


@pytest.mark.parametrize("alpha", [0.5, 0.8, 0.92])
@pytest.mark.parametrize("verify_len", [2, 6, 16])
def test_tau_of_independent_acceptance(alpha: float, verify_len: int) -> None:
    acceptance = {"kind": "curves", "curves": {"default": {"kind": "geometric", "alpha": alpha}}}
    records = simulate(
        Fixed(verify_len=verify_len),
        workload=closed(concurrency=8, requests=64, output_len={"kind": "fixed", "tokens": 2000}),
        backend=backend(acceptance=acceptance),
    )
    expected = (1 - alpha**verify_len) / (1 - alpha)
    assert metrics.tau(records) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_waiting_of_an_md1_queue(load: float) -> None:
    service_s = 0.01
    cost = {"kind": "table", "verify": "dcut_h20_verify.csv", "prefill": {"base_ms": 1e3 * service_s}}
    records = simulate(
        OFF,
        workload={
            "kind": "poisson",
            "rate_rps": load / service_s,
            "requests": 30_000,
            "prompt_len": {"kind": "fixed", "tokens": 8},
            "output_len": {"kind": "fixed", "tokens": 1},
        },
        backend=backend(cost=cost, max_running_requests=1),
    )
    waited = records.requests["admitted_s"] - records.requests["arrival_s"]
    assert waited.mean() == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.05)


def test_two_anchors_do_not_fix_a_curve() -> None:
    """The same anchors give tau 7.05 if geometric and 8.65 if linear: tau is the third number."""
    positions = np.arange(15)
    assert tau(0.89 * (0.13 / 0.89) ** (positions / 14)) == pytest.approx(7.05, abs=0.01)
    assert tau(0.89 + (0.13 - 0.89) * positions / 14) == pytest.approx(8.65, abs=0.01)
    curve = Anchored(first=0.89, last=0.13, tau=7.09).survival(15)
    assert tau(curve) == pytest.approx(7.09, abs=1e-6)
    assert curve[[0, -1]] == pytest.approx([0.89, 0.13])


def test_geometric_curve() -> None:
    assert Geometric(alpha=0.5).survival(3) == pytest.approx([0.5, 0.25, 0.125])


def test_experts_touched() -> None:
    """One token reads top_experts experts; many read all of them: E (1 - (1 - e/E)^t)."""
    moe = MODELS["qwen3-30b-a3b"]
    assert moe.mlps_touched(1) == pytest.approx(8)
    assert moe.mlps_touched(10_000) == pytest.approx(128)
    assert moe.mlps_touched(2) == pytest.approx(128 * (1 - (1 - 1 / 16) ** 2))
