"""Makes the visits of a profile within a time budget."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import log
from pathlib import Path

from adasim.errors import InputError
from adasim.experiment import TRIALS, Failure, run_trial, tidy
from adasim.plan import Trial
from adasim.profiling.design import Design
from adasim.profiling.visit import Visit

REFERENCE_EVERY_S = 8.0
SURE, UNSURE = 1.15, 1.6  # what a visit may take more than the last of its kind did, than one like it did
START_S = 0.2  # of a run besides its steps: making memory, writing records
Run = Callable[[Trial, Path], Failure | None]


@dataclass(slots=True)
class Campaign:
    """Visits made and to be made.

    Attributes:
        design: which visits there are.
        out: a folder that is ready.
        budget_s: time for this call, seconds.
        say: told before each visit what it is, with the visits made so far.
        run: runs one trial.
        clock: seconds.
    """

    design: Design
    out: Path
    budget_s: float
    say: Callable[[str, int], None]
    run: Run = run_trial
    clock: Callable[[], float] = time.monotonic
    failures: list[Failure] = field(default_factory=list)
    interrupted: bool = False
    _took_s: dict[Visit, float] = field(default_factory=dict)
    _began_s: float = 0.0
    _reference_s: float = float("-inf")  # when the last one ended

    def measure(self) -> None:
        """Make visits until all are made or the budget is spent. Ctrl-C keeps what was made."""
        self._began_s = self.clock()
        self._remember()
        try:
            todo = [(v, r) for v, r in self.design.sequence() if not self._done(v, r)]
            for visit, repeat in todo:
                if self.clock() - self._reference_s > REFERENCE_EVERY_S:
                    self._refer()
                if self._dead(visit) or not self._fits(visit):
                    continue
                self._make(visit, repeat)
            if todo:
                self._refer()
        except KeyboardInterrupt:
            self.interrupted = True
        tidy(self.out)

    def made(self) -> list[tuple[Visit, Trial]]:
        """Every visit that is on disk, references included."""
        known = [(v, self.design.trial(v, r)) for v, r in self.design.sequence()]
        references = [(self.design.reference, self._reference(i)) for i in range(self._references())]
        return [(v, t) for v, t in [*references, *known] if self._result(t).is_file()]

    def left(self) -> list[tuple[Visit, int]]:
        """Visits that were not made once, and how often the others could still be repeated."""
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
        known = {self.design.trial(v, r).key for v, r in self.design.sequence()}
        return known | {self._reference(i).key for i in range(self._references() + 1)}

    def _fits(self, visit: Visit) -> bool:
        return self.clock() - self._began_s + self.estimate_s(visit) <= self.budget_s

    def _dead(self, visit: Visit) -> bool:
        """It failed before; another try would take the time of others."""
        return any(f.trial.policy == visit.label and f.trial.config == self.design.trial(visit, f.trial.seed).config
                   for f in self.failures)  # fmt: skip

    def _refer(self) -> None:
        reference = self.design.reference
        if self._fits(reference):
            self._make(reference, self._references())
            self._reference_s = self.clock()

    def _make(self, visit: Visit, repeat: int) -> None:
        trial = self._reference(repeat) if visit.kind == "reference" else self.design.trial(visit, repeat)
        self.say(visit.place, len(list((self.out / TRIALS).iterdir())))
        start = self.clock()
        failed = self.run(trial, self.out)
        if failed is None:
            self._took_s[visit] = self.clock() - start
        elif visit.kind == "reference":
            raise InputError(f"profile: {visit.place}: {failed.error}")
        else:
            self.failures.append(failed)

    def _reference(self, number: int) -> Trial:
        return self.design.trial(self.design.reference, number)

    def _references(self) -> int:
        """References on disk; they are numbered without gaps."""
        count = 0
        while self._result(self._reference(count)).is_file():
            count += 1
        return count

    def _done(self, visit: Visit, repeat: int) -> bool:
        return self._result(self.design.trial(visit, repeat)).is_file()

    def _result(self, trial: Trial) -> Path:
        return self.out / TRIALS / trial.key / "trial.json"

    def _remember(self) -> None:
        """How long visits took in an earlier call."""
        for visit, trial in self.made():
            window_s = json.loads(self._result(trial).read_text())["window"][1]
            self._took_s[visit] = START_S + float(window_s)
