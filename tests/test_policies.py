"""One contract for all policies, and a hand-worked case for each rule."""

from typing import Any, get_args

import numpy as np
import pytest
from pydantic import TypeAdapter

from adasim.errors import InputError, PolicyError
from adasim.policies import AnyPolicy
from adasim.policies.base import Policy
from adasim.policies.dcut import DCut
from adasim.policies.driver import PolicyDriver
from adasim.policies.fixed import Fixed
from adasim.policies.head import Head
from adasim.policies.off import Off
from adasim.policies.oracle import Oracle
from adasim.policies.probe import Probe, Shape
from adasim.policies.threshold import Threshold
from adasim.types import BatchView, DraftView, EngineCaps, IntArray, StepOutcome

KINDS: list[Any] = list(get_args(get_args(AnyPolicy)[0]))


class FlatCost:
    """Every round takes the same time, or ``per_token`` more per verified token."""

    def __init__(self, per_token: float = 0.0) -> None:
        self.per_token = per_token

    def round_s(self, batch: int, draft_positions: int, verified: int, context: float) -> float:
        return 1.0 + self.per_token * verified


def caps(**fields: Any) -> EngineCaps:
    provides = frozenset({"survival", "accept_len", "margin", "cost", "truth"})
    given: dict[str, Any] = {
        "max_draft_len": 15,
        "max_running_requests": 64,
        "provides": provides,
        "cost": FlatCost(),
    }
    return EngineCaps(**(given | fields))


def batch(n: int, limits: EngineCaps, step: int = 0) -> BatchView:
    return BatchView(step, 0.0, limits, np.arange(n), np.full(n, 100), 0)


def draft(rng: np.random.Generator, draft_lens: IntArray, width: int) -> DraftView:
    n = len(draft_lens)
    return DraftView(
        draft_lens,
        survival=np.cumprod(rng.random((n, width)), axis=1, dtype=np.float64),
        accept_len=rng.normal(6, 6, n),
        truth=rng.integers(0, width + 1, n),
        margin=rng.normal(1, 2, (n, width)),
    )


def outcome(step: int, view: BatchView, draft_lens: IntArray, verify_lens: IntArray) -> StepOutcome:
    accepted = np.minimum(verify_lens - 1, 2)
    return StepOutcome(step, view.request_ids, draft_lens, verify_lens, accepted, accepted + 1, 0.01, 0)


def play(policy: Policy, limits: EngineCaps, seed: int = 0) -> list[list[int]]:
    """Plans over a changing batch, with feedback."""
    driver, rng, plans = PolicyDriver(policy, limits), np.random.default_rng(seed), []
    for step, n in enumerate([1, 7, 64, 3, 3, 12]):
        view = batch(n, limits, step)
        draft_lens = driver.draft_lens(view)
        verify_lens = driver.verify_lens(view, draft(rng, draft_lens, limits.max_draft_len))
        plans.append([*draft_lens.tolist(), *verify_lens.tolist()])
        driver.observe(outcome(step, view, draft_lens, verify_lens))
    return plans


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
class TestContract:
    """Legal plans, same inputs same plans, start() forgets, empty feedback survives."""

    def test_plans_are_legal(self, kind: Any) -> None:
        for limits in (caps(), caps(max_draft_len=7), caps(ragged=False), caps(lag_steps=3)):
            play(kind() if kind is not Fixed else Fixed(verify_len=4), limits)

    def test_same_inputs_same_plans(self, kind: Any) -> None:
        assert play(kind(), caps()) == play(kind(), caps())

    def test_start_forgets(self, kind: Any) -> None:
        policy = kind()
        first = play(policy, caps())
        assert play(policy, caps()) == first

    def test_empty_feedback(self, kind: Any) -> None:
        policy, empty = kind(), np.zeros(0, dtype=np.int64)
        PolicyDriver(policy, caps()).observe(StepOutcome(0, empty, empty, empty, empty, empty, 0.0, 0))

    def test_needs_are_checked_at_start(self, kind: Any) -> None:
        if kind().needs:
            with pytest.raises(InputError, match=r"needs .*; the engine provides nothing"):
                PolicyDriver(kind(), caps(provides=frozenset()))

    def test_round_trips_through_json(self, kind: Any) -> None:
        again: Policy = TypeAdapter(AnyPolicy).validate_json(kind().model_dump_json())
        assert again == kind()

    def test_is_documented(self, kind: Any) -> None:
        assert kind.__doc__
        assert all(f in (kind.__doc__ or "") or f in Policy.model_fields for f in kind.model_fields), (
            "every field is explained in the docstring"
        )


