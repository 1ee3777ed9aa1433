"""A version is judged once, by the requests that begin under it, in both engines."""

import numpy as np
import pytest

from adasim.calibration.rollback import Change, Rollback
from adasim.serving.judge import Judge


def serve(judge: Judge, first: int, taus: list[float], domain: int = 0) -> Change | None:
    """A cohort of equal length: all begin, then all finish."""
    ids = np.arange(first, first + len(taus))
    judge.see(ids)
    found = None
    for request, tau in zip(ids.tolist(), taus, strict=True):
        found = judge.finish(request, domain, tau) or found
    return found


def test_a_fall_is_told_once_its_cohort_has_finished() -> None:
    judge, rng = Judge(Rollback(requests=20)), np.random.default_rng(0)
    assert judge.waiting
    assert serve(judge, 0, rng.normal(3.0, 0.3, 20).tolist()) is None  # version 0 is judged against nothing
    assert not judge.waiting
    judge.begin(1, 0)
    assert judge.waiting
    change = serve(judge, 20, rng.normal(2.0, 0.3, 20).tolist())
    assert change is not None
    assert change.tau == pytest.approx(-1.0, abs=0.3)
    assert not judge.waiting
    assert serve(judge, 40, [1.0] * 20) is None  # nobody looks again


def test_only_requests_that_begin_under_a_version_count() -> None:
    judge = Judge(Rollback(requests=4))
    serve(judge, 0, [3.0, 3.1, 2.9, 3.0])
    judge.see(np.array([4, 5]))  # begun under version 0, its cohort full
    judge.begin(1, 0)
    judge.see(np.array([4, 5, 6, 7, 8, 9, 10]))
    assert judge.finish(4, 0, 1.0) is None
    assert [judge.finish(i, 0, 3.0) for i in (10, 5)] == [None, None]  # 10 came too late
    assert judge.waiting
    assert [judge.finish(i, 0, t) for i, t in ((6, 3.0), (7, 3.1), (8, 2.9), (9, 3.0))] == [None] * 4
    assert not judge.waiting


def test_a_request_without_a_round_to_judge_by_keeps_nobody_waiting() -> None:
    judge = Judge(Rollback(requests=4))
    judge.see(np.arange(4))
    assert [judge.finish(i, 0, t) for i, t in enumerate([3.0, None, 3.01, None])] == [None] * 4
    assert not judge.waiting
    judge.begin(1, 0)
    judge.see(np.arange(4, 8))
    change = [judge.finish(i, 0, t) for i, t in enumerate([1.0, 1.01, 0.99, None], 4)][-1]
    assert change is not None  # three of four tell enough
    assert change.tau == pytest.approx(1.0 - 3.005)


def test_whoever_is_left_of_an_older_cohort_is_not_waited_for() -> None:
    judge = Judge(Rollback(requests=4))
    judge.see(np.arange(4))
    judge.begin(1, 0)
    serve(judge, 4, [3.0, 3.1, 2.9, 3.0])
    assert not judge.waiting


def test_a_change_of_mix_is_not_the_versions_fault() -> None:
    judge, rng = Judge(Rollback(requests=40)), np.random.default_rng(1)
    judge.see(np.arange(40))
    for i in range(40):
        judge.finish(i, i % 2, float(rng.normal(4.0 if i % 2 else 2.0, 0.2)))
    judge.begin(1, 0)
    assert serve(judge, 40, rng.normal(2.0, 0.2, 40).tolist()) is None  # all from the harder domain


def test_equal_versions_are_seldom_called_worse() -> None:
    rng = np.random.default_rng(2)
    falls = 0
    for _ in range(400):
        judge = Judge(Rollback(requests=20, confidence=0.9))
        serve(judge, 0, rng.gamma(4, 0.5, 20).tolist())
        judge.begin(1, 0)
        falls += serve(judge, 20, rng.gamma(4, 0.5, 20).tolist()) is not None
    assert falls / 400 < 0.08  # 5 % by construction


def test_without_a_rule_nothing_is_waited_for() -> None:
    judge = Judge(None)
    assert not judge.waiting
    assert serve(judge, 0, [1.0] * 5) is None
