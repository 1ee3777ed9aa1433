"""Measures policies in alternation with plain decoding, so that a machine whose speed drifts cannot favour any."""

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from adasim.errors import InputError
from adasim.executors import Interrupted, Local, Outcome
from adasim.experiment import TRIALS, tidy
from adasim.plan import Plan, Trial
from adasim.tolerances import Validation
from adasim.turns import run_in_turns, take_turns


@dataclass(frozen=True, slots=True)
class Block:
    """All policies at one point of the sweep with one seed, and the plain decoding they are held against."""

    reference: Trial
    trials: list[Trial]

    def references(self, out: Path) -> list[Trial]:
        """Runs of the reference that ``out`` holds, by repeat."""
        found: list[Trial] = []
        while _done(repeat := replace(self.reference, repeat=len(found)), out):
            found.append(repeat)
        return found

    def next_reference(self, out: Path) -> Trial:
        """The run of the reference to make next."""
        return replace(self.reference, repeat=len(self.references(out)))


def blocks_of(plan: Plan) -> list[Block]:
    """Every point with its first seed before any with its second; policies begin one further with each seed.

    Raises:
        InputError: no policy of kind off to be held against, or none beside it.
    """
    plain = [p.label for p in plan.scenario.policies if p.kind == "off"]
    if not plain or len(plan.scenario.policies) < 2:
        raise InputError("policies: validate needs one of kind off, which all others are held against, and others")
    groups: dict[tuple[int, str], list[Trial]] = {}
    for trial in plan.trials:
        groups.setdefault((plan.scenario.seeds.index(trial.seed), json.dumps(trial.point)), []).append(trial)
    found = []
    for (repeat, _), trials in sorted(groups.items(), key=lambda group: group[0][0]):
        (reference,) = (t for t in trials if t.policy in plain)
        others = [t for t in trials if t.policy not in plain]
        turn = repeat % len(others)
        found.append(Block(reference, others[turn:] + others[:turn]))
    return found


@dataclass(slots=True)
class Measuring:
    """Runs what is missing of blocks: a few policies beside a reference, and so on.

    Engines that can stop between steps serve them in turns. Others serve a reference, the policies one
    after another, and a reference again.

    Attributes:
        out: a folder that is ready.
        settings: how many policies stand beside a reference, and how old a reference may be.
        budget_s: no part is begun that would end later, by what the longest took; None = all is run.
        advance: called after every policy's run.
        clock: Unix seconds.
    """

    out: Path
    settings: Validation
    budget_s: float | None = None
    advance: Callable[[], None] = lambda: None
    clock: Callable[[], float] = time.time
    outcome: Outcome = field(default_factory=Outcome)
    _longest_s: float = 0.0
    _last_s: float = float("-inf")  # end of the last reference run here
    _last: Trial | None = None

    def run(self, blocks: Sequence[Block]) -> int:
        """Run them in order; returns how many policies' runs are missing in the end.

        Raises:
            Interrupted: by Ctrl-C; finished runs stay usable.
        """
        began, rehearsed = self.clock(), False
        for block, part in self._parts(blocks):
            if self.budget_s is not None and self.clock() - began + self._longest_s > self.budget_s:
                break
            if not rehearsed:
                rehearse([block.reference, *part])
                rehearsed = True
            start = self.clock()
            self._part(block, part)
            self._longest_s = max(self._longest_s, self.clock() - start)
        return sum(len(missing(block, self.out)) for block in blocks)

    def _parts(self, blocks: Sequence[Block]) -> Iterator[tuple[Block, list[Trial]]]:
        for block in blocks:
            todo = missing(block, self.out)
            for first in range(0, len(todo), self.settings.pair):
                yield block, todo[first : first + self.settings.pair]

    def _part(self, block: Block, part: list[Trial]) -> None:
        if take_turns([block.reference, *part]):
            self._in_turns(block, part)
            return
        if not self._fresh(block) and not self._reference(block):
            return
        for trial in part:
            self._run(trial)
            self.advance()
        self._reference(block)

    def _in_turns(self, block: Block, part: list[Trial]) -> None:
        """The part beside a reference of its own."""
        try:
            failed = run_in_turns([block.next_reference(self.out), *part], self.out)
        except KeyboardInterrupt as error:
            tidy(self.out)
            raise Interrupted from error
        self.outcome.failures += [f for f in failed if f is not None]
        for _ in part:
            self.advance()

    def _fresh(self, block: Block) -> bool:
        """Whether the block has a reference that is young enough."""
        found = block.references(self.out)
        if not found:
            return False
        ended = self._last_s if found[-1] == self._last else ended_s(found[-1], self.out)
        return self.clock() - ended < self.settings.reference_age_s / 2

    def _reference(self, block: Block) -> bool:
        trial = block.next_reference(self.out)
        done = self._run(trial)
        self._last, self._last_s = trial, self.clock()
        return done

    def _run(self, trial: Trial) -> bool:
        outcome = Local(1).run([trial], self.out, trace=False, progress=lambda _: None)
        self.outcome.failures += outcome.failures
        self.outcome.retried += outcome.retried
        return not outcome.failures


def rehearse(trials: Sequence[Trial]) -> None:
    """Runs for nothing, a request a client: a process's first rounds load models and make what later ones find ready.

    They take turns where those that count will, so that an engine of each is there. A simulation has no such rounds. What
    fails here will fail again where it counts.

    Raises:
        Interrupted: by Ctrl-C.
    """
    real = [_short(t) for t in trials if t.scenario().backend.mark == "measured"]
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / TRIALS).mkdir()
        try:
            run_in_turns(real, Path(scratch))
        except KeyboardInterrupt as error:
            raise Interrupted from error


def _short(trial: Trial) -> Trial:
    load, backend = trial.config["workload"], trial.config["backend"]
    if "requests" in load:
        load = load | {"requests": min(load["requests"], load.get("concurrency") or 1)}
    if "opd" in backend:
        backend = backend | {"opd": None}  # it would train, and keep what it trained
    return replace(trial, config=trial.config | {"workload": load, "backend": backend})


def missing(block: Block, out: Path) -> list[Trial]:
    """Policies' runs that are not in ``out``."""
    return [t for t in block.trials if not _done(t, out)]


def ended_s(trial: Trial, out: Path) -> float:
    """When a run ended, Unix seconds; -inf where nobody wrote it down."""
    return float(json.loads((out / TRIALS / trial.key / "trial.json").read_text()).get("ended_s", float("-inf")))


def _done(trial: Trial, out: Path) -> bool:
    return (out / TRIALS / trial.key / "trial.json").is_file()
