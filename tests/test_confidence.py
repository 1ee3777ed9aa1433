"""What a drafter's confidences know and claim: by hand, in a run, and found again in records of runs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from adasim.calibration.acceptance import CurveAcceptance
from adasim.calibration.adjust import Adjust
from adasim.calibration.estimate.confidence import confidence_of, fit_confidence
from adasim.calibration.estimate.recording import Recording
from adasim.calibration.head_quality import Confidence, HeadQuality
from adasim.calibration.learning import LearningCurve
from adasim.calibration.survival import Geometric
from adasim.errors import InputError
from adasim.policies.dspark import DSpark
from adasim.policies.head import Head
from adasim.simulator.learning import Learning
from adasim.validation.attribution import own_head
from tests.build import backend, closed, simulate
from tests.recordings import recording

K = 7
CURVES = {"code": {"kind": "geometric", "alpha": 0.8}, "chat": {"kind": "geometric", "alpha": 0.5}}
TRUTH = {"code": {"noise": 0.8, "claims": 1.2, "bias": 0.5}, "chat": {"noise": 2.0, "claims": 1.0, "bias": -0.4}}
SURVIVAL = {d: np.asarray(c["alpha"]) ** np.arange(1, K + 1.0) for d, c in CURVES.items()}
COST = {"kind": "formula", "base_ms": 10.0, "per_token_ms": 0.3}


def engine(head: dict[str, Any]) -> dict[str, Any]:
    acceptance = {"kind": "curves", "curves": CURVES, "head": head}
    return backend(cost=COST, acceptance=acceptance, max_draft_len=K, rounds=True)


def runs(folder: Path, policies: list[dict[str, Any]], requests: int = 80, **workload: Any) -> Recording:
    work = closed(requests=requests, domains={"code": 0.5, "chat": 0.5}, concurrency=8, **workload)
    measure = {"warmup_requests": 0, "until_last_arrival": False}
    return recording(
        folder, backend=engine({"confidence": TRUTH}), policies=policies, workload=work, seeds=[0], measure=measure
    )


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return runs(tmp_path_factory.mktemp("told") / "run", [{"kind": "dspark"}, {"kind": "fixed", "verify_len": 4}])


def test_looks_far_out_have_curves_too() -> None:
    """Where curves claim less noise than looks have, the farthest looks are of rank 0 or 1."""
    survival = 0.44 ** np.arange(1, 16.0)
    for claims in (0.05, 0.5, 1.53, 30.0):
        head = HeadQuality(noise=8.0, reports="mean", confidence={"d": Confidence(noise=1.5, claims=claims, bias=0.5)})
        with np.errstate(all="raise", under="ignore"):
            curves = head.confidences(survival, np.concatenate([[-1e3], head.bins(15), [1e3]]), "d")
        assert ((curves >= 0) & (curves <= 1)).all()
        assert (np.diff(curves.sum(axis=1)) >= -1e-9).all(), "a better look promises more"


def test_curves_by_hand() -> None:
    """L is 0 or 1, as likely: its deviation is 1/2, and the posterior of a look s is sigmoid((s - 1/2) / sigma^2)."""
    survival, middle = np.array([0.5]), np.array([0.5])
    for claims, bias, logit in ((None, 0.0, 0.0), (1.0, 0.25, 1.0), (2.0, 0.25, 0.25), (None, 1.0, 0.25)):
        at = Confidence(noise=4.0, claims=claims, bias=bias)
        head = HeadQuality(confidence={"d": at})
        assert head.confidences(survival, middle, "d")[0, 0] == pytest.approx(1 / (1 + np.exp(-logit)), abs=1e-4)
    # the median of the upper half of looks of one noise counts as that of the other
    one, other = (HeadQuality(noise=n, reports="mean") for n in (4.0, 1.0))
    looks = np.linspace(-12, 13, 5001)
    s, equal = (float(np.interp(0.75, h.rank(survival, looks), looks)) for h in (one, other))
    head = HeadQuality(confidence={"d": Confidence(noise=4.0, claims=1.0)})
    expected = 1 / (1 + np.exp(-4 * (equal - 0.5)))  # the claimed deviation is 1/2
    assert head.confidences(survival, np.array([s]), "d")[0, 0] == pytest.approx(expected, abs=2e-3)


WORK = closed(requests=60, domains={"code": 1.0}, concurrency=8)


def test_confidences_are_as_good_and_as_sure_of_themselves_as_they_were_measured() -> None:
    """Right on average with a noise of their own, whatever the length head knows; off where they claim something else."""
    cases = {"own": {}, "vague": {"noise": 3.0}, "sure": {"claims": 0.4}, "high": {"bias": 1.0}}
    sums, known = {}, {}
    for name, at in cases.items():
        head = {"noise": 20.0, "confidence": {"code": {"noise": 0.8} | at}}
        rounds = simulate(DSpark(), backend=engine(head), workload=WORK).rounds
        assert rounds is not None
        sums[name] = rounds["confidence"]
        known[name] = np.corrcoef(rounds["confidence"], rounds["accepted"])[0, 1]
    assert sums["own"].mean() == pytest.approx(SURVIVAL["code"].sum(), rel=0.06)
    assert sums["sure"].std() > 1.15 * sums["own"].std()
    assert sums["high"].mean() > sums["own"].mean() + 0.3
    assert known["own"] > known["vague"] + 0.2
    assert known["sure"] == pytest.approx(known["own"], abs=0.1)


def test_domains_that_were_not_measured_stay_as_they_are() -> None:
    for head in ({"noise": 1.5, "bias": 0.3}, {"noise": 1.5, "reports": "mean"}):
        without, beside = (
            simulate(DSpark(), backend=engine(head | more), workload=WORK).rounds
            for more in ({}, {"confidence": {"chat": TRUTH["chat"]}})
        )
        assert without is not None
        assert beside is not None
        assert without.equals(beside)


def test_length_heads_do_not_see_confidences() -> None:
    without, beside = (
        simulate(Head(), backend=engine(more), workload=WORK).rounds for more in ({}, {"confidence": TRUTH})
    )
    assert without is not None
    assert beside is not None
    assert without.equals(beside)


def test_what_is_known_and_claimed_comes_back(told: Recording) -> None:
    part = fit_confidence(told.trials, survival=SURVIVAL)
    assert set(part.model) == {"code", "chat"}
    truth = {f"confidence.{k}.{d}": v for d, at in TRUTH.items() for k, v in at.items()}
    missed = [n for n, v in truth.items() if not part.intervals[n].low <= v <= part.intervals[n].high]
    assert len(missed) <= 1, [(n, truth[n], part.intervals[n]) for n in missed]
    for domain, at in TRUTH.items():
        assert part.model[domain].noise == pytest.approx(at["noise"], rel=0.25)
        assert part.model[domain].claims == pytest.approx(at["claims"], rel=0.15)
    assert not part.notes
    sums = part.points["confidence sums"]
    assert (sums["recorded"] - sums["fitted"]).abs().mean() < 0.15
    found = part.points["confidence"]
    assert np.average((found["expected"] - found["accepted"]).abs(), weights=found["count"]) < 0.25
    rounds = told.trials[0].records.rounds
    assert rounds is not None
    assert confidence_of(rounds, K, SURVIVAL)["code"].claims == pytest.approx(part.model["code"].claims, rel=0.02)


def test_too_little_fits_nothing_and_says_so(told: Recording, tmp_path: Path) -> None:
    """Nobody asked; the file is older than the column; too few requests of a domain; less than a full block drafted."""
    blind = [t for t in told.trials if t.label != "dspark"]
    part = fit_confidence(blind, survival=SURVIVAL)
    assert (part.model, part.intervals) == ({}, {})
    assert part.notes == ["confidence: no round asked for it; it is taken to know what the length head knows"]
    few = runs(tmp_path / "run", [{"kind": "dspark"}], requests=8)
    part = fit_confidence(few.trials, survival=SURVIVAL)
    assert set(part.model) < {"code", "chat"}
    assert len(part.notes) == 2 - len(part.model)
    assert all("are too few; there it is taken to know what the length head knows" in n for n in part.notes)
    trial = told.trials[0]
    assert trial.records.rounds is not None
    short = trial.records.rounds.assign(draft_len=K - 1)
    assert fit_confidence([replace(trial, records=replace(trial.records, rounds=short))], survival=SURVIVAL).model == {}


def test_confidences_are_moved_with_the_heads() -> None:
    head = HeadQuality(confidence={"d": Confidence(noise=1.0, claims=2.0, bias=0.1), "e": Confidence(noise=1.0)})
    moved = (
        Adjust(head_noise=0.5, head_bias=-0.6).luck(CurveAcceptance(curves={"d": Geometric(alpha=0.8)}, head=head)).head
    )
    assert (moved.noise, moved.bias) == (1.0, -0.6)
    assert moved.confidence == {
        "d": Confidence(noise=0.5, claims=1.0, bias=-0.5),
        "e": Confidence(noise=0.5, bias=-0.6),
    }


def test_a_run_shows_its_own_confidences_where_the_model_has_some(told: Recording) -> None:
    rounds, other = told.trials[0].records.rounds, {"code": Confidence(noise=5.0)}
    assert own_head(rounds, HeadQuality(), SURVIVAL) is None  # no report of the length head
    own = own_head(rounds, HeadQuality(noise=3.0, confidence=other), SURVIVAL)
    assert own is not None
    assert own.noise == 3.0
    assert own.confidence is not None
    assert own.confidence["code"].noise == pytest.approx(TRUTH["code"]["noise"], rel=0.25)


def test_bad_input_is_refused() -> None:
    for wrong in ({"noise": 0.0}, {"noise": 1.0, "claims": 99.0}, {"noise": 1.0, "bias": 31.0}, {}):
        with pytest.raises(ValidationError):
            HeadQuality.model_validate({"confidence": {"code": wrong}})
    model = CurveAcceptance.model_validate({"curves": CURVES, "head": {"confidence": TRUTH}})
    with pytest.raises(InputError, match=r"acceptance.head.confidence must be null"):
        Learning(curve=LearningCurve()).check(model, ["code"], K)
