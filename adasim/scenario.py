"""A scenario: what to run, from YAML to a list of trials."""

import itertools
import json
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, model_validator

from adasim import __version__
from adasim.backends import AnyBackend
from adasim.errors import InputError
from adasim.explain import explain
from adasim.files import load_yaml, loading_from, parse_yaml
from adasim.policies import AnyPolicy
from adasim.reference import Reference
from adasim.types import Component, Slo
from adasim.workload import AnyWorkload

Value = int | float | str | bool


class Measure(Component):
    """The part of a run that counts.

    ``warmup_requests`` finishes are left out first (null: as many as a closed loop has clients, none
    otherwise). ``until_last_arrival`` ends the window when the source runs dry, before the batch thins out
    (null: true in closed loops).
    """

    warmup_requests: int | None = Field(default=None, ge=0)
    until_last_arrival: bool | None = None


class Scenario(Component):
    """What to run: every policy, at every point of the sweep, with every seed.

    Attributes:
        policies: each with a unique label; an entry with ``each: {field: [values]}`` stands for one policy a
            value, and the report picks the best of them at every point.
        sweep: dotted field -> values; the product of all is run. ``policies.LABEL.field`` reaches into one.
        slo: limits that make requests count as goodput.
        reference: published or measured numbers to print beside the prediction.
        assumptions: what a reader must know about where the inputs are thin.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    title: str
    description: str = ""
    workload: AnyWorkload
    backend: AnyBackend
    policies: list[AnyPolicy] = Field(min_length=1)
    sweep: dict[str, Annotated[list[Value], Field(min_length=1)]] = Field(default_factory=dict)
    seeds: list[Annotated[int, Field(ge=0)]] = Field(default=[0, 1, 2], min_length=1)
    slo: Slo | None = None
    measure: Measure = Measure()
    reference: Reference | None = None
    assumptions: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _unique(self) -> Self:
        labels = [p.label for p in self.policies]
        twice = sorted({x for x in labels if labels.count(x) > 1})
        if twice:
            raise ValueError(f"policies: {', '.join(twice)} stands twice; give each a name")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError("seeds: each may stand once")
        return self

    @property
    def warmup_requests(self) -> int:
        """Finishes left out before the window opens."""
        if self.measure.warmup_requests is not None:
            return self.measure.warmup_requests
        return self.workload.clients or 0

    @property
    def until_last_arrival(self) -> bool:
        """Whether the window ends with the last arrival."""
        if self.measure.until_last_arrival is not None:
            return self.measure.until_last_arrival
        return self.workload.clients is not None


@dataclass(frozen=True, slots=True)
class Trial:
    """One run: a policy at a point of the sweep with a seed. ``config`` is a whole scenario without sweep."""

    index: int
    policy: str  # label
    point: dict[str, Value]
    seed: int
    config: dict[str, Any]
    base: Path  # folder against which the configuration's file names resolve

    @property
    def key(self) -> str:
        """Identifies the result: configuration, seed and adasim's version."""
        text = json.dumps([self.config, self.policy, self.seed, __version__], sort_keys=True)
        return sha256(text.encode()).hexdigest()[:16]

    def scenario(self) -> Scenario:
        """The validated scenario of this trial."""
        with loading_from(self.base):
            return validate(self.config, self.policy)


@dataclass(frozen=True, slots=True)
class Plan:
    """A scenario as read and expanded."""

    scenario: Scenario  # at the first point of the sweep
    trials: list[Trial]
    groups: dict[str, list[str]]  # group -> labels of the policies an ``each`` expanded into
    files: dict[str, str]  # every file that was read -> SHA-256
    notes: list[str] = field(default_factory=list)


SCENARIOS = (Path(str(files("adasim"))) / "_scenarios", Path(str(files("adasim"))).parent / "scenarios")


def packaged() -> list[Path]:
    """Scenario files that come with adasim."""
    return sorted(p for folder in SCENARIOS if folder.is_dir() for p in folder.glob("*.yaml"))


def find_scenario(name: str) -> Path:
    """The file at that path, or the packaged scenario of that name.

    Raises:
        InputError: neither.
    """
    if Path(name).is_file():
        return Path(name)
    known = {p.stem: p for p in reversed(packaged())}
    if name in known:
        return known[name]
    raise InputError(f"no scenario {name}: not a file, and not one of {', '.join(sorted(known))}")


