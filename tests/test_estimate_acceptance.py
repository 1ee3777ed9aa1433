"""Acceptance is recovered from what the simulator wrote: survival, spread, correlation, heads, learning."""

from collections import Counter
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from adasim.calibration.acceptance import CurveAcceptance
from adasim.calibration.estimate.acceptance import fit_acceptance
from adasim.calibration.estimate.head import fit_head, head_of
from adasim.calibration.estimate.learning import fit_learning, training
from adasim.calibration.estimate.part import FittedPart
from adasim.calibration.estimate.recording import Recording, numbered, rounds_of
from adasim.calibration.estimate.text_model import Shape, TextModel, sequences, settled
from adasim.calibration.survival import Measured
from adasim.calibration.text import hardness, shorter_block_tau, solve_thresholds
from adasim.errors import InputError
from adasim.records import EventRecord, frame
from adasim.types import Request
from tests.build import closed
from tests.recordings import recording

K = 5
S = 0.8 ** np.arange(1, K + 1.0)
TEXT: dict[str, Any] = {"spread": 0.15, "correlation": 0.3, "range_tokens": 4.0}
HEAD = {"noise": 1.5, "bias": 0.6}
TRUTH = {f"acceptance.{k}": v for k, v in TEXT.items()}
TRUTH |= {f"acceptance.default.survival.{k + 1}": v for k, v in enumerate(S)} | {"acceptance.default.tau": 1 + S.sum()}


def runs(
    folder: Path,
    policies: list[dict[str, Any]],
    requests: int = 40,
    seed: int = 0,
    head: dict[str, Any] | None = None,
    **engine: Any,
) -> Recording:
    curves = {"default": {"kind": "measured", "values": S.tolist()}}
    acceptance = {"kind": "curves", "curves": curves, "head": head or HEAD} | TEXT
    cost = {"kind": "formula", "base_ms": 10.0, "per_token_ms": 0.1}
    fields = {"kind": "sim", "cost": cost, "acceptance": acceptance, "rounds": True, "max_draft_len": K} | engine
    lengths = {k: {"kind": "fixed", "tokens": n} for k, n in (("prompt_len", 50), ("output_len", 80))}
    measure = {"warmup_requests": 0, "until_last_arrival": False}
    work = closed(requests=requests, concurrency=8, **lengths)
    return recording(folder, backend=fields, policies=policies, workload=work, seeds=[seed], measure=measure)


def fixed(*lengths: int) -> list[dict[str, Any]]:
    return [{"kind": "fixed", "verify_len": v} for v in lengths]


def missed(part: FittedPart[Any], truth: dict[str, float]) -> list[str]:
    at = {name: part.intervals[name] for name in truth}
    return [name for name, value in truth.items() if not at[name].low - 1e-9 <= value <= at[name].high + 1e-9]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Full blocks, blocks of 4, and a head's, of the same prompts."""
    return runs(tmp_path_factory.mktemp("whole") / "run", [*fixed(6, 4), {"kind": "head"}])


@pytest.fixture(scope="module")
def full(whole: Recording) -> FittedPart[CurveAcceptance]:
    """Fitted to the full blocks."""
    return fit_acceptance(only(whole, "fixed(verify_len=6)").trials)


def only(recording: Recording, label: str) -> Recording:
    return replace(recording, trials=[t for t in recording.trials if t.label == label])


# ---- the text model against theory


@pytest.mark.parametrize("shape", [(0.0, 0.4, 3.0), (0.1, 0.3, 3.0), (0.2, 0.0, 3.0)])
def test_thresholds_and_short_blocks_agree_with_the_simulators_own(shape: tuple[float, float, float]) -> None:
    hazards = S / np.concatenate([[1.0], S[:-1]])
    model = TextModel(Shape(*shape))
    found = model.solve(hazards, {K + 1: 1.0})
    np.testing.assert_allclose(found, solve_thresholds(S, *shape), atol=4e-3)  # their grids differ
    np.testing.assert_allclose(model.survival(found, K + 1), S, atol=1e-4)
    assert 1 + model.survival(found, 4).sum() == pytest.approx(shorter_block_tau(S, 4, *shape), rel=1e-3)


