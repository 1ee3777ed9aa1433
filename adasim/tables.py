"""From the metrics of trials to the tables of a report. Cannot tell which backend made them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import nan, sqrt
from typing import Any, Literal

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from adasim.adaptation import paybacks

Role = Literal["baseline", "static", "adaptive", "bound"]
RATIO = "speedup"
CONFIDENCE = 0.95
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


def half_width(values: np.ndarray) -> float:
    """Half of the 95 % t-interval of a mean over seeds; NaN for one seed."""
    known = values[~np.isnan(values)]
    if len(known) < 2:
        return nan
    quantile = float(stdtrit(len(known) - 1, (1 + CONFIDENCE) / 2))
    return quantile * float(known.std(ddof=1)) / sqrt(len(known))


def with_speedup(trials: pd.DataFrame, design: Design) -> pd.DataFrame:
    """Adds the speed over that of plain decoding at the same point and seed (NaN without it): paired."""
    keys, metric = [*design.point, "seed"], design.speed.metric
    baseline = [a.label for a in design.arms if a.role == "baseline"]
    base = trials[trials["policy"].isin(baseline)][[*keys, metric]]
    joined = trials.merge(base.rename(columns={metric: "_base"}), on=keys, how="left")
    joined[RATIO] = design.speed.ratio(joined[metric], joined["_base"])
    return joined.drop(columns="_base")


def summarise(trials: pd.DataFrame, design: Design) -> pd.DataFrame:
    """Mean and ``_hw`` half-width of every metric by policy and point, in the order of the policies."""
    values = [c for c in trials.columns if c not in {"policy", "seed", "backend", *design.point}]
    keys = ["policy", *design.point]
    rows = []
    for key, part in trials.groupby(keys, sort=False, dropna=False):
        row = dict(zip(keys, key, strict=True)) | {"backend": part["backend"].iloc[0], "seeds": len(part)}
        for v in values:
            numbers = part[v].to_numpy(dtype=float)
            row[v] = float(np.mean(numbers))
            row[f"{v}_hw"] = half_width(numbers)
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


def best_by_point(tables_trials: pd.DataFrame, summary: pd.DataFrame, design: Design, error: float) -> pd.DataFrame:
    """Best static and best adaptive policy per point, and whether the difference can be told.

    Args:
        tables_trials: trials with speed-ups.
        summary: of the same.
        design: what was varied.
        error: known relative error of the model (NaN: never checked); smaller gains cannot be told.
    """
    role = {a.label: a.role for a in design.arms}
    rows = []
    for key, part in _by_point(summary, design):
        row: dict[str, object] = dict(zip(design.point, key, strict=True))
        best: dict[str, str] = {}
        for name, roles in (("static", {"baseline", "static"}), ("adaptive", {"adaptive"})):
            some = part[part["policy"].map(role).isin(roles)]
            chosen = None if some.empty else design.goal.best(some)
            if chosen is None:
                continue
            best[name] = str(chosen["policy"])
            row |= {name: chosen["policy"], f"{name}_speedup": chosen[RATIO]}
            row[f"{name}_{design.goal.metric}"] = chosen[design.goal.metric]
        if len(best) == 2:
            gain, width = paired_gain(tables_trials, design, key, best["adaptive"], best["static"])
            row |= {"gain": gain, "gain_hw": width, "verdict": verdict(gain, width, error)}
        rows.append(row)
    return pd.DataFrame(rows)


def paired_gain(
    trials: pd.DataFrame, design: Design, point: Sequence[object], one: str, other: str
) -> tuple[float, float]:
    """Relative gain of a policy over another in the goal, paired by seed: mean and half-width."""
    at = trials
    for name, value in zip(design.point, point, strict=True):
        at = at[at[name] == value]
    a, b = (at[at["policy"] == p].set_index("seed")[design.goal.metric] for p in (one, other))
    gain = design.goal.ratio(a, b).replace([np.inf, -np.inf], np.nan).dropna().to_numpy() - 1
    return (float(gain.mean()) if len(gain) else nan), half_width(gain)


def verdict(gain: float, width: float, error: float) -> str:
    """better, worse, or cannot tell: a gain must exceed 1 %, the noise over seeds and the model's known error."""
    bound = np.nanmax([width, error, MATERIAL])
    if np.isnan(width):
        return "cannot tell (one seed shows no noise)"
    if np.isnan(gain) or abs(gain) <= bound:
        return "cannot tell"
    return "better" if gain > 0 else "worse"


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
