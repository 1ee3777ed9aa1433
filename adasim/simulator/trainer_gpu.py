"""Where a training round gets its GPU time: from GPUs of its own, or from the one that serves."""

from typing import TYPE_CHECKING

import simpy

if TYPE_CHECKING:
    from adasim.simulator.engine import Process


class OwnGpus:
    """GPUs that only train, used perfectly."""

    def __init__(self, env: simpy.Environment, count: int) -> None:
        self.env, self.count = env, count
        self._began_s, self._working = 0.0, False

    def work(self, gpu_s: float) -> "Process":
        """A round of ``gpu_s`` GPU-seconds."""
        self._began_s, self._working = self.env.now, True
        yield self.env.timeout(gpu_s / self.count)
        self._working = False

    def done_s(self) -> float:
        """GPU-seconds that the round under way has had."""
        return (self.env.now - self._began_s) * self.count if self._working else 0.0

    def idle(self) -> None:
        """Serving has nothing to do: no matter here."""

    def busy(self) -> None:
        """Serving has work again: no matter here."""

    def take(self, serving_s: float) -> float:
        """Seconds that training takes from a step of ``serving_s``: none."""
        return 0.0


class SharedGpu:
    """The serving GPU: training gets all of it while serving is idle, and a share while serving is busy.

    GPU time is conserved: a step of s seconds takes s + x while x seconds of training are done, x = s share / (1 - share)
    or what is left of the round.
    """

    count = 0  # GPUs of its own

    def __init__(self, env: simpy.Environment, share: float) -> None:
        self.env, self.part = env, share / (1 - share)
        self._gpu_s, self._left_s = 0.0, 0.0
        self._idle_since: float | None = None
        self._changed = env.event()  # serving went idle or busy, or the round is done

    def work(self, gpu_s: float) -> "Process":
        """A round of ``gpu_s`` GPU-seconds, in steps of serving and between them."""
        self._gpu_s = self._left_s = gpu_s
        if self._idle_since is not None:
            self._idle_since = self.env.now
        while self._left_s:
            changed = self._changed = self.env.event()
            if self._idle_since is None:
                yield changed
            else:
                yield changed | self.env.timeout(self._left_s)
                if not changed.triggered:  # idle to the round's end
                    self._left_s = 0.0

    def done_s(self) -> float:
        """GPU-seconds that the round under way has had."""
        idle_s = 0.0 if self._idle_since is None else self.env.now - self._idle_since
        return self._gpu_s - max(0.0, self._left_s - idle_s)

    def idle(self) -> None:
        """Serving has nothing to do from now on."""
        self._idle_since = self.env.now
        self._wake(self._changed)

    def busy(self) -> None:
        """Serving has work again; training has had the GPU meanwhile."""
        assert self._idle_since is not None
        self._left_s = max(0.0, self._left_s - (self.env.now - self._idle_since))
        self._idle_since = None
        self._wake(self._changed)

    def take(self, serving_s: float) -> float:
        """Seconds that training takes from a step of ``serving_s``."""
        if not self._left_s:
            return 0.0
        taken_s = min(self._left_s, serving_s * self.part)
        self._left_s -= taken_s
        if not self._left_s:  # done when the step is
            self.env.process(self._wake_later(serving_s + taken_s, self._changed))
        return taken_s

    def _wake_later(self, seconds: float, changed: simpy.Event) -> "Process":
        yield self.env.timeout(seconds)
        self._wake(changed)

    def _wake(self, changed: simpy.Event) -> None:
        if not changed.triggered:
            changed.succeed()
