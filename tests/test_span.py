"""Rounds that are played at once: the same records as one by one, and fewer events."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import simpy

from adasim.policies.base import LengthRule, Policy
from adasim.policies.driver import PolicyDriver
from adasim.policies.dspark import DSpark
from adasim.policies.fixed import Fixed
from adasim.policies.head import Head
from adasim.policies.off import Off
from adasim.records import Records
from adasim.simulator.span import Span
from adasim.types import BatchView, DraftView, EngineCaps, IntArray
from tests.build import FREE_COST, OFF, backend, closed, simulate

LENGTHS = {"kind": "lognormal", "mean": 60, "cv": 1.0, "minimum": 1, "maximum": 200}
CURVES = {"a": {"kind": "geometric", "alpha": 0.6}, "b": {"kind": "anchored", "first": 0.89, "last": 0.13, "tau": 7.09}}
TEXT = {"kind": "curves", "curves": CURVES, "correlation": 0.4, "spread": 0.1}
MIXED = closed(prompt_len=LENGTHS, output_len=LENGTHS)
STAIRS = FREE_COST | {"captured_tokens": [4, 16, 40], "eager_penalty_ms": 3.0, "overhead": {"time_share": 0.1}}
EAGLE = FREE_COST | {"draft": {"kind": "layers", "layers": 1, "autoregressive": True, "passes": 6, "top_k": 10}}
TABLE = {"kind": "table", "verify": "verify.csv", "extrapolate": True, "draft": {"kind": "linear", "base_ms": 1.0}}
MEMORY = {"blocks": 400, "prefix_cache": True}
RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one client": {"workload": closed(concurrency=1, requests=5, output_len={"kind": "fixed", "tokens": 1500})},
    "no drain": {"workload": closed(drain=False)},
    "one-token outputs": {"workload": closed(output_len={"kind": "fixed", "tokens": 1})},
    "correlated": {"workload": closed(output_len=LENGTHS, domains={"a": 1, "b": 2}), "backend": backend(acceptance=TEXT)},
    "a regression's reports": {
        "workload": closed(output_len=LENGTHS, domains={"a": 1, "b": 2}),
        "backend": backend(acceptance=TEXT | {"head": {"reports": "mean", "noise": 1.0}}),
    },
    "waiting clients": {
        "workload": closed(concurrency=14, requests=60, prompt_len=LENGTHS, output_len=LENGTHS),
        "backend": backend(max_running_requests=5, max_prefill_tokens=70),
    },
    "in step": {
        "workload": closed(concurrency=30, requests=95, output_len={"kind": "fixed", "tokens": 40}),
        "backend": backend(max_running_requests=30, max_prefill_tokens=150, kv={"blocks": 250}),
    },
    "prefill takes no time": {"workload": MIXED, "backend": backend(cost=TABLE | {"draft": {"kind": "linear"}})},
    "short of memory": {"workload": MIXED, "backend": backend(kv={"blocks": 40, "block_tokens": 12})},
    "chunked": {"workload": MIXED, "backend": backend(chunked_prefill=32)},
    "rectangular": {"backend": backend(ragged=False, cost=FREE_COST | {"captured_lens": [1, 5, 16]})},
    "lag": {"backend": backend(lag_steps=2)},
    "stairs": {"workload": MIXED, "backend": backend(cost=STAIRS)},
    "ragged rounds": {"workload": MIXED, "backend": backend(cost=FREE_COST | {"ragged": 0.3})},
    "tree": {"workload": MIXED, "backend": backend(cost=EAGLE)},
    "adjusted": {"workload": MIXED, "backend": backend(adjust={"verify": 1.1, "overhead": 2.0, "head_bias": 0.5})},
    "table with a context axis": {"workload": MIXED, "backend": backend(cost=TABLE)},
    "poisson": {"workload": {"kind": "poisson", "rate_rps": 60.0, "requests": 60, "output_len": LENGTHS}},
    "overload": {"workload": {"kind": "bursty", "rate_rps": 2000.0, "requests": 90, "prompt_len": LENGTHS}},
    "slo": {"backend": backend(scheduler={"kind": "slo", "ttft_ms": 50.0, "tpot_ms": 9.0}, max_running_requests=3)},
    "prefixes": {"workload": {"kind": "trace", "path": "trace.jsonl"}, "backend": backend(kv=MEMORY)},
    "learning": {"backend": backend(learning={"buffer": 4, "token_us": 20.0, "setup_s": 0.01})},
    "alarm": {"backend": backend(alarm={"shift": 0.2, "false_alarm_requests": 20.0})},
}
POLICIES: list[Policy] = [
    OFF,
    Fixed(verify_len=5),
    Fixed(verify_len=3, draft_len=15),
    Head(gamma=1.3, rounding="floor", base="drafts", min_verify_len=2),
    Head(gamma={1: 2.0, 4: 1.0, 40: 0.5}, idle_up_to=2),
    DSpark(stale_steps=2),
]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of ``RUNS``."""
    rows = [f"{b},{t},{c},{5 + b / 9 + t / 40 + c / 500}" for b in (1, 8) for t in (1, 64, 200) for c in (1, 4000)]
    (tmp_path / "verify.csv").write_text("\n".join(["batch,tokens,context,ms", *rows]))
    requests = [
        {"timestamp": 40 * i, "input_length": 1100, "output_length": 90, "hash_ids": [i % 3, 5 + i % 2, 99 + i]}
        for i in range(20)
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, requests)))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("run", RUNS)
def test_records_are_those_of_one_round_at_a_time(run: str, using: Callable[[str], None], files: None) -> None:
    for policy in POLICIES:
        if isinstance(policy, Fixed) and policy.draft_len and run == "tree":
            continue
        records: list[Records] = []
        for name in ("numba", "numpy"):
            using(name)
            records.append(simulate(policy, **RUNS[run]))
        for table in ("steps", "requests", "blocks", "gaps", "events"):
            one, other = (getattr(r, table) for r in records)
            pd.testing.assert_frame_equal(one, other, check_exact=True)
        assert records[0].last_arrival_s == records[1].last_arrival_s


