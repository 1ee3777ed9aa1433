"""What adaptive lengths cost and where they fail, shown on the simulated engine."""

from typing import Any, get_args

import numpy as np
import pytest
from scipy.special import expit

from adasim.calibration.acceptance import CurveAcceptance
from adasim.calibration.survival import Geometric
from adasim.errors import InputError
from adasim.plan import load
from adasim.policies import AnyPolicy
from adasim.policies.base import Policy
from adasim.policies.dspark import DSpark
from adasim.policies.exp3 import Exp3
from adasim.policies.fixed import Fixed
from adasim.policies.rolling_off import RollingOff
from adasim.policies.schedule import Schedule
from adasim.policies.sglang_ema import SGLangEma
from adasim.policies.sglang_throughput import SGLangThroughput
from adasim.policies.smartspec import SmartSpec
from adasim.policies.vllm_adaptive import VllmAdaptive
from adasim.types import Request
from tests.build import FREE_COST, OFF, backend, closed, everywhere, scenario, simulate

LONG = closed(concurrency=8, requests=48, output_len={"kind": "fixed", "tokens": 512})


def cost(**fields: Any) -> dict[str, Any]:
    """A roofline cost with these fields replaced."""
    return FREE_COST | fields


def run_s(policy: Policy, **fields: Any) -> float:
    """Seconds of one run."""
    return float(simulate(policy, **fields).steps["end_s"].iloc[-1])


def test_margins_are_as_informative_as_confidence_and_not_calibrated() -> None:
    """P(draft k accepted | those before were) = sigmoid(slope margin + intercept), at every position and margin."""
    model = CurveAcceptance(curves={"default": Geometric(alpha=0.8)})
    requests = [Request(i, 0, 10, 1000) for i in range(100)]
    luck = model.luck(requests, ["default"], 0, 7)
    run, signal = everywhere(luck, requests)
    margin = luck.margin(luck.survival(np.zeros_like(run), signal))
    claimed = expit(0.5 * margin - 0.5)
    for k in (1, 4, 7):
        reached = run >= k - 1
        for low in (0.3, 0.6, 0.9):
            some = reached & (claimed[:, k - 1] >= low) & (claimed[:, k - 1] < low + 0.1)
            if some.sum() > 500:
                assert (run[some] >= k).mean() == pytest.approx(claimed[some, k - 1].mean(), abs=0.03)
    assert abs(expit(margin[:, 0]).mean() - (run >= 1).mean()) > 0.03  # taken at face value: overconfident


def test_vllm_adaptive_learns_the_drafters_slope_from_its_own_rounds() -> None:
    acceptance = {
        "kind": "curves",
        "curves": {"default": {"kind": "geometric", "alpha": 0.8}},
        "head": {"margin_slope": 0.7, "margin_intercept": -0.2},
    }
    policy = VllmAdaptive(interval=40, memory=1.0)
    simulate(policy, workload=LONG, backend=backend(acceptance=acceptance))
    assert policy._rounds > 5 * 40
    assert policy._estimator.slope == pytest.approx(0.7, abs=0.05)
    assert policy._estimator.intercepts[:6] == pytest.approx(-0.2, abs=0.25)


def test_off_beside_a_loaded_drafter_costs_its_upkeep_every_round() -> None:
    """Without a drafter nothing; with one, idle_drafter_ms a round: for k = 0, and for a schedule when it says 0."""
    engine = backend(cost=cost(overhead={"idle_drafter_ms": 0.4}))
    plain = simulate(OFF, backend=engine).steps
    rounds = int((plain["decoding"] > 0).sum())
    for policy in (Fixed(verify_len=1), Schedule(drafts={1: 0})):
        idle = simulate(policy, backend=engine).steps
        assert (idle["decoding"] > 0).sum() == rounds
        assert idle["end_s"].iloc[-1] - plain["end_s"].iloc[-1] == pytest.approx(0.4e-3 * rounds)
    assert run_s(OFF, backend=engine) == run_s(OFF)
    assert run_s(Fixed(verify_len=4), backend=engine) == run_s(Fixed(verify_len=4))


def test_at_low_concurrency_a_head_costs_its_overhead_and_saves_nothing() -> None:
    """One request, memory-bound: all lengths cost alike, so the best rule verifies everything, as a fixed block does, and
    pays .4 ms more in rounds of about 7.5 ms."""
    alone = closed(concurrency=1, requests=10)
    engine = backend(cost=cost(overhead={"head_ms": 0.4}))
    share = run_s(DSpark(), workload=alone, backend=engine) / run_s(Fixed(verify_len=16), workload=alone, backend=engine)
    assert 1.04 < share < 1.08


