"""A part of recorded runs: what a profile is fitted on, so that the rest is left to be predicted."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from adasim.calibration.estimate.recording import RecordedTrial, Recording
from adasim.errors import InputError
from adasim.plan import parse_setting

OPTION = "--only"


def part_of(found: Recording, choices: Sequence[str]) -> Recording:
    """The runs that choices like ``policy=[off, head]`` or ``concurrency=[1, 4]`` name; all must hold.

    Runs with forced acceptance stay: they are no cells.

    Args:
        found: the runs.
        choices: ``policy``, ``seed`` or a swept field (its last part will do), and values in YAML.

    Raises:
        InputError: a field or value that no run has, or nothing is left; all problems.
    """
    if not choices:
        return found
    natural, problems = [t for t in found.trials if not t.forced], list[str]()
    wanted: dict[str, list[Any]] = {}
    for choice in choices:
        try:
            name, value = parse_setting(choice, OPTION)
        except InputError as error:
            problems += error.problems
            continue
        known = list(dict.fromkeys(_fields(t).get(name) for t in natural))
        values = value if isinstance(value, list) else [value]
        if known in ([], [None]):
            fields = dict.fromkeys(f for t in natural for f in _fields(t))
            problems.append(f"{OPTION} {choice}: no run has a field {name}; there are {', '.join(fields) or 'none'}")
        elif strange := [str(v) for v in values if v not in known]:
            there = ", ".join(str(v) for v in known if v is not None)
            problems.append(f"{OPTION} {choice}: no run has {name} {', '.join(strange)}; there are {there}")
        wanted[name] = values
    if problems:
        raise InputError(*problems)
    kept = [t for t in found.trials if t.forced or all(_fields(t).get(n) in v for n, v in wanted.items())]
    count = sum(not t.forced for t in kept)
    if not count:
        raise InputError(f"{OPTION}: no run is {' and '.join(choices)} at once")
    note = f"{count} of {len(natural)} natural runs were fitted: {'; '.join(choices)}"
    return replace(found, trials=kept, notes=[*found.notes, note])


def _fields(trial: RecordedTrial) -> dict[str, Any]:
    """What a run can be chosen by."""
    short = {name.rsplit(".", 1)[-1]: value for name, value in trial.point.items()}
    return {"policy": trial.label, "seed": trial.seed} | short | trial.point
