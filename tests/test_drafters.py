"""Named drafters of one engine, formulas with a fitted range, references with a null model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from adasim.calibration.draft_model import DraftModel
from adasim.calibration.fitted import FittedCost
from adasim.calibration.formula import FormulaCost
from adasim.calibration.roofline import RooflineCost
from adasim.errors import InputError
from adasim.policies.fixed import Fixed
from adasim.policies.head import Head
from adasim.reference import Reference
from adasim.simulator.backend import SimBackend
from adasim.types import BatchView, DraftView, EngineCaps
from tests.build import backend, plan, simulate

BETTER = {"kind": "curves", "curves": {"default": {"kind": "geometric", "alpha": 0.95}}}
DRAFTERS: dict[str, Any] = {
    "better": {"acceptance": BETTER},
    "slower": {"draft": {"kind": "linear", "base_ms": 5.0}, "overhead": {"speculative_ms": 2.0}},
}


def test_a_drafter_brings_its_acceptance() -> None:
    own = simulate(Fixed(verify_len=8), backend=backend(drafters=DRAFTERS))
    better = simulate(Fixed(verify_len=8, drafter="better"), backend=backend(drafters=DRAFTERS))
    alone = simulate(Fixed(verify_len=8), backend=backend(acceptance=BETTER))
    assert better.steps.equals(alone.steps)
    assert better.steps["emitted"].mean() > 1.2 * own.steps["emitted"].mean()


def test_a_drafter_brings_its_cost() -> None:
    """Same luck, every round 5 - 1 ms of drafting and 2 ms of overhead longer."""
    own = simulate(Fixed(verify_len=8), backend=backend(drafters=DRAFTERS)).steps
    slower = simulate(Fixed(verify_len=8, drafter="slower"), backend=backend(drafters=DRAFTERS)).steps
    rounds = own["decoding"] > 0
    assert own["emitted"].tolist() == slower["emitted"].tolist()
    longer = (slower["end_s"] - slower["start_s"]) - (own["end_s"] - own["start_s"])
    assert longer[rounds].to_numpy() == pytest.approx(0.006)
    assert longer[~rounds].to_numpy() == pytest.approx(0.0, abs=1e-12)


def test_other_policies_do_not_notice() -> None:
    with_them = simulate(Fixed(verify_len=8), backend=backend(drafters=DRAFTERS))
    without = simulate(Fixed(verify_len=8), backend=backend())
    assert with_them.steps.equals(without.steps)


def test_a_drafter_keeps_its_block() -> None:
    """A policy is checked against its own drafter's block, and a scenario may sweep over drafters' fields."""
    long = {"max_draft_len": 31, "acceptance": BETTER}
    policies = [{"kind": "fixed", "verify_len": 32, "drafter": "long"}]
    assert len(plan(backend=backend(drafters={"long": long}), policies=policies).trials) == 2
    with pytest.raises(InputError, match=r"verify_len 32 with draft_len 31; allowed: verify_len 1\.\.16"):
        plan(backend=backend(drafters={"long": long}), policies=[{"kind": "fixed", "verify_len": 32}])
    swept = {"backend.drafters.long.max_draft_len": [31, 47]}
    assert len(plan(backend=backend(drafters={"long": long}), policies=policies, sweep=swept).trials) == 4


def test_what_a_drafter_cannot_be() -> None:
    with pytest.raises(ValidationError, match="give at least one of max_draft_len, acceptance, draft, overhead"):
        DraftModel()
    layers = DraftModel.model_validate({"draft": {"kind": "layers", "layers": 1}})
    assert layers.cost_of(RooflineCost()) != RooflineCost()
    with pytest.raises(InputError, match="kind layers needs a cost of kind roofline"):
        layers.cost_of(FormulaCost(base_ms=5.0))


def test_problems_name_the_drafter() -> None:
    lost = {"kind": "closed", "concurrency": 2, "requests": 8, "domains": {"law": 1.0}}
    with pytest.raises(InputError) as error:
        plan(backend=backend(drafters={"better": {"acceptance": BETTER}}), workload=lost)
    problem = "acceptance: no curve for domain law; there are default"
    assert list(error.value.problems) == [problem, f"drafter better: {problem}"]


@pytest.mark.parametrize("model", [FormulaCost, RooflineCost])
def test_formulas_keep_to_their_fitted_range(model: type[FittedCost]) -> None:
    strict = model.model_validate({"fitted_tokens": [4, 64]})
    assert strict.verify_s(4, 64, 10) >= 0
    with pytest.raises(InputError, match=r"a pass of 65 tokens is outside the fitted 4\.\.64"):
        strict.verify_s(4, 65, 10)
    free = model.model_validate({"fitted_tokens": [4, 64], "extrapolate": True})
    for tokens in (2, 64, 80, 100):
        free.verify_s(2, tokens, 10)
    assert free.notes[-1] == "time was extrapolated: passes of 2 to 100 tokens, fitted 4..64"
    with pytest.raises(ValidationError, match="extrapolate has no effect"):
        model.model_validate({"extrapolate": True})
    with pytest.raises(ValidationError, match="must not exceed"):
        model.model_validate({"fitted_tokens": [64, 4]})


def test_formula_terms() -> None:
    """2 + 3 x .1 + 12 x .01 + 5 (1 - .9^12) ms, context or not."""
    cost = FormulaCost(base_ms=2.0, per_request_ms=0.1, per_token_ms=0.01, experts_ms=5.0, expert_share=0.1)
    assert cost.verify_s(3, 12, 0) == pytest.approx((2 + 0.3 + 0.12 + 5 * (1 - 0.9**12)) / 1e3)
    assert cost.verify_s(3, 12, 9999) == cost.verify_s(3, 12, 0)
    assert cost.notes == ["cost does not model prefill: TTFT is queueing only"]


def test_the_head_is_idle_in_small_batches() -> None:
    """AdaFlash's released engine verifies everything at 48 or fewer running requests."""
    caps = EngineCaps(max_draft_len=15, max_running_requests=64, provides=frozenset({"accept_len"}))
    head = Head(idle_up_to=48)
    for n, expected in ((48, 16), (49, 4)):
        ids = np.arange(n)
        view = BatchView(0, 0.0, caps, ids, ids + 100, 0)
        draft = DraftView(np.full(n, 15), accept_len=np.full(n, 4.2))
        assert head.verify_lens(view, draft).tolist() == [expected] * n


