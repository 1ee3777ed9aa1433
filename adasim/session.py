"""Trials in batches, as a search asks for them: what is on disk already is not run again."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pandas as pd

from adasim.executors import Executor, Outcome
from adasim.experiment import Failure, collect, unfinished
from adasim.plan import Plan, Trial

Bar = Callable[[str, int, int], AbstractContextManager[Callable[[], None]]]  # what, total, done -> advance


@dataclass(slots=True)
class Session:
    """Runs trials of one plan into one folder.

    Attributes:
        plan: what the trials come from.
        out: a folder that is ready.
        runner: who runs them.
        bar: shows progress.
        command: whose session it is.
    """

    plan: Plan
    out: Path
    runner: Executor
    bar: Bar
    command: str
    failures: list[Failure] = field(default_factory=list)
    retried: Counter[str] = field(default_factory=Counter)
    trials: dict[str, Trial] = field(default_factory=dict)  # key -> all that were asked for

    def run(self, trials: Sequence[Trial], what: str) -> pd.DataFrame:
        """Metrics of the trials that could be completed, in their order; ``what`` names them on the screen.

        Raises:
            Interrupted: by Ctrl-C; finished trials stay usable.
        """
        self.trials |= {t.key: t for t in trials}
        given_up = {f.trial.key for f in self.failures}
        todo = [t for t in unfinished(trials, self.out) if t.key not in given_up]
        with self.bar(what, len(trials), len(trials) - len(todo)) as advance:
            outcome = self.runner.run(todo, self.out, trace=False, progress=lambda _: advance())
        self.failures += outcome.failures
        self.retried += outcome.retried
        return collect(replace(self.plan, trials=list(trials)), self.out)[0]

    @property
    def outcome(self) -> Outcome:
        """Of all trials so far."""
        return Outcome(self.failures, self.retried)

    @property
    def notes(self) -> list[str]:
        """What the models of the finished trials want said."""
        return collect(replace(self.plan, trials=list(self.trials.values())), self.out)[1]
