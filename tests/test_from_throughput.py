"""Cost and acceptance from tokens per second alone: known worlds are found again, and limits are honest."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from adasim.calibration.acceptance import CurveAcceptance
from adasim.calibration.from_throughput import Posterior, fit_throughput_table
from adasim.calibration.profile import Profile
from adasim.calibration.randomized import fits, freedom
from adasim.calibration.roofline import RooflineCost
from adasim.calibration.survival import Fading, fading, tau
from adasim.calibration.throughput_files import read_throughput
from adasim.calibration.throughput_profile import as_yaml, doubts, fitted_profile
from adasim.calibration.throughput_table import Row
from adasim.calibration.world import NAMES, Cells, Worlds
from adasim.cli import main
from adasim.errors import InputError
from tests.build import backend, closed, simulate

THIN = [(1, 0), (8, 0), (64, 0), (8, 3)]  # plain decoding at three loads, one speculative row
RICH = list(product((1, 4, 16, 64), (0, 1, 3, 6)))
UNSEEN = [(1, 2), (1, 5), (2, 3), (16, 3), (32, 0), (32, 5), (64, 2), (64, 6)]


def world(**deviations: float) -> Worlds:
    """One world, so many standard deviations from what is believed."""
    return Worlds.at(np.array([[deviations.get(name, 0.0) for name in NAMES]]), ms=10.0)


def table(
    truth: Worlds, places: list[tuple[int, int]], *, noise: float = 0.0, taus: bool = True, seed: int = 0
) -> list[Row]:
    """What would be measured in a world."""
    rows = [Row(b, k) for b, k in places]
    rng = np.random.default_rng(seed)
    rate = truth.tok_s(Cells.of(rows, one_pass=False))[0] * np.exp(noise * rng.standard_normal(len(rows)))
    accepted = truth.tau(np.array([k for _, k in places], dtype=float))[0]
    return [
        r._replace(tok_s=float(t), tau=float(a) if taus and r.k else None)
        for r, t, a in zip(rows, rate, accepted, strict=True)
    ]


def errors(posterior: Posterior, truth: Worlds, places: list[tuple[int, int]] = UNSEEN) -> list[float]:
    rows = table(truth, places)
    found = posterior.tok_s([r._replace(tau=None) for r in rows])
    return [abs(i.estimate / r.tok_s - 1) for i, r in zip(found, rows, strict=True) if r.tok_s is not None]


def test_fading_by_hand() -> None:
    """Chances 1/2, then logit -ln 2 = 1/3 at place 2 with slope -1, 1/4 at place 3."""
    curve = Fading(alpha=0.5, slope=-1.0)
    assert curve.survival(3) == pytest.approx([1 / 2, 1 / 6, 1 / 24])
    assert fading(np.zeros(2), np.array([0.0, -1.0]), 2) == pytest.approx(np.array([[1 / 2, 1 / 4], [1 / 2, 1 / 6]]))


def test_a_world_by_hand() -> None:
    """Units of 10 ms: 4 requests, 2 drafts: 12 tokens; p = 2 joins weights and computing as the hypotenuse."""
    found = world()
    weights, computed = 0.6 + 0.5 * (1 - 0.97**12), 12 / 300
    draft = 2 * (0.06 + 0.06 / 0.6 / 150 * 4)
    round_ms = 10 * (np.hypot(weights, computed) + 4 / 150 + draft + 0.1)
    cells = Cells.of([Row(4, 2), Row(4, 2, tau=2.0, steps=2, top_k=2)], one_pass=False)
    tokens = tau(Fading(alpha=1 / (1 + np.exp(-0.85)), slope=-0.3).survival(2))
    assert found.tok_s(cells)[0] == pytest.approx([4e3 * tokens / round_ms, 4e3 * 2.0 / round_ms])


@pytest.mark.parametrize("one_pass", [True, False])
def test_a_profile_costs_what_its_world_does(one_pass: bool) -> None:
    found = world(request=1.0, token=-0.5, sharpness=0.3, draft=0.7, slope=-1.0)
    cost = found.cost(0, fitted_tokens=[1, 512], one_pass=one_pass, with_context=False)
    curve = found.curve(0)
    for batch, k in product((1, 16, 64), (0, 1, 5)):
        rate = found.tok_s(Cells.of([Row(batch, k)], one_pass=one_pass))[0, 0]
        step = cost.step(batch, batch * (k + 1) if k else 0, batch * (k + 1), 500.0, longest_draft=k)
        assert batch * tau(curve.survival(k)) / step.total == pytest.approx(rate)


def test_randomized_fits_sample_a_gaussian() -> None:
    """For a linear model the draws have the posterior's mean and covariance, and the fit its closed form."""
    design = np.array([[1.0, 0.5, 0.0], [0.0, 1.0, -1.0]])
    measured, noise = np.array([1.0, -0.5]), np.array([0.1, 0.4])
    weighted = design / noise[:, None]
    covariance = np.linalg.inv(weighted.T @ weighted + np.eye(3))
    mean = covariance @ weighted.T @ (measured / noise)
    rng = np.random.default_rng(0)
    n = 4000
    goal = measured + noise * rng.standard_normal((n, 2))
    draws, _ = fits(lambda z: z @ design.T, rng.standard_normal((n, 3)), goal, np.tile(noise, (n, 1)))
    assert draws.mean(axis=0) == pytest.approx(mean, abs=0.05)
    assert np.cov(draws.T) == pytest.approx(covariance, abs=0.05)
    one, cost = fits(lambda z: z @ design.T, np.zeros((1, 3)), measured[None], noise[None])
    assert one[0] == pytest.approx(mean, abs=1e-6)
    assert cost[0] == pytest.approx(mean @ mean + (((design @ mean - measured) / noise) ** 2).sum())
    hat = weighted @ covariance @ weighted.T
    assert freedom(lambda z: z @ design.T, mean, noise) == pytest.approx(2 - np.trace(hat), abs=1e-4)


