"""Where requests come from: clients of a closed loop, or arrivals on the clock."""

from collections.abc import Callable, Sequence

import simpy

from adasim.serving.admission import Admission
from adasim.serving.monitor import Finished
from adasim.serving.ranks import Ranks
from adasim.simulator.engine import Engine, Process
from adasim.types import IntArray, Request
from adasim.workload import Workload


class Source:
    """Sends requests to the engine, and tells ``watchers`` of those that finished; ``over`` happens after the last."""

    def __init__(
        self, env: simpy.Environment, workload: Workload, requests: Sequence[Request], admission: Admission | Ranks
    ) -> None:
        self.env, self.clients, self.admission = env, workload.clients, admission
        self.requests, self.sent, self.finished = requests, 0, 0
        self.drain = getattr(workload, "drain", True)
        self.over = env.event()
        self.watchers: list[Callable[[Finished], None]] = []

    def start(self, engine: Engine, submit: Callable[[int], None]) -> None:
        """Send the first requests, or begin to wait for them."""
        self.engine, self._submit = engine, submit
        if self.clients is None:
            self.env.process(self._arrivals())
        else:
            for _ in range(self.clients):
                self._send()

    def on_finish(self, index: int) -> None:
        """A request is done: in a closed loop its client sends the next."""
        self.finished += 1
        self.admission.lives.draft_version[index] = self.engine.recorder.draft_version
        for watch in self.watchers:
            watch(Finished.of(self.admission.lives, index))
        if self.clients is not None:
            self._send()
        if self.finished == len(self.requests):
            self._end()

    @property
    def ahead(self) -> int | None:
        """Requests that clients may send as others finish, without the last, which may end the run; None = all are sent.

        0 in open loops, and where somebody watches.
        """
        if self.clients is None or self.watchers:
            return 0
        return len(self.requests) - 1 - self.sent if self.sent < len(self.requests) else None

    def send_after(self, finished: IntArray) -> range:
        """Requests that clients sent as each of ``finished`` was done; not the last of the run."""
        sent = range(self.sent, min(self.sent + len(finished), len(self.requests)))
        self.admission.lives.draft_version[finished] = self.engine.recorder.draft_version
        self.sent, self.finished = sent.stop, self.finished + len(finished)
        return sent

    def _send(self) -> None:
        if self.sent == len(self.requests):
            return
        self._submit(self.sent)
        self.sent += 1
        if self.sent == len(self.requests) and not self.drain:
            self._end()

    def _arrivals(self) -> Process:
        for request in self.requests:
            if request.arrival_s > self.env.now:
                yield self.env.timeout(request.arrival_s - self.env.now)
            self._send()

    def _end(self) -> None:
        if not self.over.triggered:
            self.over.succeed()
