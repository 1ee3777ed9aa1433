"""Which part of the model is to blame: each is replaced by what the run itself showed, one at a time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, log
from typing import Any

import numpy as np
import pandas as pd

from adasim.calibration.acceptance import CurveAcceptance
from adasim.calibration.adjust import Adjust
from adasim.calibration.estimate.confidence import confidence_of
from adasim.calibration.estimate.head import head_of
from adasim.calibration.estimate.survival import survival_of
from adasim.calibration.estimate.text_model import Shape, settled
from adasim.calibration.head_quality import HeadQuality
from adasim.calibration.survival import Measured
from adasim.errors import InputError
from adasim.records import Records
from adasim.types import FloatArray
from adasim.validation.parts import TIMES, measured_parts, together
from adasim.validation.prediction import Pair, Predictor
from adasim.validation.run import Run
from adasim.validation.twin import Change, Twin, luck_seeds

PARTS = (*TIMES, "acceptance", "head")
ALL = "all together"


def own_acceptance(
    blocks: pd.DataFrame, model: CurveAcceptance, max_draft_len: int, tokens: float = inf
) -> CurveAcceptance:
    """The model with the survival of recorded blocks in the domains they met; correlation, spread and head stay.

    Args:
        blocks: ``BlockRecord`` columns.
        model: whose curves are of settled rounds.
        max_draft_len: K.
        tokens: mean answer behind the prefill's token: first rounds of short ones start anywhere, and accept more.
    """
    met = [d for d in blocks["domain"].unique() if d in model.curves]
    prior = {d: model.survival(d, max_draft_len) for d in met}
    found = survival_of(blocks[blocks["domain"].isin(met)], max_draft_len, prior)
    if tokens < inf:
        shape = Shape(model.spread, model.correlation, model.range_tokens)
        found = {d: settled(curve, shape, tokens) for d, curve in found.items()}
    curves = {d: Measured(kind="measured", values=curve.tolist()) for d, curve in found.items()}
    off = {"temperature": 0.0, "tau_by_temperature": None}  # the curves are measured at the temperature they are used at
    return model.model_copy(update={"curves": model.curves | curves, **off})


def own_head(rounds: pd.DataFrame | None, head: HeadQuality, survival: Mapping[str, FloatArray]) -> HeadQuality | None:
    """Heads as recorded rounds show them, in the form of ``head``: the length head's reports, confidences; None: too few.

    What a policy cut by the report itself does no harm: see :func:`~adasim.calibration.estimate.head.fit_head`.

    Args:
        rounds: ``RoundRecord`` columns; None = not recorded.
        head: that of the model.
        survival: of full blocks by domain, [K] each.
    """
    if rounds is None:
        return None
    known = rounds[rounds["domain"].isin(list(survival))]
    depth, updates = len(next(iter(survival.values()))), dict[str, object]()
    if (found := head_of(known, depth, survival, head.reports)) is not None:
        own = {"noise": found.noise, "bias": found.bias}
        updates |= own if found.measured is None else {"measured": (head.measured or {}) | found.measured}
    if head.confidence is not None and (sure := confidence_of(known, depth, survival)):
        updates["confidence"] = head.confidence | sure
    return head.model_copy(update=updates) if updates else None


@dataclass(slots=True)
class Attribution:
    """Swaps measured parts into twins.

    Attributes:
        predictor: knows plain decoding.
        references: runs of plain decoding, by point and seed.
        blind: runs whose verify lengths are fixed, likewise.
        advance: called after every run.
        notes: runs whose parts could not be swapped, and why.
    """

    predictor: Predictor
    references: Mapping[tuple[object, ...], Sequence[Run]]
    blind: Mapping[tuple[object, ...], Sequence[Run]]
    advance: Callable[[], None] = lambda: None
    notes: list[str] = field(default_factory=list)
    _levels: dict[tuple[object, ...], tuple[float, Adjust]] = field(default_factory=dict)

    def rows(self, run: Run, pair: Pair, measured: float) -> list[dict[str, Any]]:
        """Errors of throughput over plain decoding with each part swapped, and with all: log(predicted / measured).

        None, and a note, where a part of the run cannot be swapped: what was measured is worth a report all the same.

        Args:
            run: the measured run.
            pair: its twins.
            measured: its ratio.
        """
        try:
            return self._rows(run, pair, measured)
        except (InputError, ValueError) as error:
            self.notes.append(f"which part is to blame in {run.name} cannot be told: {error}")
            return []
        finally:
            self.advance()

    def _rows(self, run: Run, pair: Pair, measured: float) -> list[dict[str, Any]]:
        luck = luck_seeds(run.trial.seed, self.predictor.replications)
        where = {"policy": run.trial.policy, **run.trial.point, "seed": run.trial.seed}
        before = self._error(pair, luck, measured, self.predictor.plain(run, pair))
        rows = [{**where, "part": "", "error": before}]
        changes = self._changes(run, pair)
        for part, (policy, reference) in changes.items():
            swapped = pair.with_(policy, reference)
            rows.append({**where, "part": part, "error": self._error(swapped, luck, measured, swapped.plain())})
        every = pair
        for policy, reference in changes.values():
            every = every.with_(policy, reference)
        rows.append({**where, "part": ALL, "error": self._error(every, luck, measured, every.plain())})
        return rows

    def _error(self, pair: Pair, luck: Sequence[int], measured: float, plain: dict[str, float]) -> float:
        ratios = [pair.predict(seed, plain)["throughput_ratio"] for seed in luck]
        return float(np.mean(np.log(ratios))) - log(measured)

    def _changes(self, run: Run, pair: Pair) -> dict[str, tuple["Change", "Change"]]:
        """For every part that the run shows: how the twins of policy and reference change."""
        twin = pair.policy
        trial = replace(run.recorded(), policy=twin.policy)
        records = trial.records
        speed, plain = self._plain_levels(run, pair)
        own = measured_parts(trial, twin.backend.calibrated_cost, self.predictor.profile).levels(speed)
        found: dict[str, tuple[Change, Change]] = {}
        for part in TIMES:
            if part in own.model_fields_set | plain.model_fields_set:
                found[part] = (_scaled(part, own), _scaled(part, plain))
        model = twin.backend.calibrated_acceptance
        blocks, head = self._blocks(run, records), None
        if isinstance(model, CurveAcceptance) and (blocks["verify_len"] > 1).any():
            tokens = float(records.requests["tokens"].mean()) - 1
            swapped = own_acceptance(blocks, model, twin.backend.max_draft_len, tokens)
            found["acceptance"] = (lambda t: t.with_(acceptance=_with_head(swapped, t)), _same)
            seen = {d: swapped.survival(d, twin.backend.max_draft_len) for d in records.blocks["domain"].unique()}
            head = own_head(records.rounds, model.head, seen)
        if head is not None:
            found["head"] = (lambda t: t.with_(acceptance=_acceptance(t).model_copy(update={"head": head})), _same)
        return found

    def _blocks(self, run: Run, records: Records) -> pd.DataFrame:
        """Blocks that were cut blindly: the run's own, else those of fixed lengths beside it, whose text is the same."""
        beside = self.blind.get(run.place, [])
        if not beside or run in beside:
            return records.blocks
        return pd.concat([r.records().blocks for r in beside], ignore_index=True)

    def _plain_levels(self, run: Run, pair: Pair) -> tuple[float, Adjust]:
        """How many times slower the machine was at plain decoding beside a run, and the level of its parts in that."""
        if run.place not in self._levels:
            twin, profile = pair.reference, self.predictor.profile
            trials = [replace(r.recorded(), policy=twin.policy) for r in self.references[run.place]]
            parts = together([measured_parts(t, twin.backend.calibrated_cost, profile) for t in trials])
            speed = parts.speed
            self._levels[run.place] = speed, parts.levels(speed)
        return self._levels[run.place]


