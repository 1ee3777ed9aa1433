"""Metrics on records worked out by hand."""

from dataclasses import replace
from itertools import pairwise
from math import isnan, nan

import numpy as np
import pandas as pd
import pytest

from adasim import metrics
from adasim.adaptation import by_version
from adasim.metrics import Window
from adasim.policies.fixed import Fixed
from adasim.records import BlockRecord, EventRecord, GapRecord, Records, RequestRecord, StepRecord, frame
from adasim.statistics import BATCHES, t_interval
from adasim.types import Slo
from tests.build import OFF, closed, simulate


def step(
    i: int, start: float, end: float, decoding: int, verify: int, accepted: int, emitted: int, first: int
) -> StepRecord:
    return StepRecord(i, start, end, decoding, 0, 0, 0, verify, accepted, emitted, first, 0.1, 0.6, 0.1, 0.2, 7, 100.0, 1)


def request(i: int, arrival: float, first: float, finish: float, tokens: int, prompt: int = 100) -> RequestRecord:
    status = "running" if isnan(finish) else "finished"
    return RequestRecord(i, "a", status, prompt, 50, arrival, arrival, first, finish, tokens, 9, 0, 0, 0, 0, 25)


@pytest.fixture
def records() -> Records:
    """Four one-second steps: a prefill and three rounds of 2, 2 and 4 requests."""
    steps = [
        step(0, 0, 1, 0, 0, 0, 0, 2),
        step(1, 1, 2, 2, 8, 3, 5, 0),
        step(2, 2, 3, 2, 10, 6, 8, 0),
        step(3, 4, 5, 4, 4, 0, 4, 0),
    ]
    requests = [
        request(0, 0.0, 1.0, 2.0, 6),
        request(1, 0.5, 1.0, 3.0, 9),
        request(2, 1.0, 3.5, 5.0, 1),
        request(3, 3.0, 4.5, nan, 2),
    ]
    gaps = [GapRecord(1, 1.0, 2), GapRecord(2, 1.0, 2), GapRecord(3, 2.0, 2), GapRecord(3, 0.5, 2)]
    return Records(
        frame(StepRecord, steps),
        frame(RequestRecord, requests),
        frame(BlockRecord, [BlockRecord("a", 4, 1, 8)]),
        frame(GapRecord, gaps),
        frame(EventRecord, []),
        last_arrival_s=3.0,
    )


WHOLE = Window(0, 5)


def test_window_of_a_closed_loop(records: Records) -> None:
    def window(warmup: int, until: bool) -> Window:
        return metrics.window(records, warmup, open_loop=False, until_last_arrival=until)

    assert window(0, False) == Window(0, 5)
    assert window(1, False) == Window(2, 5)
    assert window(1, True) == Window(2, 3)
    assert window(9, False).seconds == 0


def test_window_of_an_open_loop(records: Records) -> None:
    """Opens with an arrival, closes with the last one, and counts what arrived, however late it finished."""
    part = metrics.window(records, 1, open_loop=True, until_last_arrival=True)
    assert part == Window(0.5, 3, "arrival")
    assert metrics.cut(records, part).requests["request"].tolist() == [1, 2, 3]
    assert metrics.backlog(records, part) == 2 / 4  # requests 2 and 3 were not done at 3 s


def test_cut_keeps_what_ends_inside(records: Records) -> None:
    inside = metrics.cut(records, Window(2, 5))
    assert inside.steps["step"].tolist() == [2, 3]
    assert inside.requests["request"].tolist() == [1, 2]
    assert inside.gaps["step"].tolist() == [2, 3, 3]


def test_rates(records: Records) -> None:
    assert metrics.output_tok_s(records, WHOLE) == (2 + 5 + 8 + 4) / 5
    assert metrics.requests_per_s(metrics.cut(records, WHOLE), WHOLE) == 3 / 5


def test_tau_pools_tokens_over_request_rounds(records: Records) -> None:
    """17 tokens in 8 request-rounds; not the mean of 2.5, 4 and 1."""
    assert metrics.tau(records) == 17 / 8
    assert metrics.verify_len(records) == 22 / 8
    assert metrics.verify_tokens_per_round(records) == 22 / 3
    assert metrics.batch(records) == 8 / 3
    assert metrics.acceptance_rate(records) == 9 / (22 - 8)


def test_latencies(records: Records) -> None:
    """TPOT leaves the first token out; one-token outputs have none."""
    assert metrics.ttft_s(records.requests).tolist() == [1.0, 0.5, 2.5, 1.5]
    tpot = metrics.tpot_s(records.requests)
    assert tpot[:2].tolist() == [1 / 5, 2 / 8]
    assert tpot[2:].isna().all()
    assert metrics.e2e_s(records.requests)[:3].tolist() == [2.0, 2.5, 4.0]
    assert metrics.percentile(tpot, 50) == pytest.approx(0.225)
    assert isnan(metrics.percentile(pd.Series([nan]), 50))


