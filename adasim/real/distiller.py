"""On-policy distillation in the torch engine: fills the buffer and swaps drafters, between two engine steps.

Serving never waits for the trainer and never trusts it: whatever it does, the drafter in use stays until a
version has been read whole, checked, and found to fit.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from adasim.real.checkpoint import Checkpoint
from adasim.real.collect import Collector
from adasim.real.draft import ready
from adasim.real.engine import Engine
from adasim.real.keeper import Keeper
from adasim.real.opd import Opd
from adasim.real.opd_process import COMMAND, Folder
from adasim.real.samples import ReplayBuffer, Sample
from adasim.real.sampling import Sampling
from adasim.real.target import Target
from adasim.real.trainer_process import TrainerProcess
from adasim.records import EventRecord


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
        domains: Sequence[str], command: Sequence[str] = COMMAND, check_s: float = 0.25,
    ) -> None:  # fmt: skip
        self.opd, self.target, self.check_s = opd, target, check_s
        self.buffer = ReplayBuffer(opd.buffer)
        self.collector = Collector(self._take, opd.max_tokens, rejected=opd.positions == "all")
        self.folder = Folder(root)
        self.folder.prepare(opd, sampling, start, target.embedding, target.head_weight, name, domains)
        self.trainer = TrainerProcess([*command, str(root)], self.folder, opd.hang_s)
        self.keeper = Keeper(opd, start, self.folder, self._note, keep=opd.keep is not None)
        self.sent, self._looked = 0, 0.0
        self._engine: Engine | None = None

    def __enter__(self) -> Self:
        self.trainer.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.trainer.__exit__(kind, error, trace)

    def poll(self, engine: Engine) -> None:
        """Between two rounds: hand samples over, see how the trainer does, take or give back a version."""
        self._engine, running = engine, engine.batch.request
        self.keeper.judge.see(running[engine.admission.lives.rounds[running] > 0])
        now = time.monotonic()
        if now - self._looked < self.check_s:
            return
        self._looked = now
        reason = self.trainer.failure()
        if reason:
            self._note("trainer_failed", self.keeper.current, 0.0, reason)
        if self.buffer.full and not self.trainer.failed and self.idle:
            self.sent += 1
            self.folder.send(self.sent, self.buffer.take(), keep=self.opd.keep is not None)
        while True:
            start = engine.clock()
            move = self.keeper.move()
            if move is None:
                return
            engine.reload(*ready(move.checkpoint, self.target), move.number)
            self.keeper.moved(move, engine.clock() - start)

    @property
    def idle(self) -> bool:
        """Whether the trainer has done all that it was given."""
        return self.folder.trained(self.sent)

    def notes(self) -> list[str]:
        """What a report must say."""
        return self.keeper.notes(self.trainer.failed, self.buffer.dropped)

    def _take(self, sample: Sample) -> None:
        self.buffer.add(sample)
        text = sample.lesson.text
        if sample.rounds:  # its only round may have been its last
            self.keeper.judge.see(np.array([text.index]))
        self.keeper.finish(text.index, text.domain, sample.tau)

    def _note(self, kind: str, version: int, seconds: float, detail: str) -> None:
        assert self._engine is not None
        self._engine.recorder.events.append(EventRecord(self._engine.clock(), kind, version, seconds, detail))
