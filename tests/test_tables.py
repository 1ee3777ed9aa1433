"""Comparisons: intervals, verdicts, crossovers, best policies."""

from math import isnan, nan

import numpy as np
import pandas as pd
import pytest
from scipy.special import stdtrit

from adasim.method import method
from adasim.tables import (
    GOODPUT,
    TPOT,
    Arm,
    Design,
    because,
    best_by_point,
    best_of_groups,
    compare,
    crossing,
    crossovers,
    gain_error,
    half_width,
    paired_gain,
    summarise,
    verdict,
    with_speedup,
)

ARMS = [
    Arm("off", "baseline"),
    Arm("s4", "static", "static"),
    Arm("s8", "static", "static"),
    Arm("head", "adaptive"),
    Arm("oracle", "bound"),
]
SPEEDS = {"off": [100, 200], "s4": [210, 240], "s8": [260, 180], "head": [300, 241], "oracle": [500, 500]}


def trials(noise: float = 0.0) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    rows = [
        {
            "policy": policy,
            "backend": "sim",
            "seed": seed,
            "c": c,
            "output_tok_s": speed + noise * rng.standard_normal(),
            "tpot_p50_ms": 1e3 / speed,
            "goodput_rps": speed / 50,
        }
        for policy, speeds in SPEEDS.items()
        for c, speed in zip((8, 32), speeds, strict=True)
        for seed in (0, 1, 2)
    ]
    return pd.DataFrame(rows)


DESIGN = Design(ARMS, "c")


def test_half_width_is_a_t_interval() -> None:
    """Three values 1, 2, 3: 4.303 x 1 / sqrt(3)."""
    assert half_width(np.array([1.0, 2.0, 3.0])) == pytest.approx(4.3027 / np.sqrt(3), rel=1e-4)
    assert isnan(half_width(np.array([1.0])))


def test_speedup_is_paired_by_seed() -> None:
    table = with_speedup(trials(noise=30.0), DESIGN)
    for (_, _), part in table.groupby(["seed", "c"]):
        base = part.loc[part["policy"] == "off", "output_tok_s"].item()
        assert np.allclose(part["speedup"], part["output_tok_s"] / base)
    speculative = trials()
    without = with_speedup(speculative.loc[speculative["policy"] != "off"], DESIGN)
    assert without["speedup"].isna().all()


def test_open_loops_compare_time_per_token() -> None:
    table = with_speedup(trials(), Design(ARMS, "c", speed=TPOT, goal=GOODPUT))
    head = table[(table["policy"] == "head") & (table["c"] == 8)]
    assert head["speedup"].tolist() == pytest.approx([3.0] * 3)


def test_equal_goodput_is_decided_by_time_per_token() -> None:
    table = summarise(trials().assign(goodput_rps=2.0, speedup=1.0), DESIGN)
    at_8 = table[(table["c"] == 8) & (table["policy"] != "oracle")]
    best = GOODPUT.best(at_8)
    assert best is not None
    assert best["policy"] == "head"
    assert GOODPUT.best(at_8.assign(goodput_rps=0.0)) is None
    assert GOODPUT.best(at_8.assign(goodput_rps=nan)) is None


def test_groups_show_their_best_member() -> None:
    summary = best_of_groups(summarise(with_speedup(trials(), DESIGN), DESIGN), DESIGN)
    best = summary[summary["policy"] == "best static"].set_index("c")["picked"]
    assert best.to_dict() == {8: "s8", 32: "s4"}


def test_best_leaves_the_oracle_out_and_judges_the_gain() -> None:
    table = with_speedup(trials(noise=0.01), DESIGN)
    best = best_by_point(table, summarise(table, DESIGN), DESIGN, nan).set_index("c")
    assert best["static"].to_dict() == {8: "s8", 32: "s4"}
    assert best["adaptive"].to_dict() == {8: "head", 32: "head"}
    assert best["verdict"].to_dict() == {8: "better", 32: "cannot tell"}  # +15 %; +0.4 %
    unsure = best_by_point(table, summarise(table, DESIGN), DESIGN, 0.2).set_index("c")
    assert unsure["verdict"].to_dict() == {8: "cannot tell", 32: "cannot tell"}


