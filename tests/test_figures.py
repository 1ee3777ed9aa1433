"""Lines or rows: what a figure of a sweep shows, and where its intervals end."""

import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt

from adasim.figures import MAX_LINES, _limits, curves
from adasim.tables import RATIO, Arm, Design


def summary(policies: int) -> pd.DataFrame:
    rows = [
        {"policy": f"rule {i}", "load": load, RATIO: 2.0 - i / 10, f"{RATIO}_hw": 0.1 * i, "ms": 3.0, "ms_hw": 5.0}
        for i in range(policies)
        for load in (1, 8, 64)
    ]
    return pd.DataFrame(rows)


def design(policies: int) -> Design:
    return Design(arms=[Arm(f"rule {i}", "static") for i in range(policies)], x="load")


def test_a_ratio_s_interval_is_symmetric_in_logarithms_and_as_wide_as_stated() -> None:
    part = pd.DataFrame({RATIO: [1.5, 3.0], f"{RATIO}_hw": [3.0, 0.3]})
    low, high = _limits(part, RATIO)
    assert low * high == pytest.approx([1.5**2, 3.0**2])
    assert (high - low) / 2 == pytest.approx([3.0, 0.3])
    assert (low > 0).all()


def test_milliseconds_do_not_fall_below_zero_and_one_seed_has_no_interval() -> None:
    part = pd.DataFrame({"ms": [3.0, 3.0, 3.0], "ms_hw": [5.0, 1.0, np.nan]})
    low, high = _limits(part, "ms")
    assert low[:2].tolist() == [0.0, 2.0]
    assert high[:2].tolist() == [8.0, 4.0]
    assert np.isnan(low[2])
    assert np.isnan(high[2])


def test_eight_policies_are_lines_and_nine_are_rows_with_a_colour_for_each_load() -> None:
    for policies, labels in (
        (MAX_LINES, [f"rule {i}" for i in range(MAX_LINES)]),
        (MAX_LINES + 1, ["1", "8", "64"]),
    ):
        figure = curves(summary(policies), design(policies), {RATIO: "speed-up", "ms": "ms"}, line=1.0)
        assert [t.get_text() for t in figure.legends[0].get_texts()] == labels
        if policies > MAX_LINES:
            ticks = [t.get_text() for t in figure.axes[0].get_yticklabels()]
            assert ticks == [f"rule {i}" for i in range(policies)]
            assert figure.axes[0].yaxis_inverted()  # the first policy on top
        plt.close(figure)
