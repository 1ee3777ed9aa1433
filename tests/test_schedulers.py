"""Admission and eviction."""

from typing import Any, get_args

import numpy as np
import pytest

from adasim.errors import PolicyError
from adasim.policies.scheduler import AnyScheduler, EmaAdmission, Fcfs, Scheduler
from adasim.types import EngineCaps, IntArray, QueueView, RunningView, StepOutcome
from tests.build import OFF, backend, closed, simulate

KINDS: list[Any] = list(get_args(get_args(AnyScheduler)[0]))
CAPS = EngineCaps(max_draft_len=15, max_running_requests=5, provides=frozenset({"predicted_len"}))


def queue(*blocks: int) -> QueueView:
    n = len(blocks)
    ids, lengths = np.arange(10, 10 + n), np.arange(1.0, n + 1)
    return QueueView(ids, np.zeros(n), np.full(n, 8), np.array(blocks, dtype=np.int64), 0.0, lengths)


def running(*blocks: int) -> RunningView:
    n = len(blocks)
    return RunningView(np.arange(n), np.full(n, 50), np.array(blocks, dtype=np.int64))


def outcome(n: int, queued: int) -> StepOutcome:
    ones = np.ones(n, dtype=np.int64)
    return StepOutcome(0, np.arange(n), ones, ones, ones, ones, 0.01, queued)


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_contract(kind: Any) -> None:
    """Admits no more than fits, in order; admits somebody when idle; start() forgets; evicts enough."""
    s: Scheduler = kind()
    s.start(CAPS)
    idle = s.admit(queue(3, 3), running(), 100, CAPS).tolist()
    assert idle[:1] == [10]
    for _ in range(50):
        s.observe(outcome(4, 20))
    assert s.admit(queue(3, 3, 3), running(1, 1, 1), 100, CAPS).tolist() == [10, 11]
    assert s.admit(queue(3, 3, 3), running(1, 1), 6, CAPS).tolist() == [10, 11]
    assert s.admit(queue(3), running(), 2, CAPS).tolist() == []
    s.start(CAPS)
    assert s.admit(queue(3, 3), running(), 100, CAPS).tolist() == idle
    assert s.evict(running(4, 4, 4), 5).tolist() == [2, 1]
    assert s.evict(running(4, 4, 4), 4).tolist() == [2]


def test_fcfs_does_not_let_a_small_request_overtake() -> None:
    assert Fcfs().admit(queue(9, 1), running(), 5, CAPS).tolist() == []


def test_ema_lets_a_burst_in_gradually() -> None:
    """N_hat <- 0.5 N_hat + 0.5 N with N = 8: 4, 6, 7; admitted up to ceil(N_hat) + 1."""
    s, wide = EmaAdmission(beta=0.5), EngineCaps(max_draft_len=15, max_running_requests=64)
    s.start(wide)
    ones = [1] * 8
    admitted = []
    for _ in range(3):
        admitted.append(len(s.admit(queue(*ones), running(), 99, wide)))
        s.observe(outcome(3, 5))
    assert admitted == [1, 5, 7]


def test_max_running_requests_holds() -> None:
    records = simulate(OFF, workload=closed(concurrency=20, requests=60), backend=backend(max_running_requests=3))
    assert records.steps["decoding"].max() == 3


class Greedy(Fcfs):
    """Admits everybody, whatever the limits."""

    def admit(self, queue: QueueView, running: RunningView, kv_free: int, caps: EngineCaps) -> IntArray:
        return np.repeat(queue.request_ids, 2)


class Idle(Fcfs):
    """Admits nobody."""

    def admit(self, queue: QueueView, running: RunningView, kv_free: int, caps: EngineCaps) -> IntArray:
        return queue.request_ids[:0]


@pytest.mark.parametrize(("kind", "message"), [(Greedy, "allowed: up to"), (Idle, "nobody of")])
def test_illegal_admission_is_named(kind: type[Fcfs], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fcfs, "admit", kind.admit)
    with pytest.raises(PolicyError, match=message):
        simulate(OFF)