@pytest.mark.parametrize(
    ("gain", "width", "error", "says"),
    [
        (0.10, 0.02, nan, "better"),
        (-0.10, 0.02, nan, "worse"),
        (0.10, 0.12, nan, "cannot tell"),
        (0.10, 0.02, 0.11, "cannot tell"),
        (0.005, 0.001, nan, "cannot tell"),
        (0.10, nan, nan, "cannot tell (one seed shows no noise)"),
        (nan, 0.01, nan, "cannot tell"),
    ],
)
def test_verdict(gain: float, width: float, error: float, says: str) -> None:
    assert verdict(gain, width, error) == says


def test_noise_and_model_error_add_in_squares() -> None:
    """3 and 4 % make 5 %: neither alone hides a gain of 4.5 %, together they do; and it is said which weighs more."""
    assert verdict(0.045, 0.03, nan) == "better"
    assert verdict(0.045, 0.001, 0.04) == "better"
    assert verdict(0.045, 0.03, 0.04) == "cannot tell"
    assert verdict(0.051, 0.03, 0.04) == "better"
    assert because(0.045, 0.03, 0.04) == "within the model's known error"
    assert because(0.045, 0.05, 0.04) == "within the noise: more seeds may tell"
    assert because(0.005, 0.001, nan) == "below 1 %"
    assert because(0.051, 0.03, 0.04) == ""


def test_speedup_is_a_geometric_mean_of_pairs() -> None:
    """Ratios 1 and 4: 2, not 2.5; exchanging the policies gives 1/2."""
    rows = [("off", 0, 100.0), ("off", 1, 100.0), ("s4", 0, 100.0), ("s4", 1, 400.0)]
    table = pd.DataFrame(rows, columns=["policy", "seed", "output_tok_s"]).assign(backend="sim", c=1, tpot_p50_ms=1.0)
    summary = summarise(with_speedup(table, DESIGN), DESIGN).set_index("policy")
    assert summary.loc["s4", "speedup"] == pytest.approx(2.0)
    assert paired_gain(table, DESIGN, "off", "s4").estimate == pytest.approx(-0.5)


def test_gains_at_many_points_hold_together() -> None:
    """The same noise is judged at 1 - 0.05 / 2 each where there are two points."""
    table = with_speedup(trials(noise=2.0), DESIGN)
    both = best_by_point(table, summarise(table, DESIGN), DESIGN, nan).set_index("c")
    one = table[table["c"] == 8]
    alone = best_by_point(one, summarise(one, DESIGN), DESIGN, nan).set_index("c")
    assert both.loc[8, "gain"] == pytest.approx(alone.loc[8, "gain"])
    share = stdtrit(2, 0.9875) / stdtrit(2, 0.975)
    log_hw = [float(np.log1p(t["gain_high"][8]) - np.log1p(t["gain"][8])) for t in (both, alone)]
    assert log_hw[0] / log_hw[1] == pytest.approx(share)


def test_one_seed_is_judged_by_its_batches() -> None:
    """Ten batches, whose common ups and downs of 30 % cancel in pairs; without them one seed tells nothing."""
    rng = np.random.default_rng(0)
    wave = np.exp(0.3 * rng.standard_normal(10))
    rows = [
        {
            "policy": p,
            "seed": 0,
            "c": c,
            "part": i,
            "output_tok_s": speed * wave[i] * np.exp(0.01 * rng.standard_normal()),
        }
        for p, speeds in SPEEDS.items()
        for c, speed in zip((8, 32), speeds, strict=True)
        for i in range(10)
    ]
    batches = with_speedup(pd.DataFrame(rows), DESIGN)
    table = trials()
    table = with_speedup(table[table["seed"] == 0], DESIGN)
    summary = summarise(table, DESIGN, batches)
    (at,) = summary[(summary["policy"] == "s8") & (summary["c"] == 8)].to_dict("records")
    assert 0.005 < at["speedup_hw"] < 0.1
    assert at["output_tok_s_hw"] > 20
    judged = best_by_point(table, summary, DESIGN, nan, batches).set_index("c")
    assert judged["verdict"].to_dict() == {8: "better", 32: "cannot tell"}
    without = best_by_point(table, summarise(table, DESIGN), DESIGN, nan).set_index("c")
    assert set(without["verdict"]) == {"cannot tell (one seed shows no noise)"}


