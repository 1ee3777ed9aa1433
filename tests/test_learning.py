"""Learning curves, losses, versions that share their luck, and the length head that follows them."""

from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from adasim.calibration.acceptance import CurveAcceptance, RecordedAcceptance
from adasim.calibration.head_quality import HeadQuality
from adasim.calibration.labels import HeadLearning, Label, expected_label, labels, settled_verify_len
from adasim.calibration.learning import LearningCurve, NamedLoss, mix_of, passes_worth, round_worth
from adasim.calibration.survival import Anchored, Geometric, harden, tau
from adasim.calibration.versioned import VersionedLuck
from adasim.errors import InputError
from adasim.policies.fixed import Fixed
from adasim.policies.head import Head
from adasim.simulator.learning import Buffer, Learning, Sample
from adasim.types import IntArray, Request
from tests.build import backend, closed, everywhere, simulate

DFLASH = Anchored(first=0.89, last=0.13, tau=7.09)
ALPHAS = (0.60, 0.75, 0.85, 0.92)
LOSSES: TypeAdapter[Any] = TypeAdapter(NamedLoss)


def reach(loss: Any) -> float:
    found: float = LOSSES.validate_python(loss).reach
    return found


# ---- curves


def test_a_domain_alone_approaches_its_asymptote_exponentially() -> None:
    curve = LearningCurve(gain=0.3, rounds=20.0)
    for n in (1, 20, 47.5):
        assert curve.after(1.0, n, 1.0, 1.0) == pytest.approx(1.3 - 0.3 * np.exp(-n / 20))
    assert curve.after(1.0, 1e6, 1.0, 0.5) == pytest.approx(1.15)


def test_a_domain_that_is_not_in_the_buffer_is_forgotten_exponentially() -> None:
    curve = LearningCurve(forgetting_rounds=100.0, floor=0.9)
    assert curve.after(1.2, 50, 0.0, 1.0) == pytest.approx(0.9 + 0.3 * np.exp(-0.5))
    assert LearningCurve(forgetting_rounds=None).after(1.2, 1e6, 0.0, 1.0) == 1.2
    assert curve.after(0.8, 1e6, 0.0, 1.0) == 0.8  # nothing is gained by being forgotten


def test_two_rounds_are_one_of_twice_the_length() -> None:
    curve = LearningCurve()
    once = curve.after(curve.after(0.97, 3, 0.4, 0.8), 5, 0.4, 0.8)
    assert once == pytest.approx(curve.after(0.97, 8, 0.4, 0.8))


def test_a_mixed_buffer_settles_where_learning_and_forgetting_balance() -> None:
    curve = LearningCurve(gain=0.3, rounds=20.0, forgetting_rounds=60.0, floor=0.9)
    settled = curve.after(1.0, 1e6, 0.25, 1.0)
    assert 0.25 * (1.3 - settled) / 20 == pytest.approx(0.75 * (settled - 0.9) / 60)


# ---- losses


def test_published_corners_of_the_losses() -> None:
    """(tau - DFlash's) / (full loss's - DFlash's), on the sets where it was published."""
    assert reach("forward_kl") == pytest.approx((7.05 - 5.86) / (7.28 - 5.86))
    assert reach("reverse_kl") == pytest.approx((7.389 - 6.54) / (7.751 - 6.54))
    assert reach("clipped_reverse_kl") == pytest.approx((7.590 - 6.54) / (7.751 - 6.54))
    assert (reach("adaflash"), reach("frozen")) == (1.0, 0.0)
    assert LearningCurve().asymptote(reach("adaflash")) * 5.86 == pytest.approx(7.28, abs=0.01)


def test_alpha_and_delta_have_their_best_where_it_was_published() -> None:
    def at(**fields: Any) -> float:
        return reach({"kind": "clipped_reverse_kl", **fields})

    alphas = np.linspace(0, 1, 21)
    assert alphas[int(np.argmax([at(alpha=float(a)) for a in alphas]))] == pytest.approx(0.8)
    assert at(alpha=1.0) < 1  # it dips at both ends
    deltas = (0.001, 0.005, 0.01, 0.02, 1.0)
    assert deltas[int(np.argmax([at(alpha=0.5, delta=d) for d in deltas]))] == 0.01
    assert at(alpha=0.0, delta=1.0) == pytest.approx(at(alpha=0.0, clip="none"))
    assert len({at(alpha=1.0, delta=d) for d in deltas}) == 1  # no reverse KL, nothing to clip


