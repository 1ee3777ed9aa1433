"""What the simulator says of measured runs: their twins with several lucks, and what the profile's uncertainty does."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import log
from typing import Any

import pandas as pd

from adasim.calibration.profile import Profile
from adasim.errors import InputError
from adasim.scenario import Scenario
from adasim.validation.measured import PLAIN, RATIOS, Run, measure, window_of
from adasim.validation.twin import Twin, luck_seeds

Change = Callable[[Twin], Twin]


@dataclass(frozen=True, slots=True)
class Pair:
    """The twins of a measured run and of the plain decoding it is held against; the latter has no luck."""

    scenario: Scenario
    policy: Twin
    reference: Twin

    def with_(self, policy: Change, reference: Change | None = None) -> "Pair":
        """The same with changed twins; ``reference`` None: both alike."""
        return replace(self, policy=policy(self.policy), reference=(reference or policy)(self.reference))

    def plain(self) -> dict[str, float]:
        """Metrics of plain decoding."""
        return _simulate(self.reference, self.scenario, 0)

    def predict(self, luck: int, plain: dict[str, float]) -> dict[str, float]:
        """Metrics of one simulated run, and their ratios to plain decoding."""
        found = _simulate(self.policy, self.scenario, luck)
        return found | {f"{name}_ratio": found[m] / plain[m] for name, m in RATIOS.items()}


def _simulate(twin: Twin, scenario: Scenario, luck: int) -> dict[str, float]:
    records = twin.run(luck)
    return measure(records, window_of(records, scenario))


def pairs_of(runs: Sequence[Run], profile: Profile) -> list[tuple[Run, Pair]]:
    """Every run but references, with its twins; the reference serves what the first reference beside it served."""
    plain = {r.place: r for r in reversed(runs) if r.trial.repeat is not None or _plain(r)}
    found = []
    for run in runs:
        if _plain(run):
            continue
        scenario = run.trial.scenario()
        beside = plain.get(run.place)
        if beside is not None:
            twins = [_twin(r, profile) for r in (run, beside)]
            found.append((run, Pair(scenario, *twins)))
    return found


def _twin(run: Run, profile: Profile) -> Twin:
    tables = (pd.read_parquet(run.folder / f"{name}.parquet") for name in ("requests", "events"))
    twin = Twin.of(run.trial.scenario(), profile, *tables)
    twin.check()
    return twin


def _plain(run: Run) -> bool:
    return any(p["name"] == run.trial.policy and p["kind"] == "off" for p in run.trial.config["policies"])


@dataclass(slots=True)
class Predictor:
    """Simulates pairs, plain decoding once a point and seed.

    Attributes:
        profile: where cost, acceptance and their uncertainty come from.
        luck: simulated runs of each measured one.
        advance: called after every pair.
    """

    profile: Profile
    luck: int
    advance: Callable[[], None] = lambda: None
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
            for luck in luck_seeds(run.trial.seed, self.luck):
                rows.append({"policy": run.trial.policy, **where, "luck": luck} | pair.predict(luck, plain))
            self.advance()
        return pd.DataFrame(rows)

    def plain(self, run: Run, pair: Pair) -> dict[str, float]:
        """Simulated plain decoding beside a run."""
        if run.place not in self._plain:
            self._plain[run.place] = pair.plain()
        return self._plain[run.place]

    def uncertainty(self, run: Run, pair: Pair) -> dict[str, float]:
        """What the profile's uncertainty moves: half-widths, relative, by metric.

        Each input is moved to its upper limit alone, with the same luck; the moves add up in squares. Policies go on
        believing what they believed.
        """
        luck = luck_seeds(run.trial.seed, 1)[0]
        base = pair.predict(luck, self.plain(run, pair))
        squares = dict.fromkeys(base, 0.0)
        for name in type(self.profile.uncertainty).model_fields:
            limits = self.profile.uncertainty.limits(name)
            if limits is None or limits[1] in {0.0, 1.0}:
                continue
            try:
                moved = pair.with_(lambda twin, name=name, to=limits[1]: twin.moved(name, to))  # type: ignore[misc]
                found = moved.predict(luck, moved.plain())
            except (InputError, ValueError):  # what the model cannot be moved to: an end of its range
                continue
            for metric, value in found.items():
                if value > 0 and base[metric] > 0:
                    squares[metric] += log(value / base[metric]) ** 2
        return {metric: total**0.5 for metric, total in squares.items()}


METRICS = (*PLAIN, *(f"{name}_ratio" for name in RATIOS))
