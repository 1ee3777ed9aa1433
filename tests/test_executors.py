"""Whoever runs trials, and whatever dies on the way: the same results, or a failure that is reported."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import active_children
from pathlib import Path

import pytest

from adasim.errors import InputError, PolicyError
from adasim.executors import DIED, TRIES, Executor, Interrupted, Local, Pool, Result
from adasim.experiment import TRIALS, Failure, failure, prepare, run_trial, unfinished
from adasim.options import executor_of
from adasim.plan import Trial
from tests.build import closed, plan


@dataclass(frozen=True, slots=True)
class Scripted(Executor):
    """Fails trials by their seed: how often, and with what."""

    script: dict[int, list[Exception]] = field(default_factory=dict)
    log: list[tuple[int, int]] = field(default_factory=list)  # seed, how many run beside it

    @contextmanager
    def open(self, trials: int, out: Path, trace: bool) -> Iterator[Pool]:
        yield _Script(self)


class _Script(Pool):
    places = 4

    def __init__(self, by: Scripted) -> None:
        self.by, self.running = by, list[Trial]()

    def submit(self, trial: Trial) -> None:
        self.by.log.append((trial.seed, len(self.running)))
        self.running.append(trial)

    def results(self) -> list[Result]:
        trial = self.running.pop(0)
        errors = self.by.script.get(trial.seed, [])
        return [(trial, failure(trial, errors.pop(0)) if errors else None)]


def trials_of(seeds: int) -> list[Trial]:
    return plan(policies=[{"kind": "off"}], seeds=list(range(seeds))).trials


def test_what_may_mend_is_tried_again_and_no_more_than_allowed(tmp_path: Path) -> None:
    script: dict[int, list[Exception]] = {
        1: [OSError("disk full")],
        2: [MemoryError("no memory")] * 5,
        3: [InputError("bad")] * 5,
        4: [PolicyError("illegal")] * 5,
    }
    executor, seen = Scripted(1, script), Counter[int]()
    outcome = executor.run(trials_of(6), tmp_path, trace=False, progress=lambda t: seen.update([t.seed]))
    assert {f.trial.seed: f.error for f in outcome.failures} == {
        2: "MemoryError: no memory",
        3: "bad",
        4: "PolicyError: illegal",
    }
    assert [f.bad_input for f in outcome.failures] == [True, False, False]
    assert Counter(seed for seed, _ in executor.log) == {0: 1, 1: 2, 2: TRIES, 3: 1, 4: 1, 5: 1}
    assert seen == dict.fromkeys(range(6), 1)
    assert outcome.notes == [
        "1 trials were tried again: OSError: disk full",
        "2 trials were tried again: MemoryError: no memory",
    ]


def test_a_trial_that_failed_runs_last_and_alone(tmp_path: Path) -> None:
    """What killed its worker cannot take others with it again."""
    executor = Scripted(1, {0: [OSError("x")], 3: [OSError("x")]})
    executor.run(trials_of(8), tmp_path, trace=False, progress=lambda _: None)
    again = executor.log[8:]
    assert again == [(0, 0), (3, 0)]


def test_ctrl_c_is_an_interruption(tmp_path: Path) -> None:
    def stop(_: Trial) -> None:
        raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        Scripted(1).run(trials_of(3), tmp_path, trace=False, progress=stop)


def test_a_killed_worker_process_is_survived(tmp_path: Path) -> None:
    """The pool it breaks is replaced, and the results are those of an undisturbed run."""
    p = plan(workload=closed(requests=80), policies=[{"kind": "off"}], seeds=list(range(6)))
    killed: list[int | None] = []

    def kill_one(_: Trial) -> None:
        if not killed:
            worker = min(active_children(), key=lambda c: c.pid or 0)
            killed.append(worker.pid)
            worker.kill()

    broken, whole = tmp_path / "broken", tmp_path / "whole"
    todo = prepare(p, broken, resume=False, overwrite=False)
    outcome = Local(2).run(todo, broken, trace=False, progress=kill_one)
    assert killed
    assert outcome.failures == []
    assert outcome.retried[DIED] > 0
    Local(1).run(prepare(p, whole, resume=False, overwrite=False), whole, trace=False, progress=lambda _: None)
    assert contents(broken) == contents(whole)


def contents(out: Path) -> dict[Path, bytes]:
    return {f.relative_to(out): f.read_bytes() for f in sorted((out / TRIALS).rglob("*")) if f.is_file()}


def test_a_failed_trial_leaves_nothing_behind(tmp_path: Path) -> None:
    p = plan(policies=[{"kind": "off"}], seeds=[0], measure={"warmup_requests": 39})
    (trial,) = prepare(p, tmp_path, resume=False, overwrite=False)
    found = run_trial(trial, tmp_path)
    assert isinstance(found, Failure)
    assert found.bad_input
    assert list((tmp_path / TRIALS).iterdir()) == []
    assert unfinished(p.trials, tmp_path) == [trial]


@pytest.mark.parametrize(
    ("kind", "workers", "address", "message"),
    [
        ("slurm", None, None, "--executor slurm: unknown; allowed: local, ray"),
        ("local", None, "auto", "--address has no effect without --executor ray"),
    ],
)
def test_options_without_effect_are_refused(kind: str, workers: int | None, address: str | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        executor_of(kind, workers, address)


def test_a_missing_ray_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'adasim\[ray\]'"):
        executor_of("ray", None, None)
