"""What visits found: one row a configuration, medians over all rounds that had it."""

import json
from collections.abc import Iterable
from math import nan
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from adasim.profiling.visit import Visit
from adasim.types import FloatArray

KEYS = {  # what -> the columns that tell its configurations apart
    "verify": ["batch", "verify_len", "ragged", "context", "drafter"],
    "draft": ["batch", "draft_len", "context", "reads"],
    "overhead": ["batch", "verify_len", "draft_len", "drafter", "reads"],
    "between": ["batch", "drafter"],
    "prefill": ["batch", "tokens"],
}
NAMES = ["batch", "draft_len", "verify_len", "ragged", "context", "drafter", "reads", "tokens"]
FAR = 5.0  # robust standard deviations from the median
APART = 0.1  # and this share of it
ENOUGH = 4  # values to tell an outlier by
MAD = 1.4826  # median absolute deviation of a normal distribution -> its standard deviation


class Run(NamedTuple):
    """A visit on disk."""

    visit: Visit
    repeat: int
    folder: Path  # its trial's


class Profiled(NamedTuple):
    """Tables of a profile."""

    follows: float  # the power of the reference's slowness that times are divided by
    points: pd.DataFrame  # what, its configuration, n, runs, medians, spreads, percentiles, outliers
    outliers: pd.DataFrame  # place, run, step, what, its configuration, ms, times (the median), excess_ms; worst first
    reference: pd.DataFrame  # at_s, step_ms, speed (1 = the median reference's)


def tabulate(runs: Iterable[Run]) -> Profiled:
    """Tables from records. ``steady_ms`` is the median of values divided by how slow the machine was then,
    as far as that explains them.

    Spreads are robust relative standard deviations, ``steady_spread`` that of the corrected values; low and high are the
    10th and 90th percentile. ``context`` is what requests knew when a visit's rounds began, ``mean_context`` what they
    knew on average at the point's rounds; ``tokens`` are those of the whole pass.
    """
    runs = list(runs)
    reference = _reference(runs)
    found = [_observed(r) for r in runs if r.visit.kind != "reference"]
    columns = ["place", "run", "step", "what", *NAMES, "known", "at_s", "ms"]
    values = pd.concat(found, ignore_index=True) if found else pd.DataFrame(columns=columns)
    slow = _slow(reference, values["at_s"].to_numpy(dtype=float))
    follows = _follows(values, slow)
    values["steady"] = values["ms"] / slow**follows
    points, odd = [], []
    for what, keys in KEYS.items():
        for key, group in values[values["what"] == what].groupby(keys, sort=True):
            far = _far(group["steady"].to_numpy(dtype=float))
            points.append(_point(what, dict(zip(keys, key, strict=True)), group, int(far.sum())))
            center = group["steady"].median()
            over = group["ms"] * (1 - center / group["steady"])  # what the value has beyond the median at that time
            odd.append(group.assign(times=group["steady"] / center, excess_ms=over)[far])
    outliers = pd.concat(odd, ignore_index=True) if odd else values.assign(times=nan, excess_ms=nan)
    outliers = outliers[["place", "run", "step", "what", *NAMES, "ms", "times", "excess_ms"]]
    outliers = outliers.sort_values("excess_ms", ascending=False, key=np.abs)
    names = [
        "what",
        *NAMES,
        *("mean_context", "n", "runs", "median_ms", "steady_ms", "spread", "steady_spread", "low_ms", "high_ms"),
        "outliers",
    ]
    return Profiled(follows, pd.DataFrame(points, columns=names), outliers.reset_index(drop=True), reference)


def _point(what: str, key: dict[str, object], group: pd.DataFrame, outliers: int) -> dict[str, object]:
    ms, steady = group["ms"].to_numpy(dtype=float), group["steady"].to_numpy(dtype=float)
    low, middle, high = np.percentile(ms, (10, 50, 90))
    center = float(np.median(steady))
    found = {
        "what": what,
        "mean_context": float(group["known"].mean()),
        "tokens": float(group["tokens"].mean()),
        "n": len(group),
        "runs": group["run"].nunique(),
        "median_ms": middle,
        "steady_ms": center,
        "spread": _spread(ms),
        "steady_spread": _spread(steady),
        "low_ms": low,
        "high_ms": high,
        "outliers": outliers,
    }
    return {"reads": "", **key, **found}


