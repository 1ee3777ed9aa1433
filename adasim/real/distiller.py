"""The serving side of on-policy distillation: fills the buffer, watches the trainer, loads and judges versions.

Serving never waits for the trainer and never trusts it: whatever it does, the drafter in use stays until a
version has been read whole, checked, and found to fit.
"""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from adasim.calibration.rollback import Change
from adasim.real.checkpoint import Checkpoint
from adasim.real.collect import Collector
from adasim.real.draft import ready
from adasim.real.engine import Engine
from adasim.real.features import TOP
from adasim.real.opd import Opd
from adasim.real.opd_process import Folder, roll_back
from adasim.real.samples import ReplayBuffer, Sample, write_samples
from adasim.real.sampling import Sampling
from adasim.real.target import Target
from adasim.real.versions import Version
from adasim.records import EventRecord
from adasim.serving.judge import Judge

END_S = 3.0  # a trainer that is asked to end gets so long


class Distiller:
    """One serving engine's trainer.

    Args:
        start: the drafter in use, version 0.
        root: an empty folder that serving and trainer share.
        name: the target's, for a trainer that runs it.
        domains: names.
        command: what starts the trainer; the folder is appended.
        check_s: between two looks at the folder.
    """

    def __init__(
        self, opd: Opd, start: Checkpoint, target: Target, name: str, sampling: Sampling, root: Path,
        domains: Sequence[str], command: Sequence[str] = (sys.executable, "-m", "adasim.real.opd_process"),
        check_s: float = 0.25,
    ) -> None:  # fmt: skip
        self.opd, self.start, self.target, self.domains = opd, start, target, domains
        self.buffer, self.judge = ReplayBuffer(opd.buffer), Judge(opd.rollback)
        self._worse: Change | None = None  # what the version in use changed, when it must go
        self.collector = Collector(self._take, opd.max_tokens, rejected=opd.positions == "all")
        self.folder = Folder(root)
        self.folder.prepare(opd, sampling, start, target, name, domains)
        self.command, self.check_s = [*command, str(root)], check_s
        self.process: subprocess.Popen[bytes] | None = None
        self.failed = ""  # why the trainer is gone
        self.current = 0
        self.before = 0  # the version that ``current`` is judged against
        self._bad: set[int] = set()  # rolled back, or trained from what was
        self.train_s = 0.0
        self.sent, self._seen, self._looked = 0, 0, 0.0
        self._alive_s, self._mtime = time.monotonic(), 0.0

    def __enter__(self) -> Self:
        with self.folder.log.open("wb") as log:
            self.process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=log, stderr=log)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def poll(self, engine: Engine) -> None:
        """Between two rounds: hand samples over, see how the trainer does, take or give back a version."""
        running = engine.batch.request
        self.judge.see(running[engine.admission.lives.rounds[running] > 0])
        now = time.monotonic()
        if now - self._looked < self.check_s:
            return
        self._looked = now
        self._watch(engine)
        if self.buffer.full and not self.failed and self.idle:
            self.sent += 1
            write_samples(self.folder.buffers / f"{self.sent:06d}.npz", self.buffer.take())
        if self._worse is not None:
            self._go_back(engine, self._worse)
        if not self.judge.waiting:
            self._update(engine)

    @property
    def idle(self) -> bool:
        """Whether the trainer has done all that it was given."""
        return self.sent == 0 or any(n >= self.sent for n in self.folder.versions.numbers())

    def notes(self) -> list[str]:
        """What a report must say."""
        said = [
            f"distillation: {self._seen} versions, trainer busy {self.train_s:.0f} s; target distributions kept as the "
            f"top {TOP} tokens and the rest; {self.opd.full_verify_share:.0%} of rounds verified their whole block"
        ]
        if self.buffer.dropped:
            said.append(f"distillation: {self.buffer.dropped} requests fell out of the buffer before they were trained")
        if self.failed:
            said.append(f"ALARM: the trainer failed, serving went on with version {self.current}: {self.failed}")
        return said

    def _take(self, sample: Sample) -> None:
        self.buffer.add(sample)
        text, accepted = sample.lesson.text, [r.accepted for r in sample.rounds]
        if accepted:  # its only round may have been its last
            self.judge.see(np.array([text.index]))
        tau = 1 + sum(accepted) / len(accepted) if accepted else None
        self._worse = self.judge.finish(text.index, text.domain, tau) or self._worse

    def _watch(self, engine: Engine) -> None:
        """Notice a trainer that died or hangs."""
        if self.failed or self.process is None:
            return
        code, now = self.process.poll(), time.monotonic()
        alive = self.folder.alive.stat().st_mtime if self.folder.alive.exists() else 0.0
        if alive != self._mtime:
            self._mtime, self._alive_s = alive, now
        if code is not None:
            lines = self.folder.log.read_text(errors="replace").strip().splitlines()
            self._fail(engine, f"exit code {code}: {lines[-1] if lines else 'it said nothing'}")
        elif now - self._alive_s > self.opd.hang_s:
            self.process.kill()
            self._fail(engine, f"no sign of life for {self.opd.hang_s:g} s, killed")

    def _fail(self, engine: Engine, reason: str) -> None:
        self.failed = reason
        self._event(engine, "trainer_failed", self.current, 0.0, reason)

    def _update(self, engine: Engine) -> None:
        """Use the newest version that was not looked at, if it is sound and comes from none that was rolled back."""
        versions, start = self.folder.versions, engine.clock()
        unseen = [n for n in versions.numbers() if n > self._seen]
        if not unseen:
            return
        self._seen = unseen[-1]
        for number in unseen:  # the oldest first: what came from a bad one is bad, and so is what came from that
            if versions.parent(number) in self._bad:
                self._bad.add(number)
                self._event(engine, "refused", number, 0.0, "it was trained from a version that was rolled back")
        found, refused = versions.newest([n for n in unseen if n not in self._bad], self.start.shape)
        for r in refused:
            self._event(engine, "refused", r.number, 0.0, r.reason)
        if found is None:
            return
        train_s = float(found.manifest.get("train_s", 0.0))
        self._event(engine, "trained", found.number, train_s, "")
        self._use(engine, found.number, found.checkpoint, start, "reload", _told(found))
        self.train_s += train_s
        self.before, self.current = self.current, found.number
        self.judge.begin(self.current, self.before)
        if self.opd.keep is None:
            versions.prune(self.before)

    def _go_back(self, engine: Engine, worse: Change) -> None:
        """Return to the version before: this one accepts less."""
        start, bad, self._worse = engine.clock(), self.current, None
        self._bad.add(bad)
        good = self.folder.versions.load(self.before, self.start.shape) if self.before else None
        checkpoint = good.checkpoint if isinstance(good, Version) else self.start
        self.current = self.before if isinstance(good, Version) else 0
        roll_back(self.folder, self.current)
        told = f"ALARM: version {bad}: tau {worse.tau:+.3f} ± {worse.half_width:.3f} against the version before"
        self._use(engine, self.current, checkpoint, start, "rollback", told)

    def _use(self, engine: Engine, number: int, new: Checkpoint, start: float, kind: str, detail: str) -> None:
        """Swap the drafter between two rounds; what it took since ``start`` is the pause."""
        engine.reload(*ready(new, self.target), number)
        self._event(engine, kind, number, engine.clock() - start, detail)

    def _event(self, engine: Engine, kind: str, version: int, seconds: float, detail: str) -> None:
        engine.recorder.events.append(EventRecord(engine.clock(), kind, version, seconds, detail))

    def _stop(self) -> None:
        if self.process is None or self.process.stdin is None:
            return
        self.process.stdin.close()
        try:
            self.process.wait(0.0 if self.failed else END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _told(version: Version) -> str:
    facts = version.manifest
    return (f"trained on {facts['samples']} requests in {facts['train_s']:.1f} s ({facts['steps']} steps, loss "
            f"{facts['losses'][0]:.3f} to {facts['losses'][-1]:.3f}, {facts['clipped']:.1%} clipped)")  # fmt: skip
