"""Reads the steps of a server while it serves: none twice, none missing, and says on whose clock."""

import time
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any

from adasim.errors import InputError
from adasim.real.sglang_client.api import Api, Gone, Refused
from adasim.real.sglang_plugin.orders import Orders
from adasim.real.sglang_plugin.rounds import Entry, Prefill, Round

POLL_S, FIRST_S = 5.0, 0.5  # between reads at most, before the first: each makes the server wait for some milliseconds
FULL = 0.25  # of what the server keeps, at most, should be new at a read


@dataclass(slots=True)
class Collector:
    """Steps from the first on that begins after ``start``.

    Attributes:
        api: the server.
        steps: in order.
        names: SGLang's ids of requests, by the numbers that steps use.
        offset_s: the server's clock less this machine's.
        unsure_s: what that may be off.
        held: from when to when the server was held, on its clock, since it was started.
    """

    api: Api
    steps: list[Entry] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    offset_s: float = 0.0
    unsure_s: float = float("inf")
    held: list[list[float]] = field(default_factory=list)
    _next: int = 0  # step to be read next
    _stop: Event = field(default_factory=Event)
    _thread: Thread | None = None
    _problem: str = ""

    def start(self) -> None:
        """Forget what was before, and read from time to time.

        Raises:
            InputError: the server has other requests to serve, or keeps no records.
        """
        found = self._look()
        busy = found["running"] + found["waiting"]
        problems = [f"{self.api.url}: serves {busy} requests of others; measure an idle server"] * bool(busy)
        problems += [f"{self.api.url}: kept_rounds is 0 in its settings: it keeps no records"] * (
            not found["kept_rounds"]
        )
        if problems:
            raise InputError(*problems)
        self._next = found["next_step"]
        self.api.order(Orders(forget=self._next))
        self._thread = Thread(target=self._poll, daemon=True)
        self._thread.start()

    def finish(self) -> str:
        """Read the rest; returns what went wrong, "" = nothing."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if not self._problem:
            self._read()
        return self._problem

    def _poll(self) -> None:
        wait_s = min(FIRST_S, POLL_S)
        while not self._stop.wait(wait_s) and not self._problem:
            if (share := self._read()) > 0:
                wait_s = min(POLL_S, wait_s * FULL / share)

    def _read(self) -> float:
        """What is new, which the server may forget then. Returns how much of what it keeps that was."""
        try:
            found = self._look()
            every: list[Entry] = [*(Round(*row) for row in found["rounds"])]
            every += [Prefill(*row) for row in found["prefills"]]
            new = sorted((entry for entry in every if entry.step >= self._next), key=lambda entry: entry.step)
            kept: int = found["kept_rounds"]
            if new and (missing := new[0].step - self._next) > 0:
                self._problem = f"{missing} steps were lost: the server keeps {kept}; raise kept_rounds in its settings"
            elif new:
                self.steps += new
                self.names |= {int(number): name for number, name in found["requests"].items()}
                self._next = new[-1].step + 1
                self.api.order(Orders(forget=self._next))
            return len(new) / kept
        except (Gone, Refused, InputError) as error:
            self._problem = str(error)
        return 0.0

    def _look(self) -> dict[str, Any]:
        """What the plugin says; adjusts the clocks."""
        before_s = time.monotonic()
        found: dict[str, Any] = self.api.info()["adasim"]
        after_s = time.monotonic()
        unsure_s = (after_s - before_s) / 2
        if unsure_s < self.unsure_s:
            offset_s = found["now_s"] - (before_s + after_s) / 2
            same = abs(offset_s) <= unsure_s  # one machine has one clock
            self.offset_s, self.unsure_s = (0.0, 0.0) if same else (offset_s, unsure_s)
        fields = {"fields": Round._fields, "prefill_fields": Prefill._fields}
        if "held" not in found or any(found.get(name) != list(names) for name, names in fields.items()):
            raise InputError(f"{self.api.url}: its adasim {found.get('adasim')} writes other round records than this one")
        self.held = found["held"]
        return found
