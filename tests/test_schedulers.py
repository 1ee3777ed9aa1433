"""Admission and eviction."""

from typing import Any, get_args

import numpy as np
import pytest

from adasim.errors import InputError, PolicyError
from adasim.policies.fixed import Fixed
from adasim.policies.scheduler import (
    AnyScheduler,
    EmaAdmission,
    Fcfs,
    Scheduler,
    ShortestPredicted,
    SloAdmission,
    VerifyPacking,
)
from adasim.records import Records
from adasim.serving.predictor import LengthPredictor
from adasim.types import EngineCaps, IntArray, QueueView, Request, RunningView, StepOutcome
from tests.build import OFF, backend, closed, plan, simulate

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


def waiting(ages_s: list[float], lengths: list[float] | None = None, now_s: float = 10.0) -> QueueView:
    """Requests 10, 11, ... of one block each that have waited so long."""
    n = len(ages_s)
    guessed = np.array(lengths) if lengths else None
    return QueueView(np.arange(10, 10 + n), now_s - np.array(ages_s), np.full(n, 8), np.ones(n, np.int64), now_s, guessed)


def test_shortest_predicted_goes_first_unless_others_lose_patience() -> None:
    """Guesses 90, 20, 50, 20 after 3, 2, 1 and 0 s: 11, 13, 12, 10; with 1.5 s of patience 10 and 11 go first."""
    view = waiting([3, 2, 1, 0], [90, 20, 50, 20])
    assert ShortestPredicted().admit(view, running(), 99, CAPS).tolist() == [11, 13, 12, 10]
    assert ShortestPredicted().admit(view, running(1, 1, 1), 99, CAPS).tolist() == [11, 13]
    assert ShortestPredicted(patience_ms=1500).admit(view, running(), 99, CAPS).tolist() == [10, 11, 13, 12]


def test_packing_keeps_the_next_verification_within_its_budget() -> None:
    """40 tokens: two full blocks of 16; once verify lengths average 4, ten requests; 80-token blocks: still one."""
    wide = EngineCaps(max_draft_len=15, max_running_requests=64)
    s = VerifyPacking(verify_tokens=40, weight=1.0)
    s.start(wide)
    ones = [1] * 20
    assert len(s.admit(queue(*ones), running(), 99, wide)) == 2
    four = np.full(3, 4)
    s.observe(StepOutcome(0, np.arange(3), four, four, four, four, 0.01, 0))
    assert len(s.admit(queue(*ones), running(1, 1, 1), 99, wide)) == 7
    s.observe(StepOutcome(0, np.arange(3), four, 20 * four, four, four, 0.01, 0))
    assert len(s.admit(queue(*ones), running(), 99, wide)) == 1


def test_slo_admission_puts_the_late_behind_and_stops_when_tokens_are_slow() -> None:
    """1 s to the first token: 10 and 11 are late. 20 ms a token with 4 running bears 4 x (50 / 20 - 1) = 6, at most 4."""
    wide = EngineCaps(max_draft_len=15, max_running_requests=64)
    view = waiting([3, 2, 0.5, 0.1, 0])
    s = SloAdmission()
    s.start(wide)
    assert s.admit(view, running(), 99, wide).tolist() == [12]  # nobody runs, nothing known: one
    four = np.ones(4, dtype=np.int64)
    s.observe(StepOutcome(0, np.arange(4), four, four, four, four, 0.02, 0))
    assert s.admit(view, running(1, 1, 1, 1), 99, wide).tolist() == [12, 13, 14, 10]
    s.start(wide)
    s.observe(StepOutcome(0, np.arange(4), four, four, four, four, 0.04, 0))
    assert s.admit(view, running(1, 1, 1, 1), 99, wide).tolist() == [12]  # 4 x (50 / 40 - 1) = 1
    for _ in range(20):
        s.observe(StepOutcome(0, np.arange(4), four, four, four, four, 0.08, 0))
    assert s.admit(view, running(1, 1, 1, 1), 99, wide).tolist() == []
    assert len(SloAdmission(tpot_ms=None).admit(view, running(1, 1, 1, 1), 99, wide)) == 4


def test_the_predictor_is_noisy_unbiased_in_the_median_and_belongs_to_the_request() -> None:
    requests = [Request(i, 0, 10, 100) for i in range(4000)]
    guess = LengthPredictor(log_sd=0.7).predict(requests, seed=3)
    assert np.median(guess) == pytest.approx(100, rel=0.05)
    assert np.log(guess).std() == pytest.approx(0.7, rel=0.05)
    assert LengthPredictor(log_sd=0.7).predict(requests[7:9], seed=3).tolist() == guess[7:9].tolist()
    assert (LengthPredictor(log_sd=0.0).predict(requests, seed=3) == 100).all()


BUSY = {
    "kind": "poisson",
    "rate_rps": 60.0,
    "requests": 150,
    "prompt_len": {"kind": "fixed", "tokens": 32},
    "output_len": {"kind": "lognormal", "mean": 60, "cv": 1.5, "minimum": 4, "maximum": 600},
}


def overloaded(scheduler: dict[str, Any], **fields: Any) -> Records:
    """More work than eight places can do."""
    return simulate(OFF, workload=BUSY, backend=backend(scheduler=scheduler, max_running_requests=8, **fields))


def wait_s(records: Records) -> float:
    return float((records.requests["admitted_s"] - records.requests["arrival_s"]).mean())


def test_shortest_first_shortens_the_wait_as_far_as_predictions_are_good() -> None:
    fcfs = wait_s(overloaded({"kind": "fcfs"}))
    exact, vague, useless = (wait_s(overloaded({"kind": "shortest"}, predictor={"log_sd": sd})) for sd in (0.0, 0.7, 5.0))
    assert exact < vague < 0.8 * fcfs
    assert useless > 0.8 * fcfs
    patient = wait_s(overloaded({"kind": "shortest", "patience_ms": 0.0}, predictor={"log_sd": 0.0}))
    assert patient == pytest.approx(fcfs)


def test_slo_admission_gives_more_goodput_under_overload() -> None:
    def in_time(records: Records) -> float:
        r = records.requests
        return float((r["first_token_s"] - r["arrival_s"] < 0.5).mean())

    assert in_time(overloaded({"kind": "slo", "ttft_ms": 500.0})) > 1.5 * in_time(overloaded({"kind": "fcfs"}))


@pytest.mark.parametrize("verify_len", [2, 8])
def test_packing_follows_what_the_length_rule_verifies(verify_len: int) -> None:
    records = simulate(
        Fixed(verify_len=verify_len),
        workload=closed(concurrency=40, requests=120),
        backend=backend(scheduler={"kind": "packing", "verify_tokens": 64}, max_running_requests=64),
    )
    late = records.steps.iloc[len(records.steps) // 2 :]
    assert late["verify_tokens"].max() <= 64
    assert late["decoding"].max() >= 64 // verify_len - 2


def test_a_scheduler_that_needs_predictions_is_refused_without_a_predictor() -> None:
    message = r"scheduler shortest needs predicted_len; the engine provides accept_len, cost"
    with pytest.raises(InputError, match=message):
        plan(backend=backend(scheduler={"kind": "shortest"}))
    unused = simulate(OFF, backend=backend(predictor={"log_sd": 1.0}))
    assert "backend.predictor has no effect: scheduler fcfs does not ask" in unused.notes