@pytest.mark.parametrize("taus", [True, False])
def test_a_known_world_is_found_again(taus: bool) -> None:
    """Sixteen exact rows: rows not seen are predicted, and acceptance is told from cost."""
    truth = world(request=0.5, token=0.8, experts=0.5, draft=0.4, start=0.6, slope=-0.5)
    found = fit_throughput_table(table(truth, RICH, taus=taus))
    assert found.rms < 0.005
    assert max(errors(found, truth)) < (0.01 if taus else 0.015)
    first, true = found.term("start"), 1 / (1 + np.exp(-0.85 - 0.6 * 0.8))
    assert first.low < true < first.high
    if taus:
        assert first.estimate == pytest.approx(true, abs=0.005)
    else:  # only its product with time is known well
        assert first.high - first.low > 0.1


def test_more_rows_narrow_the_limits() -> None:
    """Thin tables leave wide limits, widest where nothing was measured, and say what they do not tell."""
    truth = world(draft=0.5, request=0.5)
    thin, rich = (fit_throughput_table(table(truth, places)) for places in (THIN, RICH))

    def width(posterior: Posterior, batch: int, k: int) -> float:
        interval = posterior.tok_s([Row(batch, k)])[0]
        return (interval.high - interval.low) / interval.estimate

    for batch, k in ((64, 6), (1, 5), (16, 3)):
        assert width(thin, batch, k) > 1.4 * width(rich, batch, k)
    assert width(thin, 8, 3) < 0.5 * width(thin, 256, 7)
    assert {"share", "slope", "draft_request"} <= set(thin.left_open)
    assert len(rich.left_open) < len(thin.left_open)
    assert thin.extrapolated(Row(128, 3))
    assert thin.extrapolated(Row(8, 4))
    assert not thin.extrapolated(Row(32, 2))


@pytest.mark.parametrize("places", [THIN, RICH[:2] + RICH[3:5] + RICH[6::2]], ids=["thin", "nine rows"])
def test_limits_hold_what_they_promise(places: list[tuple[int, int]]) -> None:
    """Worlds drawn from what is believed, measured with 3 % noise: 95 % limits of unseen rows.

    Rows of one world miss together, so that the spread between worlds tells how well the share is known. Limits that are
    the 2.5th percentiles of n draws lie, on average, at rank 0.025 (n - 1) + 1 of n + 1, a little inside.
    """
    rng = np.random.default_rng(1)
    worlds, draws = 60, 100
    shares = []
    for seed in range(worlds):
        truth = Worlds.at(rng.standard_normal(len(NAMES))[None], ms=10.0)
        posterior = fit_throughput_table(table(truth, places, noise=0.03, seed=seed), seed=seed, draws=draws)
        seen = table(truth, UNSEEN, noise=0.03, seed=1000 + seed)
        found = posterior.tok_s([r._replace(tau=None) for r in seen])
        inside = [i.low <= r.tok_s <= i.high for i, r in zip(found, seen, strict=True) if r.tok_s is not None]
        shares.append(float(np.mean(inside)))
    error = np.std(shares, ddof=1) / worlds**0.5
    expected = 1 - 2 * (0.025 * (draws - 1) + 1) / (draws + 1)
    assert error < 0.02
    assert expected - 2 * error <= np.mean(shares) < 0.99