def _follows(values: pd.DataFrame, slow: FloatArray) -> float:
    """The power of the reference's slowness that leaves points the least spread: 0 = it tells nothing, 1 = all."""
    if values.empty:
        return 0.0
    names = ["what", *NAMES]
    group = values.assign(**{n: values[n].astype(str) for n in names}).groupby(names).ngroup().to_numpy()

    def left(power: float) -> float:
        logs = pd.Series(np.log(values["ms"].to_numpy(dtype=float).clip(1e-9)) - power * np.log(slow))
        return float((logs - logs.groupby(group).transform("median")).abs().mean())

    return min((round(p, 1) for p in np.linspace(0, 1, 11)), key=left)


def _spread(values: FloatArray) -> float:
    center = float(np.median(values))
    return MAD * float(np.median(np.abs(values - center))) / center if center else nan


def _far(values: FloatArray) -> NDArray[np.bool_]:
    """Which values are outliers by median absolute deviation, and by enough to matter."""
    center = np.median(values)
    off = np.abs(values - center)
    far = off > max(FAR * MAD * float(np.median(off)), APART * abs(float(center)))
    return far & (len(values) >= ENOUGH)


def _began_s(run: Run) -> float:
    return float(json.loads((run.folder / "trial.json").read_text())["began_s"])


def _reference(runs: list[Run]) -> pd.DataFrame:
    """When references ran, and how fast: the median of a step."""
    rows = []
    for run in runs:
        if run.visit.kind == "reference":
            steps = pd.read_parquet(run.folder / "steps.parquet")
            rounds = steps[steps["decoding"] > 0].iloc[1:]
            middle_s = float(rounds["start_s"].iloc[0] + rounds["end_s"].iloc[-1]) / 2
            seconds = float((rounds["end_s"] - rounds["start_s"]).median())
            rows.append((_began_s(run) + middle_s, 1e3 * seconds))
    table = pd.DataFrame(sorted(rows), columns=["at_s", "step_ms"])
    table["speed"] = table["step_ms"].median() / table["step_ms"]
    return table


def _slow(reference: pd.DataFrame, at_s: FloatArray) -> FloatArray:
    """How many times longer things took at these times than when the reference was at its median."""
    if reference.empty:
        return np.ones(len(at_s))
    return np.interp(at_s, reference["at_s"], 1 / reference["speed"])


def _observed(run: Run) -> pd.DataFrame:
    """Every part of every step of a run, but its first round, and rounds of another batch than the visit's."""
    visit, began_s = run.visit, _began_s(run)
    steps = pd.read_parquet(run.folder / "steps.parquet")
    steps["between_s"] = steps["start_s"].shift(-1) - steps["end_s"]
    if visit.kind == "prefill":
        some = steps[steps["prefill_tokens"] > 0]
        table = pd.DataFrame({"step": some["step"], "tokens": some["prefill_tokens"], "batch": some["first_tokens"]})
        table = table.assign(draft_len=0, verify_len=0, ragged=False, reads="", context=visit.context, known=nan)
        parts = {"prefill": some["prefill_s"]}
    else:
        some = steps[steps["decoding"] == visit.batch].iloc[1:]
        table = pd.DataFrame({"step": some["step"], "tokens": some["verify_tokens"], "batch": visit.batch})
        table = pd.concat([table, _shapes(run, some)], axis=1)
        table = table.assign(context=visit.context, known=some["context"])
        parts = {f: some[f"{f}_s"] for f in ("verify", "draft", "overhead", "between")}
    table = table.assign(
        place=visit.place,
        run=run.folder.name,
        drafter=visit.drafter,
        at_s=began_s + (some["start_s"] + some["end_s"]) / 2,
    )
    long = [table.assign(what=what, ms=1e3 * seconds) for what, seconds in parts.items()]
    found = pd.concat(long, ignore_index=True)
    drafts = found["what"] != "draft"
    found.loc[~drafts, "tokens"] = (found["draft_len"] + 1) * found["batch"]
    return found[(drafts | (found["draft_len"] > 0)) & found["ms"].notna()]


def _shapes(run: Run, some: pd.DataFrame) -> pd.DataFrame:
    """The shape of every round but the first."""
    visit = run.visit
    played = visit.probe(run.repeat).played(visit.rounds)[1:] if visit.drafter else [*visit.shapes * visit.passes][1:]
    rows = [(s.draft_len, s.verify_len, s.ragged, ",".join(s.reads)) for s in played]
    return pd.DataFrame(rows, columns=["draft_len", "verify_len", "ragged", "reads"], index=some.index)
