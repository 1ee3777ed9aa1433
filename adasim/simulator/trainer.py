"""The trainer beside an engine: a SimPy process that learns from finished requests and publishes drafter versions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING

import numpy as np
import simpy

from adasim.calibration.rollback import Change
from adasim.calibration.versioned import VersionedLuck
from adasim.records import EventRecord, VersionRecord
from adasim.serving.judge import Judge
from adasim.serving.monitor import Finished
from adasim.simulator.head_labels import HeadLabels
from adasim.simulator.learning import Buffer, Learning, Lesson
from adasim.simulator.trainer_gpu import OwnGpus, SharedGpu
from adasim.types import FloatArray, IntArray, StepSeconds

if TYPE_CHECKING:
    from adasim.simulator.engine import Process


@dataclass(slots=True)
class Version:
    """A drafter and its head, and how they came to be."""

    number: int
    parent: int
    lesson: Lesson
    factors: FloatArray  # [domains] tau as a factor of that as loaded
    levels: FloatArray  # [domains] what the head reports on average, tokens
    bias: FloatArray  # [domains] the same, less tau
    outcome: str = "training"
    began_s: float = nan
    ready_s: float = nan
    loaded_s: float = nan
    gpu_s: float = 0.0
    taken_s: float = 0.0


class Trainer:
    """Learns, publishes, and swaps the engine's drafter between two steps.

    Args:
        env: the clock.
        learning: its settings.
        luck: what a version changes.
        requests: of the whole run.
        domains: names.
        seed: of the run.
        context_tokens: says how many tokens the running requests' contexts have now.
        events: where to note what happens.
    """

    def __init__(
        self,
        env: simpy.Environment,
        learning: Learning,
        luck: VersionedLuck,
        requests: int,
        domains: Sequence[str],
        seed: int,
        context_tokens: Callable[[], int],
        events: list[EventRecord],
    ) -> None:
        self.env, self.learning, self.luck, self.domains = env, learning, luck, domains
        self.context_tokens = context_tokens
        shared = learning.shared
        self.gpu = SharedGpu(env, shared) if shared is not None else OwnGpus(env, learning.trainer_gpus)
        self.judge = Judge(learning.rollback if learning.trains else None)
        self.buffer, self.events = Buffer(learning.buffer), events
        nothing = Lesson(0.0, np.zeros(len(domains)), 0, 0, 0)
        self.in_use = Version(0, 0, nothing, np.ones(len(domains)), luck.level(), luck.bias, "in use", loaded_s=0.0)
        self.versions, self._newest = [self.in_use], self.in_use
        self._training: Version | None = None
        self._ready: Version | None = None  # trained, not in use yet
        self._back_to: Version | None = None  # to be loaded again
        self._decided_s = 0.0
        self._before = self.in_use
        self._finished = 0
        self._filled = env.event()
        self.labels = HeadLabels(learning.head, requests, luck.max_draft_len + 1, seed)
        self._rested_since: float | None = None

    # ---- the engine's side

    def idle(self) -> None:
        """The engine has nothing to do from now on."""
        self._rested_since = self.env.now
        self.gpu.idle()

    def busy(self) -> None:
        """It has again."""
        self.gpu.busy()

    def share(self, seconds: StepSeconds) -> StepSeconds:
        """Seconds of a step, with what training takes on a shared GPU as overhead."""
        taken_s = self.gpu.take(seconds.total)
        if not taken_s:
            return seconds
        assert self._training is not None
        self._training.taken_s += taken_s
        return seconds._replace(overhead=seconds.overhead + taken_s)

    def reload(self) -> "Process":
        """Between two steps: stand still and swap the drafter, where there is one to swap."""
        rested, self._rested_since = self._rested_since, None
        version, back = self._back_to, self._back_to is not None
        if version is None and self._ready is not None and not self.judge.waiting:
            version, self._ready = self._ready, None
        if version is None:
            return
        since = self.env.now if rested is None else max(rested, self._decided_s if back else version.ready_s)
        pause_s = 1e-3 * self.learning.reload_ms + 1e-6 * self.learning.recompute_us * self.context_tokens()
        left_s = max(0.0, since + pause_s - self.env.now)  # an idle engine has loaded it meanwhile
        if left_s:
            yield self.env.timeout(left_s)
        self._use(version, back)
        self._note("reload", left_s, f"version {version.number}{' again' if back else ''}")

    @property
    def shows_whole(self) -> bool:
        """Whether some blocks are drafted and verified in full, whatever the policy says, for the head to learn from."""
        return self.learning.trains and self.learning.head.full_verify_share > 0

    def observe(
        self, requests: IntArray, domains: IntArray, run: IntArray, reports: FloatArray, verify_lens: IntArray
    ) -> None:
        """A round is about to end.

        Args:
            requests: that take part, [n].
            domains: of each, [n].
            run: L, [n].
            reports: of the length head, tokens with the anchor counted, [n].
            verify_lens: tokens verified, [n].
        """
        self.judge.see(requests)
        if self.learning.trains and self.learning.head.train:
            self.labels.note(requests, run, reports - self.luck.level()[domains], verify_lens)

    def on_finish(self, done: Finished) -> None:
        """A request is done: into the buffer, and into the judgement of the version in use."""
        self._finished += 1
        if not self.learning.trains:
            return
        tokens = min(done.tokens, self.learning.max_tokens)
        self.buffer.add(self.labels.sample(done.request, done.domain, tokens))
        self._ask()
        worse = self.judge.finish(done.request, done.domain, done.tau if done.rounds else None)
        if worse is not None:
            self._go_back(worse)

    # ---- the trainer's side

    def run(self) -> "Process":
        """Forever: wait for enough new requests, train, publish."""
        while True:
            yield self._filled
            self._filled = self.env.event()
            version = self._begin()
            yield from self.gpu.work(self.learning.work_s(version.lesson.tokens))
            self._publish(version)
            self._ask()

    def _ask(self) -> None:
        """For a round, where enough requests in the buffer are new."""
        if self.buffer.fresh >= (self.learning.refresh or self.learning.buffer) and not self._filled.triggered:
            self._filled.succeed()

    def _begin(self) -> Version:
        """Start a round over the buffer, from the newest version that is not known to be bad."""
        learning, start, number = self.learning, self._newest, len(self.versions)
        lesson = self.buffer.teach(learning.epochs, learning.reuse, len(self.domains))
        curves = [learning.curve_of(d) for d in self.domains]
        factors = np.array(
            [
                c.after(f, lesson.rounds, s, learning.loss.reach)
                for c, f, s in zip(curves, start.factors.tolist(), lesson.share.tolist(), strict=True)
            ]
        )
        factors *= learning.faults.get(number, 1.0)
        levels = self.labels.levels(self.buffer.samples, start.levels, lesson.rounds)
        bias = start.bias + (levels - start.levels) - self.luck.loaded_tau * (factors - start.factors)
        version = Version(number, start.number, lesson, factors, levels, bias, began_s=self.env.now)
        self.versions.append(version)
        self._training = version
        return version

    # ---- versions

    def _publish(self, version: Version) -> None:
        """Training is done; the engine takes the newest version when it may."""
        version.gpu_s, version.ready_s = self.learning.work_s(version.lesson.tokens), self.env.now
        self._training = None
        if self._is_spoilt(version):
            version.outcome = "discarded"
            return
        if self._ready is not None:
            self._ready.outcome = "replaced"
        version.outcome = "ready"
        self._ready = self._newest = version

    def _use(self, version: Version, back: bool) -> None:
        old = self.in_use
        self.in_use, version.outcome = version, "in use"
        if back:
            self._back_to = None
        else:
            old.outcome, version.loaded_s = "replaced", self.env.now
            self._before = old
            self.judge.begin(version.number, old.number)
        self.luck.switch(version.factors, version.bias, keep=self.learning.in_flight == "old")

    def _go_back(self, change: Change) -> None:
        """The version in use is worse than the one before; what was trained from it is no good either."""
        self.in_use.outcome = "rolled back"
        self._back_to, self._decided_s, self._newest = self._before, self.env.now, self._before
        if self._ready is not None and self._is_spoilt(self._ready):
            self._ready.outcome, self._ready = "discarded", None
        says = f"version {self.in_use.number}: tau {change.tau:+.2f} ± {change.half_width:.2f} against the version before"
        self._note("rollback", 0.0, says)

    def _is_spoilt(self, version: Version) -> bool:
        """Whether one of the versions that it was trained from has been rolled back."""
        while version.number:
            version = self.versions[version.parent]
            if version.outcome == "rolled back":
                return True
        return False

    def _note(self, kind: str, seconds: float, detail: str) -> None:
        event = EventRecord(self.env.now, kind, self.in_use.number, seconds, detail, finished=self._finished)
        self.events.append(event)

    def records(self) -> list[VersionRecord]:
        """All versions, a row a domain; the one in training counts the GPU-seconds it has had."""
        if self._training is not None:
            self._training.gpu_s = self.gpu.done_s()
        return [
            VersionRecord(
                v.number,
                v.parent,
                v.outcome,
                v.began_s,
                v.ready_s,
                v.loaded_s,
                v.lesson.samples,
                v.lesson.fresh,
                v.lesson.tokens * self.learning.epochs,
                self.gpu.count,
                v.gpu_s,
                v.taken_s,
                name,
                float(v.lesson.share[d]),
                float(self.luck.loaded_tau[d] * v.factors[d]),
                float(v.bias[d]),
            )
            for v in self.versions
            for d, name in enumerate(self.domains)
        ]