def test_limits_hold_on_a_gpu_of_another_form() -> None:
    """A roofline is not of the fitted form: a hard knee, no experts, geometric acceptance."""
    inside, misses = [], []
    for i, (alpha, efficiency, launch) in enumerate(product((0.6, 0.8), (0.25, 0.6), (0.5, 2.0))):
        gpu = RooflineCost.model_validate(
            {
                "compute_efficiency": efficiency,
                "launch_ms": launch,
                "draft": {"kind": "linear", "base_ms": 0.4, "autoregressive": True},
            }
        )
        rng = np.random.default_rng(i)

        def measured(
            batch: int, k: int, gpu: RooflineCost = gpu, alpha: float = alpha, rng: np.random.Generator = rng
        ) -> Row:
            step = gpu.step(batch, batch * (k + 1) if k else 0, batch * (k + 1), 500.0, longest_draft=k)
            tokens = (1 - alpha ** (k + 1)) / (1 - alpha)
            return Row(
                batch, k, batch * tokens / step.total * np.exp(0.02 * rng.standard_normal()), tokens if k else None
            )

        posterior = fit_throughput_table([measured(*p) for p in THIN])
        for place in UNSEEN:
            row = measured(*place)
            found = posterior.tok_s([row._replace(tau=None)])[0]
            assert row.tok_s is not None
            inside.append(found.low <= row.tok_s <= found.high)
            if row.tokens <= 64:  # of which passes were measured
                misses.append(abs(found.estimate / row.tok_s - 1))
    assert np.mean(inside) >= 0.9
    assert np.mean(misses) < 0.06


def test_context_is_fitted_where_it_varies() -> None:
    """With two contexts the time per token of context is found; with one it is left to the others."""
    truth = world(context=2.0, request=0.5)
    places = [Row(b, k, context=c) for b, k, c in product((1, 8, 64), (0, 3), (500.0, 8000.0))]
    rate = truth.tok_s(Cells.of(places, one_pass=False))[0]
    accepted = float(truth.tau(np.array([3.0]))[0, 0])
    rows = [r._replace(tok_s=float(t), tau=accepted if r.k else None) for r, t in zip(places, rate, strict=True)]
    found = fit_throughput_table(rows)
    per_token = found.term("context")
    assert per_token.estimate == pytest.approx(10 * 3e-6 * np.exp(4), rel=0.03)
    assert per_token.low < 10 * 3e-6 * np.exp(4) < per_token.high
    with pytest.raises(InputError, match="say at which"):
        found.tok_s([Row(8, 3)])
    one = fit_throughput_table([r for r in rows if r.context == 500])
    assert not one.with_context
    assert one.tok_s([Row(8, 3)])[0].estimate == pytest.approx(rows[6].tok_s, rel=0.02)


def test_accept_lengths_alone() -> None:
    """Two lengths of a fading chain give the others; with one, the limits hold them."""
    truth = Fading(alpha=0.83, slope=-0.4)
    lengths = {k: tau(truth.survival(k)) for k in range(1, 9)}
    two = fit_throughput_table([Row(1, k, tau=lengths[k]) for k in (2, 6)])
    one = fit_throughput_table([Row(1, 3, tau=lengths[3])])
    for k, value in lengths.items():
        assert two.tau([k])[0].estimate == pytest.approx(value, rel=0.01)
        assert one.tau([k])[0].low < value < one.tau([k])[0].high


def test_advice_in_a_known_world() -> None:
    """The best length and the crossover of sixteen exact rows are those of the world."""
    truth = world(token=1.5, draft=0.3, request=-1.0, experts=-2.0)
    found = fit_throughput_table(table(truth, RICH))
    lengths = [0, 1, 2, 3, 4, 5, 6]
    for batch in (1, 8, 64):
        best, share = found.best_k(batch, lengths)
        rate = truth.tok_s(Cells.of([Row(batch, k) for k in lengths], one_pass=False))[0]
        assert rate[best] > 0.99 * rate.max()
        assert 0 < share <= 1
    batches = np.arange(1, 4097)
    plain, three = (truth.tok_s(Cells.of([Row(int(b), k) for b in batches], one_pass=False))[0] for k in (0, 3))
    true = batches[(three <= plain).argmax()]
    crossover = found.crossover(3)
    assert crossover.low <= true <= crossover.high
    assert crossover.batch == pytest.approx(true, rel=0.2)
    assert found.crossover(3, limit=2) == (np.inf, np.inf, np.inf)


