"""Predicts measured runs, and says how far off that was and why."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pandas as pd

from adasim.calibration.fitted_on import cell_of
from adasim.calibration.profile import Profile
from adasim.errors import InputError
from adasim.identity import EngineIdentity
from adasim.plan import Plan, Trial
from adasim.story import design
from adasim.validation.accuracy import bars_of, cells_of, crossover_of, errors_of, noise_of, ranking_of
from adasim.validation.attribution import Attribution, summary_of, to_blame
from adasim.validation.blocks import Block
from adasim.validation.measured import table_of
from adasim.validation.prediction import Predictor, pairs_of
from adasim.validation.report import Findings
from adasim.validation.run import Run

Cell = tuple[object, ...]  # policy and the values of its point


def cell(trial: Trial) -> Cell:
    """Where a trial's result goes."""
    return (trial.policy, *trial.point.values())


def fitted_cells(blocks: Iterable[Block], profile: Profile) -> set[Cell]:
    """Cells that the profile was fitted on, whatever the scenario they were recorded with calls them.

    Raises:
        InputError: all are: nothing is left to predict.
    """
    known = {run.cell for run in profile.fitted_on}
    trials = {cell(t): t for block in blocks for t in (block.reference, *block.trials)}
    plain = {cell(block.reference) for block in blocks}
    found = {at for at, trial in trials.items() if known and cell_of(*_what(trial)) in known}
    if not set(trials) - found - plain:
        raise InputError(
            f"profile {profile.name}: was fitted on every cell of this scenario; nothing is held out to predict: add "
            "policies or points, or fit on fewer runs"
        )
    return found


def _what(trial: Trial) -> tuple[Any, dict[str, Any]]:
    scenario = trial.scenario()
    return scenario.policies[0], scenario.workload.model_dump(mode="json")


def check_engine(engines: Iterable[EngineIdentity], profile: Profile, *, force: bool) -> list[str]:
    """What a report must say of where the profile comes from.

    Raises:
        InputError: from another engine than the runs, or it does not say from which; unless forced.
    """
    return list(dict.fromkeys(note for engine in engines for note in profile.refuse_other(engine, force=force)))


def check_runs(runs: Iterable[Run], here: EngineIdentity | None, *, force: bool) -> list[str]:
    """What a report must say of runs that other engines made: the first one's, or ``here``.

    Raises:
        InputError: there are such runs; unless forced.
    """
    engines = {run.folder: run.engine for run in runs}
    first = here or next(iter(engines.values()), None)
    found: dict[str, int] = {}
    for engine in engines.values():
        if engine is None or first is None:
            lines = ["simulated and measured runs do not mix"] * (engine is not first)
        else:
            lines = engine.differs(first)
        for line in lines:
            found[line] = found.get(line, 0) + 1
    says = [f"{count} of {len(engines)} runs were measured on another engine: {line}" for line, count in found.items()]
    if says and not force:
        raise InputError(*says)
    return says


def examine(
    plan: Plan,
    runs: Sequence[Run],
    profile: Profile,
    fitted: set[Cell],
    *,
    missing: int = 0,
    progress: Callable[[str, int], Callable[[], None]] = lambda what, count: lambda: None,
) -> Findings:
    """Everything that measured runs tell about the predictions.

    Args:
        plan: of the scenario.
        runs: measured, with their references.
        profile: what predicts.
        fitted: cells that do not count.
        missing: runs that were not measured yet.
        progress: what is done and how many steps it has; returns a function to call per step.

    Raises:
        InputError: no run has a plain-decoding reference beside it.
    """
    point, settings, pictured = list(plan.trials[0].point), plan.scenario.validation, design(plan)
    every = table_of(runs, settings.reference_age_s)
    pairs = pairs_of([r for r, counts in zip(runs, every["judged"], strict=True) if counts], profile) if runs else []
    if not pairs:
        near = f"no more than {settings.reference_age_s:g} s away"
        raise InputError(f"nothing to validate: no finished run has plain decoding beside it, {near}")
    measured = every[every["judged"]]
    predictor = Predictor(profile, settings.replications, progress("simulating", len(pairs)))
    predicted = predictor.table(pairs)
    uncertain, seen = dict[Cell, dict[str, float]](), set[Cell]()
    for run, pair in pairs:
        if (at := cell(run.trial)) not in seen:
            seen.add(at)
            uncertain[at] = predictor.uncertainty(run, pair)
    cells = cells_of(measured, predicted, point, fitted, uncertain)
    noise = noise_of(measured, predicted, point)
    ranking = ranking_of(measured, cells, point)
    crossover = crossover_of(cells, pictured.x, list(pictured.facets))
    bars = bars_of(cells, ranking, crossover, noise, settings.tolerances)
    notes = _said(predictor, every, point, settings.reference_age_s)
    found = Findings(
        cells, errors_of(cells), noise, ranking, crossover, bars, every, predicted, missing=missing, notes=notes
    )
    held = [(run, pair) for run, pair in pairs if cell(run.trial) not in fitted]
    attribution = _attribution(runs, predictor, progress("attributing", len(held)))
    ratios = dict(zip((r.folder for r in runs), every["throughput_ratio"], strict=True))
    rows = [row for run, pair in held for row in attribution.rows(run, pair, ratios[run.folder])]
    found.notes += attribution.notes
    if rows:
        table = pd.DataFrame(rows)
        found.attribution, found.blame = summary_of(table), to_blame(table)
    return found


def _said(predictor: Predictor, measured: pd.DataFrame, point: list[str], oldest_s: float) -> list[str]:
    """What the simulations said, by which policies, and runs that are not judged."""
    notes = [f"simulated {', '.join(policies)}: {note}" for note, policies in predictor.notes.items()]
    stale = measured[~measured["judged"]]
    if len(stale):
        named = stale[["policy", *point, "seed"]].astype(str).agg(" ".join, axis=1)
        notes.append(
            f"{len(stale)} runs lie more than {oldest_s:g} s from their reference and are not judged: {'; '.join(named)}"
        )
    return notes


def _attribution(runs: Sequence[Run], predictor: Predictor, advance: Callable[[], None]) -> Attribution:
    """Knows the runs of plain decoding and of fixed lengths."""
    plain, blind = defaultdict[Cell, list[Run]](list), defaultdict[Cell, list[Run]](list)
    for run in runs:
        kind = next(p["kind"] for p in run.trial.config["policies"] if p["name"] == run.trial.policy)
        if kind in {"off", "fixed"}:
            (plain if kind == "off" else blind)[run.place].append(run)
    return Attribution(predictor, plain, blind, advance)
