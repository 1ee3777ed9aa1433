"""Seconds of the target's pass: which form, its constants, its knee, and how far off it is where."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import minimize_scalar

from adasim.calibration.cost import CostModel, Point, TableCost
from adasim.calibration.estimate.part import (
    DRAWS,
    LEAST_RUNS,
    Estimate,
    FittedPart,
    Residual,
    interval,
    residual,
    trimmed,
    weights,
)
from adasim.calibration.estimate.recording import RecordedTrial
from adasim.calibration.estimate.regression import fit, independent
from adasim.calibration.estimate.steps import Speed, cells, machine_speed, rounds_table
from adasim.calibration.pass_cost import PassCost
from adasim.errors import InputError
from adasim.types import FloatArray

TERMS = ("base_ms", "per_token_ms", "per_request_ms", "per_attended_ms", "per_context_ms")
BESIDE = (
    "drafter_ms",
    "drafter_per_request_ms",
)  # what passes take longer while a drafter is loaded: its context follows
SHARPNESS = (2.0, 4.0, 8.0)
KNEES = 16  # tried, evenly in logarithms
CAPPED = 0.3  # relative error from which on a cell counts no more when knees are compared
FOLDS = 5
MOST_CELLS = 1200
LEAST_CELLS, LEAST_TOKENS = 4, 3
PREFER = 1.05  # a simpler form wins when its held-out error is at most this many times the best
BATCHES, LENGTHS = (1, 4, 16, 64), (1, 4, 8)


@dataclass(frozen=True, slots=True)
class Form:
    """A formula with its constants in milliseconds; ``sharpness`` 0: no knee."""

    sharpness: float
    knee: float
    used: tuple[int, ...]  # indices of TERMS + BESIDE
    found: FloatArray  # [used]

    def predict(self, table: pd.DataFrame) -> FloatArray:
        """Milliseconds of each row."""
        return _terms(table, self.sharpness, self.knee)[:, list(self.used)] @ self.found

    def constants(self) -> dict[str, float]:
        """By name, those not used 0."""
        names = TERMS + BESIDE
        return dict.fromkeys(names, 0.0) | {names[i]: float(v) for i, v in zip(self.used, self.found, strict=True)}

    def beside(self, table: pd.DataFrame) -> FloatArray:
        """Milliseconds of each row that are the loaded drafter's."""
        mine = [i for i in self.used if i >= len(TERMS)]
        found = np.array([v for i, v in zip(self.used, self.found, strict=True) if i >= len(TERMS)])
        return _terms(table, self.sharpness, self.knee)[:, mine] @ found if mine else np.zeros(len(table))


def fit_verify(trials: Sequence[RecordedTrial], seed: int = 0, speed: Speed | None = None) -> FittedPart[CostModel]:
    """The cost model of verification, without draft, prefill and overhead.

    Raises:
        InputError: too few different passes to fit anything.
    """
    speed = speed or machine_speed(trials)
    table = cells(rounds_table(trials), "verify_s", ("drafter_loaded",))
    table = table.sample(MOST_CELLS, random_state=seed).sort_index() if len(table) > MOST_CELLS else table
    different, lengths = table["cell"].nunique(), table["tokens"].round().nunique()
    if different < LEAST_CELLS or lengths < LEAST_TOKENS:
        raise InputError(
            f"verify: the grid is too thin: {different} different passes of {lengths} different token counts; needs "
            f"{LEAST_CELLS} passes and {LEAST_TOKENS} token counts. Record other batch sizes or verify lengths"
        )
    table = table.assign(ms=speed.steady_ms(table, "verify_s"))
    part, form = _choose(table, seed)
    _bootstrap(part, form, table, seed)
    part.residuals = regions("verify", table, part.points["verify"]["fitted_ms"].to_numpy())
    part.ranges = {name: _range(table[name]) for name in ("batch", "tokens", "context")}
    part.counts = {"passes": int(table["count"].sum()), "verify cells": different, "blocks": table["block"].nunique()}
    part.points["speed"] = speed.factors.rename("factor").reset_index()
    part.notes += _drift(speed)
    return part


