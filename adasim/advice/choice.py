"""Which policy to take at each load, and whether that can be told."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import exp, inf, isnan, log1p, nan
from typing import Any

import numpy as np
import pandas as pd

from adasim.advice.doubt import NOISE, input_parts, total
from adasim.advice.setup import SIMPLE
from adasim.plan import Plan
from adasim.tables import Design, crossing, paired_gain, verdict

NEAR = 0.10  # policies so far behind the best are watched
MOST = 3  # of them, plain decoding not counted


@dataclass(slots=True)
class Loop:
    """A closed or an open loop, simulated.

    Attributes:
        kind: closed, or open.
        plan: its scenario.
        design: what counts; ``speed`` is that of speed-ups, ``goal`` picks the best.
        trials: metrics of every run, speed-ups added.
        summary: means by policy and load.
        moved: runs with inputs varied: (input, runs).
        model: errors of the model itself by name, relative.
    """

    kind: str
    plan: Plan
    design: Design
    trials: pd.DataFrame
    summary: pd.DataFrame
    moved: list[tuple[str, pd.DataFrame]] = field(default_factory=list)
    model: dict[str, float] = field(default_factory=dict)

    @property
    def x(self) -> str:
        """The load's field."""
        assert self.design.x is not None
        return self.design.x

    @property
    def loads(self) -> list[float]:
        """Rising."""
        return sorted(self.summary[self.x].unique())

    def kinds(self) -> dict[str, str]:
        """Kind of each policy by label."""
        return {p.label: p.kind for p in self.plan.scenario.policies}

    def at(self, load: float) -> pd.DataFrame:
        """Means at a load."""
        return self.summary[self.summary[self.x] == load]