def _scaled(part: str, own: Adjust) -> Change:
    def change(twin: Twin) -> Twin:
        now = twin.backend.adjust or Adjust()
        return twin.with_(adjust=now.model_copy(update={part: getattr(own, part)}))

    return change


def _same(twin: Twin) -> Twin:
    return twin


def _acceptance(twin: Twin) -> Any:
    return twin.backend.calibrated_acceptance


def _with_head(model: CurveAcceptance, twin: Twin) -> CurveAcceptance:
    return model.model_copy(update={"head": _acceptance(twin).head})


def summary_of(rows: pd.DataFrame) -> pd.DataFrame:
    """A row a part: mean absolute error before, with it swapped, and how much that removes; the largest first.

    Over all cells; one in which a part could not be swapped keeps its error. Logarithms are averaged over repeats first,
    so that luck does not count as the model's error.
    """
    keys = [c for c in rows.columns if c not in {"seed", "part", "error"}]
    cells = rows.groupby([*keys, "part"], sort=False)["error"].mean().unstack("part")
    found = []
    for part in (*PARTS, ALL):
        if part in cells:
            before, after = cells[""].abs().mean(), cells[part].fillna(cells[""]).abs().mean()
            found.append((part, int(cells[part].notna().sum()), before, after, before - after))
    table = pd.DataFrame(found, columns=["part", "cells", "before", "swapped", "removed"])
    last = table["part"] == ALL
    parts = table[~last].sort_values("removed", ascending=False, kind="stable")
    return pd.concat([parts, table[last]], ignore_index=True)


def to_blame(rows: pd.DataFrame) -> pd.DataFrame:
    """A row a cell: its error, and the part whose swap removes most of it."""
    keys = [c for c in rows.columns if c not in {"seed", "part", "error"}]
    cells = rows.groupby([*keys, "part"], sort=False)["error"].mean().unstack("part")
    parts = [p for p in PARTS if p in cells]
    left = cells[parts].abs()
    table = pd.DataFrame({"error": np.expm1(cells[""]), "part": left.idxmin(axis=1), "left": left.min(axis=1)})
    table["removed"] = cells[""].abs() - table["left"]
    table["part"] = table["part"].where(table["removed"] > 0, "none alone")
    return table.drop(columns="left").reset_index()