def test_independent_text_has_the_likelihood_of_coins() -> None:
    model = TextModel(Shape(0.0, 0.0, 3.0))
    hazards = np.array([0.9, 0.7, 0.5])
    told = sequences([np.array([2, 0, 3]), np.array([1])], [np.array([4, 4, 4]), np.array([2])])
    found = model.log_likelihood(told, model.solve(hazards, {4: 1.0}))
    first = np.log(0.9 * 0.7 * 0.5) + np.log(0.1) + np.log(0.9 * 0.7 * 0.5)  # 2 then wrong, 0, all of a block
    np.testing.assert_allclose(found, [first, np.log(0.9)], rtol=1e-5)


def test_alike_neighbours_are_likelier_where_text_is_correlated() -> None:
    hazards = np.full(3, 0.7)
    steady = sequences([np.array([3, 3, 3, 0, 0, 0])], [np.full(6, 4)])
    mixed = sequences([np.array([3, 0, 3, 0, 3, 0])], [np.full(6, 4)])
    model = TextModel(Shape(0.0, 0.6, 8.0))
    at = model.solve(hazards, {4: 1.0})
    assert model.log_likelihood(steady, at)[0] > model.log_likelihood(mixed, at)[0] + 0.5


@pytest.mark.parametrize("shape", [(0.0, 0.5, 3.0), (0.1, 0.3, 5.0)])
def test_short_answers_are_better_than_settled_rounds(shape: tuple[float, float, float]) -> None:
    """Answers of 20 tokens, played by hand: the model foresees what they show, and takes it out again."""
    known, start_positions, rng = TextModel(Shape(*shape)), 19, np.random.default_rng(1)  # the prefill gives a token
    thresholds = known.solve(S / np.concatenate([[1.0], S[:-1]]), {K + 1: 1.0})
    answers, length = 40_000, start_positions + K + 2
    own, shared = rng.standard_normal((answers, length)), rng.standard_normal((answers, length + 2))
    text = np.stack([hardness(o, s, *shape) for o, s in zip(own, shared, strict=True)])
    at, counts = np.zeros(answers, dtype=np.int64), np.zeros(K + 1)
    while len(text):
        alive, run = np.ones(len(text), dtype=bool), np.zeros(len(text), dtype=np.int64)
        for d, threshold in enumerate(thresholds, start=1):
            alive &= text[np.arange(len(text)), at + d] <= threshold
            run += alive
        counts += np.bincount(run, minlength=K + 1)
        at += run + 1
        text, at = text[at < start_positions], at[at < start_positions]
    seen = np.cumsum(counts[::-1])[::-1][1:] / counts.sum()
    np.testing.assert_allclose(known.survival(thresholds, K + 1, start_positions), seen, atol=0.005)
    assert seen.sum() > S.sum() + 0.03
    np.testing.assert_allclose(settled(seen, Shape(*shape), start_positions), S, atol=0.006)
    np.testing.assert_allclose(settled(S, Shape(*shape), 1e6), S, atol=3e-4)  # a long answer is settled


# ---- recovery


def test_full_blocks_give_everything_back(full: FittedPart[CurveAcceptance]) -> None:
    part = full
    assert len(missed(part, TRUTH)) <= 1
    assert part.model.curves["default"].survival(K)[0] == pytest.approx(0.8, abs=0.05)
    assert not any("not identified" in n for n in part.notes)


def test_short_blocks_hide_the_tail_and_say_so(whole: Recording, full: FittedPart[CurveAcceptance]) -> None:
    part = fit_acceptance(only(whole, "fixed(verify_len=4)").trials)
    assert len(missed(part, TRUTH)) <= 1
    assert any("positions 4 to 5 are not identified" in n for n in part.notes)
    known, hidden = (part.intervals[f"acceptance.default.survival.{k}"] for k in (3, 4))
    assert hidden.low < 0.05  # nothing after position 3 was ever verified
    assert hidden.high - hidden.low > 2 * (known.high - known.low)
    whole_tau, tau = (p.intervals["acceptance.default.tau"] for p in (full, part))
    assert tau.high - tau.low > 1.3 * (whole_tau.high - whole_tau.low)


