"""How a report's intervals and verdicts were made, in sentences."""

from math import isnan

import pandas as pd

from adasim.statistics import BATCHES, CONFIDENCE, simultaneous
from adasim.tables import MATERIAL, Design


def method(
    trials: pd.DataFrame, best: pd.DataFrame, design: Design, *, error: float, one_seed_batches: bool, simulated: bool
) -> list[str]:
    """What a reader must know to trust or doubt the numbers.

    Args:
        trials: one row a finished trial.
        best: verdicts by point, with the column gain where two policies were compared.
        design: what was varied and what counts.
        error: known error of the model, NaN when unknown.
        one_seed_batches: whether widths come from batches of single runs.
        simulated: luck too is common to all policies, not only the requests.
    """
    seeds = trials["seed"].nunique()
    shared = "requests and luck at every token" if simulated else "requests"
    lines = [
        f"Replications: {seeds} seed{'' if seeds == 1 else 's'}. All policies of a seed meet the same {shared} "
        "(common random numbers), and comparisons are paired by it."
    ]
    if seeds > 1:
        lines.append(
            f"Intervals: ± is half of a {CONFIDENCE:.0%} t-interval over seeds; speed-ups and gains are geometric means "
            "of paired ratios, with the interval of their logarithms (Fieller's where a value is 0)."
        )
    elif one_seed_batches:
        lines.append(
            f"Intervals: one seed, so ± comes from batch means: each run is cut into {BATCHES} parts of equal work, "
            "paired between policies, and widened where neighbouring parts are correlated. It knows the noise inside "
            "this one workload only; with more seeds it would know how workloads differ."
        )
    else:
        lines.append("Intervals: none; one seed, and runs too short to be cut into batches.")
    count = int(best["gain"].notna().sum()) if "gain" in best else 0
    if count > 1:
        lines.append(
            f"Multiple comparisons: the {count} gains' intervals hold together ({simultaneous(count):.2%} each, "
            "Bonferroni); all other intervals stand each for itself, and the best of several policies is chosen on the "
            "runs that report it."
        )
    elif count:
        lines.append(
            "Multiple comparisons: one verdict, so nothing is adjusted; but the best of several policies is chosen on "
            "the runs that report it."
        )
    known = "never checked, and left out" if isnan(error) else f"{error:.1%}"
    lines.append(
        f"Verdicts: better or worse only when the gain exceeds {MATERIAL:.0%} and the root of the summed squares of the "
        f"interval's half-width and the model's known error ({known})."
    )
    if "warmup_requests" in trials:
        lines.append(_warmup(trials, design.point))
    return lines


def _warmup(trials: pd.DataFrame, point: list[str]) -> str:
    """What was cut from the start of runs, beside what MSER-5 would cut: noisy for one run, less so for the median."""
    cut, found = trials["warmup_requests"], trials["warmup_mser5"]
    text = f"Warm-up: the first {_span(cut)} requests of a run do not count. MSER-5 "
    if found.isna().all():
        return text + "cannot tell: the runs are too short for it."
    text += f"finds {_span(found.dropna())} (median {found.median():.0f})"
    if found.isna().any():
        text += f", or, in {found.isna().sum()} of {len(found)} runs, that they are too short to tell"
    more = (found - cut).groupby([trials[p] for p in point] if point else lambda _: 0).median() > 0
    if not more.any():
        return text + "; in the median run nowhere more than was cut."
    where = f" at {int(more.sum())} of {len(more)} points" if point else ""
    return text + (
        f"; in the median run{where} it is more than was cut: raise measure.warmup_requests and the number of requests, "
        "or set the former to mser5."
    )


def _span(values: "pd.Series[float]") -> str:
    low, high = int(values.min()), int(values.max())
    return f"{low}" if low == high else f"{low} to {high}"
