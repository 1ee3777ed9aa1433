"""What a deployment is predicted to do, and how far off that may be."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import log, nan
from pathlib import Path
from typing import Any

import pandas as pd

from adasim.calibration.adjust import Adjust
from adasim.calibration.profile import Profile
from adasim.errors import InputError
from adasim.exports.source import Source
from adasim.files import Columns, read_columns
from adasim.plan import Trial
from adasim.policies.base import Policy
from adasim.policies.off import Off
from adasim.scenario import Scenario
from adasim.simulator.backend import SimBackend
from adasim.validation.measured import measure, window_of
from adasim.validation.twin import farthest, twin_of

SHOWN = ("output_tok_s", "tpot_p50_ms", "ttft_p50_ms", "itl_p50_ms", "tau")
RATIO = "throughput_ratio"
ERRORS = Columns(("metric", "cells", "mean_abs", "worst"), ("bias", "worst_cell"))


@dataclass(frozen=True, slots=True)
class Prediction:
    """By policy and point: metrics, means over seeds, and ``throughput_ratio`` over plain decoding.

    Attributes:
        table: columns policy, the swept fields, metrics; and where there is no traffic batch, k, output_tok_s.
        errors: relative error by metric: "mean" and "worst" of a validation, or "interval", the half-width that the
            profile's own intervals give; empty = unknown.
        how: where the error comes from, in words.
        notes: what must be said.
    """

    table: pd.DataFrame
    errors: dict[str, dict[str, float]]
    how: str
    notes: Sequence[str] = ()


def predict(
    source: Source, policy: Policy, validation: Path | None, advance: Callable[[], None] = lambda: None
) -> Prediction:
    """The policy and plain decoding under the scenario's traffic; without a scenario, tokens/s of full batches.

    Raises:
        InputError: the validation cannot be read.
    """
    known = None if validation is None else _validated(validation)
    table, notes = _decoding(source, policy) if source.plan is None else _simulated(source, policy, advance)
    if known is not None:
        return Prediction(table, known, f"errors of the predictions that {validation} measured", notes)
    moved = _intervals(source, policy, advance)
    if moved is None:
        how = "unknown: nobody said how far off these inputs may be; measure with adasim validate, and give --validation"
        return Prediction(table, {}, how, notes)
    how = "half-width that the profile's own 95 % intervals give, at the first point; not held against measurements"
    return Prediction(table, moved, how, notes)


def _validated(folder: Path) -> dict[str, dict[str, float]]:
    """Errors by metric of a folder that ``adasim validate`` wrote."""
    path = folder / "tables" / "errors.csv"
    if not path.is_file():
        raise InputError(f"--validation {folder}: holds no tables/errors.csv, which adasim validate writes")
    rows = read_columns(path, ERRORS).to_dict("records")
    return {str(r["metric"]): {"mean": float(r["mean_abs"]), "worst": abs(float(r["worst"]))} for r in rows}


def places(source: Source) -> Iterator[Trial]:
    """One trial of every point and seed."""
    assert source.plan is not None
    seen = set()
    for trial in source.plan.trials:
        key = (str(trial.point), trial.seed)
        if key not in seen:
            seen.add(key)
            yield trial


def engine_of(source: Source, scenario: Scenario) -> SimBackend:
    """The simulated engine of a scenario's point."""
    if source.twin and source.profile is not None:
        return twin_of(scenario.backend, source.profile)
    assert isinstance(scenario.backend, SimBackend)  # else a profile was asked for
    return scenario.backend


def _run(engine: SimBackend, scenario: Scenario, policy: Policy, seed: int) -> tuple[dict[str, float], list[str]]:
    records = engine.run(scenario.workload, policy, seed)
    return measure(records, window_of(records, scenario)), records.notes