def lens(policy: Policy, view: DraftView, limits: EngineCaps | None = None) -> list[int]:
    limits = limits or caps(max_draft_len=3)
    driver = PolicyDriver(policy, limits)
    return driver.verify_lens(batch(len(view.draft_lens), limits), view).tolist()


FULL = np.array([3, 3])
CURVES = np.array([[0.9, 0.8, 0.1], [0.6, 0.5, 0.45]])


def test_off_verifies_the_anchor() -> None:
    assert lens(Off(), DraftView(np.zeros(2, dtype=np.int64))) == [1, 1]


def test_fixed_drafts_what_it_verifies() -> None:
    driver = PolicyDriver(Fixed(verify_len=3), caps())
    assert driver.draft_lens(batch(2, caps())).tolist() == [2, 2]
    driver = PolicyDriver(Fixed(verify_len=3, draft_len=15), caps())
    assert driver.draft_lens(batch(2, caps())).tolist() == [15, 15]


def test_fixed_longer_than_the_block_is_refused() -> None:
    with pytest.raises(InputError, match=r"verify_len 17 .* allowed: verify_len 1\.\.16"):
        PolicyDriver(Fixed(verify_len=17), caps())


def test_head_rounds_scales_and_clamps() -> None:
    view = DraftView(np.array([3, 3, 3]), accept_len=np.array([2.6, -1.0, 9.0]))
    assert lens(Head(), view) == [3, 1, 4]
    assert lens(Head(rounding="floor"), view) == [2, 1, 4]
    assert lens(Head(gamma=1.4, min_verify_len=2), view) == [4, 2, 4]
    # 2.6 is 1.6 drafts: 1 + round(1.4 x 1.6 = 2.24) against round(1.4 x 2.6 = 3.64)
    assert lens(Head(gamma=1.4, base="drafts"), view) == [3, 1, 4]
    assert lens(Head(gamma=0.7, base="drafts", rounding="floor"), view) == [2, 1, 4]


def test_threshold_keeps_the_leading_confident_tokens() -> None:
    """Confidences .9, .89, .125 and .6, .83, .9."""
    view = DraftView(FULL, survival=CURVES)
    assert lens(Threshold(threshold=0.5), view) == [3, 4]
    assert lens(Threshold(threshold=0.7), view) == [3, 1]
    # auto: their mean is (.9 + .889 + .125 + .6 + .833 + .9) / 6 = .708
    assert lens(Threshold(threshold="auto"), view) == [3, 1]


def test_oracle_verifies_what_will_be_accepted() -> None:
    assert lens(Oracle(), DraftView(FULL, truth=np.array([0, 3]))) == [1, 4]


def test_dcut_keeps_the_best_prefixes_of_the_batch() -> None:
    """Half of 2 x 4 tokens: two anchors and the two best drafts, .9 and .8, both of request 0."""
    view = DraftView(FULL, survival=CURVES)
    assert lens(DCut(keep_ratio=0.5), view) == [3, 1]
    assert lens(DCut(keep_ratio=1.0), view) == [4, 4]
    assert lens(DCut(keep_ratio={1: 1.0, 3: 0.5}), view) == [3, 3]  # 0.75 at batch 2: .9 .8 .6 .5


def test_dcut_auto_maximises_tokens_per_second() -> None:
    """With 0.1 s per token: budgets 4 / 6 / 8 earn 3.7/1.4, 4.8/1.6, 5.35/1.8 tokens per second: the second."""
    view = DraftView(FULL, survival=CURVES)
    costly = caps(max_draft_len=3, cost=FlatCost(0.1))
    assert lens(DCut(ratios=[0.5, 0.75, 1.0]), view, costly) == [3, 3]


def test_a_flat_cost_table_makes_dcut_auto_verify_everything() -> None:
    """The silent no-op: with nothing to save, the most expected tokens win."""
    assert lens(DCut(), DraftView(FULL, survival=CURVES)) == [4, 4]


def test_dcut_refuses_ratios_it_would_ignore() -> None:
    with pytest.raises(InputError, match="ratios has no effect"):
        PolicyDriver(DCut(keep_ratio=0.5, ratios=[0.5]), caps())


