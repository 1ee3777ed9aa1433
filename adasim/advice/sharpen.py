"""What one more measurement would sharpen most, as a command to run."""

from dataclasses import dataclass
from math import isnan, sqrt

import numpy as np
import pandas as pd

from adasim.advice.choice import Loop
from adasim.advice.doubt import DRAWS, FIT, NOISE, VALIDATION
from adasim.advice.measure import Measure
from adasim.advice.study import Findings
from adasim.calibration.from_throughput import Posterior
from adasim.calibration.throughput_table import Row
from adasim.calibration.world import Cells
from adasim.types import FloatArray

TIMES = {"verify": "verification", "draft": "drafting", "overhead": "a round's overhead", "prefill": "prefill"}
TEXT = {
    "acceptance": "acceptance",
    "correlation": "how acceptance clusters along the text",
    "range_tokens": "how far that reaches",
    "head_noise": "how well the length head knows",
    "head_bias": "the length head's bias",
}


@dataclass(frozen=True, slots=True)
class Next:
    """The measurement that would help most.

    Attributes:
        why: a sentence, without its full stop.
        commands: to run, in order.
        parts: the error where it is decided: part, half_width (of the logarithm of the speed-up).
    """

    why: str
    commands: list[str]
    parts: pd.DataFrame


def sharpen(found: Findings) -> Next | None:
    """The largest part of the error at the load where plain decoding is hardest to tell from the best fixed length.

    None where no drafter was simulated.
    """
    kind = next((k for k, c in found.curves.items() if len(c)), None)
    if kind is None:
        return None
    curve, loop, measure = found.curves[kind], found.loops[kind], Measure(found.known, found.traffic)
    row = _deciding(curve)
    load, policy = float(row["load"]), str(row["policy"])
    parts, place = _parts(row), _place(loop, load)
    if not found.known.measured:
        why = f"nothing was measured: plain decoding and one speculative run {place} replace every assumption here"
        return Next(why, measure.first_runs(load), parts)
    if parts.empty:
        return None
    top, width = str(parts["part"].iloc[0]), float(parts["half_width"].iloc[0])
    if top == NOISE:
        seeds = 2 * len(loop.plan.scenario.seeds)
        why = f"{place}, the largest part of the error is the simulation's own noise (± {width:.1%}): run more seeds"
        again = f"adasim advise (as before) --seeds {seeds} --budget 5m --overwrite"
        return _then(Next(why, [again], parts), found, loop, measure, load, policy)
    if top in {VALIDATION, FIT} and found.known.posterior is None:
        why = f"{place}, the largest part of the error is the model's own (± {width:.1%}): fit it nearer to this load"
        return Next(why, measure.times(load), parts)
    return _of_inputs(found, loop, measure, parts[parts["part"] != FIT].reset_index(drop=True), load, policy)


def _then(first: Next, found: Findings, loop: Loop, measure: Measure, load: float, policy: str) -> Next:
    """More seeds, and what would sharpen the inputs after that."""
    inputs = first.parts[~first.parts["part"].isin([NOISE, FIT, VALIDATION])].reset_index(drop=True)
    if inputs.empty:
        return first
    then = _of_inputs(found, loop, measure, inputs, load, policy)
    return Next(f"{first.why}; then, {then.why}", [*first.commands, *then.commands], first.parts)


def _of_inputs(found: Findings, loop: Loop, measure: Measure, parts: pd.DataFrame, load: float, policy: str) -> Next:
    """What would sharpen the inputs."""
    top, width, place = str(parts["part"].iloc[0]), float(parts["half_width"].iloc[0]), _place(loop, load)
    if found.known.posterior is not None:
        run, left = _best_run(found, found.known.posterior, loop, load, policy)
        size = float(parts.loc[parts["part"] == DRAWS, "half_width"].max())
        what = f"{run.k} drafts" if run.k else "plain decoding"
        why = (
            f"{place}, what the data leave open is worth ± {size:.1%} of the speed-up; a run of {what} at concurrency "
            f"{run.batch} would take that to about ± {size * sqrt(left):.1%}"
        )
        return Next(why, measure.one_run(run.batch, run.k), parts)
    why = f"{place}, most of the doubt comes from {(TIMES | TEXT).get(top, top)} (± {width:.1%} of the speed-up)"
    return Next(why, measure.text(load) if top in TEXT else measure.times(load), parts)


