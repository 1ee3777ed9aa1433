"""Hand-worked cases of the published length rules that learn, look up or ask for time."""

from typing import Any

import numpy as np
import pytest

from adasim.errors import InputError
from adasim.policies.adaspec import AdaSpec
from adasim.policies.base import Policy
from adasim.policies.driver import PolicyDriver
from adasim.policies.exp3 import Exp3
from adasim.policies.head import Head
from adasim.policies.rolling_off import RollingOff
from adasim.policies.schedule import Schedule
from adasim.policies.sglang_ema import SGLangEma
from adasim.policies.sglang_throughput import SGLangThroughput
from adasim.policies.smartspec import SmartSpec
from adasim.policies.specdecpp import SpecDecPP
from adasim.policies.tetris import Tetris
from adasim.policies.ucb1 import Ucb1
from adasim.types import BatchView, DraftView, EngineCaps, StepOutcome
from tests.test_policies import CURVES, FULL, FlatCost, batch, caps, lens

SHORT = caps(max_draft_len=3, cost=FlatCost(0.1))  # 2 requests, k = 0..3: 1.2, 1.4, 1.6, 1.8 s


def start(policy: Policy, limits: EngineCaps) -> PolicyDriver:
    return PolicyDriver(policy, limits)


def drafts(driver: PolicyDriver, n: int, step: int = 0, context: int = 100, queued: int = 0) -> int:
    """k that a rule with one length for all chooses."""
    view = BatchView(step, 0.0, driver.caps, np.arange(n), np.full(n, context), queued)
    (k,) = set(driver.draft_lens(view).tolist())
    return int(k)


def tell(driver: PolicyDriver, accepted: list[int], k: int, step: int = 0, seconds: float = 1.0) -> None:
    """A round in which all drafted k."""
    got, n = np.array(accepted), len(accepted)
    driver.observe(StepOutcome(step, np.arange(n), np.full(n, k), np.full(n, k + 1), got, got + 1, seconds, 0))


def test_specdecpp_stops_when_a_rejection_is_likely() -> None:
    """1 - S <= .7 holds for .9, .8 (not .1) and .6, .5, .45; 1 - S <= .3 for .9, .8 and none."""
    view = DraftView(FULL, survival=CURVES)
    assert lens(SpecDecPP(), view) == [3, 4]
    assert lens(SpecDecPP(stop_above=0.3), view) == [3, 1]


def test_tetris_spends_a_fixed_budget_on_the_likeliest() -> None:
    """The three likeliest of .9 .8 .1 and .6 .5 .45 are .9 .8 .6."""
    view = DraftView(FULL, survival=CURVES)
    assert lens(Tetris(drafts=3), view) == [3, 2]
    assert lens(Tetris(drafts=0), view) == [1, 1]
    assert lens(Tetris(drafts=99), view) == [4, 4]


def test_head_follows_the_load() -> None:
    """gamma 1.4 at load 1, 1.0 at 11: 1.2 at 6 = 2 running + 4 queued. 1.2 x 2.6 = 3.1, 1.2 x 1.2 = 1.4."""
    driver = start(Head(gamma={1: 1.4, 11: 1.0}), caps(max_draft_len=7))
    view = BatchView(0, 0.0, driver.caps, np.arange(2), np.full(2, 9), 4)
    seen = DraftView(np.array([7, 7]), accept_len=np.array([2.6, 1.2]))
    assert driver.verify_lens(view, seen).tolist() == [3, 1]
    assert lens(Head(idle_up_to=2), seen, caps(max_draft_len=7)) == [8, 8]  # 2 requests: the head is off
    assert lens(Head(idle_up_to=1), seen, caps(max_draft_len=7)) == [3, 1]
    with pytest.raises(InputError, match="gamma is an empty table"):
        start(Head(gamma={}), caps())


def test_schedule_looks_up_batch_and_context() -> None:
    driver = start(Schedule(drafts={1: 7, 8: {1: 5, 1000: 2}, 32: 0}), caps())
    assert [drafts(driver, n) for n in (1, 7, 8, 31, 32, 64)] == [7, 7, 5, 5, 0, 0]
    assert [drafts(driver, 8, context=c) for c in (999, 1000, 5000)] == [5, 2, 2]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Schedule(drafts={1: 16}), r"16 drafts; allowed 0\.\.15"),
        (Schedule(drafts={4: 2}), "drafts must begin at 1, it begins at 4"),
        (Schedule(drafts={1: {100: 2}}), r"drafts\[1\] must begin at 1, it begins at 100"),
        (Schedule(drafts={1: {}}), r"drafts\[1\] must begin at 1, it begins at nothing"),
        (SGLangEma(candidates={1: [3, 30]}), r"30 drafts; allowed 0\.\.15"),
        (SGLangThroughput(candidates=[99]), r"99 drafts; allowed 0\.\.15"),
        (RollingOff(drafts=16), r"16 drafts; allowed 0\.\.15"),
        (Ucb1(arms=[0, 16, 17]), r"16, 17 drafts; allowed 0\.\.15"),
        (Exp3(sizes=[2, 4]), "sizes must begin at 1, it begins at 2"),
    ],
)
def test_what_does_not_fit_the_engine_is_refused(policy: Policy, message: str) -> None:
    with pytest.raises(InputError, match=message):
        start(policy, caps())