def test_a_position_clip_that_never_binds_is_no_clip() -> None:
    assert reach("adaflash_code") == reach({"kind": "clipped_reverse_kl", "clip": "none"})
    with pytest.raises(ValidationError, match=r"binds above 0\.5 nats; what that does is not published"):
        LOSSES.validate_python({"kind": "clipped_reverse_kl", "clip": "position", "tokens": 50})
    with pytest.raises(ValidationError, match="unknown loss 'kl'; allowed: frozen, forward_kl"):
        LOSSES.validate_python("kl")


# ---- buffer


def test_worth_of_a_round() -> None:
    """Two epochs over fresh samples are 1 + 1/2 first passes each, over samples seen twice 1/4 + 1/8."""
    assert passes_worth([0, 2], epochs=2, reuse=0.5) == [1.5, 0.375]
    assert round_worth([1.5] * 128, 128, 0.5) == 1.0
    assert round_worth(passes_worth([0] * 128, 4, 1.0), 128, 1.0) == 2.0
    assert mix_of([1.5, 0.375, 0.375], [1, 0, 1], 3) == pytest.approx([1 / 6, 5 / 6, 0])


def test_buffer_keeps_the_newest_and_accounts_for_all() -> None:
    buffer = Buffer(3)
    for i in range(5):
        buffer.add(Sample(domain=i % 2, tokens=10 + i, labels=0.0, reports=0.0, rounds=1))
    assert [s.tokens for s in buffer.samples] == [12, 13, 14]
    assert (buffer.added, buffer.left, buffer.unseen, buffer.fresh) == (5, 2, 2, 3)
    lesson = buffer.teach(epochs=2, reuse=0.5, domains=2)
    assert (lesson.samples, lesson.fresh, lesson.tokens) == (3, 3, 39)
    assert lesson.rounds == pytest.approx(3 / 128)
    assert lesson.share == pytest.approx([2 / 3, 1 / 3])
    buffer.add(Sample(0, 20, 0.0, 0.0, 1))
    assert (buffer.fresh, buffer.unseen, buffer.added - buffer.left) == (1, 2, 3)
    again = buffer.teach(epochs=2, reuse=0.5, domains=2)
    assert again.rounds == pytest.approx((1 + 2 * 0.25) / 128)


# ---- versions share their luck


REQUESTS = [Request(i, 0, 10, 400) for i in range(60)]


def versioned(model: CurveAcceptance, **fields: Any) -> VersionedLuck:
    return VersionedLuck(model, REQUESTS, ["d"], 3, 15, **fields)


def runs(luck: VersionedLuck, requests: int = len(REQUESTS)) -> IntArray:
    """L at every position of the first ``requests``, one after the other."""
    return everywhere(luck, REQUESTS[:requests])[0]


TEXTS: list[dict[str, Any]] = [{}, {"spread": 0.1, "correlation": 0.4}]


@pytest.mark.parametrize("text", TEXTS)
def test_as_loaded_the_luck_is_that_without_learning(text: dict[str, Any]) -> None:
    model = CurveAcceptance(curves={"d": DFLASH}, head=HeadQuality(bias=0.5), **text)
    luck, plain = versioned(model), model.luck(REQUESTS, ["d"], 3, 15)
    for mine, theirs in zip(everywhere(luck, REQUESTS), everywhere(plain, REQUESTS), strict=True):
        assert (mine == theirs).all()
    assert (luck.posterior == plain.posterior).all()


@pytest.mark.parametrize("text", TEXTS)
def test_a_better_version_accepts_a_superset(text: dict[str, Any]) -> None:
    luck = versioned(CurveAcceptance(curves={"d": DFLASH}, **text))
    before = np.zeros(60 * 400, dtype=np.int64)
    for factor in (0.9, 1.0, 1.024, 1.05, 1.13, 1.3):
        luck.switch(np.array([factor]), np.zeros(1))
        now = runs(luck)
        assert (now >= before).all()
        assert now.mean() > before.mean()
        before = now


@pytest.mark.parametrize("text", TEXTS)
def test_thresholds_between_the_grid_are_the_solved_ones(text: dict[str, Any]) -> None:
    luck = versioned(model := CurveAcceptance(curves={"d": DFLASH}, **text))
    for factor in (0.97, 1.0, 1.08, 1.333):
        luck.switch(np.array([factor]), np.zeros(1))
        assert luck.thresholds[0] == pytest.approx(model.thresholds(harden(luck.curves[0], factor)), abs=1e-3)


def test_a_request_in_flight_can_keep_its_luck() -> None:
    luck = versioned(CurveAcceptance(curves={"d": DFLASH}))
    first = runs(luck, 30)
    luck.switch(np.array([1.3]), np.zeros(1), keep=True)
    kept = runs(luck)
    assert (kept[: 30 * 400] == first).all()
    other = versioned(CurveAcceptance(curves={"d": DFLASH}))
    other.switch(np.array([1.3]), np.zeros(1))
    assert (kept[30 * 400 :] == runs(other)[30 * 400 :]).all()