def test_drafts_that_rarely_last_are_seen_to_and_hide_nothing(tmp_path: Path) -> None:
    """A weak drafter, verified in full: deep positions are hardly ever reached, which is known, not unknown."""
    curves = {"default": {"kind": "geometric", "alpha": 0.4}}
    acceptance = {"kind": "curves", "curves": curves} | TEXT
    part = fit_acceptance(runs(tmp_path / "run", fixed(16), acceptance=acceptance, max_draft_len=15).trials)
    assert not any("not identified" in n for n in part.notes)
    assert not any("too few to tell how requests differ" in n for n in part.notes)
    assert not missed(
        part, {"acceptance.correlation": 0.3, "acceptance.default.tau": 1 + (0.4 ** np.arange(1, 16)).sum()}
    )
    assert part.intervals["acceptance.correlation"].low > 0
    deep = part.intervals["acceptance.default.survival.15"]
    known = max(k for k in range(1, 16) if "got here" not in part.intervals[f"acceptance.default.survival.{k}"].how)
    assert 3 <= known < 12
    assert 0 <= deep.value < 0.001
    assert deep.high == part.intervals[f"acceptance.default.survival.{known}"].high < 0.02


def test_rounds_that_looked_at_their_drafts_are_left_out(whole: Recording, full: FittedPart[CurveAcceptance]) -> None:
    beside = fit_acceptance([t for t in whole.trials if t.label != "fixed(verify_len=4)"])
    assert full.model == beside.model
    assert any(n.startswith("acceptance: rounds of head are left out") for n in beside.notes)
    with pytest.raises(InputError, match="no rounds of fixed length or drawn in full"):
        fit_acceptance(only(whole, "head").trials)


def test_all_lengths_together_agree_with_each(whole: Recording) -> None:
    part = fit_acceptance([t for t in whole.trials if t.choice == "fixed"])
    assert len(missed(part, TRUTH)) <= 1
    for at in (r for r in part.residuals if "verify_len" in r.region):
        assert at.error < 0.03, at


def test_the_same_prompts_again_are_no_second_sample(whole: Recording, full: FittedPart[CurveAcceptance]) -> None:
    trials = only(whole, "fixed(verify_len=6)").trials
    once, twice = full, fit_acceptance([*trials, replace(trials[0], key="again")])
    for name in ("acceptance.default.tau", "acceptance.spread"):
        assert twice.intervals[name].high - twice.intervals[name].low == pytest.approx(
            once.intervals[name].high - once.intervals[name].low, rel=0.05
        )


def test_a_text_counts_once_whatever_the_seeds_repeat(whole: Recording, full: FittedPart[CurveAcceptance]) -> None:
    """Greedy answers to listed prompts: another seed repeats some of them, here the best ones three times over."""
    (trial,) = only(whole, "fixed(verify_len=6)").trials
    rounds = trial.records.rounds
    assert rounds is not None
    best = rounds.groupby("request")["accepted"].mean().nlargest(20).index
    repeated = deepcopy(trial.records)
    repeated.rounds = rounds[rounds["request"].isin(best)].assign(request=lambda r: r["request"] + 1000)
    repeated.requests = repeated.requests.assign(request=lambda r: r["request"] + 1000)
    again = [replace(trial, key=f"again {i}", seed=90 + i, records=repeated) for i in range(3)]
    part = fit_acceptance([trial, *again])
    assert part.counts["acceptance requests"] == full.counts["acceptance requests"]
    mine, theirs = (p.model.curves["default"].survival(K) for p in (part, full))
    np.testing.assert_allclose(mine, theirs, rtol=0.002)


