"""Tables that others published: a third fitted, the rest predicted, within limits that were measured and tightened."""

from math import nan
from pathlib import Path

import numpy as np
import pytest

from adasim.calibration.throughput_table import Row
from tests.public_cases import page
from tests.public_cases.held_out import Case, Judged, judge, load, nearest, not_fitted, quadratic

CASES = {c.name: c for c in load()}
COUNTED = [c for c in CASES.values() if not c.few]
DRAWS = 8  # predictions need none


@pytest.fixture(scope="module")
def judged() -> dict[str, Judged]:
    return {name: judge(case, DRAWS) for name, case in CASES.items()}


@pytest.mark.parametrize("case", COUNTED, ids=lambda c: c.name)
def test_at_most_a_third_is_fitted(case: Case) -> None:
    """Nor all rows of a batch where there is a choice."""
    fitted = case.rows["role"] == "input"
    assert 0 < fitted.sum() <= len(case.rows) / 3
    assert set(case.rows["role"]) == {"input", "predicted"}
    for _, column in case.rows.groupby(["group", "batch"]):
        if len(column) > 1:
            assert (column["role"] == "predicted").any()


@pytest.mark.parametrize("name", CASES)
def test_rows_not_fitted_are_predicted(name: str, judged: dict[str, Judged]) -> None:
    found = judged[name]
    mean, worst = found.case.limits
    assert found.error <= mean
    assert found.worst <= worst
    assert mean <= 1.2 * found.error + 0.003, "limits are as measured"


def test_no_worse_than_the_null_model_but_where_said(judged: dict[str, Judged]) -> None:
    """AngelSlim's table does not follow a smooth cost: there as little as the null model does."""
    worse = {name for name, found in judged.items() if not found.case.few and found.error >= found.null_error()}
    assert worse == {"angelslim_qwen3_30b"}


def test_targets(judged: dict[str, Judged]) -> None:
    """Issue's bars: 10 %, four of five columns near the best, less regret than the best constant length."""
    t = page.totals(list(judged.values()))
    assert t["cells"] == 458
    assert t["error"] < 0.056
    assert t["columns"] == 117
    assert t["near"] > 0.82
    assert t["regret"] < t["constant"]
    assert t["tau_error"] < 0.015


def test_null_models_by_hand() -> None:
    """Two rows fix a line of the logarithm through k; six rows the whole quadratic."""
    rows = [Row(8, 0), Row(8, 2), Row(8, 4)]
    known, measured = np.array([True, True, False]), np.array([100.0, 200.0, 0.0])
    assert quadratic(rows, known, measured) == pytest.approx([100, 200, 400])
    assert nearest(rows, known, measured) == pytest.approx([100, 200, 200])
    assert np.isnan(nearest([Row(4, 2), Row(8, 2)], np.array([True, False]), np.array([1.0, nan]))[1])


def test_judgement_by_hand() -> None:
    """Fixed by hand: two columns, one advised right, one 10 % off; the constant gives away 0 and 5 %."""
    case = CASES["dspark_v4pro"]
    found = judge(case, DRAWS)
    part = found.cells[found.cells["batch"].isin([1, 16]) & found.cells["k"].isin([0, 3])]
    cells = part.assign(
        measured=[100.0, 200.0, 100.0, 90.0],
        predicted=[120.0, 180.0, 100.0, 110.0],
        low=[90.0] * 4,
        high=[150.0] * 4,
        role=["input", "predicted", "predicted", "predicted"],
        error=[0.2, -0.1, 0.0, 0.2],
    )[["batch", *(c for c in part if c != "batch")]].assign(
        k=[0, 3, 0, 3], label=["plain", "3"] * 2, batch=[1, 1, 16, 16]
    )
    by_hand = Judged(case, cells, found.posteriors, [])
    assert by_hand.error == pytest.approx(0.1)
    assert by_hand.inside == pytest.approx(2 / 3)
    assert by_hand.advice()["regret"].tolist() == pytest.approx([0.0, 0.1])
    assert by_hand.constant[0] == "3"
    assert by_hand.constant[1] == pytest.approx(0.05)
    assert by_hand.sides == (1, 2)


def test_the_plain_row_of_another_set_up_is_noticed(judged: dict[str, Judged]) -> None:
    """Llama-4-Scout's speed-ups exceed its tokens per round; no other table's do."""
    doubtful = {name for name, found in judged.items() if found.doubts}
    assert doubtful == {"specbundle_llama_4_scout_lmsys", "specbundle_llama_4_scout_specforge"}


def test_the_report_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture a case, a row a case, and a reason for what was not fitted."""
    few = [
        CASES[n] for n in ("dspark_v4pro", "vllm20780_eagle3", "angelslim_qwen3_30b", "vllm48892_positions", "lmsys_dsv3")
    ]
    monkeypatch.setattr(page, "load", lambda: few)
    monkeypatch.setattr(page, "judge", lambda case: judge(case, DRAWS))
    page.write(tmp_path / "out")
    text = (tmp_path / "out" / "report.md").read_text()
    for case in few:
        assert f"figures/{case.name}.png" in text
        assert case.source in text
        assert (tmp_path / "out" / "figures" / f"{case.name}.png").stat().st_size > 5000
    for why in not_fitted().values():
        assert why in text
