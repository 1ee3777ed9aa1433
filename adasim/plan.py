"""From a scenario to the trials it stands for."""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from adasim import __version__
from adasim.errors import InputError
from adasim.explain import explain
from adasim.files import load_yaml, loading_from, parse_yaml
from adasim.policies.base import Policy
from adasim.scenario import Cases, Scenario, Value, find_scenario, validate

MAX_PROBLEMS = 20
Made = TypeVar("Made", bound=BaseModel)
PROSE = ("name", "title", "description", "assumptions", "reference", "policies", "seeds", "sweep", "tune", "profile",
         "validation")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Trial:
    """One run: a policy at a point of the sweep with a seed. ``config`` is a whole scenario without sweep.

    ``repeat`` tells real runs of the same apart; None where there is but one.
    """

    policy: str  # label
    point: dict[str, Value]
    seed: int
    config: dict[str, Any]
    base: Path  # folder against which the configuration's file names resolve
    digests: tuple[str, ...] = ()  # of the files that its inputs come from
    repeat: int | None = None

    @property
    def key(self) -> str:
        """Identifies the result: its own configuration, input files, seed and adasim's version."""
        mine = {k: v for k, v in self.config.items() if k not in PROSE}
        policy = next(p for p in self.config["policies"] if p["name"] == self.policy)
        which = [] if self.repeat is None else [self.repeat]
        text = json.dumps([mine, policy, self.seed, self.digests, __version__, *which], sort_keys=True, default=str)
        return sha256(text.encode()).hexdigest()[:16]

    def scenario(self) -> Scenario:
        """The validated scenario of this trial, with its policy only."""
        with loading_from(self.base):
            scenario = validate(self.config)
        mine = [p for p in scenario.policies if p.label == self.policy]
        return scenario.model_copy(update={"policies": mine})


@dataclass(frozen=True, slots=True)
class Plan:
    """A scenario as read and expanded."""

    scenario: Scenario  # at the first point of the sweep
    trials: list[Trial]
    groups: dict[str, list[str]]  # group -> labels of the policies an ``each`` expanded into
    files: dict[str, str]  # every file that was read -> SHA-256
    notes: list[str] = field(default_factory=list)


def load(name: str, settings: Sequence[str] = (), edit: Callable[[dict[str, Any]], None] | None = None) -> Plan:
    """Read a scenario, apply ``field=value`` settings, expand it and check every trial.

    Args:
        name: path or packaged name.
        settings: dotted overrides; the value is YAML.
        edit: changes the raw scenario before it is expanded.

    Raises:
        InputError: everything that is wrong, each with its path.
    """
    path = find_scenario(name)
    config = load_yaml(path)
    if config.get("sweep") is None:
        config.pop("sweep", None)
    problems: list[str] = []
    notes: list[str] = []
    for setting in settings:
        try:
            key, value = parse_setting(setting)
            sweep = config.get("sweep")
            if isinstance(sweep, dict):
                if key in sweep:
                    del sweep[key]
                    notes.append(f"--set {key}: replaces the sweep over it")
                _refuse_swept(sweep, key)
            if key.startswith("sweep."):
                axis = key.removeprefix("sweep.")
                sweep = config.setdefault("sweep", {})
                sweep[axis] = _chosen(axis, sweep.get(axis), value)
            else:
                assign(config, key, value)
        except InputError as error:
            problems += error.problems
    with loading_from(path.parent) as used:
        try:
            if edit is not None and not problems:
                edit(config)
            plan = expand(config, path.parent, searching=edit is not None)
        except InputError as error:
            raise InputError(*problems, *error.problems) from error
        if problems:
            raise InputError(*problems)
        inputs = {_short(p): sha256(p.read_bytes()).hexdigest() for p in sorted(used)}
    # reference cells are compared with results, they do not make them
    reference = plan.scenario.reference
    digests = tuple(d for n, d in inputs.items() if reference is None or Path(n).name != Path(reference.file).name)
    trials = [replace(t, digests=digests) for t in plan.trials]
    mine = {_short(path.resolve()): sha256(path.read_bytes()).hexdigest()}
    return replace(plan, trials=trials, files=mine | inputs, notes=notes + plan.notes)


def parse_setting(setting: str, option: str = "--set") -> tuple[str, Any]:
    """Field and value of ``field=value``, given with an option; the value is YAML.

    Raises:
        InputError: it has another form.
    """
    key, sep, text = setting.partition("=")
    if not sep or not key:
        raise InputError(f"{option} {setting}: expected field=value, like workload.concurrency=64")
    return key, parse_yaml(text, f"{option} {key}")


def changed(model: type[Made], config: dict[str, Any], settings: Sequence[str]) -> Made:
    """A component from its configuration with ``field=value`` settings applied.

    Raises:
        InputError: everything that is wrong, each with its path.
    """
    problems: list[str] = []
    for setting in settings:
        try:
            assign(config, *parse_setting(setting))
        except InputError as error:
            problems += error.problems
    try:
        made = model.model_validate(config)
    except ValidationError as error:
        raise InputError(*problems, *explain(error, model)) from None
    if problems:
        raise InputError(*problems)
    return made


def _short(path: Path) -> str:
    """A file's name with its folder's: enough to tell files apart, nothing about the machine."""
    return f"{path.parent.name}/{path.name}"


