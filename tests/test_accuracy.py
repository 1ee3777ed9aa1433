"""Errors, noise, rankings and crossovers of numbers whose answers are known."""

from collections.abc import Mapping
from math import nan
from typing import Any

import numpy as np
import pandas as pd
import pytest

from adasim.tolerances import Tolerances
from adasim.validation.accuracy import Bar, Noise, bars_of, cells_of, crossover_of, errors_of, noise_of, ranking_of
from adasim.validation.measured import METRICS, at
from adasim.validation.report import Findings, answer

POINT = ["domain", "load"]


def runs(ratios: Mapping[tuple[str, int], list[float]], *, reference: str = "off", **more: Any) -> pd.DataFrame:
    """A run a value: (policy, load) -> throughput ratios by seed."""
    rows = []
    for (policy, load), values in ratios.items():
        for seed, value in enumerate(values):
            row = dict.fromkeys(METRICS, 1.0) | {"policy": policy, "domain": "code", "load": load, "seed": seed}
            row |= {"throughput_ratio": value, "output_tok_s": 100 * value, "at_s": 0.0, "reference": policy == reference}
            rows.append(row | more)
    return pd.DataFrame(rows)


def cells(measured: Any, predicted: Any, fitted: set[Any] | None = None, uncertain: Any = None) -> pd.DataFrame:
    return cells_of(runs(measured), runs(predicted, luck=0), POINT, fitted or set(), uncertain or {})


def test_errors_by_hand() -> None:
    """Means over repeats are geometric: 2 and 0.5 are 1; 1.1 of them is off by 10 %."""
    measured = {("off", 1): [1.0, 1.0], ("a", 1): [2.0, 0.5], ("b", 1): [1.0, 1.0], ("c", 1): [1.0, 1.0]}
    predicted = {("off", 1): [1.0, 1.0], ("a", 1): [1.1, 1.1], ("b", 1): [0.8, 0.8], ("c", 1): [9.0, 9.0]}
    table = cells(measured, predicted, fitted={("c", "code", 1)})
    errors = errors_of(table).set_index("metric").loc["throughput_ratio"]
    assert errors["cells"] == 2  # neither plain decoding nor what was fitted
    assert errors["mean_abs"] == pytest.approx(0.15)
    assert errors["bias"] == pytest.approx(-0.05)
    assert errors["worst"] == pytest.approx(-0.2)
    assert errors["worst_cell"] == "b, domain code, load 1"


def test_a_prediction_is_as_wide_as_its_luck_and_the_profiles_uncertainty() -> None:
    sims = [runs({("a", 1): [x, x]}, luck=i) for i, x in enumerate(np.exp([-0.1, 0.0, 0.1]))]
    uncertain: dict[tuple[object, ...], dict[str, float]] = {("a", "code", 1): {"throughput_ratio": 0.3}}
    table = cells_of(runs({("a", 1): [1.0, 1.0]}), pd.concat(sims), POINT, set(), uncertain)
    luck = 1.96 * 0.1 / np.sqrt(2)
    assert table["predicted_throughput_ratio_hw"].iloc[0] == pytest.approx(np.hypot(luck, 0.3))


def noise(measured: pd.DataFrame, predicted: pd.DataFrame | None = None) -> Noise:
    return noise_of(measured, measured.assign(throughput_ratio=1.0, luck=0) if predicted is None else predicted, POINT)


def test_noise_is_the_distance_from_the_mean_of_a_cell() -> None:
    """Repeats of normal noise: the mean distance is sigma sqrt(2 / pi), whatever their number; / sqrt n of a mean."""
    rng = np.random.default_rng(0)
    for count in (2, 5):
        many = {("a", i): np.exp(rng.normal(0, 0.05, count)).tolist() for i in range(600)}
        found = noise(runs(many))
        assert found.run == pytest.approx(0.05 * np.sqrt(2 / np.pi), rel=0.08)
        assert found.cell == pytest.approx(found.run / np.sqrt(count), rel=1e-9)


def test_what_the_prediction_knows_of_a_repeat_is_no_noise() -> None:
    """By hand: 1 and 4 that are predicted as 0.5 and 2 scatter by nothing; as 1 and 1, by ln 2 from the mean."""
    measured = runs({("a", 1): [1.0, 4.0]})
    assert noise(measured, runs({("a", 1): [0.5, 2.0]}, luck=0)).run == pytest.approx(0)
    assert noise(measured).run == pytest.approx(np.log(2) * np.sqrt(2))
    assert noise(measured).cell == pytest.approx(np.log(2))


def test_references_are_compared_with_the_next_one() -> None:
    table = runs({("off", 1): [1.0]})
    block = pd.concat([table.assign(output_tok_s=v, at_s=t) for v, t in ((100.0, 5.0), (110.0, 1.0), (121.0, 0.0))])
    assert noise(pd.concat([block, runs({("a", 1): [1.0, 1.0]})])).reference == pytest.approx(np.log(1.1))