CSV = """# measured
batch,k,tok_s,accept_length
1,0,51,1
8,0,380,1
64,0,2100,1
8,3,700,2.4
"""


def written(tmp_path: Path, text: str, name: str = "thin.csv") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_a_profile_runs_as_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command writes a profile that loads again; a simulated closed loop has the predicted throughput."""
    from adasim import metrics
    from adasim.policies.fixed import Fixed

    path, out = written(tmp_path, CSV), tmp_path / "thin.yaml"
    command = ["calibrate", "--from-throughput", str(path), "--out", str(out), "--set", "hardware=H100"]
    main_ok(command)
    says = capsys.readouterr().out
    assert "does not tell" in says
    assert "measured with 3 drafts; more than 3 are extrapolated" in says
    profile = Profile.load(str(out))
    assert profile == fitted_profile([path], "thin", about={"hardware": "H100"})[0]
    assert as_yaml(profile) == out.read_text()
    assert profile.uncertainty.acceptance is not None
    assert 0 < profile.uncertainty.acceptance < 0.2
    records = simulate(
        Fixed(verify_len=4),
        workload=closed(concurrency=8, requests=120, drain=False, output_len={"kind": "fixed", "tokens": 256}),
        backend=backend(cost=profile.cost.model_dump(), acceptance=profile.acceptance.model_dump(), max_draft_len=3),
    )
    part = metrics.window(records, 16, open_loop=False, until_last_arrival=True)
    predicted = fit_throughput_table(read_throughput([path]).rows).tok_s([Row(8, 3)])[0].estimate
    assert metrics.output_tok_s(metrics.cut(records, part), part) == pytest.approx(predicted, rel=0.02)
    with pytest.raises(SystemExit) as caught:
        main([*command, "--set", "colour=red", "--set", "one_pass=maybe", "--set", "concurrency=0"])
    assert caught.value.code == 2
    says = capsys.readouterr().err
    assert all(
        s in says for s in ("exists; use --overwrite", "colour=red: allowed: only, ", "one_pass=maybe", "concurrency=0")
    )


def main_ok(arguments: list[str]) -> None:
    """Run a command that must succeed."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 0


def test_trees_become_drafters(tmp_path: Path) -> None:
    text = "batch,k,steps,top_k,tok_s,accept_length\n1,0,,,200,1\n1,15,4,4,190,2.5\n8,0,,,700,1\n8,15,4,4,690,2.5\n"
    path = written(tmp_path, text)
    profile, _ = fitted_profile([path], "trees")
    tree = profile.drafters["4x4 of 16"]
    assert tree.max_draft_len == 15
    assert isinstance(tree.acceptance, CurveAcceptance)
    assert tau(tree.acceptance.survival("default", 15)) == pytest.approx(2.5)
    step = tree.cost_of(profile.cost).step(8, 128, 128, 0.0, longest_draft=15)
    assert 8 * 2.5 / step.total == pytest.approx(690, rel=0.05)
    posterior = fit_throughput_table(read_throughput([path]).rows)
    with pytest.raises(InputError, match="a tree of 16 tokens needs its accept length"):
        posterior.tok_s([Row(4, 15, steps=4, top_k=4)])


def test_accept_lengths_alone_are_no_profile(tmp_path: Path) -> None:
    path = written(tmp_path, "k,accept_length\n1,1.8\n3,2.4\n")
    with pytest.raises(InputError, match="accept lengths alone give no cost"):
        fitted_profile([path], "x")


def test_doubtful_rows_are_named() -> None:
    """Twice as fast with 1.5 tokens a round cannot be one set-up; 1.5 times as fast can."""
    rows = [Row(8, 0, 100.0), Row(8, 3, 200.0, tau=1.5), Row(8, 5, 150.0, tau=1.5)]
    assert doubts(rows) == [
        "doubtful - 3 drafts at batch 8 are 2.00 times as fast as plain decoding, with only 1.50 tokens a round: the "
        "plain row comes from a slower set-up"
    ]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([Row(1, 0, 5.0)], "nothing is said about speculation"),
        ([Row(1, 0, 5.0), Row(1, 3)], "needs tok_s or an accept length"),
        ([Row(1, 0, 5.0, context=9.0), Row(1, 3, 6.0)], "some rows tell their context"),
        ([Row(1, 0, 5.0), Row(1, 3, 6.0, steps=2, top_k=2)], "a tree needs its accept length"),
    ],
)
def test_fits_refuse_what_cannot_be_known(rows: list[Row], message: str) -> None:
    with pytest.raises(InputError, match=message):
        fit_throughput_table(rows)