def test_itl_weighs_every_chunk(records: Records) -> None:
    """Eight chunks: two gaps of 0.5, four of 1.0, two of 2.0."""
    assert metrics.itl_s(records.gaps, 25) == 0.5
    assert metrics.itl_s(records.gaps, 50) == 1.0
    assert metrics.itl_s(records.gaps, 75) == 1.0
    assert metrics.itl_s(records.gaps, 99) == 2.0


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        (Slo(e2e_ms=1e9), [True, True, True, False]),
        (Slo(ttft_ms=1000.0), [True, True, False, False]),
        (Slo(tpot_ms=200.0), [True, False, True, False]),
        (Slo(e2e_ms=2500.0), [True, True, False, False]),
        (Slo(ttft_ms=900.0, tpot_ms=250.0), [False, True, False, False]),
    ],
)
def test_goodput(records: Records, slo: Slo, met: list[bool]) -> None:
    assert metrics.slo_met(records.requests, slo).tolist() == met
    assert metrics.goodput_rps(records, WHOLE, slo) == sum(met) / 5


def test_time_shares(records: Records) -> None:
    shares = metrics.time_shares(records, WHOLE)
    assert shares == pytest.approx({"draft": 0.08, "verify": 0.48, "overhead": 0.08, "prefill": 0.16, "idle": 0.2})


def test_summary_of_nothing_is_not_a_number(records: Records) -> None:
    row = metrics.summary(records, Window(5, 5), None)
    assert isnan(row["tau"])
    assert isnan(row["output_tok_s"])


def test_open_loop_goodput_does_not_depend_on_the_tail() -> None:
    """When every request meets the SLO under both policies, their goodput is the same."""
    workload = {"kind": "poisson", "rate_rps": 5.0, "requests": 40}
    slo, rates = Slo(e2e_ms=1e6), []
    for policy in (OFF, Fixed(verify_len=8)):
        run = simulate(policy, workload=workload)
        part = metrics.window(run, 0, open_loop=True, until_last_arrival=True)
        row = metrics.summary(run, part, slo)
        assert row["slo_met"] == 1
        rates.append(row["goodput_rps"])
    assert rates[0] == rates[1]


def test_batches_by_hand(records: Records) -> None:
    """19 tokens in three parts, done 1 + (19/3 - 2)/5, 2 + (38/3 - 7)/8 and 5 s after the start, idling counted."""
    found = metrics.batches(records, WHOLE, Slo(tpot_ms=300), count=3)
    at = [0, 1 + (19 / 3 - 2) / 5, 2 + (38 / 3 - 7) / 8, 5]
    assert found["output_tok_s"] == pytest.approx([19 / 3 / (b - a) for a, b in pairwise(at)])
    assert found["tpot_p50_ms"] == pytest.approx([200, 250, nan], nan_ok=True)
    assert found["goodput_rps"] == pytest.approx([3 / 5] * 3)
    assert metrics.batches(records, WHOLE, None, count=4) == {}


def test_batches_share_the_work_of_a_run() -> None:
    """Their harmonic mean is the run's throughput: equal tokens over times that add up."""
    records = simulate(workload=closed(requests=60, drain=False))
    part = metrics.window(records, 4, open_loop=False, until_last_arrival=True)
    found = metrics.batches(records, part, None)
    assert len(found["output_tok_s"]) == BATCHES
    harmonic = BATCHES / sum(1 / x for x in found["output_tok_s"])
    assert harmonic == pytest.approx(metrics.output_tok_s(metrics.cut(records, part), part), rel=0.01)


def test_one_run_knows_the_noise_over_seeds() -> None:
    """The batch-means interval of each of 24 seeds holds their common mean about as often as it says."""
    runs = []
    for seed in range(24):
        records = simulate(
            seed=seed, workload=closed(requests=80, output_len={"kind": "fixed", "tokens": 48}, drain=False)
        )
        part = metrics.window(records, 8, open_loop=False, until_last_arrival=True)
        runs.append(t_interval(np.array(metrics.batches(records, part, None)["output_tok_s"]), series=True))
    truth = np.mean([r.estimate for r in runs])
    assert sum(r.low <= truth <= r.high for r in runs) >= 20


def test_warmup_by_mser5_reads_requests_in_their_order(records: Records) -> None:
    """100 requests finish in reverse of their arrival; the ten that finish first take three times as long a token."""
    rows = []
    for i in range(100):
        finish = 100.0 + 100 - i
        slow = 3.0 if i >= 90 else 1.0 + 0.01 * (i % 2)
        rows.append(request(i, finish - 10 * slow, finish - 1, finish, 10))
    table = frame(RequestRecord, rows)
    many = replace(records, requests=table, last_arrival_s=1e9)
    assert metrics.warmup_by_mser5(many, open_loop=False, until_last_arrival=True) == 10
    assert metrics.warmup_by_mser5(records, open_loop=False, until_last_arrival=True) is None
    early = replace(many, last_arrival_s=120.0)
    assert metrics.warmup_by_mser5(early, open_loop=False, until_last_arrival=True) is None  # 20 finished by then


def test_tau_by_drafter_version() -> None:
    blocks = [BlockRecord("a", 4, 1, 8, 0), BlockRecord("a", 4, 3, 8, 0), BlockRecord("a", 4, 3, 2, 1)]
    found = by_version(frame(BlockRecord, blocks))
    assert found["draft_version"].tolist() == [0, 1]
    assert found["rounds"].tolist() == [16, 2]
    assert found["tau"].tolist() == [3.0, 4.0]
