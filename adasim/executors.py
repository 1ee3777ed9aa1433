"""Who runs trials: this process, processes of this machine, or Ray. The results are the same bytes."""

import gc
import os
import signal
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import forkserver, get_all_start_methods, get_context
from pathlib import Path

from adasim.experiment import Failure, run_trial, tidy
from adasim.plan import Trial

TRIES = 3  # of a trial whose failure another try may mend
DIED = "its worker process died"
PRELOADED = [  # what workers will need
    "adasim.cli", "adasim.experiment", "adasim.kernels.compiled",
    "pyarrow.pandas_compat", "pyarrow.parquet", "scipy.special",
]  # fmt: skip
Result = tuple[Trial, Failure | None]


class Interrupted(Exception):
    """Ctrl-C: finished trials are on disk."""


@dataclass(slots=True)
class Outcome:
    """What became of trials: those that could not be completed, and what was tried again."""

    failures: list[Failure] = field(default_factory=list)
    retried: Counter[str] = field(default_factory=Counter)  # error -> times

    @property
    def notes(self) -> list[str]:
        """A line for each reason to try again."""
        return [f"{count} trials were tried again: {error}" for error, count in self.retried.items()]


class Pool(ABC):
    """Takes trials in, gives results out; a finished trial is on disk when its result comes."""

    places: int  # trials worth handing in at a time

    @abstractmethod
    def submit(self, trial: Trial) -> None:
        """Start a trial, or queue it."""

    @abstractmethod
    def results(self) -> list[Result]:
        """Wait until at least one of the submitted trials is over."""


@dataclass(frozen=True, slots=True)
class Executor(ABC):
    """Runs trials, whatever dies on the way."""

    workers: int

    @abstractmethod
    @contextmanager
    def open(self, trials: int, out: Path, trace: bool) -> Iterator[Pool]:
        """A pool for ``trials`` trials that writes into ``out``; on an exception its workers are stopped at once."""

    def run(self, trials: list[Trial], out: Path, *, trace: bool, progress: Callable[[Trial], None]) -> Outcome:
        """Run trials; ``progress`` is called with each that is over.

        A trial that fails by bad input or an illegal answer of its policy is not tried again; whatever else goes
        wrong, the death of its worker included, is tried ``TRIES`` times.

        Raises:
            Interrupted: by Ctrl-C; finished trials stay usable.
        """
        outcome, todo, tries, running = Outcome(), deque(trials), Counter[str](), 0
        if not trials:
            return outcome
        try:
            with self.open(len(trials), out, trace) as pool:
                while todo or running:
                    # what failed before runs last and alone: it can take no other trial with it again
                    while todo and running < (1 if tries[todo[0].key] else pool.places):
                        tries[todo[0].key] += 1
                        pool.submit(todo.popleft())
                        running += 1
                    for trial, failed in pool.results():
                        running -= 1
                        if failed is not None and failed.again and tries[trial.key] < TRIES:
                            outcome.retried[failed.error] += 1
                            todo.append(trial)
                            continue
                        if failed is not None:
                            outcome.failures.append(failed)
                        progress(trial)
        except KeyboardInterrupt as error:
            raise Interrupted from error
        if outcome.retried:
            tidy(out)
        return outcome


@dataclass(frozen=True, slots=True)
class Local(Executor):
    """Processes of this machine; this one alone when one is enough."""

    @contextmanager
    def open(self, trials: int, out: Path, trace: bool) -> Iterator[Pool]:
        """See :meth:`Executor.open`."""
        workers = min(self.workers, trials)
        if workers == 1:
            yield _Here(out, trace)
            return
        pool = _Processes(workers, out, trace)
        try:
            yield pool
        except BaseException:
            pool.kill()
            raise
        pool.close()


class _Here(Pool):
    """This process."""

    places = 1

    def __init__(self, out: Path, trace: bool) -> None:
        self.out, self.trace = out, trace
        self.done: list[Result] = []

    def submit(self, trial: Trial) -> None:
        self.done.append((trial, run_trial(trial, self.out, self.trace)))

    def results(self) -> list[Result]:
        done, self.done = self.done, []
        return done


class _Processes(Pool):
    """Worker processes. When one dies, its pool is broken: all trials in it count as tried, and a new one is made."""

    def __init__(self, workers: int, out: Path, trace: bool) -> None:
        self.workers, self.out, self.trace = workers, out, trace
        self.places = 2 * workers  # one in hand, one waiting
        self.futures: dict[Future[Failure | None], Trial] = {}
        self.pool = _process_pool(workers)

    def submit(self, trial: Trial) -> None:
        try:
            future = self.pool.submit(run_trial, trial, self.out, self.trace)
        except BrokenProcessPool as error:  # a worker died since the last look
            future = Future()
            future.set_exception(error)
        self.futures[future] = trial

    def results(self) -> list[Result]:
        done, _ = wait(self.futures, return_when=FIRST_COMPLETED)
        broken = any(isinstance(f.exception(), BrokenProcessPool) for f in done)
        if broken:
            done, _ = wait(self.futures)
            self.kill()
            self.pool = _process_pool(self.workers)
        over = [f for f in self.futures if f in done]  # in the order in which they were handed in
        return [(trial, self._result(f, trial)) for f in over for trial in [self.futures.pop(f)]]

    def _result(self, future: Future[Failure | None], trial: Trial) -> Failure | None:
        error = future.exception()
        if error is None:
            return future.result()
        says = DIED if isinstance(error, BrokenProcessPool) else f"{type(error).__name__}: {error}"
        return Failure(trial, says, again=True)

    def kill(self) -> None:
        """Stop at once."""
        for process in list((self.pool._processes or {}).values()):
            process.terminate()
        self.pool.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Stop when idle."""
        self.pool.shutdown()


def _process_pool(workers: int) -> ProcessPoolExecutor:
    # A fork server: workers inherit no thread or lock of this process, and imports are paid once. It starts with
    # Ctrl-C ignored, and so do its workers: interrupts are this process's to handle.
    context = get_context("forkserver" if "forkserver" in get_all_start_methods() else "spawn")
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload(PRELOADED)
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            forkserver.ensure_running()
        finally:
            signal.signal(signal.SIGINT, before)
    return ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(gc.get_threshold(),))


def _begin(thresholds: tuple[int, int, int]) -> None:
    """A worker starts: it leaves interrupts to its parent, and collects garbage as rarely, but for what was preloaded."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()
    gc.set_threshold(*thresholds)


def cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