def expand(config: dict[str, Any], base: Path, *, searching: bool = False) -> Plan:
    """Trials of a raw scenario: sweep x policies x seeds, each checked.

    Args:
        config: the raw scenario.
        base: folder against which its file names resolve.
        searching: its ``tune`` is in use, and not worth a note.

    Raises:
        InputError: all problems.
    """
    config = deepcopy(config)
    config["policies"], groups, problems = _each(config.get("policies"))
    try:
        whole = validate(config)
    except InputError as error:
        raise InputError(*problems, *error.problems) from error
    for raw, policy in zip(config["policies"], whole.policies, strict=True):
        raw["name"] = policy.label  # a swept field must not change it
    sweep = whole.sweep
    config.pop("sweep", None)
    trials: list[Trial] = []
    found: dict[str, str] = {}  # problem -> the first point that has it
    for point, fields in _points(sweep):
        at = deepcopy(config)
        place = ", ".join(f"{k}={v}" for k, v in point.items())
        try:
            for key, value in fields.items():
                assign(at, key, deepcopy(value))
            scenario = validate(at)
        except InputError as error:
            found |= {p: place for p in error.problems if p not in found}
            continue
        found |= {p: place for p in _check(scenario) if p not in found}
        trials += [Trial(p.label, point, seed, at, base) for p in scenario.policies for seed in scenario.seeds]
    problems += [f"sweep ({place}): {problem}" if place else problem for problem, place in found.items()]
    if problems:
        raise InputError(*problems[:MAX_PROBLEMS])
    notes = []
    if whole.backend.lag_steps and all(type(p).observe is Policy.observe for p in whole.policies):
        notes.append("backend.lag_steps has no effect: no policy here uses feedback")
    if whole.tune is not None and not searching:
        notes.append("tune is what adasim tune searches; nothing is searched here")
    return Plan(validate(trials[0].config), trials, groups, {}, notes)


def _check(scenario: Scenario) -> list[str]:
    """What keeps a point from running."""
    problems: list[str] = []
    backend, workload = scenario.backend, scenario.workload
    for policy in scenario.policies:
        try:
            backend.check_policy(policy)
        except InputError as error:
            problems += error.problems
    for seed in scenario.seeds:
        try:
            backend.check_workload(workload, seed)
        except InputError as error:
            problems += error.problems
            break
    if (count := workload.count) <= scenario.warmup_requests:
        problems.append(
            f"measure: nothing to measure: {count} requests, {scenario.warmup_requests} of them warm-up; "
            f"raise the number of requests or lower measure.warmup_requests"
        )
    return problems


def _points(sweep: dict[str, list[Value] | Cases]) -> Iterator[tuple[dict[str, Value], dict[str, Any]]]:
    """Every point of the sweep, and the fields it sets."""
    axes = [
        [(label, case) for label, case in values.items()] if isinstance(values, dict) else [(v, {key: v}) for v in values]
        for key, values in sweep.items()
    ]
    for chosen in itertools.product(*axes):
        point: dict[str, Value] = {key: label for key, (label, _) in zip(sweep, chosen, strict=True)}
        yield point, {field: value for _, fields in chosen for field, value in fields.items()}


def _refuse_swept(sweep: dict[str, Any], key: str) -> None:
    """A field that the cases of an axis set cannot be set beside them."""
    for axis, cases in sweep.items():
        if isinstance(cases, dict) and any(isinstance(case, dict) and key in case for case in cases.values()):
            raise InputError(f"--set {key}: has no effect, sweep.{axis} sets it; choose cases with sweep.{axis}=[...]")


def _chosen(axis: str, cases: Any, value: Any) -> Any:
    """Some of the cases of an axis, where a list of their labels is given; else the value itself."""
    if not isinstance(cases, dict) or not isinstance(value, list):
        return value
    unknown = [str(label) for label in value if label not in cases]
    if unknown:
        known = ", ".join(map(str, cases))
        raise InputError(f"--set sweep.{axis}: no case {', '.join(unknown)}; there are {known}")
    return {label: cases[label] for label in value}


def _each(policies: Any) -> tuple[Any, dict[str, list[str]], list[str]]:
    """Entries with ``each`` expanded, labels by group (its name or kind), and what is wrong."""
    if not isinstance(policies, list):
        return policies, {}, []
    expanded: list[Any] = []
    groups: dict[str, list[str]] = {}
    problems: list[str] = []
    for i, entry in enumerate(policies):
        if not isinstance(entry, dict) or "each" not in entry:
            expanded.append(entry)
            continue
        rest = {k: v for k, v in entry.items() if k not in {"each", "name"}}
        group, values = str(entry.get("name", entry.get("kind"))), entry["each"]
        if not isinstance(values, dict) or not values or not all(isinstance(v, list) and v for v in values.values()):
            problems.append(f"policies.{i}.each: must map fields to lists of values")
            expanded.append(rest | {"name": group})
            continue
        for combination in itertools.product(*values.values()):
            fields = dict(zip(values, combination, strict=True))
            label = f"{group} {', '.join(f'{k}={v}' for k, v in fields.items())}"
            expanded.append({**rest, **fields, "name": label})
            groups.setdefault(group, []).append(label)
    return expanded, groups, problems


def assign(config: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted field of a raw scenario; list items go by position, policies also by label or unique kind.

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
        if at.get(part) is None:
            at[part] = {}
        return at[part]
    raise InputError(f"{path}: leads through {at!r}, which has no fields")


def _position(items: list[Any], part: str, path: str) -> int:
    if part.isdecimal() and int(part) < len(items):
        return int(part)
    names = [str(x.get("name", x.get("kind"))) if isinstance(x, dict) else str(x) for x in items]
    kinds = [str(x.get("kind")) if isinstance(x, dict) else "" for x in items]
    for known in (names, kinds):
        if known.count(part) == 1:
            return known.index(part)
    raise InputError(f"{path}: no item {part}; there are {', '.join(names)} (0..{len(names) - 1})")