def test_draft_block_drafts_all_and_verifies_k() -> None:
    driver = start(Schedule(drafts={1: 3, 8: 0}, draft_block=True), caps())
    view = batch(2, driver.caps)
    assert driver.draft_lens(view).tolist() == [15, 15]
    assert driver.verify_lens(view, DraftView(np.array([15, 15]))).tolist() == [4, 4]
    assert drafts(driver, 8) == 0


def test_rolling_off_never_comes_back() -> None:
    """Means of the last two rates: (1 + .25) / 2, then (.25 + .5) / 2 < .5: off, whatever follows."""
    driver = start(RollingOff(drafts=4, window=2, threshold=0.5), caps())
    ks = []
    for accepted in ([4, 4], [1, 1], [2, 2], [4, 4], [4, 4], [4, 4]):
        ks.append(drafts(driver, 2))
        tell(driver, np.minimum(accepted, ks[-1]).tolist(), ks[-1])
    assert ks == [4, 4, 4, 0, 0, 0]


def test_sglang_ema_moves_one_step_at_a_time() -> None:
    """From k = 3, ema 2. Five rounds of 3: 3 - .8^5 = 2.67 > 3 - .5: up. Five of 0: .876 <= 3 - .75: down. Five of 0:
    .287 > 1 - .75: stays. Five of 0: .094: down."""
    driver = start(SGLangEma(candidates={1: [1, 3, 5]}), caps())
    ks = []
    for accepted in (3, 0, 0, 0, 0):
        for _ in range(5):
            ks.append(drafts(driver, 1))
            tell(driver, [accepted], ks[-1])
    assert ks[::5] == [3, 5, 3, 3, 1]


def test_sglang_ema_keeps_tiers_apart_and_never_goes_back_to_zero() -> None:
    driver = start(SGLangEma(candidates={1: [1, 3, 5], 8: [0, 1], 32: [0, 1, 3], 64: [0]}), caps())
    assert [drafts(driver, n) for n in (1, 8, 32, 64)] == [3, 1, 1, 0]
    for _ in range(50):
        tell(driver, [0] * 8, drafts(driver, 8))
        tell(driver, [0] * 64, drafts(driver, 64))
    assert [drafts(driver, n) for n in (1, 8, 64)] == [3, 1, 0]


def test_sglang_throughput_weighs_acceptance_by_position_against_cost() -> None:
    """4 requests accept 3 3 0 1 of 3: S = 3/4, 2/4, 2/4. At .05 s a token, k = 1, 2, 3 earn 1.75/1.4, 2.25/1.6, 2.75/1.8
    = 1.25, 1.41, 1.53; at 1 s a token 1.75/9, 2.25/13, 2.75/17."""
    for per_token, candidates, best in ((0.05, None, 3), (1.0, None, 1), (1.0, [2, 3], 2), (0.05, [1, 2], 2)):
        policy = SGLangThroughput(interval=1, candidates=candidates)
        driver = start(policy, caps(max_draft_len=3, cost=FlatCost(per_token)))
        assert drafts(driver, 4) == max(candidates or [3])  # nothing known: the largest
        tell(driver, [3, 3, 0, 1], 3)
        assert policy.survival().tolist() == [0.75, 0.5, 0.5]
        assert drafts(driver, 4) == best


def test_sglang_throughput_extrapolates_what_it_no_longer_sees() -> None:
    """k falls to 2: positions 3.. are forgotten and go on from .8, .4 by halves."""
    policy = SGLangThroughput(interval=1, candidates=[2, 5])
    driver = start(policy, caps(max_draft_len=5, cost=FlatCost(0.2)))
    drafts(driver, 5)
    tell(driver, [5, 5, 1, 1, 0], 5)
    assert policy.survival().tolist() == [0.8, 0.4, 0.4, 0.4, 0.4]
    assert drafts(driver, 5) == 2
    np.testing.assert_allclose(policy.survival(), [0.8, 0.4, 0.2, 0.1, 0.05])


def test_sglang_throughput_forgets_after_its_window_and_decides_at_intervals() -> None:
    """Windows of two rounds, decisions in rounds 0, 3, 6: cheap tokens, so k follows what was accepted last."""
    policy = SGLangThroughput(window=2, interval=3, candidates=[1, 3])
    driver = start(policy, caps(max_draft_len=3, cost=FlatCost(0.05)))
    ks = []
    for accepted in (3, 0, 0, 1, 1, 1, 1):
        ks.append(drafts(driver, 4))
        tell(driver, [min(accepted, ks[-1])] * 4, ks[-1])
    assert ks == [3, 3, 3, 1, 1, 1, 3]  # S_1 = 1 alone: flat beyond, so up it goes


