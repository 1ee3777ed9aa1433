"""How much the measured numbers move between two measurements of one scenario: no prediction can be held to less."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from adasim.errors import InputError
from adasim.identity import EngineIdentity
from adasim.validation.measured import PLAIN, RATIOS, Run, runs_of, table_of

METRICS = (*(f"{name}_ratio" for name in RATIOS), *PLAIN)


def compare(first: Path, second: Path) -> tuple[pd.DataFrame, list[str]]:
    """A row a cell that both folders hold: second / first - 1 of every metric, means over repeats; and notes.

    Raises:
        InputError: not records, or no cell in common.
    """
    runs = [runs_of(folder) for folder in (first, second)]
    point = list(runs[0][0].trial.point)
    if any(list(r.trial.point) != point for part in runs for r in part):
        raise InputError(f"--floor: {first} and {second} sweep different fields")
    tables = [_cells(part, ["policy", *point]) for part in runs]
    common = [cell for cell in tables[0].index if cell in tables[1].index]
    if not common:
        raise InputError(f"--floor: {first} and {second} have no policy and point in common")
    moved = (tables[1].loc[common] - tables[0].loc[common]).apply(np.expm1)
    left = [
        f"{len(t) - len(common)} cells of {f} are not in the other" for f, t in zip((first, second), tables, strict=True)
    ]
    notes = [line for line in left if not line.startswith("0 ")]
    return moved.reset_index(), notes + _engines(runs)


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
    one, other = (EngineIdentity.model_validate(engine) for engine in found)
    return [f"measured on another engine: first {line}" for line in one.differs(other)]
