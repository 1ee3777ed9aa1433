"""Moments of a round on the server's monotonic clock: as the host sees them on a CPU, as the device does on a GPU."""

import time
from typing import Any

import torch

REBASE_S = 30.0  # events tell milliseconds in single precision: beyond that they are counted from a later one


class Marks:
    """Takes moments and tells their seconds. On a GPU they are events of the current stream, which cost no waiting."""

    def __init__(self, device: str) -> None:
        self._cuda = device != "cpu"
        if self._cuda:
            self._base, self._base_s = self._event(), time.monotonic()
            self._base.synchronize()
            self._base_s = (self._base_s + time.monotonic()) / 2

    def now(self) -> Any:
        """This moment, in the order of the work that was given to the device."""
        return self._event() if self._cuda else time.monotonic()

    def known(self, mark: Any) -> bool:
        """Whether the device has come that far."""
        return bool(mark.query()) if self._cuda else True

    def seconds(self, mark: Any) -> float:
        """Of a moment that is known."""
        if not self._cuda:
            return float(mark)
        found = self._base_s + 1e-3 * float(self._base.elapsed_time(mark))
        if found > self._base_s + REBASE_S:
            self._base, self._base_s = mark, found
        return found

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