def _choose(table: pd.DataFrame, seed: int) -> tuple[FittedPart[CostModel], Form]:
    """The form with the least held-out error, the simplest among equals."""
    rng = np.random.default_rng(seed)
    fold = pd.Series(rng.permutation(table["cell"].nunique()) % FOLDS, index=table["cell"].unique())
    held = table["cell"].map(fold).to_numpy()
    errors: dict[float, FloatArray] = {}
    for sharpness in (0.0, *SHARPNESS):
        off = np.empty(len(table))
        for i in range(FOLDS):
            out = held == i
            if out.any() and not out.all():
                off[out] = _fit(table[~out], sharpness).predict(table[out]) / table["ms"].to_numpy()[out] - 1
        errors[sharpness] = np.abs(off)
    scores = {s: trimmed(e) for s, e in errors.items()}
    best = min(scores.values())
    sharpness = next(s for s in scores if scores[s] <= PREFER * best + 5e-4)
    form = _fit(table, sharpness)
    told = ", ".join(f"{_name(s)} {e:.1%}" for s, e in scores.items())
    beside = form.beside(table)
    grid = _grid(table.assign(ms=table["ms"] - beside))
    if grid is not None:
        told += f", table {grid[1]:.1%}"
    note = f"verification: mean error on held-out cells by form: {told}"
    model: CostModel
    if grid is not None and grid[1] < 0.8 * scores[sharpness]:
        model, fitted, error = grid[0], _looked_up(grid[0], table) + beside, grid[1]
        note += "; the table is used"
    else:
        c = {name: ms for name, ms in form.constants().items() if name in TERMS}
        tokens = [int(np.floor(table["tokens"].min())), int(np.ceil(table["tokens"].max()))]
        model = PassCost(
            **c, knee_tokens=form.knee, sharpness=form.sharpness or 1.0, fitted_tokens=tokens, extrapolate=True
        )
        fitted, error = form.predict(table), scores[sharpness]
        note += f"; {_name(sharpness)} is used"
    absent = [TERMS[i] for i in range(len(TERMS)) if i not in form.used]
    notes = [note] + [f"verification: {', '.join(absent)} cannot be told from the other terms here, taken as 0"] * bool(
        absent
    )
    points = table[["block", "batch", "tokens", "context", "drafter_loaded", "ms", "count"]].assign(fitted_ms=fitted)
    return FittedPart(model, notes=notes, error=error, points={"verify": points}), form


