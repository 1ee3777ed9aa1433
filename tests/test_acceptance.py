"""Acceptance models: curves, correlated text, heads, replay."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from adasim import metrics
from adasim.calibration.acceptance import AnyAcceptance, CurveAcceptance, RecordedAcceptance
from adasim.calibration.head_quality import HeadQuality
from adasim.calibration.luck import HEADS, TOKENS, RequestRng
from adasim.calibration.survival import Anchored, Budgets, Geometric, Measured, harden, tau
from adasim.calibration.text import hardness, shorter_block_tau, solve_thresholds
from adasim.errors import InputError
from adasim.policies.base import Policy
from adasim.policies.dspark import DSpark
from adasim.policies.fixed import Fixed
from adasim.policies.head import Head
from adasim.records import Records
from adasim.types import Request
from tests.build import backend, closed, everywhere, simulate

DFLASH = Anchored(first=0.89, last=0.13, tau=7.09)


def survival_of(records: Records) -> np.ndarray:
    """Full-block survival, pooled over rounds."""
    full = records.blocks[records.blocks["verify_len"] == records.blocks["verify_len"].max()]
    total = full["blocks"].sum()
    return np.array([full.loc[full["accepted"] >= k, "blocks"].sum() / total for k in range(1, 16)])


def test_budgets_reproduce_their_points() -> None:
    tokens = {4: 3.16875, 8: 4.778125, 12: 5.71875, 16: 6.2875}
    curve = Budgets(tokens=tokens).survival(15)
    for length, value in tokens.items():
        assert 1 + curve[: length - 1].sum() == pytest.approx(value, rel=2e-3)
    assert np.all(np.diff(curve) <= 0)


def test_harden_scales_tau() -> None:
    curve = DFLASH.survival(15)
    assert tau(harden(curve, 0.78)) == pytest.approx(0.78 * 7.09)
    with pytest.raises(InputError, match=r"asks for tau 21\.3; possible: 1\.\.16"):
        harden(curve, 3.0)


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        (Measured, {"values": [0.5, 0.6]}, "must not rise"),
        (Measured, {"values": [1.2]}, "less than or equal to 1"),
        (Anchored, {"first": 0.5, "last": 0.6, "tau": 3.0}, "last must be below first"),
        (Anchored, {"first": 0.9, "last": 0.1, "tau": 15.9}, r"cannot be met by these anchors; allowed"),
        (Budgets, {"tokens": {4: 2.0, 8: 5.0}}, "ever more slowly"),
        (Geometric, {"alpha": float("nan")}, "finite"),
    ],
)
def test_impossible_curves_are_refused(model: type[Any], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        model(**fields)


def test_curves_that_end_too_early_are_refused() -> None:
    for curve in (Measured(values=[0.9]), Budgets(tokens={4: 3.0, 8: 4.0})):
        with pytest.raises(InputError, match="the engine"):
            curve.survival(15)


@pytest.mark.parametrize(("spread", "correlation"), [(0.0, 0.0), (0.0, 0.5), (0.2, 0.0), (0.15, 0.4)])
def test_correlated_text_keeps_the_full_block_curve(spread: float, correlation: float) -> None:
    """Whatever the correlation, full-block rounds have the survival curve that was put in."""
    acceptance = {
        "kind": "curves",
        "curves": {"default": {"kind": "anchored", "first": 0.89, "last": 0.13, "tau": 7.09}},
        "spread": spread,
        "correlation": correlation,
    }
    records = simulate(
        Fixed(verify_len=16),
        workload=closed(concurrency=8, requests=400, output_len={"kind": "fixed", "tokens": 600}),
        backend=backend(acceptance=acceptance),
    )
    assert survival_of(records) == pytest.approx(DFLASH.survival(15), abs=0.02)
    assert metrics.tau(records) == pytest.approx(7.09, rel=0.02)


def test_spread_makes_requests_differ() -> None:
    def taus(spread: float) -> "np.ndarray":
        acceptance = {
            "kind": "curves",
            "curves": {"default": {"kind": "geometric", "alpha": 0.8}},
            "spread": spread,
        }
        r = simulate(
            Fixed(verify_len=16),
            workload=closed(requests=100, output_len={"kind": "fixed", "tokens": 400}),
            backend=backend(acceptance=acceptance),
        ).requests
        return ((r["tokens"] - 1) / r["rounds"]).to_numpy()

    assert taus(0.3).std() > 2 * taus(0.0).std()


def test_hardness_is_standard_normal_and_correlated() -> None:
    draws = [np.random.default_rng(i).standard_normal(2000 + 2002) for i in range(200)]
    g = np.stack([hardness(d[:2000], d[2000:], 0.2, 0.5, 4.0) for d in draws])
    assert g.mean() == pytest.approx(0, abs=0.05)
    assert g.var() == pytest.approx(1, abs=0.05)
    for lag in (1, 4, 12):
        product = (g[:, :-lag] * g[:, lag:]).mean()
        assert product == pytest.approx(0.2 + 0.5 * np.exp(-lag / 4), abs=0.04)


def test_shorter_blocks_gain_from_correlation() -> None:
    """Independent luck: a block cut short accepts what the curve says. Correlated luck: more."""
    curve = DFLASH.survival(15)
    assert shorter_block_tau(curve, 8, 0, 0, 3) == pytest.approx(1 + curve[:7].sum())
    predicted = shorter_block_tau(curve, 8, 0, 0.5, 3)
    assert predicted > 1.03 * (1 + curve[:7].sum())
    acceptance = {"kind": "curves", "curves": {"default": DFLASH.model_dump()}, "correlation": 0.5}
    records = simulate(
        Fixed(verify_len=8),
        workload=closed(concurrency=8, requests=200, output_len={"kind": "fixed", "tokens": 600}),
        backend=backend(acceptance=acceptance),
    )
    assert metrics.tau(records) == pytest.approx(predicted, rel=0.02)


@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_luck_does_not_depend_on_lengths(correlation: float) -> None:
    """A longer output begins with the same luck; so does a longer block, up to its own length."""
    model = CurveAcceptance(curves={"d": Geometric(alpha=0.8)}, correlation=correlation, spread=correlation / 5)

    def luck(output_len: int, max_draft_len: int) -> np.ndarray:
        requests = [Request(3, 0, 10, output_len)]
        return everywhere(model.luck(requests, ["d"], 1, max_draft_len), requests)[0][:80]

    assert luck(100, 15).tolist() == luck(177, 15).tolist()
    if not correlation:  # with it, thresholds depend on the block that the curve belongs to
        assert luck(100, 7).tolist() == luck(100, 15).clip(max=7).tolist()


def test_thresholds_of_independent_text_are_normal_quantiles() -> None:
    assert solve_thresholds(np.array([0.5, 0.25]), 0, 0, 3) == pytest.approx([0, 0])


def test_confidence_is_calibrated() -> None:
    """Of the drafts that get confidence p, a share p is accepted; with a bias it is not."""
    curve = DFLASH.survival(15)
    model = CurveAcceptance(curves={"d": DFLASH}, head=HeadQuality(noise=2.0))
    biased = CurveAcceptance(curves={"d": DFLASH}, head=HeadQuality(noise=2.0, bias=2.0))
    requests = [Request(i, 0, 10, 500) for i in range(200)]

    def miss(m: CurveAcceptance) -> float:
        luck = m.luck(requests, ["d"], 0, 15)
        run, signal = everywhere(luck, requests)
        confidence = luck.survival(np.zeros(len(run), dtype=np.int64), signal)
        good = np.arange(1, 16) <= run[:, None]
        bins = (confidence * 10).astype(int).clip(0, 9)
        return max(
            abs(confidence[bins == b].mean() - good[bins == b].mean()) for b in range(10) if (bins == b).sum() > 500
        )

    assert miss(model) < 0.03
    assert miss(biased) > 0.1
    run, signal = everywhere(model.luck(requests, ["d"], 0, 15), requests)
    assert (signal - run).std() == pytest.approx(2.0, rel=0.02)
    assert curve[0] == pytest.approx((run >= 1).mean(), abs=0.02)


def test_a_head_that_reports_means_is_right_on_average_and_shrunk() -> None:
    """As least squares make it: E[L | report] = report - 1, and Var L = Var report + mean square error."""
    curves: Any = {"chat": Geometric(alpha=0.4), "code": DFLASH}
    model = CurveAcceptance(curves=curves, head=HeadQuality(noise=1.5, reports="mean"))
    requests = [Request(i, i % 2, 10, 400) for i in range(400)]
    luck = model.luck(requests, list(curves), 0, 15)
    run, signal = everywhere(luck, requests)
    domains = np.repeat([r.domain for r in requests], 400)
    report = luck.report(domains, signal)
    assert 1 <= report.min() <= report.max() <= 16
    explained = []
    for d in range(2):
        truth, says = run[domains == d], report[domains == d] - 1
        assert says.mean() == pytest.approx(truth.mean(), rel=0.03)
        for low, high in ((0, 33), (33, 67), (67, 100)):
            part = (says >= np.percentile(says, low)) & (says <= np.percentile(says, high))
            assert truth[part].mean() == pytest.approx(says[part].mean(), abs=0.05 * truth.std())
        explained.append(says.var() / truth.var())
        assert explained[d] + ((truth - says) ** 2).mean() / truth.var() == pytest.approx(1, abs=0.05)
    assert min(explained) > 1 / (1 + 1.5**2) - 0.01  # what the best straight line through the look at L explains
    assert max(explained) < 0.5


def test_temperature_and_context_scale_tau() -> None:
    hot = CurveAcceptance(curves={"d": DFLASH}, temperature=0.5, tau_by_temperature={0.0: 1.0, 1.0: 0.8})
    assert tau(hot.survival("d", 15)) == pytest.approx(0.9 * 7.09)
    with pytest.raises(ValidationError, match=r"tau_by_temperature: 2.0 is outside 0.0..1.0"):
        CurveAcceptance(curves={"d": DFLASH}, temperature=2.0, tau_by_temperature={0.0: 1.0, 1.0: 0.8})
    with pytest.raises(ValidationError, match="no effect"):
        CurveAcceptance(curves={"d": DFLASH}, temperature=1.0)

    long = CurveAcceptance(curves={"d": DFLASH}, tau_by_context={100: 1.0, 10_000: 0.6})

    def mean_run(prompt_len: int) -> float:
        requests = [Request(0, 0, prompt_len, 3000)]
        return float(everywhere(long.luck(requests, ["d"], 0, 15), requests)[0].mean())

    assert mean_run(6800) < 0.85 * mean_run(100)
    with pytest.raises(InputError, match=r"request 3 has context 9000\.\.12000; covered 100\.\.10000"):
        long.check_requests([Request(3, 0, 9000, 3000)])


def test_unknown_domain_is_refused() -> None:
    with pytest.raises(InputError, match="no curve for domain math; there are d"):
        CurveAcceptance(curves={"d": DFLASH}).check(["math"], 15)


RECORDED = "request,domain,position,accepted\n7,math,1,3\n7,math,5,0\n7,math,6,2\n"


def test_recorded_replay(tmp_path: Path) -> None:
    """Positions 1..4 lie in the run of 3, position 5 in the run of 0, 6..8 in the run of 2; then it wraps."""
    (tmp_path / "runs.csv").write_text(RECORDED)
    model = RecordedAcceptance(file=str(tmp_path / "runs.csv"))
    requests = [Request(0, 0, 10, 12)]
    assert everywhere(model.luck(requests, ["math"], 0, 15), requests)[0].tolist() == [3, 3, 2, 1, 0, 0, 2, 1, 0, 3, 3, 2]
    model.check(["math"], 15)
    with pytest.raises(InputError, match="no recorded request of domain code; there are math"):
        model.check(["code"], 15)
    with pytest.raises(InputError, match="recorded with 15 drafts a block, the engine drafts 20"):
        model.check(["math"], 20)
    assert everywhere(model.luck(requests, ["math"], 0, 2), requests)[0].tolist()[:4] == [2, 2, 2, 1]
    with pytest.raises(InputError, match=r"a run of 3, but acceptance.max_draft_len says 2"):
        RecordedAcceptance(file=str(tmp_path / "runs.csv"), max_draft_len=2).check(["math"], 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("request,domain,position\n1,a,0\n", "column accepted is missing"),
        ("request,domain,position,accepted\n", "no rows"),
        ("request,domain,position,accepted\n1,a,0,-2\n", r"row 1: accepted is -2, must be a whole number >= 0"),
        ("request,domain,position,accepted\n1,a,0,3\n1,a,9,1\n", "the next must be at 4, not 9"),
    ],
)
def test_bad_recordings_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "runs.csv").write_text(text)
    adapter: TypeAdapter[Any] = TypeAdapter(AnyAcceptance)
    with pytest.raises(ValidationError, match=message):
        adapter.validate_python({"kind": "recorded", "file": str(tmp_path / "runs.csv")})


@pytest.mark.parametrize("policy", [Fixed(verify_len=5), Head(), DSpark()], ids=lambda p: p.kind)
def test_luck_is_drawn_for_many_requests_at_once(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 requests of 4 clients: text and noise in four calls each, and no noise for those who read no head."""
    calls = Counter[int]()
    normals = RequestRng.normals

    def counted(self: RequestRng, *arguments: Any) -> None:
        calls[self._key & 3] += 1
        normals(self, *arguments)

    monkeypatch.setattr(RequestRng, "normals", counted)
    simulate(policy, workload=closed(requests=200))
    assert calls[TOKENS] <= 4
    assert calls[HEADS] <= 4
    assert bool(calls[HEADS]) == bool(policy.needs & {"accept_len", "survival"})


def test_equal_thresholds_are_one() -> None:
    """A geometric curve has one threshold at all distances, but for rounding: grades are few."""
    model = CurveAcceptance(curves={"a": Geometric(alpha=0.8)})
    luck = model.luck([Request(0, 0, 9, 500)], ["a"], 3, 15)
    grades = luck.text(luck.requests[0])
    assert 1 <= grades.max() <= 5
    assert 0.1 < (grades > grades.min()).mean() < 0.3
