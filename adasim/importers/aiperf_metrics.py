"""AIPerf's metrics: values with their units."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from adasim.importers.fields import Malformed, mapping, number, whole

SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "seconds": 1.0}


def value_of(metrics: Mapping[str, Any], name: str) -> Any:
    """A metric's value, as it stands."""
    return mapping(metrics, name).get("value")


def seconds_per_unit(metrics: Mapping[str, Any], name: str) -> float:
    """Seconds of a metric's unit.

    Raises:
        Malformed: an unknown unit.
    """
    unit = mapping(metrics, name).get("unit", "ms")
    if unit not in SECONDS:
        raise Malformed(f"{name}: unit {unit!r}, allowed: {', '.join(SECONDS)}")
    return SECONDS[unit]


def seconds_of(metrics: Mapping[str, Any], name: str) -> float | None:
    """A time; None when absent."""
    value = number({name: value_of(metrics, name)}, name)
    return None if value is None else value * seconds_per_unit(metrics, name)


def count_of(metrics: Mapping[str, Any], name: str) -> int | None:
    """A count; None when absent."""
    return whole({name: value_of(metrics, name)}, name)


def histogram_of(given: Mapping[str, Any]) -> Counter[int]:
    """Rounds by drafts accepted."""
    found = Counter[int]()
    for drafts in given:
        if not drafts.isdecimal() or len(drafts) > 4:
            raise Malformed(f"acceptance_histogram: {drafts!r} is no number of drafts")
        found[int(drafts)] = whole(given, drafts) or 0
    return found
