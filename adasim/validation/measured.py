"""Measured runs, each beside the plain decoding that ran next to it in time."""

from collections.abc import Sequence
from math import exp, inf, log, nan
from typing import Any

import numpy as np
import pandas as pd

from adasim import experiment, metrics
from adasim.metrics import Window
from adasim.records import Records
from adasim.scenario import Scenario
from adasim.validation.run import Run

RATIOS = {"throughput": "output_tok_s", "tpot_p50": "tpot_p50_ms", "tpot_p95": "tpot_p95_ms"}  # over plain decoding
PLAIN = (
    "output_tok_s", "tpot_p50_ms", "tpot_p95_ms", "ttft_p50_ms", "ttft_p95_ms", "itl_p50_ms", "itl_p95_ms", "itl_p99_ms",
    "tau", "verify_tokens_per_round",
)  # fmt: skip
METRICS = (*PLAIN, *(f"{name}_ratio" for name in RATIOS))


def measure(records: Records, part: Window) -> dict[str, float]:
    """What measured and simulated runs are compared by; the same code for both."""
    inside = metrics.cut(records, part)
    found = {"output_tok_s": metrics.output_tok_s(inside, part)}
    latencies = {"tpot": metrics.tpot_s(inside.requests), "ttft": metrics.ttft_s(inside.requests)}
    for name, values in latencies.items():
        found |= {f"{name}_p{q}_ms": 1e3 * metrics.percentile(values, q) for q in (50, 95)}
    found |= {f"itl_p{q}_ms": 1e3 * metrics.itl_s(inside.gaps, q) for q in (50, 95, 99)}
    found |= {"tau": metrics.tau(inside), "verify_tokens_per_round": metrics.verify_tokens_per_round(inside)}
    return found


def window_of(records: Records, scenario: Scenario) -> Window:
    """The part of a simulated run that counts, by the scenario's rules."""
    return experiment.window_of(records, scenario)[0]


def table_of(runs: Sequence[Run], oldest_s: float = inf) -> pd.DataFrame:
    """One row a run: policy, point, seed, repeat, when, how far the next reference is, metrics, ratios to plain decoding.

    The reference is interpolated in time between the runs before and after, in logarithms. A reference itself is held
    against the others of its block: what is left is noise. ``judged`` is false where the next reference lies more than
    ``oldest_s`` away.
    """
    rows = []
    for run in runs:
        row: dict[str, Any] = {"policy": run.trial.policy, **run.trial.point, "seed": run.trial.seed}
        row |= {"repeat": run.trial.repeat, "at_s": run.at_s, "reference": run.is_reference}
        rows.append(row | measure(run.records(), run.window))
    for run, row in zip(runs, rows, strict=True):
        beside = [r for r, other in zip(rows, runs, strict=True) if r["reference"] and other.place == run.place]
        beside = [r for r in beside if r is not row]
        age_s = min((abs(r["at_s"] - run.at_s) for r in beside), default=nan)
        row |= {"reference_age_s": age_s, "judged": run.is_reference or not age_s > oldest_s}
        for name, metric in RATIOS.items():
            row[f"{name}_ratio"] = row[metric] / at(run.at_s, [(r["at_s"], r[metric]) for r in beside])
    return pd.DataFrame(rows)


def at(when_s: float, known: Sequence[tuple[float, float]]) -> float:
    """A value at a time, from (time, value) pairs: linear in logarithms between neighbours; the mean without times."""
    if not known:
        return nan
    times, values = zip(*sorted(known), strict=True)
    logs = [log(v) for v in values]
    if np.isnan([when_s, *times]).any():
        return exp(float(np.mean(logs)))
    return exp(float(np.interp(when_s, times, logs)))