def test_the_reference_is_interpolated_in_time() -> None:
    """Half way between 100 and 400 in logarithms is 200; outside the nearest counts; without times the mean does."""
    known = [(10.0, 100.0), (20.0, 400.0)]
    assert at(15.0, known) == pytest.approx(200)
    assert at(0.0, known) == pytest.approx(100)
    assert at(99.0, known) == pytest.approx(400)
    assert at(float("nan"), known) == pytest.approx(200)
    assert np.isnan(at(1.0, []))


def three(a: list[float], b: list[float], says_a: float, says_b: float) -> pd.DataFrame:
    measured = {("off", 1): [1.0] * 3, ("a", 1): a, ("b", 1): b}
    predicted = {("off", 1): [1.0] * 3, ("a", 1): [says_a] * 3, ("b", 1): [says_b] * 3}
    return ranking_of(runs(measured), cells(measured, predicted), POINT)


def test_a_wrong_order_counts_where_the_gap_is_clear_of_noise() -> None:
    found = three([1.5, 1.51, 1.52], [1.3, 1.31, 1.3], 1.3, 1.4).iloc[0]
    assert (found["clear"], found["wrong"]) == (3, 1)
    assert found["wrong_pairs"] == "a against b: measured +15.9%"
    assert found["kendall_tau"] == pytest.approx(1 / 3)


def test_a_wrong_order_within_noise_does_not() -> None:
    found = three([1.5, 1.2, 1.4], [1.3, 1.35, 1.31], 1.3, 1.4).iloc[0]
    assert found["wrong"] == 0
    assert three([1.5], [1.3], 1.3, 1.4).iloc[0]["clear"] == 0  # one repeat knows no noise


def test_noise_common_to_all_policies_hides_nothing() -> None:
    """A repeat with easier requests lifts all alike: gaps are paired by it."""
    assert three([1.5, 1.0, 2.0], [1.3, 0.87, 1.74], 1.3, 1.4).iloc[0]["wrong"] == 1


def test_crossovers_lie_after_the_last_load_that_pays() -> None:
    measured = {("a", c): [v] for c, v in {1: 1.5, 2: 0.9, 4: 1.2, 8: 0.8, 16: 0.7}.items()}
    predicted = {("a", c): [v] for c, v in {1: 1.5, 2: 1.4, 4: 1.2, 8: 1.1, 16: 1.01}.items()}
    found = crossover_of(cells(measured, predicted), "load", ["domain"]).iloc[0]
    assert (found["measured"], found["steps"], found["counts"]) == (8, 2, True)
    assert pd.isna(found["predicted"])
    fitted = crossover_of(cells(measured, predicted, fitted={("a", "code", 4)}), "load", ["domain"])
    assert not fitted.iloc[0]["counts"]


def bars(error: float, repeat: float, **limits: Any) -> dict[str, Bar]:
    measured, predicted = {("a", 1): [1.0], ("a", 2): [1.0]}, {("a", 1): [1 + error], ("a", 2): [1 + error]}
    table = cells(measured, predicted)
    ranking, crossover = ranking_of(runs(measured), table, POINT), crossover_of(table, "load", ["domain"])
    found = bars_of(table, ranking, crossover, Noise(repeat, repeat, 0.0, 0.0), Tolerances(**limits))
    return {bar.what.partition(",")[0] + bar.what[-5:]: bar for bar in found}


def test_the_limit_of_the_mean_follows_the_repeat_error() -> None:
    mean, worst = "throughput over plain decodingerror", "throughput over plain decoding cell"
    assert bars(0.05, 0.0)[mean].met is True
    assert bars(0.08, 0.0)[mean].met is False
    assert bars(0.08, 0.06)[mean].met is True  # 1.5 x 6 %
    assert bars(0.08, 0.06)[worst].met is True
    assert bars(-0.16, 0.2)[worst].met is False


def test_a_limit_says_who_set_it_and_how_many_cells_exceed_it() -> None:
    mean, worst = "throughput over plain decodingerror", "throughput over plain decoding cell"
    assert bars(0.08, 0.02)[mean].why == (
        "as stated, since 1.5 x the repeat error of a cell (2.0%) is less; 2 of 2 cells exceed it"
    )
    assert bars(0.08, 0.06)[mean].why == "set by 1.5 x the repeat error of a cell (6.0%); 0 of 2 cells exceed it"
    assert bars(0.08, float("nan"))[mean].why.startswith("as stated, since the repeat error is unknown")
    assert bars(0.2, 0.0)[worst].why.endswith("2 of 2 cells exceed it")


def test_nothing_judged_is_no_pass() -> None:
    """Cells that were all fitted have no error: the answer says so, and the exit code is not 0."""
    table = cells({("a", 1): [1.0]}, {("a", 1): [1.0]}, fitted={("a", "code", 1)})
    errors, none, noise = errors_of(table), pd.DataFrame(), Noise(nan, nan, nan, nan)
    made = Findings(table, errors, noise, none, none, bars_of(table, none, none, noise, Tolerances()), none, none)
    assert all(bar.met is None for bar in made.bars)
    assert not made.passed
    assert any("cannot be judged, so nothing is" in line for line in answer(made))


def test_what_was_not_measured_is_not_judged() -> None:
    found = bars(0.0, float("nan"))
    assert found["pairs of policies in the wrong orderorder"].met is None