def contenders(loop: Loop) -> dict[tuple[Any, ...], list[str]]:
    """Policies whose order matters, by load: plain decoding, the best fixed length, and those near the best."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for load in loop.loads:
        at = loop.at(load)
        best = loop.design.goal.best(at)
        names = ["off", best_fixed(loop, load)]
        if best is not None:
            value = best[loop.design.goal.metric]
            behind = loop.design.goal.ratio(pd.Series(value, at.index), at[loop.design.goal.metric]) - 1
            close = at.assign(behind=behind).sort_values("behind", kind="stable")
            names += [str(p) for p in close.loc[close["behind"] <= NEAR, "policy"]][:MOST]
        there = set(at["policy"])
        found[(load,)] = [n for n in dict.fromkeys(names) if n in there]
    return found


def best_fixed(loop: Loop, load: float) -> str:
    """The fixed length of at least one draft that is fastest at a load; empty without one."""
    kinds, at = loop.kinds(), loop.at(load)
    fixed = at[at["policy"].map(kinds) == "fixed"]
    best = None if fixed.empty else loop.design.speed.best(fixed)
    return "" if best is None else str(best["policy"])


def gain(loop: Loop, design: Design, load: float, one: str, other: str) -> tuple[float, dict[str, float]]:
    """How much better a policy is than another, relative, and the parts of the error of that ratio (logarithmic)."""
    runs = loop.trials[loop.trials[loop.x] == load]
    found = paired_gain(runs, design, one, other)
    width = _log_width(found.low, found.high)
    first = runs[runs["seed"] == loop.plan.scenario.seeds[0]]
    moved = [(name, table[table[loop.x] == load] if len(table) else table) for name, table in loop.moved]
    inputs = input_parts(first, moved, design, one, other)
    return found.estimate, {NOISE: width} | inputs | loop.model


def _log_width(low: float, high: float) -> float:
    """Half-width of a relative interval, in logarithms; without limit where it reaches -1."""
    if isnan(low) or isnan(high):
        return nan
    return inf if low <= -1 or high == inf else (log1p(high) - log1p(low)) / 2


def told(estimate: float, parts: dict[str, float]) -> tuple[str, float]:
    """A verdict, and the half-width of the gain, all parts together."""
    width = half(estimate, parts)
    noise = parts.get(NOISE, nan)
    return verdict(estimate, width if not isnan(noise) else nan, nan), width


def half(estimate: float, parts: dict[str, float]) -> float:
    """Half-width of a relative gain from parts that are logarithmic."""
    size = total(parts)
    return inf if size > 5 else (1 + estimate) * float(np.sinh(size))


def choose(loop: Loop) -> pd.DataFrame:
    """A row a load: the best policy, the one to take, its gain over plain decoding and what the error is made of.

    The one to take is the simplest among the best and those that cannot be told from it and surely beat plain decoding,
    or are it.
    """
    rows = []
    watched, kinds = contenders(loop), loop.kinds()
    for load in loop.loads:
        at = loop.at(load)
        best = loop.design.goal.best(at)
        row: dict[str, Any] = {"loop": loop.kind, "load": load}
        if best is None:
            rows.append(row | {"take": "", "best": "", "verdict": "nothing reaches the limits"})
            continue
        name = str(best["policy"])
        rivals = {p: gain(loop, loop.design, load, name, p) for p in watched[(load,)] if p != name}
        alike = [p for p, (g, parts) in rivals.items() if told(g, parts)[0].startswith("cannot tell")]
        safe = [p for p in alike if p == "off" or told(*gain(loop, loop.design, load, p, "off"))[0] == "better"]
        take = min([name, *safe], key=lambda p: _rank(kinds[p], at, p, loop))
        over, parts = gain(loop, loop.design, load, take, "off") if take != "off" else (0.0, {})
        lead, lead_parts = gain(loop, loop.design, load, name, "off") if name != "off" else (0.0, {})
        says, width = told(over, parts) if take != "off" else ("plain", 0.0)
        if "off" not in set(at["policy"]):
            says = "plain decoding was not predicted"
        row |= {"take": take, "best": name, "gain": over, "error": width, "verdict": says}
        row |= {"best_gain": lead, "best_error": half(lead, lead_parts) if lead_parts else 0.0}
        row |= {"alike": ", ".join(p for p in alike if p != take), "missing": ", ".join(_missing(loop, load))}
        whose = parts or lead_parts
        row |= {f"error_{part}": size for part, size in whose.items()}
        rows.append(row)
    return pd.DataFrame(rows)


def _rank(kind: str, at: pd.DataFrame, policy: str, loop: Loop) -> tuple[int, float]:
    """Simplicity first, then the goal."""
    value = float(at.loc[at["policy"] == policy, loop.design.goal.metric].iloc[0])
    return SIMPLE.index(kind), value if loop.design.goal.lower_is_better else -value


def _missing(loop: Loop, load: float) -> list[str]:
    """Policies without a prediction at a load."""
    there = set(loop.at(load)["policy"])
    return [p.label for p in loop.plan.scenario.policies if p.label not in there]


@dataclass(frozen=True, slots=True)
class Crossover:
    """Where speculation stops paying along the load: 0 = it never paid, inf = not up to the last load.

    Attributes:
        at, low, high: the load and its limits.
        last: highest load that was looked at.
        first: lowest.
    """

    at: float
    low: float
    high: float
    first: float
    last: float

    def says(self) -> str:
        """In words."""
        if self.at == 0:
            text = f"nowhere from {self.first:g} on"
        elif self.at == inf:
            text = f"up to {self.last:g} and maybe beyond"
        else:
            text = f"up to about {self.at:.3g}"
        low, high = self._limit(self.low), self._limit(self.high)
        return text if low == high else f"{text} ({low} to {high})"

    def _limit(self, load: float) -> str:
        if load == 0:
            return f"below {self.first:g}"
        return f"beyond {self.last:g}" if load == inf else f"{load:.3g}"


def speed_curve(loop: Loop) -> pd.DataFrame:
    """The best fixed length's speed-up over plain decoding by load, with its band.

    Columns: load, policy, speedup, low, high, and the parts of the error.
    """
    design = replace(loop.design, goal=loop.design.speed)
    rows = []
    for load in loop.loads:
        name = best_fixed(loop, load)
        if not name or "off" not in set(loop.at(load)["policy"]):
            continue
        over, parts = gain(loop, design, load, name, "off")
        size = total(parts)
        rows.append(
            {"load": load, "policy": name, "speedup": 1 + over}
            | {"low": (1 + over) * exp(-size), "high": (1 + over) * exp(min(size, 5.0))}
            | {f"error_{part}": value for part, value in parts.items()}
        )
    return pd.DataFrame(rows)


def crossover(curve: pd.DataFrame) -> Crossover | None:
    """Where the speed-up falls through 1, and where its band does; None without a curve."""
    if len(curve) < 2:
        return None
    by = curve.set_index("load")
    ends = {name: _falls(by[name]) for name in ("speedup", "low", "high")}
    return Crossover(ends["speedup"], ends["low"], ends["high"], float(by.index[0]), float(by.index[-1]))


def _falls(curve: "pd.Series[float]") -> float:
    """Load of the last fall through 1; 0 where it ends below without one, inf where it ends above."""
    if curve.iloc[-1] >= 1:
        return inf
    found = crossing(curve)
    return 0.0 if found is None else found


def regions(choices: pd.DataFrame) -> list[tuple[Sequence[float], pd.DataFrame]]:
    """Neighbouring loads at which the same policy is to be taken with the same verdict, and is the best or is not."""
    if choices.empty:
        return []
    keys = choices["take"] + "|" + choices["verdict"].astype(str) + "|" + (choices["best"] == "off").astype(str)
    block = (keys != keys.shift()).cumsum()
    return [(list(part["load"]), part) for _, part in choices.groupby(block, sort=False)]