def test_full_blocks_have_the_tau_of_the_version() -> None:
    """A version spoilt to 0.8 from the first moment on serves 0.8 of tau."""
    acceptance = {"kind": "curves", "curves": {"default": DFLASH.model_dump()}, "correlation": 0.4}
    fields = {"buffer": 4, "token_us": 0.01, "setup_s": 0.0, "reload_ms": 0.0, "faults": {1: 0.8}}
    still = {"gain": 0.0, "rounds": 1e9, "forgetting_rounds": None}
    records = simulate(
        Fixed(verify_len=16),
        workload=closed(concurrency=8, requests=150, output_len={"kind": "fixed", "tokens": 600}),
        backend=backend(acceptance=acceptance, learning={**fields, "curve": still}),
    )
    later = records.steps[records.steps["draft_version"] >= 1]
    assert later["accepted"].sum() / later["decoding"].sum() + 1 == pytest.approx(0.8 * 7.09, rel=0.02)
    assert records.versions is not None
    assert records.versions["tau"].to_numpy()[1:] == pytest.approx(0.8 * 7.09)


# ---- heads


def test_labels_of_one_round() -> None:
    """L = 9 and 2, cut at 6 tokens: 5 and 2 drafts accepted."""
    run, verified = np.array([9, 2]), np.array([6, 6])
    expected: dict[Label, list[float]] = {
        "full_block": [10, 3],
        "full_verify": [10, 3],
        "emitted": [6, 3],
        "accepted": [5, 2],
        "accepted_of_predicted": [16 * 5 / 6, 16 * 2 / 6],
    }
    for kind, values in expected.items():
        assert labels(kind, run, verified, 16) == pytest.approx(values)


@pytest.mark.parametrize("kind", ["full_block", "emitted", "accepted", "accepted_of_predicted"])
def test_mean_label_of_geometric_acceptance(kind: Label) -> None:
    survival = Geometric(alpha=0.8).survival(15)
    run = np.random.default_rng(0).geometric(0.2, 100_000).clip(max=16) - 1
    mean = labels(kind, run, np.full(len(run), 5), 16).mean()
    assert expected_label(kind, survival, 5) == pytest.approx(mean, rel=0.01)


# Verify lengths at which a head that learns from its own rounds comes to rest, geometric acceptance of ALPHAS,
# true E[L] + 1 = 2.5, 4.0, 6.2, 9.2. Emitted lengths depend on the start: from 2 or 3 they stay.
FIXED_POINTS: dict[Label, tuple[float, float, float, float]] = {
    "accepted": (1, 1, 1, 1),
    "accepted_of_predicted": (4.5, 6.0, 7.9, 9.9),
    "full_block": (2.6, 4.0, 6.1, 9.1),
}


@pytest.mark.parametrize("kind", FIXED_POINTS)
def test_fixed_points_of_labels(kind: Label) -> None:
    """Without noise: within what the noise of sampling adds at a rounding edge (2.5 lies on one)."""
    settled = [settled_verify_len(kind, Geometric(alpha=a).survival(15), 16) for a in ALPHAS]
    assert settled[1:] == pytest.approx(FIXED_POINTS[kind][1:], abs=0.15)
    assert settled[0] == pytest.approx(FIXED_POINTS[kind][0], abs=0.15 if kind != "full_block" else 0.61)


def test_emitted_labels_stay_near_where_they_begin() -> None:
    curves = [Geometric(alpha=a).survival(15) for a in ALPHAS]
    assert [settled_verify_len("emitted", c, 2) for c in curves] == [2, 2, 2, 2]
    assert [settled_verify_len("emitted", c, 3) for c in curves] == [2, 2, 3, 3]
    assert [settled_verify_len("emitted", c, 1) for c in curves] == [1, 1, 1, 1]
    assert settled_verify_len("accepted_of_predicted", curves[3], 1) == 1  # nothing verified, nothing learned


def relearned(alpha: float, head: dict[str, Any]) -> float:
    """Mean verify length in the later half of a run whose head alone is trained."""
    acceptance = {"kind": "curves", "curves": {"default": {"kind": "geometric", "alpha": alpha}}}
    still = {"gain": 0.0, "forgetting_rounds": None}
    quick = {"buffer": 8, "token_us": 0.01, "setup_s": 0.0, "reload_ms": 0.0}
    learning = {"curve": still, "head": {"knows": "domain", "rounds": 0.25, **head}, **quick}
    records = simulate(
        Head(),
        workload=closed(concurrency=8, requests=400),
        backend=backend(acceptance=acceptance, learning=learning),
    )
    steps = records.steps[records.steps["decoding"] > 0]
    steps = steps[steps["draft_version"] > steps["draft_version"].max() / 2]
    return float(steps["verify_tokens"].sum() / steps["decoding"].sum())


