"""How much the measured numbers move between two measurements of one scenario: no prediction can be held to less."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from adasim.errors import InputError
from adasim.recorded import policy_of
from adasim.validation.measured import METRICS, table_of
from adasim.validation.recorded_runs import BELIEFS, differing
from adasim.validation.run import Run, runs_of


def compare(first: Path, second: Path) -> tuple[pd.DataFrame, list[str]]:
    """A row a cell that both folders hold: second / first - 1 of every metric, means over common seeds; and notes.

    Raises:
        InputError: not records, made with different settings, or nothing in common.
    """
    runs = [runs_of(folder) for folder in (first, second)]
    point = list(runs[0][0].trial.point)
    if any(list(r.trial.point) != point for part in runs for r in part):
        raise InputError(f"--floor: {first} and {second} sweep different fields")
    common = {_place(r) for r in runs[0]} & {_place(r) for r in runs[1]}
    if not common:
        raise InputError(f"--floor: {first} and {second} have no policy, point and seed in common")
    kept = [[r for r in part if _place(r) in common] for part in runs]
    if problems := _differences(*kept):
        raise InputError(*(f"--floor: {first} and {second} differ: {line}" for line in problems))
    tables = [_cells(part, ["policy", *point]) for part in kept]
    moved = (tables[1].loc[tables[0].index] - tables[0]).apply(np.expm1)
    left = [(folder, len({_place(r) for r in part} - common)) for folder, part in zip((first, second), runs, strict=True)]
    notes = [f"{count} runs of {folder} are not in the other, and left out" for folder, count in left if count]
    return moved.reset_index(), notes + _engines(runs)


def _place(run: Run) -> tuple[object, ...]:
    return (run.trial.policy, *run.place)


def _differences(one: Sequence[Run], other: Sequence[Run]) -> list[str]:
    """Settings of runs of the same policy, point and seed; beliefs of policies about time count where they ask."""
    theirs = {_place(r): r for r in other}
    found: dict[str, None] = {}
    for run in one:
        mine, yours = (_counting(r) for r in (run, theirs[_place(run)]))
        found |= dict.fromkeys(line[1:] for line in differing(mine, yours, "the other says"))
    return list(found)


def _counting(run: Run) -> Mapping[str, Any]:
    """The configuration of a run, without what its policy does not ask for."""
    config = dict(run.config or {})
    if run.engine is not None and config and "cost" not in policy_of(config["policy"], run.folder).needs:
        config["backend"] = {k: v for k, v in config["backend"].items() if k not in BELIEFS}
    return config


def summary_of(moved: pd.DataFrame) -> pd.DataFrame:
    """A row a metric: mean absolute move, mean move, and the largest."""
    rows = []
    for metric in METRICS:
        values = moved[metric].dropna()
        if len(values):
            worst = float(values.iloc[int(values.abs().to_numpy().argmax())])
            rows.append((metric, len(values), values.abs().mean(), values.mean(), worst))
    return pd.DataFrame(rows, columns=["metric", "cells", "mean_abs", "mean", "worst"])


def says_of(table: pd.DataFrame) -> list[str]:
    """The floor in sentences."""
    found = table.set_index("metric")
    says = []
    for metric, what in (("throughput_ratio", "Throughput over plain decoding"), ("output_tok_s", "Tokens per second")):
        if metric in found.index:
            r = found.loc[metric]
            says.append(
                f"{what} moves by {r['mean_abs']:.1%} on average over {r['cells']:.0f} cells (bias "
                f"{r['mean']:+.1%}, at most {r['worst']:+.1%})."
            )
    return says


def _cells(runs: Sequence[Run], keys: list[str]) -> pd.DataFrame:
    """Logarithms of every metric, means over the runs of a cell."""
    table = table_of(runs)
    numbers = table[list(METRICS)]
    return numbers.where(numbers > 0).apply(np.log).groupby([table[k] for k in keys], sort=False).mean()


def _engines(runs: Sequence[Sequence[Run]]) -> list[str]:
    """Where the engines of two measurements differ."""
    found = [next((r.engine for r in part if r.engine is not None), None) for part in runs]
    if found[0] is None or found[1] is None:
        return ["at least one of the folders was simulated"]
    return [f"measured on another engine: first {line}" for line in found[0].differs(found[1])]