def test_what_may_be_alike_by_chance_is_not_one_text() -> None:
    """By hand: two prompts of one length, coin tosses. Two equal tosses tell nothing, thirty do."""

    def table(count: int) -> pd.DataFrame:
        toss = np.random.default_rng(0).integers(0, 2, count)
        both = [
            pd.DataFrame(
                {
                    "trial": t, "seed": t, "domain": "d", "request": 0, "step": range(count), "verify_len": 3,
                    "accepted": toss, "position": np.cumsum(toss + 1), "context": np.cumsum(toss + 1) + 9,
                    "draft_version": 0,
                }
            )
            for t in (0, 1)
        ]  # fmt: skip
        return pd.concat(both, ignore_index=True)

    assert numbered(table(2))["text"].nunique() == 2
    assert numbered(table(30))["text"].nunique() == 1
    other = table(30).assign(context=lambda r: r["context"] + r["seed"])  # another prompt length: another prompt
    assert numbered(other)["text"].nunique() == 2


def test_little_data_widens_intervals_and_says_so(tmp_path: Path, full: FittedPart[CurveAcceptance]) -> None:
    few = fit_acceptance(runs(tmp_path / "few", fixed(6), requests=6, seed=1).trials)
    many = full
    assert any("too few to tell how requests differ" in n for n in few.notes)
    spread = few.intervals["acceptance.spread"]
    assert (spread.low, spread.high) == (0.0, 0.95)
    for name in ("acceptance.default.tau", "acceptance.default.survival.1"):
        assert few.intervals[name].high - few.intervals[name].low > 1.5 * (
            many.intervals[name].high - many.intervals[name].low
        )
    assert not missed(few, TRUTH)


def test_forced_acceptance_means_nothing(whole: Recording) -> None:
    forced = [replace(t, forced=True) for t in whole.trials]
    assert rounds_of(forced).empty
    with pytest.raises(InputError, match="all acceptance was by decree"):
        fit_acceptance(forced)


@pytest.mark.slow
def test_intervals_hold_the_truth_as_often_as_they_say(tmp_path: Path) -> None:
    """Ten runs of few requests: of their 95 % intervals one in twenty misses, several of one run together."""
    misses: Counter[str] = Counter()
    for seed in range(10):
        misses.update(missed(fit_acceptance(runs(tmp_path / str(seed), fixed(6), 16, seed).trials), TRUTH))
    assert sum(misses.values()) <= 0.15 * 10 * len(TRUTH)
    assert max(misses.values(), default=0) <= 4


# ---- context and temperature


def test_what_context_does_is_seen_when_it_does_something(tmp_path: Path) -> None:
    harder = {1: 1.3, 40: 1.3, 90: 1.0, 140: 0.7, 10000: 0.7}
    curves = {"default": {"kind": "measured", "values": S.tolist()}}
    acceptance = {"kind": "curves", "curves": curves, "tau_by_context": harder}
    part = fit_acceptance(runs(tmp_path / "run", fixed(6), acceptance=acceptance).trials)
    assert part.model.tau_by_context is not None
    factors = [part.model.tau_by_context[c] for c in sorted(part.model.tau_by_context)]
    assert factors[0] > 1.05
    assert factors[-1] < 0.95
    assert any("flat outside the contexts measured" in n for n in part.notes)


# ---- heads


def test_heads_come_back_from_rounds_that_they_cut_themselves(whole: Recording) -> None:
    part = fit_head(whole.trials)
    assert not missed(part, {"head.noise": 1.5, "head.bias": 0.6})
    assert part.intervals["head.bias"].high - part.intervals["head.bias"].low < 0.6
    assert part.model.reports == "truth"
    assert not missed(fit_head(whole.trials, survival={"default": S}), {"head.noise": 1.5, "head.bias": 0.6})


def test_a_head_that_reports_means_comes_back_as_one(tmp_path: Path) -> None:
    """Reports of a regression are shrunk: taken for 1 + L and noise, they would look far better than they are."""
    found = runs(tmp_path / "run", [{"kind": "head"}, *fixed(6)], head=HEAD | {"reports": "mean"})
    part = fit_head(found.trials, survival={"default": S})
    assert part.model.reports == "mean"
    assert not missed(part, {"head.noise": 1.5, "head.bias": 0.6})
    assert part.intervals["head.noise"].high - part.intervals["head.noise"].low < 1.0
    assert any("taken as mean" in n for n in part.notes)
    own = fit_head(found.trials)  # under the survival of the full blocks beside, which is not quite the true one
    assert not missed(own, {"head.noise": 1.5})
    assert own.model.reports == "mean"
    rounds = found.trials[0].records.rounds
    assert rounds is not None
    simple, right = head_of(rounds, K, {"default": S}, "truth"), head_of(rounds, K, {"default": S}, "mean")
    assert simple is not None
    assert right is not None
    assert simple.noise < 0.6 * right.sigma(S)  # in tokens