@pytest.mark.parametrize("kind", FIXED_POINTS)
def test_simulated_relearning_comes_to_rest_at_the_fixed_points(kind: Label) -> None:
    found = [relearned(a, {"label": kind}) for a in ALPHAS]
    assert found == pytest.approx(FIXED_POINTS[kind], abs=0.25)


def test_full_verification_of_some_rounds_is_unbiased() -> None:
    """A quarter of the rounds verify 16 tokens, the rest what those taught: as the full block's labels."""
    found = relearned(0.75, {"label": "full_verify", "full_verify_share": 0.25, "rounds": 1.0})
    assert found == pytest.approx(0.75 * 4.0 + 0.25 * 16, abs=0.25)


def test_an_untrained_head_lags_behind_its_drafter() -> None:
    """What the drafter gains, the head reports too little; a trained head follows."""

    def bias(**head: Any) -> tuple[float, float]:
        versions = simulate(
            Fixed(verify_len=16),
            workload=closed(concurrency=8, requests=600),
            backend=backend(learning={"buffer": 16, "token_us": 0.01, "curve": {"rounds": 0.5}, "head": head}),
        ).versions
        assert versions is not None
        last = versions.iloc[-1]
        return float(last["head_bias"]), float(versions["tau"].iloc[0] - last["tau"])

    lag, gained = bias(train=False)
    assert lag == pytest.approx(gained)
    assert lag < -0.5
    followed, _ = bias(rounds=0.1)
    assert abs(followed) < 0.2 * abs(lag)


def test_confidence_follows_the_head() -> None:
    """A head that was not retrained believes the old curve; a retrained one the new."""
    luck = versioned(CurveAcceptance(curves={"d": DFLASH}))
    old = luck.posterior.copy()
    luck.switch(np.array([1.2]), np.array([-0.2 * 7.09]))
    assert luck.posterior == pytest.approx(old)
    luck.switch(np.array([1.2]), np.zeros(1))
    better = HeadQuality().posterior(harden(luck.curves[0], 1.2))
    assert luck.posterior[0] == pytest.approx(better)
    assert luck.level() == pytest.approx([1.2 * tau(luck.curves[0])])


def test_head_level_approaches_its_labels() -> None:
    head = HeadLearning(rounds=4.0)
    assert head.level(5.0, 2.0, 4.0) == pytest.approx(5 + 2 * (1 - np.exp(-1)))
    assert HeadLearning(rounds=0.0).level(5.0, 2.0, 0.1) == 7.0
    assert HeadLearning(train=False).level(5.0, 2.0, 9.0) == 5.0


# ---- what is refused


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"refresh": 200}, "refresh 200 exceeds the buffer of 128"),
        ({"shared": 0.5, "gpus": 2}, "gpus has no effect with shared"),
        ({"in_flight": "old", "recompute_us": 1.0}, "recompute_us has no effect"),
        ({"faults": {0: 0.5}}, "versions start at 1"),
        ({"head": {"full_verify_share": 0.1}}, "full_verify_share belongs to label full_verify"),
        ({"loss": "adam"}, "unknown loss 'adam'"),
    ],
)
def test_senseless_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Learning(**fields)


def test_curves_must_fit_the_acceptance_model() -> None:
    model = CurveAcceptance(curves={"d": Geometric(alpha=0.9)})
    with pytest.raises(InputError) as refused:
        Learning(curves={"x": LearningCurve()}, curve=LearningCurve(gain=2.0)).check(model, ["d"], 15)
    assert "no domain x; there are d" in str(refused.value)
    assert "gain takes d to tau 24.4; possible: 1..16, exclusive" in str(refused.value)
    with pytest.raises(InputError, match=r"a fault of 0\.1 takes d to tau 0\.7"):
        Learning(faults={2: 0.1}).check(model, ["d"], 15)
    regression = model.model_copy(update={"head": HeadQuality(reports="mean")})
    with pytest.raises(InputError, match=r"acceptance\.head\.reports must be truth"):
        Learning().check(regression, ["d"], 15)
    recorded = RecordedAcceptance.model_construct(kind="recorded", file="x")
    with pytest.raises(InputError, match="needs acceptance of kind curves, not recorded"):
        Learning().check(recorded, ["d"], 15)
