"""What the simulator says of measured runs: their twins with several lucks, and what the profile's uncertainty does."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import log, nan
from typing import Any

import pandas as pd

from adasim.calibration.adjust import Adjust
from adasim.calibration.profile import Profile
from adasim.scenario import Scenario
from adasim.validation.measured import METRICS, RATIOS, measure, window_of
from adasim.validation.run import Run
from adasim.validation.twin import Change, Twin, farthest, luck_seeds


@dataclass(frozen=True, slots=True)
class Pair:
    """The twins of a measured run and of the plain decoding it is held against; the latter has no luck.

    Attributes:
        scenario: of the run.
        policy: its twin.
        reference: that of plain decoding.
        said: notes of the simulations made so far.
    """

    scenario: Scenario
    policy: Twin
    reference: Twin
    said: dict[str, None] = field(default_factory=dict)

    def with_(self, policy: Change, reference: Change | None = None) -> "Pair":
        """The same with changed twins; ``reference`` None: both alike."""
        return replace(self, policy=policy(self.policy), reference=(reference or policy)(self.reference))

    def plain(self) -> dict[str, float]:
        """Metrics of plain decoding."""
        return self._simulate(self.reference, 0)

    def predict(self, luck: int, plain: dict[str, float]) -> dict[str, float]:
        """Metrics of one simulated run, and their ratios to plain decoding."""
        found = self._simulate(self.policy, luck)
        return found | {f"{name}_ratio": found[m] / plain[m] for name, m in RATIOS.items()}

    def _simulate(self, twin: Twin, luck: int) -> dict[str, float]:
        records = twin.run(luck)
        self.said.update(dict.fromkeys((*twin.notes, *records.notes)))
        return measure(records, window_of(records, self.scenario))


def pairs_of(runs: Sequence[Run], profile: Profile) -> list[tuple[Run, Pair]]:
    """Every run but references, with its twins; the reference serves what the first reference beside it served."""
    plain = {r.place: r for r in reversed(runs) if r.is_reference}
    found = []
    for run in runs:
        if run.is_reference:
            continue
        scenario = run.trial.scenario()
        beside = plain.get(run.place)
        if beside is not None:
            found.append((run, Pair(scenario, _twin(run, profile), _twin(beside, profile))))
    return found


def _twin(run: Run, profile: Profile) -> Twin:
    tables = (pd.read_parquet(run.folder / f"{name}.parquet") for name in ("requests", "events"))
    twin = Twin.of(run.trial.scenario(), profile, *tables)
    twin.check()
    return twin


@dataclass(slots=True)
class Predictor:
    """Simulates pairs, plain decoding once a point and seed.

    Attributes:
        profile: where cost, acceptance and their uncertainty come from.
        replications: simulated runs of each measured one.
        advance: called after every pair.
        notes: what a report must say: where models left their range, what could not be moved; policies by note.
    """

    profile: Profile
    replications: int
    advance: Callable[[], None] = lambda: None
    notes: dict[str, dict[str, None]] = field(default_factory=dict)
    _plain: dict[tuple[object, ...], dict[str, float]] = field(default_factory=dict)

    def table(self, pairs: Sequence[tuple[Run, Pair]]) -> pd.DataFrame:
        """One row a simulated run: policy, point, seed, luck, metrics, ratios; and those of plain decoding, ratios 1."""
        rows: list[dict[str, Any]] = []
        for run, pair in pairs:
            where = {**run.trial.point, "seed": run.trial.seed}
            first = run.place not in self._plain
            plain = self.plain(run, pair)
            if first:
                label = pair.reference.policy.label
                ratios = dict.fromkeys((f"{name}_ratio" for name in RATIOS), 1.0)
                rows.append({"policy": label, **where, "luck": 0} | plain | ratios)
            for luck in luck_seeds(run.trial.seed, self.replications):
                rows.append({"policy": run.trial.policy, **where, "luck": luck} | pair.predict(luck, plain))
            for note in pair.said:
                self._note(note, run)
            self.advance()
        return pd.DataFrame(rows)

    def plain(self, run: Run, pair: Pair) -> dict[str, float]:
        """Simulated plain decoding beside a run."""
        if run.place not in self._plain:
            self._plain[run.place] = pair.plain()
        return self._plain[run.place]

    def uncertainty(self, run: Run, pair: Pair) -> dict[str, float]:
        """What the profile's uncertainty moves: half-widths, relative, by metric.

        Each input is moved to its upper limit alone, with the same luck; the moves add up in squares. Where that is
        impossible it is moved to its lower limit, else as far as either way goes; one that cannot be moved at all leaves
        every half-width unknown (NaN). Policies go on believing what they believed.
        """
        luck = luck_seeds(run.trial.seed, 1)[0]
        base = pair.predict(luck, self.plain(run, pair))
        squares = dict.fromkeys(base, 0.0)
        for name in type(self.profile.uncertainty).model_fields:
            limits = self.profile.uncertainty.limits(name)
            if limits is None or limits[0] == limits[1]:
                continue
            for metric, value in self._moved(name, limits, run, pair, luck).items():
                if not (value <= 0 or base[metric] <= 0):
                    squares[metric] += log(value / base[metric]) ** 2
        return {metric: total**0.5 for metric, total in squares.items()}

    def _moved(self, name: str, limits: tuple[float, float], run: Run, pair: Pair, luck: int) -> Mapping[str, float]:
        """Metrics with one input moved; NaN where it cannot be."""

        def predict(to: float) -> dict[str, float]:
            moved = pair.with_(lambda twin: twin.moved(name, to))
            return moved.predict(luck, moved.plain())

        start = float(Adjust.model_fields[name].default)
        best: tuple[dict[str, float], float] | None = None
        for end in reversed(limits):
            found = farthest(predict, start, end)
            if found is not None and (best is None or found[1] > best[1]):
                best = found
            if best is not None and best[1] == 1:
                return best[0]
        if best is None:
            self._note(f"{name} cannot be moved by its uncertainty: the interval of the prediction is unknown", run)
            return dict.fromkeys(METRICS, nan)
        self._note(f"{name} can be moved by {best[1]:.0%} of its uncertainty only; the interval shows that part", run)
        return best[0]

    def _note(self, note: str, run: Run) -> None:
        self.notes.setdefault(note, {})[run.trial.policy] = None
