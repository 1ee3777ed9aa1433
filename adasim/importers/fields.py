"""Values of one record, checked: what is missing is None, what cannot be is refused with what is allowed."""

import math
from collections.abc import Mapping
from typing import Any

MAX_COUNT = 10**15


class Malformed(ValueError):
    """One record cannot be used. Says what is wrong and what is allowed; the reader adds where."""


def number(record: Mapping[str, Any], name: str, *, low: float = 0.0, high: float = math.inf) -> float | None:
    """A finite number in ``low..high``, from JSON or text; None when absent, null, empty or NaN.

    Raises:
        Malformed: anything else.
    """
    value = record.get(name)
    if value is None or value == "":
        return None
    try:
        found = math.inf if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        found = math.inf
    if math.isnan(found):
        return None
    if not low <= found <= high or math.isinf(found):
        limit = f"{low:g}..{high:g}" if high < math.inf else f"a number >= {low:g}"
        raise Malformed(f"{name} is {_shown(value)}, allowed: {limit}")
    return found


def whole(record: Mapping[str, Any], name: str, *, high: int = MAX_COUNT) -> int | None:
    """A count; None when absent.

    Raises:
        Malformed: negative, fractional or no number.
    """
    found = number(record, name, high=high)
    if found is None:
        return None
    if found % 1:
        raise Malformed(f"{name} is {_shown(record[name])}, allowed: a whole number >= 0")
    return int(found)


def text(record: Mapping[str, Any], name: str) -> str | None:
    """A text, or a plain value as one; None when absent or empty."""
    value = record.get(name)
    return None if value is None or value == "" or isinstance(value, dict | list) else str(value)


def mapping(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object within; an empty one when absent.

    Raises:
        Malformed: it is something else.
    """
    value = record.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise Malformed(f"{name} is {_shown(value)}, allowed: an object")
    return value


def numbers(value: Any, name: str, *, low: float = 0.0, high: float = math.inf) -> list[float]:
    """A list of finite numbers in ``low..high``; empty when null.

    Raises:
        Malformed: no list, or an entry that cannot be (the first is named).
    """
    if value is None:
        return []
    if not isinstance(value, list):
        raise Malformed(f"{name} is {_shown(value)}, allowed: a list of numbers")
    for i, item in enumerate(value):
        if type(item) not in {int, float} or not low <= item <= high or math.isinf(item):
            limit = f"{low:g}..{high:g}" if high < math.inf else f"numbers >= {low:g}"
            raise Malformed(f"{name}[{i}] is {_shown(item)}, allowed: {limit}")
    return [float(v) for v in value]


def needed(value: float | None, name: str) -> float:
    """The value.

    Raises:
        Malformed: there is none.
    """
    if value is None:
        raise Malformed(f"{name} is missing")
    return value


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else shown[:37] + "..."
