"""Budgets for the whole batch: sizes, shares, old confidences, and the estimator behind vLLM's rule."""

import numpy as np
import pytest
from scipy.special import expit

from adasim.policies.acceptance_estimator import AcceptanceEstimator
from adasim.policies.base import Policy
from adasim.policies.budget import budget_of, spend
from adasim.policies.dcut import DCut
from adasim.policies.driver import PolicyDriver
from adasim.policies.dspark import DSpark
from adasim.policies.stale import StaleCurves
from adasim.policies.step_times import StepTimes
from adasim.policies.vllm_adaptive import VllmAdaptive
from adasim.types import BatchView, DraftView, FloatArray, IntArray, StepOutcome
from tests.test_policies import CURVES, FULL, FlatCost, batch, caps, lens

VIEW = DraftView(FULL, survival=CURVES)


class Stairs:
    """Seconds by verified tokens that rise at graph sizes: {up to this size: seconds}."""

    def __init__(self, steps: dict[int, float]) -> None:
        self.steps, self.asked = steps, 0

    def round_s(self, batch: int, draft_positions: int, verified: int, context: float) -> float:
        self.asked += 1
        return next(s for size, s in self.steps.items() if verified <= size)


def test_spend_equals_sorting() -> None:
    """Against a stable sort, on curves full of ties and short drafts."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        n, width = rng.integers(1, 9), rng.integers(1, 9)
        curves = np.round(np.cumprod(rng.random((n, width)) ** 0.3, axis=1), 1)
        lengths = rng.integers(0, width + 1, n)
        curves = np.where(np.arange(width) < lengths[:, None], curves, -1.0)
        budget = int(rng.integers(0, lengths.sum() + 1))
        kept = np.argsort(-curves.ravel(), kind="stable")[:budget]
        assert spend(curves, budget).tolist() == (1 + np.bincount(kept // width, minlength=n)).tolist()


def test_dspark_admits_while_tokens_per_second_rise() -> None:
    """At .1 s a token the six drafts .9 .8 .6 .5 .45 .1 earn, one by one, 2/1.2, 2.9/1.3, 3.7/1.4, 4.3/1.5, 4.8/1.6,
    5.25/1.7, 5.35/1.8 = 1.67, 2.23, 2.64, 2.87, 3.0, 3.09, 2.97 tokens per second: five."""
    limits = caps(max_draft_len=3, cost=FlatCost(0.1))
    assert lens(DSpark(stale_steps=0), VIEW, limits) == [3, 4]
    assert lens(DSpark(stale_steps=0, stop="best"), VIEW, limits) == [3, 4]


def test_the_early_stop_stands_before_a_riser() -> None:
    """Up to 4 tokens 1 s, then 1.3 s: 2.9, 3.7, then 4.3 / 1.3 = 3.3 falls, but 5.35 / 1.3 = 4.1 would have been best."""
    limits = caps(max_draft_len=3, cost=Stairs({4: 1.0, 8: 1.3}), captured_tokens=(4, 8))
    assert lens(DSpark(stale_steps=0), VIEW, limits) == [3, 1]
    assert lens(DSpark(stale_steps=0, stop="best"), VIEW, limits) == [4, 4]


def test_budget_of_nothing() -> None:
    assert budget_of(np.full((3, 4), -1.0), np.ones(13), early=True) == 0
    assert budget_of(np.full((3, 4), 0.5), np.ones(13), early=True) == 12
    assert budget_of(np.full((3, 4), 0.5), np.arange(1.0, 14.0), early=True) == 0


def shown(curves: FloatArray, ids: IntArray | None = None, step: int = 0) -> tuple[BatchView, DraftView]:
    limits = caps(max_draft_len=3, cost=FlatCost(0.1))
    ids = np.arange(len(curves)) if ids is None else ids
    return BatchView(step, 0.0, limits, ids, np.full(len(ids), 100), 0), DraftView(np.full(len(ids), 3), curves)


def test_the_budget_is_sized_by_old_confidences_and_spent_by_new_ones() -> None:
    """CURVES are worth five drafts; a round later they are gone, but five are still spent, on the best of the new."""
    driver = PolicyDriver(DSpark(stale_steps=1), caps(max_draft_len=3, cost=FlatCost(0.1)))
    assert driver.verify_lens(*shown(CURVES)).tolist() == [4, 4]  # nothing old yet: everything
    poor = np.array([[0.03, 0.02, 0.01], [0.06, 0.05, 0.04]])
    assert driver.verify_lens(*shown(poor, step=1)).tolist() == [3, 4]
    assert driver.verify_lens(*shown(CURVES, step=2)).tolist() == [1, 1]  # .03 is not worth .1 s


def test_old_curves_follow_their_requests() -> None:
    old = np.array([[0.9, 0.8], [0.5, 0.4], [0.1, 0.0]])
    stale = StaleCurves(1)
    assert stale.swap(np.array([7, 3, 5]), old) is None
    back = stale.swap(np.array([5, 9, 7]), np.zeros((3, 2)))
    assert back is not None
    np.testing.assert_allclose(back, [old[2], old.mean(axis=0), old[0]])
    for steps in (0, 2):
        stale = StaleCurves(steps)
        ages = [stale.swap(np.array([1]), np.full((1, 1), float(i))) for i in range(5)]
        assert [None if a is None else float(a[0, 0]) for a in ages] == [None] * steps + [
            float(i) for i in range(5 - steps)
        ]


def test_step_times_are_exact_on_a_staircase_and_asked_for_once() -> None:
    cost = Stairs({24: 1.0, 40: 2.0, 64: 3.5})
    limits = caps(max_draft_len=7, cost=cost, captured_tokens=(24, 40, 64))
    times, view = StepTimes(limits), batch(8, limits)
    seconds = times.by_tokens(view)
    assert seconds.tolist() == [cost.round_s(8, 64, tokens, 100) for tokens in range(8, 65)]
    asked = cost.asked
    assert times.by_tokens(view) is seconds
    assert times.by_drafts(view, draft_block=False).tolist() == [1.0, 1.0, 1.0, 2.0, 2.0, 3.5, 3.5, 3.5]
    assert cost.asked == asked + 8


@pytest.mark.parametrize(
    "policy", [DCut(), DSpark(), DSpark(stop="best"), VllmAdaptive(interval=1, warmup_refits=1)], ids=lambda p: p.label
)
def test_a_flat_cost_table_makes_every_budget_verify_everything(policy: Policy) -> None:
    """The silent no-op: nothing to save, so the most expected tokens win, however unlikely."""
    limits = caps(max_draft_len=3, cost=FlatCost())
    driver = PolicyDriver(policy, limits)
    for step in range(5):
        view = batch(2, limits, step)
        lengths = driver.verify_lens(view, DraftView(FULL, CURVES, margin=np.full((2, 3), -3.0)))
        assert lengths.tolist() == [4, 4]
        driver.observe(StepOutcome(step, view.request_ids, FULL, lengths, np.zeros(2, int), np.ones(2, int), 1.0, 0))


def world(rng: np.random.Generator, n: int, slope: float, intercepts: FloatArray) -> tuple[FloatArray, IntArray]:
    """Margins [n, K], and how many drafts in a row are good, [n]."""
    margin = rng.normal(2.0, 2.0, (n, len(intercepts)))
    good = rng.random(margin.shape) < expit(slope * margin + intercepts)
    return margin, np.cumprod(good, axis=1).sum(axis=1)


def verified(accepted: IntArray, verify_lens: IntArray) -> StepOutcome:
    got, n = np.minimum(accepted, verify_lens - 1), len(accepted)
    return StepOutcome(0, np.arange(n), np.full(n, 5), verify_lens, got, got + 1, 1.0, 0)


@pytest.mark.parametrize("cut", ["never", "by margin"])
def test_the_estimator_finds_slope_and_intercepts(cut: str) -> None:
    """Whether or not the rule itself decides, by margin, what gets verified."""
    slope, intercepts = 0.5, np.array([-0.2, -0.4, -0.6, -0.8, -1.0])
    estimator, rng = AcceptanceEstimator(5, memory=1.0), np.random.default_rng(0)
    for _ in range(1500):
        margin, run = world(rng, 32, slope, intercepts)
        lengths = np.full(32, 6) if cut == "never" else 1 + np.cumprod(margin > 0.5, axis=1).sum(axis=1)
        estimator.observe(margin, verified(run, lengths))
    estimator.refit()
    assert estimator.slope == pytest.approx(slope, abs=0.03)
    assert estimator.intercepts == pytest.approx(intercepts, abs=0.12)


def test_the_estimator_is_calibrated_where_uncensored_counting_is_not() -> None:
    """S_5 as predicted and as it is; counting drafts behind a refusal as refused gives far less."""
    slope, intercepts = 0.5, np.full(5, -0.5)
    estimator, rng = AcceptanceEstimator(5, memory=1.0), np.random.default_rng(1)
    margins, runs = zip(*[world(rng, 64, slope, intercepts) for _ in range(300)], strict=True)
    for margin, run in zip(margins, runs, strict=True):
        estimator.observe(margin, verified(run, np.full(64, 6)))
    estimator.refit()
    margin, run = np.concatenate(margins), np.concatenate(runs)
    truth = (run >= 5).mean()
    assert estimator.survival(margin)[:, 4].mean() == pytest.approx(truth, abs=0.01)
    naive = np.prod([(run >= k).mean() for k in range(1, 6)])  # product of "accepted / verified" at each position
    assert naive < truth / 2


def test_only_decided_drafts_are_counted() -> None:
    """Verified 3 of 5 drafts each: accepted 1 (two decided), 3 (three), 0 (one); accepted ones are 1, 3, 0."""
    estimator = AcceptanceEstimator(5, memory=0.25)
    estimator.observe(np.zeros((3, 5)), verified(np.array([1, 3, 0]), np.full(3, 4)))
    decided, accepted, _ = estimator._count.sum(axis=2)
    assert decided.tolist() == [3, 2, 1, 0, 0]
    assert accepted.tolist() == [2, 1, 1, 0, 0]
    estimator.refit()
    assert estimator._count[0].sum() == pytest.approx(6 * 0.25)


def test_vllm_adaptive_verifies_all_until_it_has_learnt() -> None:
    """Two refits of twenty rounds; then drafts that are never accepted are no longer verified."""
    driver = PolicyDriver(VllmAdaptive(interval=20, warmup_refits=2), caps(max_draft_len=3, cost=FlatCost(0.2)))
    seen = []
    for step in range(50):
        view, _ = shown(CURVES, step=step)
        lengths = driver.verify_lens(view, DraftView(FULL, margin=np.full((2, 3), 2.0)))
        seen.append(lengths.tolist())
        driver.observe(StepOutcome(step, view.request_ids, FULL, lengths, np.zeros(2, int), np.ones(2, int), 1.0, 0))
    assert seen[:40] == [[4, 4]] * 40
    assert seen[41:] == [[1, 1]] * 9


def test_captured_lengths_round_up_where_drafts_allow_else_the_round_is_eager() -> None:
    limits = caps(max_draft_len=7, ragged=False, captured_lens=(1, 4, 8))
    driver = PolicyDriver(DCut(), limits)
    full, short = np.array([7, 7]), np.array([4, 4])
    assert driver.legalise(np.array([2, 3]), full).tolist() == [4, 4]
    assert driver.legalise(np.array([5, 1]), full).tolist() == [8, 8]
    assert driver.legalise(np.array([5, 1]), short).tolist() == [5, 5]  # nobody drafted eight
    assert driver.legalise(np.array([1, 1]), full).tolist() == [1, 1]
    assert [driver.is_eager(np.array(x)) for x in ([4, 4], [8, 8], [5, 5], [4, 1])] == [False, False, True, True]
    anything = PolicyDriver(DCut(), caps())
    assert not anything.is_eager(np.array([5, 2]))
