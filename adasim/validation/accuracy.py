"""Predicted against measured: errors by cell, repeat noise, ranking, crossovers, and which limits are met."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import exp, isnan, log, nan, sqrt
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import stdtrit
from scipy.stats import kendalltau

from adasim.statistics import CONFIDENCE, simultaneous, t_interval
from adasim.tables import MATERIAL
from adasim.tolerances import Tolerances
from adasim.validation.measured import METRICS

MAIN = ("throughput_ratio", "tau", "tpot_p50_ratio", "tpot_p95_ratio")  # what limits are about
NORMAL = 1.96


def cells_of(
    measured: pd.DataFrame,
    predicted: pd.DataFrame,
    point: Sequence[str],
    fitted: set[tuple[object, ...]],
    uncertain: Mapping[tuple[object, ...], Mapping[str, float]],
) -> pd.DataFrame:
    """One row a cell (policy and point), means over its repeats; plain decoding's cells are marked ``reference``.

    Columns of each metric: ``measured_M``, ``predicted_M`` (geometric means), ``error_M`` = predicted / measured - 1, and
    relative half-widths ``measured_M_hw`` (t-interval over repeats) and ``predicted_M_hw`` (luck of as many runs, and
    the profile's uncertainty, in squares).

    Args:
        measured: see ``measured.table_of``.
        predicted: see ``Predictor.table``.
        point: swept fields.
        fitted: cells the profile was fitted on.
        uncertain: what the profile's uncertainty moves, relative, by cell and metric.
    """
    keys, rows = ["policy", *point], []
    simulated = dict(list(predicted.groupby(keys, sort=False)))
    for key, real in measured.groupby(keys, sort=False):
        if (sim := simulated.get(key)) is None:
            continue
        row: dict[str, Any] = dict(zip(keys, key, strict=True))
        row |= {"fitted": key in fitted, "reference": bool(real["reference"].all()), "repeats": real["seed"].nunique()}
        for metric in METRICS:
            here, there = _logs(real, metric), _logs(sim, metric)
            row |= {f"measured_{metric}": _exp(here.mean()), f"predicted_{metric}": _exp(there.mean())}
            row[f"error_{metric}"] = _exp(there.mean() - here.mean()) - 1
            repeats = np.array(here.groupby(real["seed"]).mean().to_list(), dtype=np.float64)
            row[f"measured_{metric}_hw"] = t_interval(repeats).half_width
            luck = there.groupby(sim["seed"]).var(ddof=1).mean() / row["repeats"]
            moved = uncertain.get(key, {}).get(metric, 0.0)
            row[f"predicted_{metric}_hw"] = sqrt((NORMAL**2 * luck if luck > 0 else 0.0) + moved**2)
        row["cell"] = ", ".join(
            f"{k.rsplit('.', 1)[-1]} {v}" if k != "policy" else f"{v}" for k, v in zip(keys, key, strict=True)
        )
        rows.append(row)
    return pd.DataFrame(rows)


def _logs(table: pd.DataFrame, metric: str) -> "pd.Series[float]":
    return np.log(table[metric].where(table[metric] > 0))


def _exp(value: float) -> float:
    return value if isnan(value) else exp(value)


@dataclass(frozen=True, slots=True)
class Noise:
    """How much the measured numbers themselves move, relative."""

    run: float  # measured over predicted throughput ratio of a run, from its cell's mean, mean absolute
    cell: float  # the same of a mean over a cell's repeats, which is what is judged
    reference: float  # two plain-decoding runs of one block that follow each other, mean absolute
    absolute: float  # a repeat of a cell from the cell's mean, tokens per second


def noise_of(measured: pd.DataFrame, predicted: pd.DataFrame, point: Sequence[str]) -> Noise:
    """Repeat-to-repeat errors; NaN where nothing was repeated.

    Repeats answer other requests, which the prediction of each knows: what is left is the luck of the text, of the
    simulation, and the machine.
    """
    plain = measured[measured["reference"]].sort_values("at_s", kind="stable")
    steps = [
        abs(log(b / a))
        for _, block in plain.groupby([*point, "seed"], sort=False)
        for a, b in zip(block["output_tok_s"], block["output_tok_s"].iloc[1:], strict=False)
    ]
    keys = ["policy", *point]
    real = measured[~measured["reference"]]
    says = _logs(predicted, "throughput_ratio").groupby([predicted[k] for k in [*keys, "seed"]], sort=False).mean()
    expected = says.reindex(pd.MultiIndex.from_frame(real[[*keys, "seed"]])).to_numpy()
    ratios = real.assign(off=_logs(real, "throughput_ratio") - expected, speed=_logs(real, "output_tok_s"))
    run, cell = _from_mean(ratios, keys, "off")
    reference = float(np.mean(steps)) if steps else nan
    return Noise(run, cell, reference, _from_mean(ratios, keys, "speed")[0])


def _from_mean(table: pd.DataFrame, keys: list[str], column: str) -> tuple[float, float]:
    """Mean distance of a value from its cell's mean, freed from the mean's following it (n / (n - 1)); of the mean."""
    values, means = [], []
    for _, part in table.groupby(keys, sort=False):
        logs = part[column].dropna()
        if (n := len(logs)) > 1:
            values.append(float((logs - logs.mean()).abs().mean()) * sqrt(n / (n - 1)))
            means.append(values[-1] / sqrt(n))
    return (float(np.mean(values)), float(np.mean(means))) if values else (nan, nan)


def errors_of(cells: pd.DataFrame) -> pd.DataFrame:
    """A row a metric: mean absolute error, bias, worst cell, over cells that were not fitted and are no reference."""
    rows, held = [], held_out(cells)
    for metric in METRICS:
        error = held[f"error_{metric}"].dropna()
        if error.empty:
            continue
        at = int(error.abs().to_numpy().argmax())
        rows.append(
            {
                "metric": metric, "cells": len(error), "mean_abs": error.abs().mean(), "bias": error.mean(),
                "worst": error.iloc[at], "worst_cell": held["cell"].loc[error.index].iloc[at],
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def held_out(cells: pd.DataFrame) -> pd.DataFrame:
    """Cells that count."""
    return cells[~cells["fitted"] & ~cells["reference"]]


def ranking_of(measured: pd.DataFrame, cells: pd.DataFrame, point: Sequence[str]) -> pd.DataFrame:
    """A row a point: Kendall's tau of predicted and measured throughput over policies, and the pairs that differ.

    A gap between two policies exceeds noise when it exceeds 1 % and the half-width of its interval: paired by seed,
    variances pooled over pairs, all intervals of a point holding together. Pairs of held-out cells count, and of
    these with plain decoding.
    """
    rows = []
    for key, part in _by_point(cells, point):
        real = measured[(measured[list(point)] == list(key)).all(axis=1)] if point else measured
        logs = np.log(real.pivot_table(index="seed", columns="policy", values="throughput_ratio", aggfunc="mean"))
        plain = part.loc[part["reference"], "policy"]
        logs[list(plain)] = 0.0  # what all are held against
        counts = part.loc[~part["fitted"] | part["reference"], "policy"]
        names = [p for p in counts if p in logs]
        if len(names) < 2:
            continue
        predicted = dict(zip(part["policy"], np.log(part["predicted_throughput_ratio"]), strict=True))
        gaps = {pair: logs[pair[0]] - logs[pair[1]] for pair in combinations(names, 2)}
        noise = _half_widths(gaps, set(plain))
        clear = {p: float(g.mean()) for p, g in gaps.items() if abs(g.mean()) > max(noise[p], log(1 + MATERIAL))}
        wrong = [p for p, gap in clear.items() if (predicted[p[0]] - predicted[p[1]]) * gap <= 0]
        tau = kendalltau([logs[n].mean() for n in names], [predicted[n] for n in names]).statistic
        says = "; ".join(f"{a} against {b}: measured {exp(clear[a, b]) - 1:+.1%}" for a, b in wrong)
        rows.append(
            dict(zip(point, key, strict=True))
            | {"policies": len(names), "kendall_tau": float(tau), "pairs": len(gaps), "clear": len(clear)}
            | {"wrong": len(wrong), "wrong_pairs": says}
        )
    return pd.DataFrame(rows)


def _half_widths(gaps: Mapping[tuple[str, str], "pd.Series[float]"], plain: set[str]) -> dict[tuple[str, str], float]:
    """Of paired gaps; without repeats no gap is known to exceed noise.

    One variance for all pairs of policies, another for those with plain decoding, which share no luck with it.
    """
    found = dict.fromkeys(gaps, float("inf"))
    for with_plain in (False, True):
        known = {p: g.dropna() for p, g in gaps.items() if bool(plain & set(p)) == with_plain and g.count() > 1}
        if not known:
            continue
        free = sum(len(g) - 1 for g in known.values())
        variance = sum(float(g.var(ddof=1)) * (len(g) - 1) for g in known.values()) / free
        policies = len({name for pair in known for name in pair})
        dof = (policies - 1) * (max(len(g) for g in known.values()) - 1)  # pairs share policies: no more than these
        times = float(stdtrit(dof, (1 + simultaneous(len(gaps), CONFIDENCE)) / 2))
        found |= {p: times * sqrt(variance / len(g)) for p, g in known.items()}
    return found


def crossover_of(cells: pd.DataFrame, x: str | None, facets: Sequence[str]) -> pd.DataFrame:
    """A row a policy and facet: the first load at which it no longer beats plain decoding, measured and predicted.

    ``steps`` is how many grid steps they lie apart; ``counts`` when no cell of it was used for fitting.
    """
    if x is None:
        return pd.DataFrame()
    rows = []
    for key, part in cells[~cells["reference"]].groupby(["policy", *facets], sort=False):
        rising = part.sort_values(x)
        grid = rising[x].tolist()
        first = [_first_below(rising[f"{arm}_throughput_ratio"].tolist()) for arm in ("measured", "predicted")]
        if len(grid) < 2:
            continue
        named = [grid[i] if i < len(grid) else None for i in first]
        rows.append(
            dict(zip(["policy", *facets], key, strict=True))
            | {"measured": named[0], "predicted": named[1], "steps": abs(first[0] - first[1])}
            | {"counts": not part["fitted"].any()}
        )
    return pd.DataFrame(rows)


def _first_below(ratios: Sequence[float]) -> int:
    """Where a policy stops paying for good: after the last load at which it pays."""
    pays = [i for i, r in enumerate(ratios) if r >= 1]
    return pays[-1] + 1 if pays else 0


@dataclass(frozen=True, slots=True)
class Bar:
    """One limit and whether it is met; None: it cannot be told."""

    what: str
    value: float
    limit: float
    met: bool | None
    why: str = ""


def bars_of(
    cells: pd.DataFrame, ranking: pd.DataFrame, crossover: pd.DataFrame, noise: Noise, limits: Tolerances
) -> list[Bar]:
    """Every limit of the scenario, held against what was found."""
    found = {str(row["metric"]): row for _, row in errors_of(cells).iterrows()}
    repeats = 0.0 if isnan(noise.cell) else limits.repeat_factor * noise.cell
    mean = max(limits.throughput_mae, repeats)
    repeat = f"{limits.repeat_factor:g} x the repeat error of a cell ({noise.cell:.1%})"
    set_by = f"set by {repeat}" if repeats > limits.throughput_mae else f"as stated, since {repeat} is less"
    set_by = "as stated, since the repeat error is unknown" if isnan(noise.cell) else set_by
    asked = [
        ("throughput over plain decoding, mean error", "throughput_ratio", "mean_abs", mean, set_by),
        ("throughput over plain decoding, worst cell", "throughput_ratio", "worst", limits.throughput_worst, ""),
        ("tau, mean error", "tau", "mean_abs", limits.tau, ""),
        ("median TPOT over plain decoding, mean error", "tpot_p50_ratio", "mean_abs", limits.tpot_p50, ""),
        ("TPOT p95 over plain decoding, mean error", "tpot_p95_ratio", "mean_abs", limits.tpot_p95, ""),
    ]
    bars = []
    for what, metric, column, limit, why in asked:
        if metric not in found:
            bars.append(Bar(what, nan, limit, None, why))
            continue
        value, error = abs(float(found[metric][column])), held_out(cells)[f"error_{metric}"].abs()
        over = f"{int((error > limit).sum())} of {int(error.notna().sum())} cells exceed it"
        worst = str(found[metric]["worst_cell"]) if column == "worst" else ""
        bars.append(Bar(what, value, limit, value <= limit, "; ".join(filter(None, (worst, why, over)))))
    if limits.ranking:
        wrong = float(ranking["wrong"].sum()) if len(ranking) else nan
        clear = int(ranking["clear"].sum()) if len(ranking) else 0
        met = None if not clear else wrong == 0
        bars.append(Bar("pairs of policies in the wrong order", wrong, 0, met, f"of {clear} pairs clear of noise"))
    counted = crossover[crossover["counts"]] if len(crossover) else crossover
    steps = float(counted["steps"].max()) if len(counted) else nan
    why = f"of {len(counted)} crossovers"
    met = None if isnan(steps) else steps <= limits.crossover_steps
    return [*bars, Bar("crossover, grid steps off", steps, limits.crossover_steps, met, why)]


def _by_point(table: pd.DataFrame, point: Sequence[str]) -> list[tuple[tuple[Any, ...], pd.DataFrame]]:
    return [(key, part) for key, part in table.groupby(list(point), sort=False)] if point else [((), table)]