def test_leaving_the_captured_lengths_falls_off_a_cliff() -> None:
    """Lengths 1, 4, 8, 16 have graphs, others cost 5 ms more. Five tokens: eager when four drafts are all there is, eight
    with a graph when the block was drafted. A policy that chooses by tokens per second does not see it coming."""
    graphs = {"captured_lens": [1, 4, 8, 16], "eager_penalty_ms": 5.0}
    engine = backend(cost=cost(**graphs), ragged=False)

    def round_s(policy: Policy, **fields: Any) -> float:
        steps = simulate(policy, workload=closed(concurrency=1, requests=4), **fields).steps
        rounds = steps[steps["decoding"] > 0]
        return float((rounds["end_s"] - rounds["start_s"]).median())

    graph, eager = round_s(Fixed(verify_len=4), backend=engine), round_s(Fixed(verify_len=5), backend=engine)
    assert eager - graph == pytest.approx(5e-3, abs=0.1e-3)
    padded = simulate(Fixed(verify_len=5, draft_len=15), workload=closed(concurrency=1), backend=engine).steps
    assert set(padded["verify_tokens"]) - {0} == {8}
    blind = SGLangThroughput(candidates=[3, 4])
    assert round_s(blind, backend=engine) == pytest.approx(eager, abs=0.1e-3)
    assert round_s(blind, backend=backend(ragged=False)) == pytest.approx(graph, abs=0.1e-3)


def test_captured_lengths_need_a_rectangular_engine() -> None:
    with pytest.raises(InputError, match=r"captured_lens is for rectangular engines: set ragged: false"):
        scenario(backend=backend(cost=cost(captured_lens=[1, 4])))


def drafts_at_the_end(policy: Policy) -> float:
    """Drafts per request and round in the last quarter of a run whose text is hard first and easy later."""
    text = {
        "kind": "ramp",
        "points": [{"at": 0, "mix": {"hard": 1.0}}, {"at": 10, "mix": {"hard": 1.0}}, {"at": 11, "mix": {"easy": 1.0}}],
    }
    curves = {"hard": {"kind": "geometric", "alpha": 0.15}, "easy": {"kind": "geometric", "alpha": 0.9}}
    steps = simulate(
        policy,
        workload=closed(requests=60, domains=text),
        backend=backend(acceptance={"kind": "curves", "curves": curves}),
    ).steps
    rounds = steps[steps["decoding"] > 0]
    late = rounds.iloc[len(rounds) * 3 // 4 :]
    assert rounds["draft_tokens"].iloc[:5].sum() > 0
    return float(late["draft_tokens"].sum() / late["decoding"].sum())


@pytest.mark.parametrize(
    "policy",
    [RollingOff(window=20, threshold=0.2), SmartSpec()],
    ids=lambda p: p.kind,
)
def test_off_is_a_trap_for_rules_that_learn_only_from_what_they_draft(policy: Policy) -> None:
    """By decree, or because k = 0 teaches nothing: easy text comes, and nobody tries."""
    assert drafts_at_the_end(policy) == 0


@pytest.mark.parametrize("policy", [SGLangThroughput(), SGLangEma(), Exp3(hold=1)], ids=lambda p: p.kind)
def test_rules_that_keep_trying_come_back(policy: Policy) -> None:
    assert drafts_at_the_end(policy) > 2


def test_old_confidences_hurt_most_when_a_request_is_alone() -> None:
    """The budget of a batch averages over many requests and hardly changes; that of one is another round's luck."""
    lost = {}
    for concurrency in (1, 32):
        zoo = load("policy_zoo", [f"workload.concurrency={concurrency}", "workload.requests_per_client=6"]).scenario
        fresh, old = (zoo.backend.run(zoo.workload, DSpark(stale_steps=s, stop="best"), 0).steps for s in (0, 2))
        tokens_per_s = [s["emitted"].sum() / s["end_s"].iloc[-1] for s in (fresh, old)]
        lost[concurrency] = 1 - tokens_per_s[1] / tokens_per_s[0]
    assert lost[1] > 0.04
    assert abs(lost[32]) < 0.02


def test_the_zoo_shows_every_rule() -> None:
    kinds = {k.model_fields["kind"].default for k in get_args(get_args(AnyPolicy)[0])} - {"probe"}  # decides nothing
    assert {p.kind for p in load("policy_zoo", ["workload.concurrency=8", "seeds=[0]"]).scenario.policies} == kinds