def load(name: str, settings: Sequence[str] = ()) -> Plan:
    """Read a scenario, apply ``field=value`` settings, expand it and check every trial.

    Args:
        name: path or packaged name.
        settings: dotted overrides; the value is YAML.

    Raises:
        InputError: everything that is wrong, each with its path.
    """
    path = find_scenario(name)
    config = load_yaml(path)
    notes = []
    for setting in settings:
        key, sep, text = setting.partition("=")
        if not sep or not key:
            raise InputError(f"--set {setting}: expected field=value, like workload.concurrency=64")
        if key in config.get("sweep", {}):
            del config["sweep"][key]
            notes.append(f"--set {key}: replaces the sweep over it")
        if key.startswith("sweep."):
            config.setdefault("sweep", {})[key.removeprefix("sweep.")] = parse_yaml(text, f"--set {key}")
        else:
            assign(config, key, parse_yaml(text, f"--set {key}"))
    with loading_from(path.parent) as used:
        plan = expand(config, path.parent)
        digests = {p.name: sha256(p.read_bytes()).hexdigest() for p in sorted(used | {path.resolve()})}
    return Plan(plan.scenario, plan.trials, plan.groups, digests, notes)


def expand(config: dict[str, Any], base: Path) -> Plan:
    """Trials of a raw scenario: sweep x policies x seeds, each checked."""
    config = deepcopy(config)
    config["policies"], groups = _each(config.get("policies"))
    whole = validate(config)
    config.pop("sweep", None)
    trials: list[Trial] = []
    problems: dict[str, None] = {}
    for point in _points(whole.sweep):
        at = deepcopy(config)
        try:
            for key, value in point.items():
                assign(at, key, value)
            scenario = validate(at)
        except InputError as error:
            place = ", ".join(f"{k}={v}" for k, v in point.items())
            problems |= {f"sweep ({place}): {p}" if place else p: None for p in error.problems}
            continue
        for policy, label in zip(scenario.policies, (p.label for p in whole.policies), strict=True):
            for seed in scenario.seeds:
                try:
                    scenario.backend.check(scenario.workload, policy, seed)
                except InputError as error:
                    problems |= dict.fromkeys(error.problems)
                trials.append(Trial(len(trials), label, point, seed, at, base))
    if problems:
        raise InputError(*list(problems)[:20])
    return Plan(validate(trials[0].config), trials, groups, {})


def validate(config: dict[str, Any], only: str | None = None) -> Scenario:
    """A scenario from its raw form (``each`` already expanded); ``only`` keeps one policy.

    Raises:
        InputError: all problems, each with its path and what is allowed.
    """
    try:
        scenario = Scenario.model_validate(config)
    except ValidationError as error:
        raise InputError(*explain(error, Scenario)) from error
    if only is None:
        return scenario
    return scenario.model_copy(update={"policies": [p for p in scenario.policies if p.label == only]})


def _points(sweep: dict[str, list[Value]]) -> Iterator[dict[str, Value]]:
    for values in itertools.product(*sweep.values()):
        yield dict(zip(sweep, values, strict=True))


def _each(policies: Any) -> tuple[Any, dict[str, list[str]]]:
    """Expand entries with ``each``; the group's label is its name or kind."""
    if not isinstance(policies, list):
        return policies, {}
    expanded: list[Any] = []
    groups: dict[str, list[str]] = {}
    for i, entry in enumerate(policies):
        if not isinstance(entry, dict) or "each" not in entry:
            expanded.append(entry)
            continue
        rest = {k: v for k, v in entry.items() if k not in {"each", "name"}}
        values = entry["each"]
        if (
            not isinstance(values, dict)
            or not values
            or not all(isinstance(v, list) and v for v in values.values())
        ):
            raise InputError(f"policies.{i}.each: must map fields to lists of values")
        group = str(entry.get("name", entry.get("kind")))
        for combination in itertools.product(*values.values()):
            fields = dict(zip(values, combination, strict=True))
            label = f"{group} {', '.join(f'{k}={v}' for k, v in fields.items())}"
            expanded.append({**rest, **fields, "name": label})
            groups.setdefault(group, []).append(label)
    return expanded, groups


def assign(config: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted field of a raw scenario; list items go by position, policies by label too.

    Raises:
        InputError: the path leads through something that is neither.
    """
    at: Any = config
    *parents, last = key.split(".")
    for i, part in enumerate(parents):
        at = _child(at, part, ".".join(parents[: i + 1]))
    if isinstance(at, list):
        at[_position(at, last, key)] = value
    elif isinstance(at, dict):
        at[last] = value
    else:
        raise InputError(f"{key}: {'.'.join(parents)} is {at!r} and has no fields")


def _child(at: Any, part: str, path: str) -> Any:
    if isinstance(at, list):
        return at[_position(at, part, path)]
    if isinstance(at, dict):
        return at.setdefault(part, {})
    raise InputError(f"{path}: leads through {at!r}, which has no fields")


def _position(items: list[Any], part: str, path: str) -> int:
    if part.isdecimal() and int(part) < len(items):
        return int(part)
    names = [str(x.get("name", x.get("kind"))) if isinstance(x, dict) else str(x) for x in items]
    if names.count(part) == 1:
        return names.index(part)
    raise InputError(f"{path}: no item {part}; there are {', '.join(names)} (0..{len(names) - 1})")
