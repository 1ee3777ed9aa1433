"""Time stamps of server logs."""

import re
from datetime import datetime, timedelta

FULL = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d(?:[.,]\d{1,6})?)")
SHORT = re.compile(r"\b(\d\d-\d\d) (\d\d:\d\d:\d\d)\b")  # vLLM writes no year


class LogClock:
    """Seconds since the first stamped line. Where no year is written, a jump back by half a year begins the next one."""

    def __init__(self) -> None:
        self._first: datetime | None = None
        self._last: datetime | None = None
        self._year = 2024  # a leap year, so that the first one may have any day

    def seconds(self, line: str) -> float | None:
        """Of this line; None when it has no stamp."""
        if found := FULL.search(line):
            stamp = _stamp(f"{found[1]} {found[2].replace(',', '.')}")
        elif found := SHORT.search(line):
            stamp = _stamp(f"{self._year}-{found[1]} {found[2]}")
            if stamp and self._last and stamp < self._last - timedelta(days=180):
                self._year += 1
                stamp = _stamp(f"{self._year}-{found[1]} {found[2]}")
        else:
            return None
        if stamp is None:
            return None
        self._last = stamp
        self._first = self._first or stamp
        return (stamp - self._first).total_seconds()


def _stamp(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None