def _simulated(source: Source, policy: Policy, advance: Callable[[], None]) -> tuple[pd.DataFrame, list[str]]:
    rows: list[dict[str, Any]] = []
    said: dict[str, None] = {}
    for trial in places(source):
        scenario = trial.scenario()
        engine = engine_of(source, scenario)
        for one in (Off(), policy):
            found, notes = _run(engine, scenario, one, trial.seed)
            said |= dict.fromkeys(notes)
            label = "plain decoding" if isinstance(one, Off) else policy.label
            rows.append({"policy": label, **trial.point, "seed": trial.seed} | {m: found[m] for m in SHOWN})
            advance()
    table = pd.DataFrame(rows)
    point = [c for c in table.columns if c not in {"policy", "seed", *SHOWN}]
    mean = table.drop(columns="seed").groupby(["policy", *point], sort=False, dropna=False).mean().reset_index()
    plain = mean[mean["policy"] == "plain decoding"]
    if point:
        mean = mean.merge(plain[[*point, "output_tok_s"]], on=point, suffixes=("", "_plain"))
    else:
        mean["output_tok_s_plain"] = float(plain["output_tok_s"].iloc[0])
    mean[RATIO] = mean["output_tok_s"] / mean.pop("output_tok_s_plain")
    return mean, list(said)


def _decoding(source: Source, policy: Policy) -> tuple[pd.DataFrame, list[str]]:
    """Tokens/s of full batches at the best k by formula: what can be said without traffic."""
    found = source.rates(draft_block=source.one_pass)
    shown = [r for r in found if r.batch & (r.batch - 1) == 0 or r is found[-1]]
    table = pd.DataFrame(
        [
            {"policy": policy.label, "batch": r.batch, "k": r.k, "output_tok_s": r.best_tok_s, RATIO: 1 + r.gain}
            for r in shown
        ]
    )
    return table, ["decoding of full batches by formula: no prefill, no queue (give a scenario for latencies)"]


def _intervals(source: Source, policy: Policy, advance: Callable[[], None]) -> dict[str, dict[str, float]] | None:
    """Relative half-widths by metric, each input of the profile moved by its uncertainty; None = it states none."""
    profile = source.profile
    moves = _moves(profile)
    if profile is None or not moves:
        return None
    measure_at = _measured_by(source, policy)
    base = measure_at(Adjust())
    squares = dict.fromkeys(base, 0.0)
    for name, end in moves:
        start = float(Adjust.model_fields[name].default)
        found = farthest(partial(_moved_to, measure_at, name), start, end)
        for metric, value in (found[0] if found else dict.fromkeys(base, nan)).items():
            squares[metric] += log(value / base[metric]) ** 2 if value > 0 and base[metric] > 0 else 0.0
        advance()
    return {metric: {"interval": total**0.5} for metric, total in squares.items()}


def _moved_to(measure_at: Callable[[Adjust], dict[str, float]], name: str, value: float) -> dict[str, float]:
    return measure_at(Adjust.model_validate({name: value}))


def runs_of(source: Source, validation: Path | None) -> int:
    """How often ``predict`` will call ``advance``."""
    simulated = 2 * len(list(places(source))) if source.plan else 0
    return simulated + (len(_moves(source.profile)) if validation is None else 0)


def _moves(profile: Profile | None) -> list[tuple[str, float]]:
    """Inputs with an uncertainty, and their upper limits."""
    if profile is None:
        return []
    limits = ((name, profile.uncertainty.limits(name)) for name in type(profile.uncertainty).model_fields)
    return [(name, found[1]) for name, found in limits if found is not None and found[0] != found[1]]


def _measured_by(source: Source, policy: Policy) -> Callable[[Adjust], dict[str, float]]:
    """Metrics at the first point with inputs moved; what policies believe of time stays as it was."""
    if source.plan is None:
        return lambda adjust: _rates_with(source, adjust)
    trial = next(places(source))
    scenario = trial.scenario()
    engine = engine_of(source, scenario)

    def moved(adjust: Adjust) -> dict[str, float]:
        changed = engine.model_copy(update={"adjust": adjust, "believed": engine.believed or engine.calibrated_cost})
        found, plain = (_run(changed, scenario, p, trial.seed)[0] for p in (policy, Off()))
        return {m: found[m] for m in SHOWN} | {RATIO: found["output_tok_s"] / plain["output_tok_s"]}

    return moved


def _rates_with(source: Source, adjust: Adjust) -> dict[str, float]:
    """Tokens/s of the first batch at the k that was chosen for it, with inputs moved."""
    k = source.rates(draft_block=source.one_pass)[0].k
    cost, acceptance, _ = source.backend.model_copy(update={"adjust": adjust}).models(source.drafter)
    moved = replace(source, cost=cost, acceptance=acceptance).rates(draft_block=source.one_pass)[0].tok_s
    return {"output_tok_s": float(moved[k]), RATIO: float(moved[k] / moved[0])}
