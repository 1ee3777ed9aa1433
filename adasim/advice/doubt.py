"""How far a predicted gain may be off: noise, inputs, the fit, and what a validation found. Each a part of the error."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from math import hypot, inf, isfinite, isnan, nan, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from adasim.advice.known import Known
from adasim.calibration.cost import CostModel
from adasim.errors import InputError
from adasim.plan import Plan, Trial, assign
from adasim.sensitivity import moves_of
from adasim.statistics import CONFIDENCE
from adasim.tables import Design

DRAWN = 12  # worlds of a fit to throughput that are simulated
ADVERSE = {"acceptance": 0}  # index of the limit that is worse for speculation: tau lower, everything else higher
ORDER = ("acceptance", "verify", "draft", "overhead", "head_bias", "head_noise", "prefill", "correlation", "range_tokens")
NOISE, FIT, VALIDATION, DRAWS = "noise", "fit", "validation", "measurements"


@dataclass(frozen=True, slots=True)
class Variation:
    """One way in which the inputs may be off: raw fields of a scenario."""

    name: str
    fields: dict[str, Any]


def variations_of(plan: Plan, known: Known) -> tuple[list[Variation], list[str]]:
    """How the inputs are varied, the most important first, and notes on those that are not.

    Inputs of a profile move one at a time to the limit that is worse for speculation; a fit to throughput, whose terms
    move together, is replaced by others that explain the same measurements.
    """
    if known.posterior is not None:
        count = min(DRAWN, len(known.posterior.deviations) - 1)
        return [Variation(DRAWS, _drawn(known, i)) for i in range(1, count + 1)], []
    moves, notes = moves_of(plan)
    found = [
        Variation(m.name, {m.field: m.values[min(ADVERSE.get(m.name, -1), len(m.values) - 1)]}) for m in moves if m.values
    ]
    return sorted(found, key=lambda v: ORDER.index(v.name)), notes


def _drawn(known: Known, i: int) -> dict[str, Any]:
    """Another world's cost and acceptance, in place of the profile."""
    posterior = known.posterior
    assert posterior is not None
    tokens = [r.tokens for r in posterior.rows if r.tok_s is not None]
    cost: CostModel = posterior.worlds.cost(
        i,
        fitted_tokens=[min(tokens), max(tokens)],
        one_pass=posterior.one_pass,
        with_context=posterior.with_context,
    )
    draft = cost.model_dump(mode="json")["draft"]
    curve = {"curves": {"default": posterior.worlds.curve(i).model_dump(mode="json")}}
    fields: dict[str, Any] = {
        "backend.profile": None,
        "backend.cost": cost.model_dump(mode="json", exclude_none=True),
        "backend.acceptance": {"kind": "curves"} | curve,
    }
    for name, own in known.profile.drafters.items():
        raw = own.model_dump(mode="json", exclude_none=True)
        raw["draft"] = draft | {"passes": raw["draft"]["passes"]} if raw.get("draft", {}).get("passes") else draft
        fields[f"backend.drafters.{name}"] = raw
    return fields


def varied(plan: Plan, variation: Variation, contenders: dict[tuple[Any, ...], list[str]]) -> list[Trial]:
    """The contenders' trials of the first seed, with the inputs varied.

    Args:
        plan: of the loop.
        variation: what is varied.
        contenders: policies by the values of a point.
    """
    first = plan.scenario.seeds[0]
    trials = []
    for trial in plan.trials:
        if trial.seed == first and trial.policy in contenders.get(tuple(trial.point.values()), []):
            config = deepcopy(trial.config)
            for name, value in variation.fields.items():
                if name.startswith("backend.drafters."):  # names may hold dots
                    config["backend"].setdefault("drafters", {})[name.removeprefix("backend.drafters.")] = value
                else:
                    assign(config, name, deepcopy(value))
            trials.append(replace(trial, config=config))
    return trials


def log_ratio(runs: pd.DataFrame, design: Design, one: str, other: str) -> float:
    """Logarithm of how many times better a policy is than another in the goal; NaN when one is missing or 0."""
    metric = design.goal.metric
    by = runs.groupby("policy")[metric].mean()
    if one not in by or other not in by:
        return nan
    over, under = (by[other], by[one]) if design.goal.lower_is_better else (by[one], by[other])
    return float(np.log(over / under)) if over > 0 and under > 0 else nan


def input_parts(
    base: pd.DataFrame, moved: Sequence[tuple[str, pd.DataFrame]], design: Design, one: str, other: str
) -> dict[str, float]:
    """What each input adds to the error of a log ratio at one point: half-widths.

    Args:
        base: runs at the point, of the first seed.
        moved: name of the input and runs at the point, of the same seed.
        design: whose goal counts.
        one, other: policies. Where one of them has no result in one of the worlds but reaches something in the other,
            the part is infinite: the ratio may be anything.
    """
    before = log_ratio(base, design, one, other)
    parts: dict[str, list[float]] = {}
    for name, runs in moved:
        if not {one, other} <= set(runs["policy"] if len(runs) else ()):
            continue
        after = log_ratio(runs, design, one, other)
        if isnan(before) and isnan(after):
            continue
        parts.setdefault(name, []).append(inf if isnan(before) or isnan(after) else abs(after - before))
    return {name: _size(name, steps) for name, steps in parts.items()}


def _size(name: str, steps: list[float]) -> float:
    """Half-width from the steps of one input: moved inputs are at their limits, drawn worlds scatter (few: Student)."""
    if name != DRAWS or not all(map(isfinite, steps)):
        return max(steps)
    return float(stdtrit(len(steps), (1 + CONFIDENCE) / 2)) * sqrt(float(np.mean(np.square(steps))))


def total(parts: dict[str, float]) -> float:
    """Root of the summed squares; parts that are not known (NaN) are left out."""
    return hypot(*(p for p in parts.values() if not isnan(p)))


def validated(folder: Path) -> dict[str, float]:
    """Mean error of a validation, relative, by loop: of throughput over plain decoding, and of median TPOT over it.

    Raises:
        InputError: the folder holds no finished validation.
    """
    path = folder / "tables" / "errors.csv"
    try:
        table = pd.read_csv(path).set_index("metric")["mean_abs"]
    except (OSError, KeyError, ValueError) as error:
        raise InputError(f"--validation {folder}: holds no errors of adasim validate ({path.name}: {error})") from error
    if "throughput_ratio" not in table:
        raise InputError(f"--validation {folder}: says nothing of throughput over plain decoding; finish it first")
    closed = float(table["throughput_ratio"])
    return {"closed": closed, "open": float(table.get("tpot_p50_ratio", closed))}
