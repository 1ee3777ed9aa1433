"""Cost and acceptance from throughput tables, and cost from speed-ups: known worlds are found again."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from adasim.calibration.cost import LinearDraft
from adasim.calibration.formula import FormulaCost
from adasim.calibration.roofline import RooflineCost
from adasim.calibration.speedups import (
    Method,
    fit_roofline,
    fit_speculative_ms,
    fit_time_share,
    speedup,
    with_speculative_ms,
)
from adasim.calibration.throughput import Quadratic, ThroughputCell, ThroughputFit, fit_throughput
from adasim.choice import best_constant, choices
from adasim.errors import InputError
from adasim.tables import compare
from tests.build import backend, closed, simulate

WORLD = FormulaCost(
    base_ms=6.0,
    per_request_ms=0.03,
    per_token_ms=0.05,
    experts_ms=9.0,
    expert_share=0.03,
    draft=LinearDraft(base_ms=0.6, autoregressive=True),
)
METHOD = Method(tau=5.86, verify_len=16, block=16, prompt_len=128, output_len=512)


def cells(world: FormulaCost, alpha: float, *, taus: bool = False) -> list[ThroughputCell]:
    found = []
    for k, batch in product((0, 1, 3, 6), (1, 4, 16, 64)):
        tau = (1 - alpha ** (k + 1)) / (1 - alpha)
        cell = ThroughputCell(batch, k + 1, 1.0, tau if taus else None)
        found.append(cell._replace(tok_s=ThroughputFit(world, alpha, 0.0).tok_s(cell)))
    return found


def test_hand_worked_cell() -> None:
    """Batch 4, two drafts of chance 1/2: tau 1.75, 12 tokens, 6 + .12 + .6 + 9 (1 - .97^12) + 2 x .6 ms."""
    round_ms = 6 + 0.12 + 0.6 + 9 * (1 - 0.97**12) + 2 * 0.6
    fit = ThroughputFit(WORLD, 0.5, 0.0)
    assert fit.tok_s(ThroughputCell(4, 3, 1.0)) == pytest.approx(1e3 * 4 * 1.75 / round_ms)
    assert fit.tok_s(ThroughputCell(4, 3, 1.0, tau=2.0)) == pytest.approx(1e3 * 4 * 2.0 / round_ms)


@pytest.mark.parametrize("taus", [True, False])
def test_a_known_world_is_found_again(taus: bool) -> None:
    """Without noise, sixteen cells give back every number, acceptance included."""
    fit = fit_throughput(cells(WORLD, 0.7, taus=taus))
    assert fit.rms < 1e-4
    for name in ("base_ms", "per_token_ms", "experts_ms", "expert_share"):
        assert getattr(fit.cost, name) == pytest.approx(getattr(WORLD, name), rel=0.05), name
    assert fit.alpha is None if taus else fit.alpha == pytest.approx(0.7, abs=0.01)
    unseen = ThroughputCell(32, 5, 1.0, tau=2.0)
    assert fit.tok_s(unseen) == pytest.approx(ThroughputFit(WORLD, 0.7, 0.0).tok_s(unseen), rel=1e-3)


def test_terms_left_out_cost_nothing() -> None:
    dense = WORLD.model_copy(update={"experts_ms": 0.0})
    fit = fit_throughput(cells(dense, 0.7), terms=("base", "request", "token", "draft"))
    assert fit.cost.experts_ms == 0
    assert fit.rms < 1e-4


def test_fits_refuse_what_cannot_be_known() -> None:
    table = cells(WORLD, 0.7)
    with pytest.raises(InputError, match="6 cells cannot fix 7 unknowns"):
        fit_throughput(table[:6])
    with pytest.raises(InputError, match="cannot tell base, request, token, draft, draft_request apart"):
        fit_throughput(table, terms=("base", "request", "token", "draft", "draft_request"))
    with pytest.raises(InputError, match="six cells"):
        Quadratic([c for c in table if c.batch < 16])
    fit = fit_throughput(table)
    with pytest.raises(InputError, match=r"a pass of 512 tokens is outside the fitted 1\.\.448"):
        fit.tok_s(ThroughputCell(64, 8, 1.0))


def test_quadratic_is_exact_on_its_own_world() -> None:
    def law(k: int, b: int) -> float:
        return float(np.exp(3 + 0.2 * k - 0.03 * k * k + 0.6 * np.log2(b) - 0.02 * k * np.log2(b)))

    table = [ThroughputCell(b, k + 1, law(k, b)) for k, b in product((0, 2, 5), (1, 4, 32))]
    assert Quadratic(table).tok_s(ThroughputCell(16, 5, 1.0)) == pytest.approx(law(4, 16))


def test_a_simulated_batch_gives_the_fitted_throughput() -> None:
    """The formula of a steady batch is what the closed loop does; first tokens come free of charge (1 of 128)."""
    from adasim import metrics
    from adasim.policies.fixed import Fixed

    cell = ThroughputCell(16, 4, 1.0)
    records = simulate(
        Fixed(verify_len=4),
        workload=closed(concurrency=16, requests=96, drain=False, output_len={"kind": "fixed", "tokens": 128}),
        backend=backend(cost=WORLD.model_dump(), max_running_requests=16, acceptance=_geometric(0.7), max_draft_len=3),
    )
    part = metrics.window(records, 16, open_loop=False, until_last_arrival=True)
    measured = metrics.output_tok_s(metrics.cut(records, part), part)
    assert measured == pytest.approx(ThroughputFit(WORLD, 0.7, 0.0).tok_s(cell), rel=0.02)


def _geometric(alpha: float) -> dict[str, object]:
    return {"kind": "curves", "curves": {"default": {"kind": "geometric", "alpha": alpha}}}


def test_a_known_gpu_is_found_again() -> None:
    """Speed-ups at four batches give back arithmetic, per-request and speculative time, in units of memory time."""
    gpu = with_speculative_ms(RooflineCost(compute_efficiency=0.31, per_request_ms=0.05), 1.7)
    found = fit_roofline(RooflineCost(), METHOD, {b: speedup(gpu, b, METHOD) for b in (1, 32, 64, 128)})
    assert found.compute_efficiency == pytest.approx(0.31, rel=1e-3)
    assert found.per_request_ms == pytest.approx(0.05, rel=1e-2)
    assert found.overhead.speculative_ms == pytest.approx(1.7, rel=1e-2)
    with pytest.raises(InputError, match="three batches"):
        fit_roofline(RooflineCost(), METHOD, {1: 3.5, 32: 1.5})


def test_one_number_fits() -> None:
    gpu = with_speculative_ms(RooflineCost(), 1.7)
    assert fit_speculative_ms(RooflineCost(), METHOD, 1, speedup(gpu, 1, METHOD)) == pytest.approx(1.7)
    assert fit_time_share(4.0, 3.0) == pytest.approx(0.25)
    with pytest.raises(InputError, match="nothing is lost"):
        fit_time_share(3.0, 3.1)
    with pytest.raises(InputError, match="slower than 20"):
        fit_speculative_ms(RooflineCost(), METHOD, 1, 20.0)


def test_speedup_is_amdahls() -> None:
    """With free drafts and a round that costs as much as a plain one, only the prefill keeps tau from being the gain."""
    cost = RooflineCost.model_validate({"launch_ms": 0.0, "draft": {"kind": "linear"}})
    one = replace(METHOD, tau=4.0, verify_len=1, block=4)
    assert speedup(cost, 1, replace(one, output_len=10**6, prompt_len=1)) == pytest.approx(4.0, rel=1e-4)
    plain, prefill = cost.verify_s(1, 1, 128 + 256), cost.prefill_s(128, 64, 0)
    assert speedup(cost, 1, one) == pytest.approx((512 * plain + prefill) / (512 * plain / 4 + prefill))


def test_time_share_stretches_every_step() -> None:
    lost = RooflineCost.model_validate({"overhead": {"time_share": 0.2}})
    for arguments in ((4, 0, 4, 100.0), (4, 64, 64, 100.0)):
        assert lost.step(*arguments).total == pytest.approx(RooflineCost().step(*arguments).total / 0.8)
    alone = lost.step(0, 0, 0, 0.0, prefill=100)
    assert alone.total == pytest.approx(RooflineCost().step(0, 0, 0, 0.0, prefill=100).total / 0.8)


def test_regret() -> None:
    """Choosing b at 1 gives away 10 %; always a gives away 0 and 20 %, always b 10 and 0 %."""
    import pandas as pd

    rows = [("a", 1, 100.0, 90.0), ("b", 1, 90.0, 95.0), ("a", 8, 160.0, 150.0), ("b", 8, 200.0, 180.0)]
    published = pd.DataFrame([(p, at, v, "predicted") for p, at, v, _ in rows], columns=["policy", "at", "value", "role"])
    ours = pd.DataFrame([(p, at, v, 0.0) for p, at, _, v in rows], columns=["policy", "x", "tok", "tok_hw"])
    table, errors = compare(ours, published.assign(null=[np.nan, 45.0, 160.0, 200.0]), "x", "tok")
    found = choices(table)
    assert found["chosen"].tolist() == ["b", "b"]
    assert found["regret"].tolist() == pytest.approx([0.1, 0.0])
    constant = best_constant(table)
    assert constant is not None
    assert constant.policy == "b"
    assert constant.mean_regret == pytest.approx(0.05)
    assert errors["null_cells"] == 3
    assert errors["null_mean_abs"] == pytest.approx(0.5 / 3)