def _deciding(curve: pd.DataFrame) -> "pd.Series[float]":
    """The load whose speed-up is least far from 1, in units of its error."""
    names = [c for c in curve.columns if c.startswith("error_")]
    size = np.sqrt((curve[names].fillna(0.0) ** 2).sum(axis=1)).clip(lower=1e-9)
    return curve.loc[(np.log(curve["speedup"]).abs() / size).idxmin()]


def _parts(row: "pd.Series[float]") -> pd.DataFrame:
    """Parts of the error, the largest first."""
    known = [(str(n).removeprefix("error_"), float(row[n])) for n in row.index if str(n).startswith("error_")]
    table = pd.DataFrame([p for p in known if not isnan(p[1])], columns=["part", "half_width"])
    return table.sort_values("half_width", ascending=False, kind="stable", ignore_index=True)


def _place(loop: Loop, load: float) -> str:
    return f"at {load:g} concurrent requests" if loop.kind == "closed" else f"at {load:g} requests per second"


def _best_run(found: Findings, posterior: Posterior, loop: Loop, load: float, policy: str) -> tuple[Row, float]:
    """The run that would leave the least variance of the speed-up, and the share that it leaves."""
    full = found.known.max_draft_len
    k = int(policy.removeprefix("k=")) if policy.startswith("k=") else full
    batch = max(1, round(load if loop.kind == "closed" else float(loop.at(load)["batch"].max())))
    context = found.traffic.prompt + found.traffic.output / 2 if posterior.with_context else None
    loads = sorted({1, batch, *(2**i for i in range(9) if 2**i <= 4 * batch)})
    runs = [Row(b, n, context=context) for b in loads for n in sorted({0, k, full})]
    left = remaining(posterior, [Row(batch, k, context=context), Row(batch, 0, context=context)], runs)
    best = int(np.argmin(left))
    return runs[best], float(left[best])


def remaining(posterior: Posterior, target: list[Row], candidates: list[Row]) -> FloatArray:
    """Share of the variance of log(tok_s of target 0 / of target 1) that is left when a candidate is measured too, [c].

    By linear regression over the posterior's worlds on the candidate's tokens per second and, with drafts, accept length,
    each with the noise that the table itself shows.
    """
    worlds, terms = posterior.worlds, posterior.worlds.terms
    rates = np.log(worlds.tok_s(Cells.of(target, one_pass=posterior.one_pass)))[1:]
    goal = rates[:, 0] - rates[:, 1]
    goal = goal - goal.mean()
    seen = np.log(worlds.tok_s(Cells.of(candidates, one_pass=posterior.one_pass)))[1:]
    taus = np.log(worlds.tau(np.array([r.k for r in candidates], dtype=np.float64)))[1:]
    noises = [float(np.mean(terms[name][1:] ** 2)) for name in ("scatter", "tau_scatter")]
    left = []
    for i, row in enumerate(candidates):
        columns = [seen[:, i], taus[:, i]] if row.k else [seen[:, i]]
        x = np.column_stack(columns)
        x = x - x.mean(axis=0)
        inner = x.T @ x / len(x) + np.diag(noises[: x.shape[1]])
        cross = x.T @ goal / len(x)
        left.append(1 - float(cross @ np.linalg.solve(inner, cross)) / max(float(goal @ goal) / len(goal), 1e-300))
    return np.clip(np.array(left), 0.0, 1.0)