class Wrong(Policy):
    """Answers whatever the test says."""

    kind: str = "wrong"
    drafts: Any = None
    verifies: Any = None

    def draft_lens(self, batch: BatchView) -> IntArray:
        return super().draft_lens(batch) if self.drafts is None else self.drafts

    def verify_lens(self, batch: BatchView, draft: DraftView) -> IntArray:
        return np.ones(len(batch), dtype=np.int64) if self.verifies is None else self.verifies


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Wrong(drafts=np.array([99])), r"wrong.*\.draft_lens: request 0 at step 2 got 99, allowed 0\.\.15"),
        (Wrong(verifies=np.array([0])), r"wrong.*\.verify_lens: request 0 at step 2 got 0, allowed 1\.\.16"),
        (Wrong(verifies=np.array([17])), r"got 17, allowed 1\.\.16"),
        (Wrong(verifies=np.array([2.0])), "expected 1 integers"),
        (Wrong(verifies=np.array([1, 1])), "expected 1 integers"),
        (Wrong(verifies=[1]), "expected 1 integers"),
    ],
)
def test_illegal_answers_are_named(policy: Policy, message: str) -> None:
    driver = PolicyDriver(policy, caps())
    view = batch(1, caps(), step=2)
    with pytest.raises(PolicyError, match=message):
        driver.verify_lens(view, DraftView(driver.draft_lens(view)))


def test_rectangular_engines_pad_to_the_longest() -> None:
    view = DraftView(np.array([3, 3, 1]), truth=np.array([0, 2, 0]))
    assert lens(Oracle(), view, caps(max_draft_len=3, ragged=False)) == [3, 3, 2]


class Listener(Off):
    """Remembers the steps it was told about."""

    heard: list[int] = []  # noqa: RUF012 - shared on purpose within a test

    def observe(self, outcome: StepOutcome) -> None:
        self.heard.append(outcome.step)


@pytest.mark.parametrize(("lag", "heard"), [(0, [0, 1, 2, 3]), (2, [0, 1]), (9, [])])
def test_feedback_is_late(lag: int, heard: list[int]) -> None:
    policy = Listener(heard=[])
    driver = PolicyDriver(policy, caps(lag_steps=lag))
    ones = np.ones(1, dtype=np.int64)
    for step in range(4):
        driver.observe(outcome(step, batch(1, caps()), ones, ones))
    assert policy.heard == heard


def test_probe_visits_every_shape_equally_often_and_the_first_once_more() -> None:
    shapes = [Shape(draft_len=0, verify_len=1), Shape(draft_len=3, verify_len=4), Shape(draft_len=7, verify_len=8)]
    driver, orders = PolicyDriver(Probe(shapes=shapes), caps(max_draft_len=7)), []
    for step in range(1 + 3 * 20):
        view = batch(2, caps(), step)
        drafted = driver.draft_lens(view)
        orders.append((int(drafted[0]), int(driver.verify_lens(view, DraftView(drafted))[0])))
    pairs = [(s.draft_len, s.verify_len) for s in shapes]
    assert orders[0] == pairs[0]
    passes = [orders[i : i + 3] for i in range(1, len(orders), 3)]
    assert all(sorted(p) == pairs for p in passes)
    assert len({tuple(p) for p in passes}) == 6  # every order comes up


def test_probe_keeps_the_mean_of_ragged_rounds() -> None:
    for draft_len, verify_len in ((7, 4), (15, 8), (15, 12), (15, 15)):
        probe = Probe(shapes=[Shape(draft_len=draft_len, verify_len=verify_len, ragged=True)])
        driver, view = PolicyDriver(probe, caps()), batch(4000, caps())
        lengths = driver.verify_lens(view, DraftView(driver.draft_lens(view)))
        assert lengths.mean() == pytest.approx(verify_len, rel=0.03)
        assert lengths.min() >= 2
        assert len(set(lengths.tolist())) > 2


def test_probe_refuses_what_cannot_be_drafted() -> None:
    with pytest.raises(InputError, match=r"draft_len 9; the engine drafts 0\.\.7"):
        PolicyDriver(Probe(shapes=[Shape(draft_len=9, verify_len=2)]), caps(max_draft_len=7))
    with pytest.raises(ValueError, match="verify_len 5 needs draft_len 4 or more"):
        Shape(draft_len=3, verify_len=5)
    with pytest.raises(ValueError, match=r"ragged needs verify_len 3\.\.draft_len"):
        Shape(draft_len=7, verify_len=8, ragged=True)