def test_a_head_that_no_formula_holds_for_is_taken_as_seen(tmp_path: Path) -> None:
    """It reports in two lumps, far too much, and knows little; what is accepted behind each report follows."""
    lumps = [1.4, 1.5, 1.6, 1.7, 1.8, 4.0, 4.4, 4.8, 5.2, 5.6, 6.0]
    truth = {"noise": 1.0, "reports": "measured", "measured": {"default": {"noise": 2.0, "quantiles": lumps}}}
    found = runs(tmp_path / "run", [{"kind": "head"}, *fixed(6)], requests=80, head=truth)
    part = fit_head(found.trials, survival={"default": S})
    head = part.model
    assert head.reports == "measured"
    assert head.measured is not None
    assert not missed(part, {"head.noise.default": 2.0, "head.noise": 1.0, "head.bias": 0.0})
    at = np.interp(np.linspace(0.1, 0.9, 9), np.linspace(0, 1, 41), head.measured["default"].quantiles)
    np.testing.assert_allclose(at[[0, 1, 2, 3, 6, 7, 8]], np.array(lumps)[[1, 2, 3, 4, 7, 8, 9]], atol=0.25)
    rounds = found.trials[0].records.rounds
    assert rounds is not None
    again = CurveAcceptance(curves={"default": Measured(values=S.tolist())}, head=head, **TEXT)
    luck = again.luck([Request(i, 0, 50, 80, 0.0) for i in range(200)], ["default"], 3, K)
    ids = np.arange(200)
    run = np.zeros(200, dtype=np.int64) + 2
    told = luck.report(np.zeros(200, dtype=np.int64), luck.signal(ids, luck.base, run))
    assert told.min() >= min(lumps) - 0.3
    assert told.max() <= max(lumps) + 0.3
    with pytest.raises(InputError, match="no reports of domain other; there are default"):
        head.check(["default", "other"])


def test_a_naive_look_at_cut_rounds_would_blame_the_head(whole: Recording) -> None:
    rounds = only(whole, "head").trials[0].records.rounds
    assert rounds is not None
    naive = float((rounds["accept_len"] - 1 - rounds["accepted"]).mean())
    assert naive > 0.7  # the truth is 0.6: what was cut off was often good


def test_without_reports_a_head_is_assumed(whole: Recording) -> None:
    part = fit_head(only(whole, "fixed(verify_len=6)").trials)
    assert any("its quality is assumed" in n for n in part.notes)
    assert (part.intervals["head.bias"].low, part.intervals["head.bias"].high) == (-30, 30)


# ---- learning


def test_learning_comes_back_from_versions(tmp_path: Path) -> None:
    curve = {"gain": 0.3, "rounds": 3.0, "forgetting_rounds": None}
    learning = {"curve": curve, "loss": "adaflash", "buffer": 64, "token_us": 1.0, "setup_s": 0.01, "reload_ms": 0.0}
    trials = runs(tmp_path / "run", fixed(6), requests=700, learning=learning).trials
    part = fit_learning(trials)
    assert not missed(part, {"learning.default.gain": 0.3, "learning.default.rounds": 3.0})
    assert part.model["default"].gain == pytest.approx(0.3, abs=0.12)
    assert part.model["default"].forgetting_rounds is None
    assert any("forgetting is not known" in n for n in part.notes)
    rounds = trials[0].records.rounds
    assert rounds is not None
    last = rounds["draft_version"] == rounds["draft_version"].max()
    trials[0].records.rounds = rounds.drop(rounds.index[last][10:])  # the run ended soon after its last version came
    fewer = fit_learning(trials)
    assert fewer.counts["versions in default"] == part.counts["versions in default"] - 1
    assert not missed(fewer, {"learning.default.gain": 0.3, "learning.default.rounds": 3.0})


