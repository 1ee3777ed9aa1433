"""Sends a workload to a server, as its clients would."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Event, Lock, Thread
from typing import Any

from adasim.real.sglang_client.api import Api, Gone, Refused
from adasim.types import Request
from adasim.workload import Workload


@dataclass(slots=True)
class Traffic:
    """What was sent and what came back, request by request. Seconds are this machine's monotonic clock.

    Attributes:
        sent_s: when each was sent.
        answers: SGLang's ``output_ids`` and ``meta_info`` of those that were finished.
        lost: what ended the run early; "" = nothing.
        late_s: how much later than asked the latest request of an open loop was sent.
    """

    sent_s: dict[int, float] = field(default_factory=dict)
    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    lost: str = ""
    late_s: float = 0.0


@dataclass(slots=True)
class Sender:
    """Sends prompts and waits for their answers, each in a thread of its own.

    Attributes:
        api: the server.
        requests: in order of arrival.
        prompts: tokens of each.
        name: what SGLang's ids of requests begin with; their index follows.
        shapes: SGLang's sampling parameters of each.
    """

    api: Api
    requests: Sequence[Request]
    prompts: Sequence[list[int]]
    name: str
    shapes: Sequence[dict[str, Any]]
    traffic: Traffic = field(default_factory=Traffic)
    _next: int = 0
    _lock: Lock = field(default_factory=Lock)
    _sent: Event = field(default_factory=Event)  # all are
    _stop: Event = field(default_factory=Event)  # nothing more is to be sent
    _ending: bool = False  # what runs is to be aborted

    def send(self, workload: Workload, began_s: float) -> None:
        """As the workload says, from ``began_s`` on; comes back when all is answered, or lost."""
        try:
            if workload.clients is None:
                self._open(began_s)
            else:
                self._closed(workload.clients, drain=bool(getattr(workload, "drain", True)))
        except Exception as error:  # on a thread of its own nobody else would notice
            self._lose(f"{type(error).__name__}: {error}")
            raise

    def _closed(self, clients: int, *, drain: bool) -> None:
        """``clients`` send one after the other; without ``drain`` all is over when the last request has been sent."""
        threads = [Thread(target=self._client, daemon=True) for _ in range(min(clients, len(self.requests)))]
        for thread in threads:
            thread.start()
        if not drain:
            while not (self._sent.wait(0.5) or self._stop.is_set()):
                pass
            self._end(threads)
        _join(threads)

    def _open(self, began_s: float) -> None:
        """Everyone at the time of arrival, counted from ``began_s``."""
        threads = []
        for index, request in enumerate(self.requests):
            if self._stop.wait(max(began_s + request.arrival_s - time.monotonic(), 0.0)):
                break
            self.traffic.late_s = max(self.traffic.late_s, time.monotonic() - began_s - request.arrival_s)
            threads.append(Thread(target=self._ask, args=(index,), daemon=True))
            threads[-1].start()
        _join(threads)

    def abort(self) -> None:
        """Send no more, and end what is under way; requests of others go on."""
        self._ending = True
        with self._lock:
            self._next = len(self.requests)
            under_way = self.traffic.sent_s.keys() - self.traffic.answers.keys()
        for index in sorted(under_way):
            try:
                self.api.abort(f"{self.name}{index}")
            except (Gone, Refused) as error:
                self._lose(str(error))

    def _end(self, threads: Sequence[Thread]) -> None:
        """Abort what runs; again, since the last request may still be on its way."""
        while any(t.is_alive() for t in threads) and not self._stop.is_set():
            self.abort()
            time.sleep(0.2)

    def _client(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                if self._next >= len(self.requests):
                    return
                index, self._next = self._next, self._next + 1
            self._ask(index)

    def _ask(self, index: int) -> None:
        """One request, from sending to its answer."""
        with self._lock:
            self.traffic.sent_s[index] = time.monotonic()
            if len(self.traffic.sent_s) == len(self.requests):
                self._sent.set()
        try:
            answer = self.api.generate(f"{self.name}{index}", self.prompts[index], self.shapes[index])
        except (Gone, Refused) as error:
            self._lose(str(error))
            return
        reason = answer["meta_info"].get("finish_reason") or {}
        if reason.get("type") != "abort":
            self.traffic.answers[index] = answer
        elif not self._ending:
            self._lose(f"the server aborted request {index}: {reason.get('message')}")

    def _lose(self, why: str) -> None:
        with self._lock:
            self.traffic.lost = self.traffic.lost or why
        self._stop.set()


def _join(threads: Sequence[Thread]) -> None:
    """Wait for all; unlike a bare join, Ctrl-C gets through."""
    for thread in threads:
        while thread.is_alive():
            thread.join(0.5)