def reference(tmp_path: Path, text: str, **fields: Any) -> Reference:
    path = tmp_path / "cells.csv"
    path.write_text(text)
    return Reference(source="x", file=str(path), mean_abs_error=0.1, max_abs_error=0.2, **fields)


def test_reference_with_a_null_model(tmp_path: Path) -> None:
    text = "policy,at,value,role,null\na,1,2.0,predicted,1.5\na,8,1.0,extrapolated,\n"
    cells = reference(tmp_path, text, null_model="half of it").cells
    assert cells["role"].tolist() == ["predicted", "extrapolated"]
    assert cells["null"].iloc[0] == 1.5
    assert np.isnan(cells["null"].iloc[1])
    with pytest.raises(ValidationError, match=r"null and reference\.null_model go together"):
        reference(tmp_path, text)
    with pytest.raises(ValidationError, match=r"null and reference\.null_model go together"):
        reference(tmp_path, "policy,at,value,role\na,1,2.0,predicted\n", null_model="none")
    with pytest.raises(ValidationError, match="null holds numbers > 0"):
        reference(tmp_path, text.replace("1.5", "-1.5"), null_model="half of it")
    with pytest.raises(ValidationError, match="role guessed; allowed: input, predicted, extrapolated"):
        reference(tmp_path, text.replace("extrapolated", "guessed"), null_model="half of it")


def test_inputs_name_the_drafters() -> None:
    given = SimBackend.model_validate(backend(drafters=DRAFTERS)).inputs
    assert {"drafter better", "drafter slower"} <= set(given)