def _bootstrap(part: FittedPart[CostModel], form: Form, table: pd.DataFrame, seed: int) -> None:
    """Intervals of the constants and the knee over blocks, or over cells where there is one block only."""
    by = "block" if table["block"].nunique() >= LEAST_RUNS else "cell"
    group, names = pd.factorize(table[by])
    drawn = weights(len(names), seed, DRAWS)
    constants, knees, spread = [], [], []
    fitted = form.predict(table)
    for w in drawn[: DRAWS if form.sharpness == 0 else DRAWS // 2]:
        again = _fit(table, form.sharpness, w[group], near=form.knee, used=form.used)
        constants.append(list(again.constants().values()))
        knees.append(again.knee)
        spread.append(np.abs(again.predict(table) / fitted - 1))
    how = f"bootstrap over {len(names)} {'runs' if by == 'block' else 'cells of few runs'}"
    part.extra = {name: form.constants()[name] for name in BESIDE}
    for i, name in enumerate(TERMS + BESIDE):
        draws = np.array([c[i] for c in constants])
        value = form.constants()[name]
        part.intervals[f"verify.{name}"] = interval(value, draws, len(names), how, (0.0, np.inf))
    most = float(table["tokens"].max())
    if form.sharpness:
        part.intervals["verify.knee_tokens"] = interval(form.knee, np.array(knees), len(names), how, (0.0, most))
    else:
        least = float(table["tokens"].min())
        part.intervals["verify.knee_tokens"] = Estimate(
            value=0.0, low=0.0, high=least, how=f"no knee within the measured {least:g} to {most:g} tokens"
        )
    part.error = float(np.hypot(part.error, np.median(np.array(spread)) * 1.96))


def _fit(
    table: pd.DataFrame,
    sharpness: float,
    weight: FloatArray | None = None,
    near: float | None = None,
    used: Sequence[int] | None = None,
) -> Form:
    """Constants of one form; a knee is searched, near a known one where that is given."""
    ms = table["ms"].to_numpy()
    weight = np.sqrt(table["count"].to_numpy()) * (1.0 if weight is None else weight)
    kept = weight > 0
    part, ms, weight = table[kept], ms[kept], weight[kept]

    def at(knee: float) -> tuple[float, Form]:
        terms = _terms(part, sharpness, knee)
        mine = tuple(independent(terms, TERMS + BESIDE, ms)) if used is None else tuple(used)
        found = fit(terms[:, list(mine)], ms, weight)
        off = np.abs(terms[:, list(mine)] @ found / ms - 1)
        return float(np.sum(weight * np.minimum(off, CAPPED))), Form(sharpness, knee, mine, found)

    if not sharpness:
        return at(0.0)[1]
    if near:
        low, high = near / 3, near * 3
    else:
        knees = np.geomspace(1.5, max(part["tokens"].max(), 3.0), KNEES)
        i = int(np.argmin([at(k)[0] for k in knees.tolist()]))
        low, high = knees[max(i - 1, 0)], knees[min(i + 1, KNEES - 1)]
    best = minimize_scalar(
        lambda x: at(float(np.exp(x)))[0], bounds=(np.log(low), np.log(high)), method="bounded", options={"xatol": 0.02}
    )
    return at(float(np.exp(best.x)))[1]


def _terms(table: pd.DataFrame, sharpness: float, knee: float) -> FloatArray:
    """[rows, TERMS + BESIDE]."""
    loaded = table["drafter_loaded"].to_numpy(dtype=float)
    batch, tokens, context = (table[c].to_numpy(dtype=float) for c in ("batch", "tokens", "context"))
    if sharpness:
        high, low = np.maximum(tokens, knee), np.minimum(tokens, knee)
        rise = high * (1 + (low / high) ** sharpness) ** (1 / sharpness)
    else:
        rise = tokens
    return np.stack([np.ones(len(table)), rise, batch, tokens * context, batch * context, loaded, loaded * batch], axis=1)


def _grid(table: pd.DataFrame) -> tuple[TableCost, float] | None:
    """A table where the cells make a grid, and its error where every inner cell is interpolated from its neighbours."""
    logs = np.log(table["context"].to_numpy())
    order = np.sort(logs)
    edges = (order[1:] + order[:-1])[np.diff(order) > 0.35] / 2
    level = np.searchsorted(edges, logs)
    length = (table["tokens"] / table["batch"]).round(2)
    rows = table.assign(level=level, length=length)
    if any(np.ptp(part) > 0.7 for _, part in pd.Series(logs).groupby(level)):
        return None
    where = ["batch", "length", "level"]
    at = rows.groupby(where)["ms"].median()
    axes = [sorted(at.index.get_level_values(k).unique()) for k in where]
    if len(at) != np.prod([len(a) for a in axes]) or len(axes[0]) < 2 or len(axes[1]) < 3:
        return None
    context = np.exp(rows.groupby("level")["context"].apply(lambda c: np.log(c).mean())).round(1)
    points = [
        Point(
            batch=int(b),
            tokens_per_request=float(n),
            context=float(context[c]) if len(axes[2]) > 1 else None,
            ms=float(ms),
        )
        for (b, n, c), ms in at.items()
    ]
    values = at.to_numpy().reshape([len(a) for a in axes])
    inner = []
    for axis in (0, 1):
        x = np.array(axes[axis], dtype=float)
        v = np.moveaxis(values, axis, 0)
        for i in range(1, len(x) - 1):
            share = (x[i] - x[i - 1]) / (x[i + 1] - x[i - 1])
            inner.append(np.abs(((1 - share) * v[i - 1] + share * v[i + 1]) / v[i] - 1).ravel())
    return TableCost(points=points, extrapolate=True), trimmed(np.concatenate(inner)) if inner else np.inf


def _looked_up(model: TableCost, table: pd.DataFrame) -> FloatArray:
    asked = zip(table["batch"].round().astype(int), table["tokens"].round().astype(int), table["context"], strict=True)
    return np.array([1e3 * model.verify_s(b, t, c) for b, t, c in asked])


def regions(part: str, table: pd.DataFrame, fitted_ms: FloatArray) -> list[Residual]:
    """Errors by batch and tokens a request."""
    batch = np.searchsorted(BATCHES, table["batch"])
    length = np.searchsorted(LENGTHS, (table["tokens"] / table["batch"]).round(3))
    off = pd.Series(fitted_ms / table["ms"].to_numpy() - 1)
    out = []
    for (b, n), mine in off.groupby([batch, length]):
        region = f"batch {_between(BATCHES, int(b))}, {_between(LENGTHS, int(n))} tokens a request"
        out.append(residual(part, region, mine.to_numpy()))
    return out


def _between(edges: Sequence[int], i: int) -> str:
    if i == 0:
        return f"{edges[0]}"
    return f"{edges[i - 1] + 1}-{edges[i]}" if i < len(edges) else f"over {edges[-1]}"


def _drift(speed: Speed) -> list[str]:
    runs = len(speed.factors)
    if speed.tied < 2:
        return [f"speed of the machine: no step was made in two runs alike, so its drift over {runs} runs is unknown"]
    low, high = speed.factors.quantile([0.05, 0.95])
    return [
        f"speed of the machine: {runs} runs, of which {speed.tied} made steps that others made too, differ by a factor "
        f"of {high / low:.2f} (5th to 95th percentile); taken out before fitting"
    ]


def _name(sharpness: float) -> str:
    return f"knee of sharpness {sharpness:g}" if sharpness else "straight lines"


def _range(values: "pd.Series[Any]") -> tuple[float, float]:
    return float(values.min()), float(values.max())
