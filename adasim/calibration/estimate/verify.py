"""Seconds of the target's pass: which form, its constants, its knee, and how far off it is where."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from adasim.calibration.cost import CostModel
from adasim.calibration.estimate.forms import BESIDE, Form, Rise, fit_form, rises_of
from adasim.calibration.estimate.part import DRAWS, LEAST_RUNS, FittedPart, interval, trimmed, weights
from adasim.calibration.estimate.ragged import ragged_share
from adasim.calibration.estimate.recording import RecordedTrial
from adasim.calibration.estimate.regions import regions
from adasim.calibration.estimate.steps import Speed, cells, machine_speed, rounds_table
from adasim.calibration.estimate.tables import looked_up, make_table
from adasim.calibration.interval import Estimate
from adasim.calibration.pass_cost import PassCost
from adasim.errors import InputError

SHARPNESS = (2.0, 4.0, 8.0)
FOLDS = 5
MOST_CELLS = 1200
LEAST_CELLS, LEAST_TOKENS = 4, 3
PREFER = 1.05  # a simpler form wins when its held-out error is at most this many times the best
TABLE_WINS = 0.8  # a table must be better than a formula by so much: it says nothing outside its grid


def fit_verify(trials: Sequence[RecordedTrial], seed: int = 0, speed: Speed | None = None) -> FittedPart[CostModel]:
    """The cost model of verification, without draft, prefill and overhead.

    Raises:
        InputError: too few different passes to fit anything.
    """
    speed = speed or machine_speed(trials)
    rounds, flags = rounds_table(trials), ("drafter_loaded",)
    share, ragged = _ragged(cells(rounds, "verify_s", (*flags, "ragged")), seed, speed), rounds["ragged"].any()
    if share is not None and share.value:
        rounds = rounds.assign(verify_s=rounds["verify_s"] / np.where(rounds["ragged"], 1 + share.value, 1.0))
    table = cells(rounds, "verify_s", flags)
    table = table.sample(MOST_CELLS, random_state=seed).sort_index() if len(table) > MOST_CELLS else table
    different, lengths = table["cell"].nunique(), table["tokens"].round().nunique()
    if different < LEAST_CELLS or lengths < LEAST_TOKENS:
        raise InputError(
            f"verify: the grid is too thin: {different} different passes of {lengths} different token counts; needs "
            f"{LEAST_CELLS} passes and {LEAST_TOKENS} token counts. Record other batch sizes or verify lengths"
        )
    table = table.assign(ms=speed.steady_ms(table, "verify_s"))
    part, form = _choose(table, seed)
    _bootstrap(part, form, table, seed, speed)
    if share is not None:
        part.model = part.model.model_copy(update={"ragged": share.value})
        part.intervals["verify.ragged"] = share
    elif ragged:
        part.notes.append(
            "verification: no equal lengths of about as many tokens were recorded beside ragged rounds, which are taken "
            "to take as long"
        )
    part.residuals = regions("verify", table, part.points["verify"]["fitted_ms"].to_numpy())
    part.ranges = {name: _range(table[name]) for name in ("batch", "tokens", "context")}
    part.counts = {"passes": int(table["count"].sum()), "verify cells": different, "blocks": table["block"].nunique()}
    part.points["speed"] = speed.factors.rename("factor").reset_index()
    part.notes += _drift(speed)
    return part


def _ragged(table: pd.DataFrame, seed: int, speed: Speed) -> Estimate | None:
    table = table.sample(MOST_CELLS, random_state=seed).sort_index() if len(table) > MOST_CELLS else table
    return ragged_share(table.assign(ms=speed.steady_ms(table, "verify_s")), seed)


def _choose(table: pd.DataFrame, seed: int) -> tuple[FittedPart[CostModel], Form]:
    """The form with the least held-out error, the simplest among equals."""
    rng = np.random.default_rng(seed)
    fold = pd.Series(rng.permutation(table["cell"].nunique()) % FOLDS, index=table["cell"].unique())
    held = table["cell"].map(fold).to_numpy()
    counts, scores = np.sqrt(table["count"].to_numpy(dtype=float)), dict[Rise, float]()
    for rise in rises_of(table, SHARPNESS):
        off = np.empty(len(table))
        for i in range(FOLDS):
            out = held == i
            if out.any() and not out.all():
                off[out] = fit_form(table[~out], rise).predict(table[out]) / table["ms"].to_numpy()[out] - 1
        scores[rise] = trimmed(np.abs(off), counts)
    best = min(scores.values())
    rise = next(r for r in scores if scores[r] <= PREFER * best + 5e-4)
    form = fit_form(table, rise)
    told = ", ".join(f"{r.name} {e:.1%}" for r, e in scores.items())
    beside = form.beside(table)
    grid = make_table(table.assign(ms=table["ms"] - beside))
    if grid is not None:
        told += f", table {grid[1]:.1%}"
    note = f"verification: mean error on held-out cells by form: {told}"
    model: CostModel
    if grid is not None and grid[1] < TABLE_WINS * scores[rise]:
        model, fitted, error = grid[0], looked_up(grid[0], table) + beside, grid[1]
        note += "; the table is used"
    else:
        tokens = [int(np.floor(table["tokens"].min())), int(np.ceil(table["tokens"].max()))]
        model = PassCost(**form.cost(), fitted_tokens=tokens, extrapolate=True)
        fitted, error = form.predict(table), scores[rise]
        note += f"; {rise.name} are used" if rise.nodes else f"; {rise.name} is used"
    absent = [name for i, name in enumerate(form.names) if i not in form.used and name not in BESIDE]
    notes = [note] + [f"verification: {', '.join(absent)} cannot be told from the other terms here, taken as 0"] * bool(
        absent
    )
    points = table[["block", "batch", "tokens", "context", "drafter_loaded", "ms", "count"]].assign(fitted_ms=fitted)
    return FittedPart(model, notes=notes, error=error, held_out=error, points={"verify": points}), form


def _bootstrap(part: FittedPart[CostModel], form: Form, table: pd.DataFrame, seed: int, speed: Speed) -> None:
    """Intervals of the constants and the knee over blocks, or over cells where there is one block only."""
    by = "block" if table["block"].nunique() >= LEAST_RUNS else "cell"
    group, names = pd.factorize(table[by])
    drawn = weights(len(names), seed, DRAWS)
    constants, knees, spread = [], [], []
    fitted = form.predict(table)
    times = speed.cases(table, seed, DRAWS)
    for w, case in zip(drawn[: DRAWS // 2 if form.rise.sharpness else DRAWS], times, strict=False):
        again = fit_form(table.assign(ms=table["ms"] * case), form.rise, w[group], used=form.used)
        constants.append(list(again.constants().values()))
        knees.append(again.rise.knee)
        spread.append(np.abs(again.predict(table) / fitted - 1))
    how = f"bootstrap over {len(names)} {'runs' if by == 'block' else 'cells of few runs'}"
    part.extra = {name: form.constants()[name] for name in BESIDE}
    for i, name in enumerate(form.names):
        draws = np.array([c[i] for c in constants])
        value = form.constants()[name]
        part.intervals[f"verify.{name}"] = interval(value, draws, len(names), how, (0.0, np.inf))
    most = float(table["tokens"].max())
    if form.rise.sharpness:
        part.intervals["verify.knee_tokens"] = interval(form.rise.knee, np.array(knees), len(names), how, (0.0, most))
    else:
        least = float(table["tokens"].min())
        none = "no one knee: times are linear between nodes" if form.rise.nodes else "no knee"
        part.intervals["verify.knee_tokens"] = Estimate(
            value=0.0, low=0.0, high=least, how=f"{none} within the measured {least:g} to {most:g} tokens"
        )
    part.error = float(np.hypot(part.error, 1.96 * np.median(np.array(spread))))


def _drift(speed: Speed) -> list[str]:
    runs = len(speed.factors)
    if speed.tied < 2:
        return [f"speed of the machine: no step was made in two runs alike, so its drift over {runs} runs is unknown"]
    low, high = speed.factors.quantile([0.05, 0.95])
    return [
        f"speed of the machine: {runs} runs, of which {speed.tied} made steps that others made too, differ by a factor "
        f"of {high / low:.2f} (5th to 95th percentile); taken out before fitting"
    ]


def _range(values: "pd.Series[Any]") -> tuple[float, float]:
    return float(values.min()), float(values.max())