def test_learning_after_a_rollback_goes_on_from_the_version_before(whole: Recording) -> None:
    """Version 2 is rolled back to 1; 3 is trained from 1. Seen in steps, as of an engine without a version table."""
    records = deepcopy(only(whole, "fixed(verify_len=6)").trials[0].records)
    steps = records.steps
    times = steps["start_s"]
    steps["draft_version"] = np.select([times < 0.5, times < 1.0, times < 1.5, times < 2.0], [0, 1, 2, 1], 3)
    kinds = [(0.5, "reload", 1), (1.0, "reload", 2), (1.5, "rollback", 1), (2.0, "reload", 3)]
    records.events = frame(EventRecord, [(t, kind, v, 0.0, "", "", 0) for t, kind, v in kinds])
    records.versions = None
    trial = replace(whole.trials[0], records=records)
    assert training(trial, "default", 3)["parent"].tolist() == [0, 0, 1, 1]


def test_a_head_that_stays_behind_its_drafter_shows_by_version(tmp_path: Path) -> None:
    """The drafter learns, the head keeps its level: it reports ever less than is accepted."""
    curve = {"gain": 0.4, "rounds": 1.0, "forgetting_rounds": None}
    learning = {"curve": curve, "loss": "adaflash", "buffer": 64, "token_us": 1.0, "setup_s": 0.01, "reload_ms": 0.0}
    frozen_head = learning | {"head": {"train": False}}
    found = runs(tmp_path / "run", [{"kind": "head"}], requests=300, seed=6, learning=frozen_head)
    part = fit_head(found.trials)
    table = part.points["head by version"]
    low, bias, high = (table[c].to_numpy(dtype=float) for c in ("low", "bias", "high"))
    assert low[0] <= HEAD["bias"] <= high[0]
    assert bias[-1] < HEAD["bias"] - 0.3
    assert any("by version" in n for n in part.notes)


def test_temperatures_are_told_apart(whole: Recording) -> None:
    """The same runs, short blocks named as if drawn hotter: tau relative to what such lengths have on average is 1."""
    trials = only(whole, "fixed(verify_len=6)").trials
    hot = [replace(t, key="hot", backend=t.backend | {"sampling": {"temperature": 0.7}}) for t in trials]
    part = fit_acceptance([*trials, *trials, *hot])
    assert part.model.tau_by_temperature is not None
    assert sorted(part.model.tau_by_temperature) == [0.0, 0.7]
    assert list(part.model.tau_by_temperature.values()) == pytest.approx([1.0, 1.0], abs=1e-9)
    assert part.model.temperature == 0.0
    only_hot = fit_acceptance(hot)
    assert only_hot.model.temperature == 0.7
    assert only_hot.ranges["temperature"] == (0.7, 0.7)
    curve = only_hot.model.curves["default"].survival(K)
    np.testing.assert_array_equal(only_hot.model.survival("default", K), curve)  # at what was recorded, as it was counted


def test_the_prediction_at_a_temperature_is_what_was_seen_there(whole: Recording) -> None:
    """Hot runs whose drafts fail more often: the profile gives both tau back, not a mixture of them."""
    trials = only(whole, "fixed(verify_len=6)").trials
    hot = deepcopy(trials[0])
    rounds = hot.records.rounds
    assert rounds is not None
    rounds["accepted"] //= 2
    heated = replace(hot, key="hot", backend=hot.backend | {"sampling": {"temperature": 0.7}})
    part = fit_acceptance([trials[0], heated])
    for trial, heat in ((trials[0], 0.0), (heated, 0.7)):
        assert trial.records.rounds is not None
        measured = 1 + float(trial.records.rounds["accepted"].mean())
        says = part.model.model_copy(update={"temperature": heat}).survival("default", K)
        assert 1 + says.sum() == pytest.approx(measured, rel=0.01)
