"""Makes the visits of a profile within a time budget."""

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import log
from pathlib import Path

from adasim.experiment import TRIALS, Failure, run_trial, tidy
from adasim.plan import Trial
from adasim.profiling.design import Design
from adasim.profiling.visit import Visit

REFERENCE_EVERY_S = 8.0
SURE, UNSURE = 1.15, 1.6  # what a visit may take more than the last of its kind did, than one like it did
CLOSING_S = 5.0  # of the budget for tables and figures: at least, and as long as getting ready took
CLOSING = 0.2  # share of the budget for them, at most
START_S = 0.2  # of a run besides its steps: making memory, writing records
Run = Callable[[Trial, Path], Failure | None]


@dataclass(slots=True)
class Campaign:
    """Visits made and to be made.

    Attributes:
        design: which visits there are.
        out: a folder that is ready.
        budget_s: time for this call, seconds, from ``began_s`` on.
        say: told before each visit what it is, with the visits made so far.
        run: runs one trial.
        clock: seconds.
        began_s: when the call began; null = when measuring does.
    """

    design: Design
    out: Path
    budget_s: float
    say: Callable[[str, int], None]
    run: Run = run_trial
    clock: Callable[[], float] = time.monotonic
    began_s: float | None = None
    failures: list[Failure] = field(default_factory=list)
    interrupted: bool = False
    _took_s: dict[Visit, float] = field(default_factory=dict)
    _failed: set[Visit] = field(default_factory=set)  # another try would take the time of others
    _until_s: float = 0.0
    _count: int = 0  # runs on disk
    _reference_s: float = float("-inf")  # when the last one ended

    def measure(self) -> None:
        """Make visits until all are made or the budget is spent. Ctrl-C keeps what was made."""
        now_s = self.clock()
        self.began_s = now_s if self.began_s is None else self.began_s
        closing_s = min(max(CLOSING_S, now_s - self.began_s), CLOSING * self.budget_s)
        self._until_s = self.began_s + self.budget_s - closing_s
        self._remember()
        try:
            todo = [(v, r) for v, r in self.design.sequence() if not self._done(v, r)]
            if todo:
                self._rehearse()
            for visit, repeat in todo:
                if self.clock() - self._reference_s > REFERENCE_EVERY_S:
                    self._refer()
                if self.design.reference in self._failed:
                    break  # whatever keeps it from running keeps the others from being compared
                if visit not in self._failed and self._fits(visit):
                    self._make(visit, repeat)
            if todo:
                self._refer()
        except KeyboardInterrupt:
            self.interrupted = True
        tidy(self.out)

    def made(self) -> list[tuple[Visit, int]]:
        """Every visit and repeat that is on disk, references included."""
        references = [(self.design.reference, i) for i in range(self._references())]
        return [*references, *(at for at in self.design.sequence() if self._done(*at))]

    def left(self) -> list[tuple[Visit, int]]:
        """Visits whose repeats are not all made, and how many are missing."""
        missing: dict[Visit, int] = {}
        for visit, repeat in self.design.sequence():
            missing[visit] = missing.get(visit, 0) + (not self._done(visit, repeat))
        return [(v, n) for v, n in missing.items() if n]

    def never(self) -> list[Visit]:
        """Visits without a single run."""
        there = {v for v, _ in self.made()}
        return [v for v in dict.fromkeys(v for v, _ in self.design.sequence()) if v not in there]

    def more_s(self) -> float:
        """Seconds that the missing runs would take, by those that were made; 0 when nothing is known."""
        return sum(self.estimate_s(v) * n for v, n in self.left())

    def estimate_s(self, visit: Visit) -> float:
        """Seconds that a visit will take: as long as the last time, or in proportion to the one most like it."""
        if visit in self._took_s:
            return self._took_s[visit] * SURE
        if not self._took_s:
            return 0.0
        like = min(self._took_s, key=lambda v: (v.kind != visit.kind, abs(log(v.work / visit.work))))
        return START_S + max(self._took_s[like] - START_S, 0.0) * visit.work / like.work * UNSURE

    def keys(self) -> set[str]:
        """Of every trial that may lie in the folder."""
        references = [(self.design.reference, i) for i in range(self._references() + 1)]
        return {self.design.key(v, r) for v, r in [*references, *self.design.sequence()]}

    def _fits(self, visit: Visit) -> bool:
        return self.clock() + self.estimate_s(visit) <= self._until_s

    def _rehearse(self) -> None:
        """A run for nothing: a process's first rounds load models and make kernels that later ones find ready."""
        smallest = min((v for v in self.design.visits if v.kind == "probe"), key=lambda v: v.work)
        self.say("rehearsal", self._count)
        with tempfile.TemporaryDirectory() as scratch:
            (Path(scratch) / TRIALS).mkdir()
            self.run(self.design.trial(smallest, 0), Path(scratch))  # what fails here will fail again where it counts

    def _refer(self) -> None:
        reference = self.design.reference
        if reference not in self._failed and self._fits(reference):
            self._make(reference, self._references())
            self._reference_s = self.clock()

    def _make(self, visit: Visit, repeat: int) -> None:
        self.say(visit.place, self._count)
        start = self.clock()
        failed = self.run(self.design.trial(visit, repeat), self.out)
        if failed is None:
            self._count += 1
            self._took_s[visit] = self.clock() - start
        else:
            self.failures.append(failed)
            self._failed.add(visit)

    def _references(self) -> int:
        """References on disk; they are numbered without gaps."""
        count = 0
        while self._done(self.design.reference, count):
            count += 1
        return count

    def _done(self, visit: Visit, repeat: int) -> bool:
        return (self.folder(visit, repeat) / "trial.json").is_file()

    def folder(self, visit: Visit, repeat: int) -> Path:
        """Where a repeat's records lie."""
        return self.out / TRIALS / self.design.key(visit, repeat)

    def _remember(self) -> None:
        """How long visits took in an earlier call."""
        for visit, repeat in self.made():
            window_s = json.loads((self.folder(visit, repeat) / "trial.json").read_text())["window"][1]
            self._took_s[visit] = START_S + float(window_s)
            self._count += 1
