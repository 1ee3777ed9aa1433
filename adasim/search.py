"""What ``adasim tune`` varies, what it maximises, and under which limits."""

import re
from collections.abc import Mapping, Sequence
from math import exp, log
from typing import Any, Self

import numpy as np
from pydantic import Field, model_validator

from adasim.errors import InputError
from adasim.types import Component

RANGE = re.compile(r"(log:)?([-+\d.eE]+?)\.\.([-+\d.eE]+?)(?:\.\.([-+\d.eE]+))?")
METRICS = {  # metric -> whether less is better
    "output_tok_s": False,
    "goodput_rps": False,
    "slo_met": False,
    "requests_per_s": False,
    **{f"{m}_p{q}_ms": True for m in ("ttft", "tpot", "itl", "e2e") for q in (50, 90, 99)},
}
Setting = int | float | str | bool | None


class Tune(Component):
    """A search for the best policy.

    Attributes:
        search: ``POLICY.field`` -> values, or a range: ``0.8..1.6`` (evenly spaced; whole numbers when both ends are),
            ``2..16..2`` (with a step), ``log:0.01..1`` (evenly spaced logarithms). Policies without stand as they are.
        goal: metric to maximise or, for latencies, to minimise; null = goodput with an SLO, else tokens per second
            (closed loops) or median TPOT (open ones).
        limits: metric -> most it may be (latencies) or least (all others), on average over seeds.
        candidates: values of one ranged policy; several ranges share them.
        seeds: of the last rung.
        eta: a rung keeps one candidate in so many, and gives each as many times the runs.
    """

    search: dict[str, str | list[Setting]] = Field(default_factory=dict)
    goal: str | None = None
    limits: dict[str, float] = Field(default_factory=dict)
    candidates: int = Field(default=12, ge=2, le=1000)
    seeds: int = Field(default=9, ge=3, le=1000)
    eta: int = Field(default=3, ge=2, le=10)

    @model_validator(mode="after")
    def _known(self) -> Self:
        named = [*self.limits, *([self.goal] if self.goal else [])]
        problems = [f"unknown metric {m}; allowed: {', '.join(METRICS)}" for m in named if m not in METRICS]
        for key, spec in self.search.items():
            if "." not in key:
                problems.append(f"search.{key}: expected POLICY.field, like head.gamma")
            try:
                spaced(spec, 2)
            except InputError as error:
                problems += [f"search.{key}: {p}" for p in error.problems]
        if problems:
            raise InputError(*problems)
        return self


def spaced(spec: str | Sequence[Setting], count: int) -> list[Setting]:
    """The values of a list, or ``count`` of a range (all whole numbers of one that has fewer).

    Raises:
        InputError: not a range, or one without values.
    """
    if not isinstance(spec, str):
        if not spec:
            raise InputError("holds no value")
        return list(dict.fromkeys(spec))
    found = RANGE.fullmatch(spec.strip())
    if not found:
        raise InputError(f"{spec!r} is no range; allowed: LOW..HIGH, LOW..HIGH..STEP, log:LOW..HIGH, or a list")
    try:
        low, high = float(found[2]), float(found[3])
        step = float(found[4]) if found[4] else None
    except ValueError as error:
        raise InputError(f"{spec!r}: {error}") from error
    whole = all(re.fullmatch(r"[-+]?\d+", part) for part in (found[2], found[3], found[4] or "0"))
    if not low < high or (found[1] and low <= 0) or (step is not None and (step <= 0 or found[1])):
        raise InputError(f"{spec!r}: must rise, by a step above 0 if any; log: needs ends above 0 and no step")
    if step is not None:
        points = low + step * np.arange(int((high - low) / step + 1e-9) + 1)
    elif found[1]:
        points = np.exp(np.linspace(log(low), log(high), count))
    else:
        points = np.linspace(low, high, min(count, int(high - low) + 1) if whole else count)
    if whole:
        return list(dict.fromkeys(int(p) for p in np.rint(points)))
    return list(dict.fromkeys(float(f"{p:.4g}") for p in points))


def add_search(config: dict[str, Any], search: Mapping[str, str | Sequence[Setting]], candidates: int) -> None:
    """Turn searched fields of a raw scenario's policies into ``each``; the search is gone from the scenario.

    Raises:
        InputError: a policy that is not there, or a field that is searched twice.
    """
    policies = config.get("policies")
    if not isinstance(policies, list):
        return  # the scenario's own check says what is wrong
    fields: dict[int, dict[str, str | Sequence[Setting]]] = {}
    problems = []
    for key, spec in search.items():
        label, _, name = key.rpartition(".")
        at = _entry(policies, label)
        if at is None:
            names = ", ".join(str(p.get("name", p.get("kind"))) for p in policies if isinstance(p, dict))
            problems.append(f"search.{key}: no policy {label}; there are {names}")
        elif name in {"kind", "name"} or name in policies[at].get("each", {}):
            problems.append(f"search.{key}: {'cannot be searched' if name in {'kind', 'name'} else 'is in each already'}")
        else:
            fields.setdefault(at, {})[name] = spec
    if problems:
        raise InputError(*problems)
    for at, specs in fields.items():
        ranges = sum(isinstance(s, str) for s in specs.values())
        count = max(2, round(exp(log(candidates) / ranges))) if ranges else candidates
        entry = {k: v for k, v in policies[at].items() if k not in specs}
        each = {name: spaced(spec, count) for name, spec in specs.items()}
        policies[at] = entry | {"each": {**entry.get("each", {}), **each}}


def _entry(policies: Sequence[Any], label: str) -> int | None:
    """Position of the policy of that name, or the only one of that kind."""
    for known in ("name", "kind"):
        found = [i for i, p in enumerate(policies) if isinstance(p, dict) and p.get(known) == label]
        if len(found) == 1:
            return found[0]
    return None