@pytest.mark.parametrize("policy", [OFF, Fixed(verify_len=5), Head()], ids=lambda p: p.kind)
def test_a_span_goes_as_far_as_its_request(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """One client, no event in sight: one span for all requests but the last, which a span does not send."""
    spans: list[bool] = []
    play = Span.play

    def watched(self: Span) -> Any:
        played = yield from play(self)
        spans.append(played)
        return played

    monkeypatch.setattr(Span, "play", watched)
    records = simulate(policy, workload=closed(concurrency=1, requests=6))
    assert len(records.steps) > 40
    assert spans == [True] * 2


def test_those_who_finish_are_replaced_within_a_span(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight clients, no event in sight: sixty requests take a few spans."""
    counts: list[int] = []
    exchange = Span._exchange

    def watched(self: Span, running: IntArray, moved: int, ends_s: Any) -> None:
        counts.append(moved)
        exchange(self, running, moved, ends_s)

    monkeypatch.setattr(Span, "_exchange", watched)
    workload = closed(concurrency=8, requests=60, output_len=LENGTHS)
    records = simulate(Fixed(verify_len=5), workload=workload)
    assert (records.requests["status"] == "finished").all()
    assert sum(counts) > 50
    assert len(counts) < 5


@pytest.mark.parametrize(
    ("fields", "spans"),
    [
        ({}, True),
        ({"alarm": {}}, True),
        ({"parallel": {"tp": 2}}, True),
        ({"rounds": True}, False),
        ({"learning": {"buffer": 4}}, False),
        ({"parallel": {"tp": 2, "dp": 2}}, False),
        ({"disaggregation": {}}, False),
    ],
)
def test_who_plays_rounds_at_once(fields: dict[str, Any], spans: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those who look at every round, and not engines whose rounds do more."""
    made: list[Span] = []
    begin = Span.__init__

    def noted(self: Span, *arguments: Any) -> None:
        made.append(self)
        begin(self, *arguments)

    monkeypatch.setattr(Span, "__init__", noted)
    simulate(Fixed(verify_len=5), backend=backend(**fields))
    assert bool(made) == spans


@pytest.mark.parametrize("seed", range(200))
def test_the_clock_stops_at_the_very_end(seed: int) -> None:
    rng = np.random.default_rng(seed)
    start_s, *ends = np.cumsum(rng.exponential(10.0 ** rng.integers(-6, 3), rng.integers(2, 5))).tolist()
    env = simpy.Environment(0.0 if seed % 5 == 0 else start_s)
    span = object.__new__(Span)
    span.env = env
    env.process(span._pass([env.now, *ends]))
    env.run()
    assert env.now == ends[-1]


@pytest.mark.parametrize("rounding", ["round", "floor"])
@pytest.mark.parametrize("base", ["block", "drafts"])
@pytest.mark.parametrize("idle_up_to", [0, 9])
def test_a_rule_says_what_the_hooks_answer(rounding: Any, base: Any, idle_up_to: int) -> None:
    for seed in range(50):
        rng = np.random.default_rng(seed)
        policy = Head(
            gamma=float(rng.uniform(0.3, 2)), rounding=rounding, base=base, min_verify_len=int(rng.integers(1, 9)),
            idle_up_to=idle_up_to,
        )  # fmt: skip
        driver, n = PolicyDriver(policy, caps()), int(rng.integers(1, 20))
        view = BatchView(0, 0.0, caps(), np.arange(n), np.full(n, 9), 3)
        draft = DraftView(driver.draft_lens(view), accept_len=rng.normal(5, 6, n))
        rule = driver.rule(n, 3)
        assert rule is not None
        assert (draft.draft_lens == rule.draft_len).all()
        np.testing.assert_array_equal(driver.verify_lens(view, draft), said(rule, draft))


def said(rule: LengthRule, draft: DraftView) -> IntArray:
    """Verify lengths by the words of :class:`LengthRule`."""
    assert draft.accept_len is not None
    if rule.verify_len:
        return np.full(len(draft.accept_len), rule.verify_len)
    scaled = rule.gamma * (draft.accept_len - rule.anchor)
    whole = np.floor(scaled) if rule.floor else np.rint(scaled)
    return (rule.anchor + whole).clip(rule.least, rule.draft_len + 1).astype(np.int64)


def caps(**fields: Any) -> EngineCaps:
    provides = frozenset({"accept_len", "survival", "cost", "margin", "truth"})
    return EngineCaps(max_draft_len=15, max_running_requests=32, provides=provides, **fields)


class Longer(Head):
    """Changes a hook, and inherits a rule that no longer holds."""

    def verify_lens(self, batch: BatchView, draft: DraftView) -> IntArray:
        return draft.draft_lens + 1


class Shorter(Off):
    """Changes both."""

    def verify_lens(self, batch: BatchView, draft: DraftView) -> IntArray:
        return np.ones(len(batch), dtype=np.int64)

    def rule(self, running: int, queued: int) -> LengthRule:
        return LengthRule(0, 1)


def test_an_inherited_rule_does_not_outlive_its_hooks() -> None:
    assert PolicyDriver(Longer(), caps()).rule(3, 0) is None
    assert PolicyDriver(Shorter(), caps()).rule(3, 0) == LengthRule(0, 1)


def test_rectangular_engines_say_the_length_that_they_run() -> None:
    limits = caps(ragged=False, captured_lens=(1, 6, 16))
    assert PolicyDriver(Fixed(verify_len=5, draft_len=9), limits).rule(3, 0) == LengthRule(9, 6)
    assert PolicyDriver(Head(), limits).rule(3, 0) is None