def test_smartspec_maximises_goodput() -> None:
    """a = .5: 1, 1.5, 1.75, 1.875 tokens over 1.2, 1.4, 1.6, 1.8 s: .92 (with the bonus), 1.07, 1.09, 1.04."""
    assert drafts(start(SmartSpec(prior=0.5), SHORT), 2) == 2
    assert drafts(start(SmartSpec(prior=0.5, off_bonus=1.4), SHORT), 2) == 0


def test_smartspec_counts_only_what_was_decided() -> None:
    """Accepted 2 and 0 of 2: 2 accepted, 1 refused. Half weight on prior .5 of 1: (.25 + 1) / (.5 + 1.5) = .625."""
    policy = SmartSpec(prior=0.5, weight=0.5)
    driver = start(policy, SHORT)
    tell(driver, [2, 0], 2)
    assert policy._rate.value == pytest.approx(0.625)
    tell(driver, [0, 0], 0)  # no drafts: nothing learnt
    assert policy._rate.value == pytest.approx(0.625)


@pytest.mark.parametrize("k", [1, 3, 15])
def test_the_estimated_rate_does_not_depend_on_k(k: int) -> None:
    policy, rng = SmartSpec(weight=0.01), np.random.default_rng(0)
    driver = start(policy, caps())
    for _ in range(1000):
        tell(driver, np.minimum(rng.geometric(0.2, 32) - 1, k).tolist(), k)
    assert policy._rate.value == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize(
    ("fields", "k"),
    [
        ({"tpot_ms": 1000}, 3),  # 1.2, .933, .914, .96 s a token
        ({"tpot_ms": 950}, 2),
        ({"tpot_ms": 900}, 2),  # none: the quickest
        ({"tpot_ms": 1500, "tokens": "sure"}, 1),  # 1.2, 1.4, 1.6, 1.8 s a round
        ({"tpot_ms": 1000, "tokens": "sure"}, 0),
    ],
)
def test_adaspec_takes_the_longest_that_keeps_the_slo(fields: dict[str, Any], k: int) -> None:
    fields["tpot_ms"] = float(fields["tpot_ms"])
    assert drafts(start(AdaSpec(prior=0.5, **fields), SHORT), 2) == k


def test_ucb1_tries_every_arm_then_the_best_bound() -> None:
    """10, 20 and 15 tokens/s: rewards .5, 1, .75, equal bonuses. Batches of 8 learn for themselves."""
    driver = start(Ucb1(arms=[0, 1, 3], hold=1), caps())
    ks = []
    for step, accepted in enumerate((9, 19, 14, 19)):
        ks.append(drafts(driver, 1, step))
        tell(driver, [accepted], ks[-1], step)
    assert ks == [0, 1, 3, 1]
    assert drafts(driver, 8, step=9) == 0


def test_ucb1_explores_again_when_the_bonus_outgrows_the_gap() -> None:
    """Rewards .5 and 1 with exploration .2: arm 0 again once .2 sqrt(2 ln t) (1 - 1/sqrt(t - 1)) > .5."""
    driver = start(Ucb1(arms=[0, 1], hold=1), caps())
    ks = []
    for step in range(200):
        ks.append(drafts(driver, 1, step))
        tell(driver, [9 if ks[-1] == 0 else 19], ks[-1], step)
    bonus = [0.2 * np.sqrt(2 * np.log(t)) * (1 - 1 / np.sqrt(t - 1)) > 0.5 for t in range(2, 200)]
    assert ks.index(0, 1) == 2 + bonus.index(True)
    assert ks.count(1) > 190


def test_exp3_raises_the_weight_of_what_paid() -> None:
    """Two arms, mix .5: w = exp(.5 x 1 / .5 / 2) = e^.5 for the one played: .5 x .6225 + .25 = .561."""
    policy = Exp3(arms=[0, 3], mix=0.5, hold=1)
    driver = start(policy, caps())
    played = [0, 3].index(drafts(driver, 1))
    tell(driver, [9], 3)
    assert policy.chances(1)[played] == pytest.approx(0.561, abs=1e-3)


def test_exp3_finds_the_better_arm() -> None:
    driver = start(Exp3(arms=[0, 3, 7], hold=1), caps())
    ks = []
    for step in range(3000):
        ks.append(drafts(driver, 1, step))
        tell(driver, [{0: 9, 3: 19, 7: 14}[ks[-1]]], ks[-1], step)
    assert ks[-1000:].count(3) > 800


def test_a_bandit_keeps_its_arm_and_credits_late_feedback_to_it() -> None:
    policy = Ucb1(arms=[0, 1, 3], hold=2)
    driver = start(policy, caps(lag_steps=3))
    ks = []
    for step in range(10):
        ks.append(drafts(driver, 1, step))
        tell(driver, [4 * ks[-1] + 1], ks[-1], step)
    # outcomes of steps 0..3 are only known at 3..6: until then an untried arm comes first
    assert ks[:4] == [0, 0, 0, 0]
    assert policy._counts[1].sum() == 7
    assert (policy._sums[1] / np.maximum(policy._counts[1], 1)).tolist()[:2] == [2.0, 6.0]
