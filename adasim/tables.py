"""From the metrics of trials to the tables of a report. Cannot tell which backend made them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import hypot, nan
from typing import Any, Literal

import numpy as np
import pandas as pd

from adasim.adaptation import paybacks
from adasim.statistics import CONFIDENCE, Interval, ratio_interval, relative, simultaneous, t_interval

Role = Literal["baseline", "static", "adaptive", "bound"]
RATIO = "speedup"
MATERIAL = 0.01  # smaller gains are never called better or worse


@dataclass(frozen=True, slots=True)
class Arm:
    """A policy as a report sees it: ``bound`` arms know the truth and cannot be deployed."""

    label: str
    role: Role
    group: str | None = None  # of the policies one ``each`` expanded into


@dataclass(frozen=True, slots=True)
class Goal:
    """A metric to compare policies by."""

    metric: str
    words: str
    lower_is_better: bool = False
    then_least: str | None = None  # decides between policies less than 1 % apart

    def ratio(self, one: "pd.Series[float]", other: "pd.Series[float]") -> "pd.Series[float]":
        """How many times better ``one`` is."""
        return other / one if self.lower_is_better else one / other

    def interval(self, one: "pd.Series[float]", other: "pd.Series[float]", confidence: float, series: bool) -> Interval:
        """The same as an interval over paired values; see :func:`~adasim.statistics.ratio_interval`."""
        over, under = (other, one) if self.lower_is_better else (one, other)
        a, b = np.asarray(over, dtype=np.float64), np.asarray(under, dtype=np.float64)
        return ratio_interval(a, b, confidence, series=series)

    def best(self, table: pd.DataFrame) -> "pd.Series[Any] | None":
        """The row that does best; None when nothing was measured, or nothing reached more than 0."""
        values = table[self.metric] * (-1 if self.lower_is_better else 1)
        if values.isna().all() or not values.any():
            return None
        if self.then_least is not None:
            alike = values >= values.max() - MATERIAL * abs(values.max())
            values = -table[self.then_least].where(alike)
        return table.iloc[int(values.argmax())]


THROUGHPUT = Goal("output_tok_s", "output tokens/s")
TPOT = Goal("tpot_p50_ms", "median TPOT", lower_is_better=True)
GOODPUT = Goal("goodput_rps", "goodput", then_least="tpot_p50_ms")


@dataclass(frozen=True, slots=True)
class Design:
    """What was varied and what counts.

    ``x`` is the axis of figures, ``facets`` the other swept fields. ``speed`` defines the speed-up over ``off``,
    ``goal`` picks the best policy: in an open loop throughput says only what arrived.
    """

    arms: Sequence[Arm]
    x: str | None
    facets: Sequence[str] = ()
    speed: Goal = THROUGHPUT
    goal: Goal = THROUGHPUT

    @property
    def point(self) -> list[str]:
        """All swept fields."""
        return [*([self.x] if self.x else []), *self.facets]

    def arm(self, label: str) -> Arm:
        """The arm of that label."""
        return next(a for a in self.arms if a.label == label)


@dataclass(slots=True)
class Tables:
    """Everything a report shows."""

    trials: pd.DataFrame  # metrics by policy, point and seed, speed-up added
    summary: pd.DataFrame  # mean and half-width by policy and point; groups also as their best member
    best: pd.DataFrame  # per point: best static, best adaptive, gain, verdict
    crossover: pd.DataFrame  # per policy and facet
    reference: pd.DataFrame | None = None
    payback: pd.DataFrame = field(default_factory=pd.DataFrame)  # per policy and point, where a drafter learns
    errors: dict[str, float] = field(default_factory=dict)
    method: list[str] = field(default_factory=list)  # how intervals and verdicts were made


def half_width(values: np.ndarray) -> float:
    """Half of the 95 % t-interval of a mean over seeds; NaN for one seed."""
    return t_interval(values).half_width


def with_speedup(trials: pd.DataFrame, design: Design) -> pd.DataFrame:
    """Adds the speed over that of plain decoding at the same point and seed (NaN without it): paired."""
    keys, metric = [*design.point, "seed"], design.speed.metric
    baseline = [a.label for a in design.arms if a.role == "baseline"]
    keys += ["part"] if "part" in trials else []
    base = trials[trials["policy"].isin(baseline)][[*keys, metric]]
    joined = trials.merge(base.rename(columns={metric: "_base"}), on=keys, how="left")
    joined[RATIO] = design.speed.ratio(joined[metric], joined["_base"])
    return joined.drop(columns="_base")


def summarise(trials: pd.DataFrame, design: Design, batches: pd.DataFrame | None = None) -> pd.DataFrame:
    """Mean and ``_hw`` half-width of every metric by policy and point, in the order of the policies.

    The speed-up's mean is geometric. With one seed the widths come from ``batches`` of its run, where they have them.
    """
    values = [c for c in trials.columns if c not in {"policy", "seed", "backend", *design.point}]
    keys = ["policy", *design.point]
    within = {} if batches is None else dict(iter(batches.groupby(keys, sort=False, dropna=False)))
    rows = []
    for key, part in trials.groupby(keys, sort=False, dropna=False):
        row = dict(zip(keys, key, strict=True)) | {"backend": part["backend"].iloc[0], "seeds": len(part)}
        for v in values:
            numbers = part[v].to_numpy(dtype=float)
            found = ratio_interval(numbers, np.ones(len(numbers))) if v == RATIO else t_interval(numbers)
            row[v] = found.estimate if v == RATIO else float(np.mean(numbers))
            row[f"{v}_hw"] = found.half_width
            if len(part) == 1 and key in within and v in within[key]:
                row[f"{v}_hw"] = _within(within[key][v].to_numpy(dtype=float), v)
        rows.append(row)
    order = {a.label: i for i, a in enumerate(design.arms)}
    table = pd.DataFrame(rows)
    table["_order"] = table["policy"].map(order)
    return table.sort_values(["_order", *design.point]).drop(columns="_order").reset_index(drop=True)


def summarise_paybacks(trials: pd.DataFrame, design: Design) -> pd.DataFrame:
    """Mean and ``_hw`` half-width over seeds of :func:`adasim.adaptation.paybacks`; most engines, longest time."""
    runs = paybacks(trials, design.point, open_loop=design.speed is not THROUGHPUT)
    if runs.empty:
        return runs
    rows = []
    for key, part in runs.groupby(["policy", *design.point], sort=False, dropna=False):
        row = dict(zip(["policy", *design.point], key, strict=True))
        names = ("throughput", "tpot", "trainer_share", "reserved_share", "payback", "payback_reserved", "late_saving")
        for name in names:
            numbers = part[name].to_numpy(dtype=float)
            row |= {name: float(np.mean(numbers)), f"{name}_hw": half_width(numbers)}
        rows.append(row | {name: float(part[name].max()) for name in ("engines", "repaid_after_s")})
    return pd.DataFrame(rows)


def _within(values: np.ndarray, metric: str) -> float:
    """Half-width from the batches of one run."""
    if metric == RATIO:
        return ratio_interval(values, np.ones(len(values)), series=True).half_width
    return t_interval(values, series=True).half_width


def best_of_groups(summary: pd.DataFrame, design: Design) -> pd.DataFrame:
    """One more row per group and point: the member that serves the goal best, as ``best GROUP`` (``picked``)."""
    group = summary["policy"].map({a.label: a.group for a in design.arms})
    rows = []
    for key, part in summary[group.notna()].groupby([group, *design.point], sort=False):
        best = design.goal.best(part)
        row = (part.iloc[0] if best is None else best).copy()
        row["picked"] = row["policy"]
        row["policy"] = f"best {key[0]}"
        rows.append(row)
    shown = summary.assign(picked=None)
    return pd.concat([shown, pd.DataFrame(rows)], ignore_index=True) if rows else shown


def best_by_point(
    trials: pd.DataFrame, summary: pd.DataFrame, design: Design, error: float, batches: pd.DataFrame | None = None
) -> pd.DataFrame:
    """Best static and best adaptive policy per point, and whether the difference can be told.

    The intervals of the gains hold together: each has the confidence 1 - 0.05 / points.

    Args:
        trials: with speed-ups.
        summary: of the same.
        design: what was varied.
        error: known relative error of the model (NaN: never checked); see :func:`verdict`.
        batches: of the same runs, used where there is one seed.
    """
    role = {a.label: a.role for a in design.arms}
    rows = []
    for key, part in _by_point(summary, design):
        row: dict[str, object] = dict(zip(design.point, key, strict=True))
        for name, roles in (("static", {"baseline", "static"}), ("adaptive", {"adaptive"})):
            some = part[part["policy"].map(role).isin(roles)]
            chosen = None if some.empty else design.goal.best(some)
            if chosen is None:
                continue
            row |= {name: chosen["policy"], f"{name}_speedup": chosen[RATIO]}
            row[f"{name}_{design.goal.metric}"] = chosen[design.goal.metric]
        rows.append(row)
    confidence = simultaneous(sum({"static", "adaptive"} <= row.keys() for row in rows))
    for row in rows:
        if {"static", "adaptive"} <= row.keys():
            point = [row[p] for p in design.point]
            runs = replicates(trials, batches, design, point)
            gain = paired_gain(runs, design, str(row["adaptive"]), str(row["static"]), confidence)
            row |= {"gain": gain.estimate, "gain_low": gain.low, "gain_high": gain.high, "gain_hw": gain.half_width}
            row |= {"verdict": verdict(gain.estimate, gain.half_width, error)}
            row |= {"because": because(gain.estimate, gain.half_width, error)}
    return pd.DataFrame(rows)


def replicates(
    trials: pd.DataFrame, batches: pd.DataFrame | None, design: Design, point: Sequence[object]
) -> pd.DataFrame:
    """What stands for independent runs at a point: its seeds, or the batches of its only one."""
    runs = _at(trials, design, point)
    if batches is None or batches.empty or runs["seed"].nunique() > 1:
        return runs
    return _at(batches, design, point)


def _at(table: pd.DataFrame, design: Design, point: Sequence[object]) -> pd.DataFrame:
    for name, value in zip(design.point, point, strict=True):
        table = table[table[name] == value]
    return table


def paired_gain(runs: pd.DataFrame, design: Design, one: str, other: str, confidence: float = CONFIDENCE) -> Interval:
    """Relative gain of a policy over another in the goal at one point, paired by seed (or by batch of the only seed)."""
    series = "part" in runs
    keys = ["seed", "part"] if series else ["seed"]
    metric = design.goal.metric
    if metric not in runs:
        return Interval(nan, nan, nan)
    a, b = (runs[runs["policy"] == p].set_index(keys)[metric] for p in (one, other))
    a, b = a.align(b, join="inner")
    return relative(design.goal.interval(a, b, confidence, series))


def verdict(gain: float, width: float, error: float) -> str:
    """better, worse, or cannot tell: a gain must exceed its uncertainty, and 1 %.

    The uncertainty is the root of the summed squares of the noise's half-width and of the model's known error
    (NaN: never checked, left out): two independent causes.
    """
    if np.isnan(width):
        return "cannot tell (one seed shows no noise)"
    if np.isnan(gain) or abs(gain) <= max(hypot(width, np.nan_to_num(error)), MATERIAL):
        return "cannot tell"
    return "better" if gain > 0 else "worse"


def because(gain: float, width: float, error: float) -> str:
    """What keeps a verdict from being told: whether more seeds would help."""
    if not verdict(gain, width, error).startswith("cannot tell") or np.isnan(gain):
        return ""
    if np.isnan(width):
        return "run more seeds"
    if abs(gain) <= MATERIAL:
        return "below 1 %"
    return "within the noise: more seeds may tell" if width > np.nan_to_num(error) else "within the model's known error"


def gain_error(cells: pd.DataFrame) -> float:
    """Mean error of the ratios between policies at one point, over predicted reference cells; NaN without two.

    What a gain needs to be judged by: errors that two policies share cancel in their ratio.

    Args:
        cells: columns policy, at, role, reference, predicted.
    """
    known = cells[(cells["role"] == "predicted") & cells["predicted"].notna()]
    errors = [
        abs((one["predicted"] / other["predicted"]) / (one["reference"] / other["reference"]) - 1)
        for _, part in known.groupby("at", sort=False)
        for (_, one), (_, other) in combinations(part.iterrows(), 2)
    ]
    return float(np.mean(errors)) if errors else nan


def crossovers(trials: pd.DataFrame, design: Design) -> pd.DataFrame:
    """Where each policy's speed-up falls through 1 along ``x``: per seed by interpolation in log2 x, then pooled.

    Columns: policy, facets, at, at_hw, and ``says`` in words (never crossing included).
    """
    rows = []
    if design.x is None or trials[RATIO].isna().all():
        return pd.DataFrame(columns=["policy", *design.facets, "at", "at_hw", "says"])
    for key, part in trials.groupby(["policy", *design.facets], sort=False):
        if design.arm(str(key[0])).role == "baseline":
            continue
        curve = part.groupby(design.x)[RATIO].mean()
        found = [crossing(s.set_index(design.x)[RATIO].sort_index()) for _, s in part.groupby("seed")]
        at = np.array([f for f in found if f is not None])
        row = dict(zip(["policy", *design.facets], key, strict=True))
        if len(at) == len(found):
            mean, width = float(at.mean()), half_width(at)
            says = f"{mean:.3g}" if np.isnan(width) else f"{mean:.3g} ± {width:.2g}"
            row |= {"at": mean, "at_hw": width, "says": says}
        else:
            row |= {"at": nan, "at_hw": nan, "says": _no_crossing(curve)}
            if len(at):
                row["says"] = f"{row['says']}; {len(at)} of {len(found)} seeds cross near {at.mean():.3g}"
        rows.append(row)
    return pd.DataFrame(rows)


def crossing(curve: pd.Series) -> float | None:
    """The last x where a curve falls through 1, linear in log2 x; None when it does not."""
    x, y = curve.index.to_numpy(dtype=float), curve.to_numpy(dtype=float)
    falls = np.flatnonzero((y[:-1] >= 1) & (y[1:] < 1))
    if not len(falls) or np.any(x <= 0):
        return None
    i = falls[-1]
    share = (y[i] - 1) / (y[i] - y[i + 1])
    return float(2 ** (np.log2(x[i]) + share * (np.log2(x[i + 1]) - np.log2(x[i]))))


def _no_crossing(curve: pd.Series) -> str:
    first, last = curve.index[0], curve.index[-1]
    if (curve >= 1).all():
        return f"above {last} (still {curve.iloc[-1]:.2f}x there)"
    if (curve < 1).all():
        return f"below {first} (only {curve.iloc[0]:.2f}x there)"
    return "rises through 1"


def compare(summary: pd.DataFrame, cells: pd.DataFrame, x: str, metric: str) -> tuple[pd.DataFrame, dict[str, float]]:
    """Predictions beside reference cells, and the errors over those that were predicted.

    Args:
        summary: by policy and point.
        cells: columns policy, at, value, role and optionally null, the null model's prediction.
        x: swept field that ``at`` refers to.
        metric: column of ``summary``.
    """
    ours = summary[["policy", x, metric, f"{metric}_hw"]].rename(
        columns={x: "at", metric: "predicted", f"{metric}_hw": "half_width"}
    )
    table = cells.rename(columns={"value": "reference"}).merge(ours, on=["policy", "at"], how="left")
    table["error"] = table["predicted"] / table["reference"] - 1
    table["null_error"] = table.get("null", nan) / table["reference"] - 1
    held_out = table[table["role"] != "input"]
    known = held_out["error"].dropna()
    errors = {
        "cells": float(len(known)),
        "missing": float(table["predicted"].isna().sum()),
        "mean_abs": float(known.abs().mean()),
        "bias": float(known.mean()),
        "worst": float(known.abs().max()),
    }
    columns = ["policy", "at", "role", "reference", "predicted", "half_width", "error"]
    rivals = held_out.dropna(subset=["null_error", "error"])
    if len(rivals):
        columns += ["null", "null_error"]
        errors["null_cells"] = float(len(rivals))
        errors["null_mean_abs"] = float(rivals["null_error"].abs().mean())
        errors["mean_abs_beside_null"] = float(rivals["error"].abs().mean())
    return table[columns], errors


def _by_point(table: pd.DataFrame, design: Design) -> "list[tuple[tuple[object, ...], pd.DataFrame]]":
    if not design.point:
        return [((), table)]
    return [(key, part) for key, part in table.groupby(design.point, sort=False)]
