"""The trainer beside an engine: a SimPy process that learns from finished requests and publishes drafter versions."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING

import numpy as np
import simpy

from adasim.calibration.labels import labels
from adasim.calibration.rollback import Served
from adasim.calibration.versioned import VersionedLuck
from adasim.records import EventRecord, VersionRecord
from adasim.serving.admission import Admission
from adasim.simulator.learning import Buffer, Learning, Lesson, Sample
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
        admission: who runs, and the lives of finished requests.
        domains: names.
        seed: of the run.
    """

    def __init__(
        self,
        env: simpy.Environment,
        learning: Learning,
        luck: VersionedLuck,
        admission: Admission,
        domains: Sequence[str],
        seed: int,
    ) -> None:
        self.env, self.learning, self.luck, self.admission, self.domains = env, learning, luck, admission, domains
        n, count = len(admission.lives), len(domains)
        self.buffer = Buffer(learning.buffer)
        nothing = Lesson(0.0, np.zeros(count), 0, 0, 0)
        loaded = Version(0, 0, nothing, np.ones(count), luck.level(), luck.bias, "in use", loaded_s=0.0)
        self.versions, self.events = [loaded], list[EventRecord]()
        self.in_use, self._newest = loaded, loaded
        self._ready: Version | None = None  # trained, not in use yet
        self._back_to: Version | None = None  # decided, not loaded yet
        self._decided_s = 0.0
        self.finished_requests = 0
        self._labels, self._reports, self._rounds = np.zeros(n), np.zeros(n), np.zeros(n, dtype=np.int64)
        self._whole = np.random.default_rng([seed, 4])  # which rounds are verified in full
        self._shown = np.zeros(0, dtype=bool)  # of the round that is running
        self._filled = env.event()
        self._training: Version | None = None
        self._left_s = 0.0  # shared: GPU-seconds of the round still to do
        self._changed = env.event()  # shared: serving went idle or busy, or the work is done
        self.idle_since: float | None = None
        self._rested_since: float | None = None
        self._served: dict[int, Served] = {0: Served()}
        self._before, self._judged = loaded, learning.rollback is None
        self._cohort: set[int] = set()  # of the version in use: requests it alone serves, not finished yet
        self._places = 0 if learning.rollback is None else learning.rollback.requests
        self._seen = np.zeros(n, dtype=bool)  # requests that have had a round

    # ---- the engine's side: what happens to its steps

    def idle(self) -> None:
        """The engine has nothing to do from now on."""
        self.idle_since = self.env.now
        self._wake()

    def busy(self) -> None:
        """It has again: a shared GPU has trained meanwhile."""
        assert self.idle_since is not None
        if self._left_s:
            self._left_s = max(0.0, self._left_s - (self.env.now - self.idle_since))
        self._rested_since, self.idle_since = self.idle_since, None
        self._wake()

    def share(self, seconds: StepSeconds) -> StepSeconds:
        """Seconds of a step on a GPU shared with training, whose part counts as overhead."""
        if not self._left_s or self.learning.shared is None:
            return seconds
        extra = min(self._left_s, seconds.total * self.learning.shared / (1 - self.learning.shared))
        self._left_s = max(0.0, self._left_s - extra)
        assert self._training is not None
        self._training.taken_s += extra
        stretched = seconds._replace(overhead=seconds.overhead + extra)
        if not self._left_s:  # done when the step is
            self.env.process(self._wake_after(stretched.total, self._changed))
        return stretched

    def reload(self) -> "Process":
        """Between two steps: stand still and swap the drafter, where there is one to swap."""
        rested, self._rested_since = self._rested_since, None
        version, back = self._back_to, self._back_to is not None
        if version is None and self._ready is not None and self._judged:
            version, self._ready = self._ready, None
        if version is None:
            return
        known_s = self._decided_s if back else version.ready_s
        since = self.env.now if rested is None else max(rested, known_s)
        context = int(self.admission.batch.context.sum())
        pause_s = 1e-3 * self.learning.reload_ms + 1e-6 * self.learning.recompute_us * context
        left_s = max(0.0, since + pause_s - self.env.now)  # an idle engine has loaded it meanwhile
        if left_s:
            yield self.env.timeout(left_s)
        self._use(version, back)
        self._note("loaded", left_s, f"version {version.number}{' again' if back else ''}")

    def whole_blocks(self, verify_lens: IntArray, draft_lens: IntArray) -> IntArray:
        """Verify lengths, some raised to the full block to show the head uncensored lengths, [n]."""
        if not self.learning.trains or not self.learning.head.full_verify_share:
            return verify_lens
        self._shown = self._whole.random(len(verify_lens)) < self.learning.head.full_verify_share
        return np.where(self._shown, draft_lens + 1, verify_lens)

    def observe(self, requests: IntArray, domains: IntArray, at: IntArray, verify_lens: IntArray) -> None:
        """A round is about to end: note who is new, what the head said and what it will be told, [n] each."""
        if self._places:
            new = requests[~self._seen[requests]][: self._places].tolist()
            self._cohort.update(new)
            self._places -= len(new)
        self._seen[requests] = True
        if not self.learning.trains or not self.learning.head.train:
            return
        block = self.luck.max_draft_len + 1
        kind = self.learning.head.label
        said = self.luck.signal[at] + 1 - self.luck.level()[domains]
        told = labels(kind, self.luck.run[at], verify_lens, block)
        if kind == "full_verify":
            whole = self._shown & (verify_lens == block)  # chosen by chance: those that a policy chose are the good ones
            requests, said, told = requests[whole], said[whole], told[whole]
        self._labels[requests] += told
        self._reports[requests] += said
        self._rounds[requests] += 1

    def on_finish(self, index: int) -> None:
        """A request is done: into the buffer, and into the judgement of the version in use."""
        life = self.admission.lives[index]
        self.finished_requests += 1
        if not self.learning.trains:
            return
        tokens = min(life.request.prompt_len + life.tokens, self.learning.max_tokens)
        sums = float(self._labels[index]), float(self._reports[index]), int(self._rounds[index])
        self.buffer.add(Sample(life.request.domain, tokens, *sums))
        if self.buffer.fresh >= (self.learning.refresh or self.learning.buffer) and not self._filled.triggered:
            self._filled.succeed()
        if index in self._cohort:
            self._cohort.remove(index)
            self._served[self.in_use.number].add(life.request.domain, 1 + life.accepted / life.rounds)
            if not self._cohort and not self._places:
                self._judge()

    # ---- the trainer's side

    def run(self) -> "Process":
        """Forever: wait for enough new requests, train, publish."""
        while True:
            yield self._filled
            self._filled = self.env.event()
            version = self._begin()
            yield from self._work(version)
            self._training = None
            self._publish(version)
            if self.buffer.fresh >= (self.learning.refresh or self.learning.buffer) and not self._filled.triggered:
                self._filled.succeed()

    def _begin(self) -> Version:
        """Start a round over the buffer, from the newest version that is not known to be bad."""
        learning, start, number = self.learning, self._newest, len(self.versions)
        samples = list(self.buffer.samples)
        lesson = self.buffer.teach(learning.epochs, learning.reuse, len(self.domains))
        curves = [learning.curve_of(d) for d in self.domains]
        factors = np.array(
            [
                c.after(f, lesson.rounds, s, learning.loss.reach)
                for c, f, s in zip(curves, start.factors.tolist(), lesson.share.tolist(), strict=True)
            ]
        )
        factors *= learning.faults.get(number, 1.0)
        levels = start.levels.copy()
        for d in range(len(self.domains)):
            mine = [s for s in samples if s.domain == d]
            rounds = sum(s.rounds for s in mine)
            if rounds:
                error = (sum(s.labels for s in mine) - sum(s.reports for s in mine)) / rounds - levels[d]
                levels[d] = learning.head.level(levels[d], error, lesson.rounds)
        bias = start.bias + (levels - start.levels) - self.luck.loaded_tau * (factors - start.factors)
        version = Version(number, start.number, lesson, factors, levels, bias, began_s=self.env.now)
        self.versions.append(version)
        self._training = version
        return version

    def _work(self, version: Version) -> "Process":
        """Take the time of a round, on GPUs of its own or on what serving leaves."""
        work_s = self.learning.work_s(version.lesson.tokens)
        if self.learning.shared is None:
            yield self.env.timeout(work_s / self.learning.trainer_gpus)
            return
        self._left_s = work_s
        if self.idle_since is not None:
            self.idle_since = self.env.now
        while self._left_s:
            self._changed = self.env.event()
            if self.idle_since is None:
                yield self._changed
                continue
            changed = self._changed
            yield changed | self.env.timeout(self._left_s)
            if not changed.triggered:
                self._left_s = 0.0

    def _wake_after(self, seconds: float, changed: simpy.Event) -> "Process":
        yield self.env.timeout(seconds)
        if not changed.triggered:
            changed.succeed()

    def _wake(self) -> None:
        if not self._changed.triggered:
            self._changed.succeed()

    # ---- versions

    def _publish(self, version: Version) -> None:
        """Training is done; the engine takes the newest version when it may."""
        version.gpu_s, version.ready_s = self.learning.work_s(version.lesson.tokens), self.env.now
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
            self._served[version.number] = Served()
            if self.learning.rollback is not None:
                self._before, self._judged, self._places = old, False, self.learning.rollback.requests
        self.luck.switch(version.factors, version.bias, keep=self.learning.in_flight == "old")

    def _judge(self) -> None:
        """Decide, once, whether the version in use is worse than the one before."""
        rule, self._judged = self.learning.rollback, True
        assert rule is not None
        if self.in_use is self._before:
            return  # as loaded: there is none before it
        change = rule.change(self._served[self.in_use.number], self._served[self._before.number])
        if change is None or not rule.is_worse(change):
            return
        self.in_use.outcome = "rolled back"
        self._back_to, self._decided_s, self._newest = self._before, self.env.now, self._before
        if self._ready is not None and self._is_spoilt(self._ready):
            self._ready.outcome, self._ready = "discarded", None
        says = f"version {self.in_use.number}: tau {change.tau:+.2f} ± {change.half_width:.2f} against the version before"
        self._note("rolled back", change.tau, says)

    def _is_spoilt(self, version: Version) -> bool:
        """Whether one of the versions that it was trained from has been rolled back."""
        while version.number:
            version = self.versions[version.parent]
            if version.outcome == "rolled back":
                return True
        return False

    def _note(self, kind: str, value: float, says: str) -> None:
        number = self.in_use.number
        self.events.append(EventRecord(self.env.now, kind, number, "", self.finished_requests, value, says))

    def records(self) -> list[VersionRecord]:
        """All versions, a row a domain; the one in training counts the GPU-seconds it has had."""
        if self._training is not None:
            version = self._training
            if self.learning.shared is None:
                version.gpu_s = (self.env.now - version.began_s) * self.learning.trainer_gpus
            else:
                idle_s = 0.0 if self.idle_since is None else self.env.now - self.idle_since
                version.gpu_s = self.learning.work_s(version.lesson.tokens) - max(0.0, self._left_s - idle_s)
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
                self.learning.trainer_gpus,
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