def test_errors_that_two_policies_share_cancel_in_a_gain() -> None:
    """Both 10 % too high: no error of their ratio. One 10 % high, the other right: 10 %."""
    cells = pd.DataFrame({"policy": ["a", "b"], "at": 4, "role": "predicted", "reference": [1.0, 2.0]})
    assert gain_error(cells.assign(predicted=[1.1, 2.2])) == pytest.approx(0)
    assert gain_error(cells.assign(predicted=[1.1, 2.0])) == pytest.approx(0.1)
    assert isnan(gain_error(cells.assign(predicted=[1.1, 2.0], role=["input", "predicted"])))
    assert isnan(gain_error(cells.assign(predicted=[1.1, 2.0], at=[4, 8])))


def test_the_report_says_how_sure_it_is() -> None:
    table = with_speedup(trials(), DESIGN).assign(warmup_requests=8.0, warmup_mser5=5.0)
    best = best_by_point(table, summarise(table, DESIGN), DESIGN, 0.024)
    says = method(table, best, DESIGN, error=0.024, one_seed_batches=False, simulated=True)
    text = " ".join(says)
    assert "3 seeds" in text
    assert "the 2 gains' intervals hold together (97.50% each, Bonferroni)" in text
    assert "the model's known error (2.4%)" in text
    assert "the first 8 requests" in text
    assert "nowhere more than was cut" in text
    late = table.assign(warmup_mser5=np.where(table["c"] == 8, 20.0, nan))
    (warmup,) = [
        s
        for s in method(late, best, DESIGN, error=nan, one_seed_batches=False, simulated=True)
        if s.startswith("Warm-up")
    ]
    assert "finds 20 (median 20), or, in 15 of 30 runs, that they are too short to tell" in warmup
    assert "at 1 of 2 points it is more than was cut" in warmup


@pytest.mark.parametrize(
    ("curve", "at"),
    [
        ({4: 1.5, 16: 0.5}, 8.0),  # halfway in log2
        ({4: 2.0, 8: 1.0, 16: 0.8}, 8.0),
        ({4: 2.0, 16: 1.2}, None),
        ({4: 0.9, 16: 0.8}, None),
        ({1: 1.2, 2: 0.9, 4: 1.1, 8: 0.5}, 2 ** (2 + 0.1 / 0.6)),  # the last fall counts
    ],
)
def test_crossing(curve: dict[float, float], at: float | None) -> None:
    assert crossing(pd.Series(curve)) == (None if at is None else pytest.approx(at))


def test_crossovers_in_words() -> None:
    table = with_speedup(trials(), DESIGN)
    says = crossovers(table, DESIGN).set_index("policy")["says"]
    assert "off" not in says
    assert says["s8"].startswith("29.5 ± ")
    assert says["head"] == "above 32 (still 1.21x there)"
    low = table.assign(speedup=0.5)
    assert crossovers(low, DESIGN).set_index("policy")["says"]["s8"] == "below 8 (only 0.50x there)"


def test_compare_counts_predicted_cells_only() -> None:
    summary = summarise(with_speedup(trials(), DESIGN), DESIGN)
    cells = pd.DataFrame(
        [
            ("s8", 8, 2.6, "input"),
            ("s8", 32, 1.0, "predicted"),
            ("head", 8, 2.5, "predicted"),
            ("gone", 8, 1.0, "predicted"),
        ],
        columns=["policy", "at", "value", "role"],
    )
    table, errors = compare(summary, cells, "c", "speedup")
    assert table["error"].tolist()[:3] == pytest.approx([0, -0.1, 0.2])
    assert errors == pytest.approx({"cells": 2, "missing": 1, "mean_abs": 0.15, "bias": 0.05, "worst": 0.2})


def test_speedups_are_paired_whatever_else_was_measured() -> None:
    """Mean batch sizes are a metric, and differ between policies."""
    table = trials()
    plain = with_speedup(table, DESIGN)
    table["batch"] = np.arange(len(table), dtype=float)
    assert with_speedup(table, DESIGN)["speedup"].tolist() == plain["speedup"].tolist()
    assert plain["speedup"].notna().all()
