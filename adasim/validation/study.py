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
from adasim.validation.measured import Run, table_of
from adasim.validation.prediction import Pair, Predictor, pairs_of
from adasim.validation.report import Findings

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


def check_engine(engines: Sequence[EngineIdentity], profile: Profile, *, force: bool) -> list[str]:
    """Notes on where the profile comes from.

    Raises:
        InputError: from another engine than the runs, unless forced.
    """
    if engines and profile.identity is None:
        return [f"the profile {profile.name} does not say which engine was measured"]
    return list(dict.fromkeys(note for engine in engines for note in profile.refuse_other(engine, force=force)))


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
    pairs = pairs_of(runs, profile)
    if not pairs:
        raise InputError("nothing to validate: no finished run has plain decoding beside it")
    predictor = Predictor(profile, settings.luck, progress("simulating", len(pairs)))
    predicted = predictor.table(pairs)
    measured = table_of(runs)
    uncertain, seen = dict[Cell, dict[str, float]](), set[Cell]()
    for run, pair in pairs:
        if (at := cell(run.trial)) not in seen:
            seen.add(at)
            uncertain[at] = predictor.uncertainty(run, pair)
    cells = cells_of(measured, predicted, point, fitted, uncertain)
    errors, noise = errors_of(cells), noise_of(measured, point)
    ranking = ranking_of(measured, cells, point)
    crossover = crossover_of(cells, pictured.x, list(pictured.facets))
    found = Findings(
        cells, errors, noise, ranking, crossover, bars_of(errors, ranking, crossover, noise, settings.tolerances),
        measured, predicted, missing=missing,
    )  # fmt: skip
    held = [(run, pair) for run, pair in pairs if cell(run.trial) not in fitted]
    rows = _attribute(runs, held, measured, predictor, progress("attributing", len(held)))
    if rows:
        table = pd.DataFrame(rows)
        found.attribution, found.blame = summary_of(table), to_blame(table)
    return found


def _attribute(
    runs: Sequence[Run],
    held: Sequence[tuple[Run, Pair]],
    measured: pd.DataFrame,
    predictor: Predictor,
    advance: Callable[[], None],
) -> list[dict[str, Any]]:
    """Errors of held-out runs with parts swapped."""
    ratios = dict(zip((r.folder for r in runs), measured["throughput_ratio"], strict=True))
    plain, blind = defaultdict[Cell, list[Run]](list), defaultdict[Cell, list[Run]](list)
    for run in runs:
        kind = next(p["kind"] for p in run.trial.config["policies"] if p["name"] == run.trial.policy)
        if kind in {"off", "fixed"}:
            (plain if kind == "off" else blind)[run.place].append(run)
    attribution = Attribution(predictor, plain, blind, advance)
    return [row for run, pair in held for row in attribution.rows(run, pair, ratios[run.folder])]
