"""Which drafter version an engine uses and when that changes: one set of rules for every engine.

The keeper says what to do and is told what was done; how an engine swaps its drafter is the engine's affair.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

from adasim.calibration.rollback import Change
from adasim.real.checkpoint import Checkpoint
from adasim.real.features import TOP
from adasim.real.opd import Opd
from adasim.real.opd_process import Folder, roll_back
from adasim.real.versions import Version
from adasim.serving.judge import Judge

Note = Callable[[str, int, float, str], None]  # kind, version, seconds, detail


class Move(NamedTuple):
    """The version that the engine should use from now on, 0 being the one it began with."""

    number: int
    checkpoint: Checkpoint
    kind: Literal["reload", "rollback"]
    detail: str
    train_s: float = 0.0


class Keeper:
    """Takes the newest sound version, has it judged, and goes back when it accepts less.

    Args:
        start: version 0.
        folder: where the trainer publishes.
        note: takes events.
        keep: versions stay on disk when they are no longer needed.
    """

    def __init__(self, opd: Opd, start: Checkpoint, folder: Folder, note: Note, *, keep: bool) -> None:
        self.opd, self.start, self.folder, self.note, self.keep = opd, start, folder, note, keep
        self.judge = Judge(opd.rollback)
        self.current = 0
        self.before = 0  # the version that ``current`` is judged against
        self.seen = 0  # the newest version that was looked at
        self.train_s = 0.0
        self.worse: Change | None = None  # what the version in use changed, when it must go
        self._bad: set[int] = set()  # rolled back, refused, or trained from what was

    def finish(self, request: int, domain: int, tau: float | None) -> None:
        """A request is done. Args: tau: its tokens per round; None = it had none."""
        self.worse = self.judge.finish(request, domain, tau) or self.worse

    def move(self) -> Move | None:
        """What the engine should do now; None = go on as it does. Ask again when it is done."""
        if self.worse is not None:
            return self._back(self.worse)
        return None if self.judge.waiting else self._forward()

    def moved(self, move: Move, seconds: float) -> None:
        """The engine has done it. Args: seconds: how long serving paused."""
        self.note(move.kind, move.number, seconds, move.detail)
        if move.kind == "rollback":
            self._bad.add(self.current)
            self.worse, self.current = None, move.number
            roll_back(self.folder, self.current)
            return
        self.train_s += move.train_s
        self.before, self.current = self.current, move.number
        self.judge.begin(self.current, self.before)
        if not self.keep:
            self.folder.versions.prune(self.before)

    def refused(self, move: Move, reason: str) -> None:
        """The engine would not: what it uses stays. A rollback is asked for again."""
        self.note("refused", move.number, 0.0, reason)
        if move.kind == "reload":
            self._bad.add(move.number)
            roll_back(self.folder, self.current)

    def notes(self, trainer_failed: str, dropped: int) -> list[str]:
        """What a report must say.

        Args:
            trainer_failed: why the trainer is gone; "" = it is not.
            dropped: requests that fell out of the buffer.
        """
        said = [
            f"distillation: {self.seen} versions, trainer busy {self.train_s:.0f} s; target distributions kept as the "
            f"top {TOP} tokens and the rest; {self.opd.full_verify_share:.0%} of rounds verified their whole block"
        ]
        if dropped:
            said.append(f"distillation: {dropped} requests fell out of the buffer before they were trained")
        if trainer_failed:
            said.append(f"ALARM: the trainer failed, serving went on with version {self.current}: {trainer_failed}")
        return said

    def _forward(self) -> Move | None:
        """The newest version that was not looked at, if it is sound and comes from none that is bad."""
        versions = self.folder.versions
        unseen = [n for n in versions.numbers() if n > self.seen]
        if not unseen:
            return None
        self.seen = unseen[-1]
        for number in unseen:  # the oldest first: what came from a bad one is bad, and so is what came from that
            if versions.parent(number) in self._bad:
                self._bad.add(number)
                self.note("refused", number, 0.0, "it was trained from a version that was rolled back")
        found, refused = versions.newest([n for n in unseen if n not in self._bad], self.start)
        for r in refused:
            self.note("refused", r.number, 0.0, r.reason)
        if found is None:
            return None
        train_s = float(found.manifest.get("train_s", 0.0))
        self.note("trained", found.number, train_s, "")
        return Move(found.number, found.checkpoint, "reload", _told(found), train_s)

    def _back(self, worse: Change) -> Move:
        """To the version before: this one accepts less."""
        good = self.folder.versions.load(self.before, self.start) if self.before else None
        told = f"ALARM: version {self.current}: tau {worse.tau:+.3f} ± {worse.half_width:.3f} against the version before"
        if isinstance(good, Version):
            return Move(self.before, good.checkpoint, "rollback", told)
        return Move(0, self.start, "rollback", told)


def _told(version: Version) -> str:
    facts = version.manifest
    return (f"trained on {facts['samples']} requests in {facts['train_s']:.1f} s ({facts['steps']} steps, loss "
            f"{facts['losses'][0]:.3f} to {facts['losses'][-1]:.3f}, {facts['clipped']:.1%} clipped)")  # fmt: skip
