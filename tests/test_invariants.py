"""What must hold in every run, by name."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from adasim import report
from adasim.executors import Local
from adasim.experiment import collect, prepare
from adasim.policies.base import Policy
from adasim.policies.dcut import DCut
from adasim.policies.fixed import Fixed
from adasim.policies.head import Head
from adasim.records import Records
from adasim.serving.admission import Admission
from adasim.serving.kv import KvMemory, KvPool
from adasim.simulator import backend as simulated
from adasim.story import tell
from adasim.types import BatchView, DraftView, IntArray
from tests.build import OFF, backend, closed, plan, simulate

LENGTHS = {"kind": "lognormal", "mean": 60, "cv": 1.0, "minimum": 1, "maximum": 200}
ROOFLINE = {"kind": "roofline", "hardware": "h100", "model": "qwen3-8b", "draft": {"kind": "layers", "layers": 1}}
RUNS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "one client": {"workload": closed(concurrency=1, requests=6)},
    "no drain": {"workload": closed(drain=False)},
    "short of memory": {
        "workload": closed(prompt_len=LENGTHS, output_len=LENGTHS),
        "backend": backend(kv={"blocks": 40}),
    },
    "short of memory, chunked": {
        "workload": closed(prompt_len=LENGTHS, output_len=LENGTHS, requests=80),
        "backend": backend(kv={"blocks": 60, "block_tokens": 8}, chunked_prefill=32),
    },
    "ema": {"backend": backend(scheduler={"kind": "ema"}, kv={"blocks": 40})},
    "rectangular": {"backend": backend(ragged=False)},
    "poisson": {
        "workload": {
            "kind": "poisson",
            "rate_rps": 40.0,
            "requests": 60,
            "output_len": LENGTHS,
            "prompt_len": LENGTHS,
        }
    },
    "learning": {"backend": backend(learning={"buffer": 4, "token_us": 20.0, "rollback": {"requests": 4}}, alarm={})},
    "learning, short of memory": {
        "workload": closed(prompt_len=LENGTHS, output_len=LENGTHS),
        "backend": backend(learning={"buffer": 4, "token_us": 20.0, "shared": 0.4}, kv={"blocks": 40}),
    },
    "two ranks, short of memory": {
        "workload": closed(prompt_len=LENGTHS, output_len=LENGTHS),
        "backend": backend(cost=ROOFLINE, parallel={"tp": 2, "dp": 2}, kv={"blocks": 40}),
    },
    "three ranks, chunked, rectangular": {
        "workload": closed(prompt_len=LENGTHS, output_len=LENGTHS, concurrency=7),
        "backend": backend(
            cost=ROOFLINE,
            parallel={"tp": 12, "dp": 3, "routing": "least_requests"},
            max_running_requests=9,
            chunked_prefill=50,
            ragged=False,
            scheduler={"kind": "ema"},
        ),
    },
    "disaggregated, short of memory": {
        "workload": closed(prompt_len=LENGTHS, output_len=LENGTHS),
        "backend": backend(disaggregation={"prefill_engines": 2}, kv={"blocks": 40}),
    },
    "disaggregated, two ranks, short of memory": {
        "workload": {"kind": "poisson", "rate_rps": 40.0, "requests": 60, "output_len": LENGTHS, "prompt_len": LENGTHS},
        "backend": backend(
            cost=ROOFLINE, parallel={"tp": 2, "dp": 2}, disaggregation={"parallel": {"tp": 2}}, kv={"blocks": 30}
        ),
    },
    "disaggregated, one-token outputs": {
        "workload": closed(output_len={"kind": "fixed", "tokens": 1}),
        "backend": backend(disaggregation={}),
    },
    "one-token outputs": {"workload": closed(output_len={"kind": "fixed", "tokens": 1})},
}
POLICIES: list[Policy] = [OFF, Fixed(verify_len=16), Head(gamma=1.3), DCut()]


@pytest.fixture(params=RUNS, scope="module")
def run(request: pytest.FixtureRequest) -> dict[str, Any]:
    return RUNS[request.param]


@pytest.fixture(params=POLICIES, ids=lambda p: p.kind, scope="module")
def records(request: pytest.FixtureRequest, run: dict[str, Any]) -> Records:
    return simulate(request.param, **run)


def test_conservation_of_requests(records: Records, run: dict[str, Any]) -> None:
    """arrived = finished + running + waiting; what never arrived is dropped."""
    r = records.requests
    arrived = r["arrival_s"].notna()
    assert set(r.loc[arrived, "status"]) <= {"finished", "running", "waiting"}
    assert set(r.loc[~arrived, "status"]) <= {"dropped"}
    if run.get("workload", closed()).get("drain", True):
        assert (r["status"] == "finished").all()
        assert (r["tokens"] == r["output_len"]).all()


def test_conservation_of_tokens(records: Records) -> None:
    """Tokens of requests = tokens of steps; accepted <= verified - 1; emitted <= accepted + 1."""
    r, s = records.requests, records.steps
    assert r["tokens"].sum() == s["emitted"].sum() + s["first_tokens"].sum()
    assert r["rounds"].sum() == s["decoding"].sum()
    assert r["accepted"].sum() == s["accepted"].sum()
    assert (s["accepted"] <= s["verify_tokens"] - s["decoding"]).all()
    assert (s["emitted"] <= s["accepted"] + s["decoding"]).all()
    assert (records.blocks["accepted"] < records.blocks["verify_len"]).all()
    assert records.blocks["blocks"].sum() == s["decoding"].sum()


def test_every_chunk_has_a_gap(records: Records) -> None:
    """One chunk per request and round, and one per return from an eviction, each with the time since the last."""
    again = records.steps["first_tokens"].sum() - records.requests["first_token_s"].notna().sum()
    assert records.gaps["chunks"].sum() == records.steps["decoding"].sum() + again
    spans = records.requests["finish_s"] - records.requests["first_token_s"]
    if (records.requests["status"] == "finished").all():
        assert (records.gaps["gap_s"] * records.gaps["chunks"]).sum() == pytest.approx(spans.sum())
    assert (records.gaps["gap_s"] > 0).all()


def test_causality(records: Records) -> None:
    """arrival <= admission <= first token <= finish."""
    r = records.requests
    for before, after in pairwise(["arrival_s", "admitted_s", "first_token_s", "finish_s"]):
        later = r[r[after].notna()]
        assert (later[before] <= later[after]).all()


def test_monotone_clock(records: Records) -> None:
    """Steps do not overlap and their parts add up."""
    s = records.steps
    assert (s["start_s"].to_numpy()[1:] >= s["end_s"].to_numpy()[:-1] - 1e-12).all()
    parts = s[["draft_s", "verify_s", "overhead_s", "prefill_s"]].sum(axis=1)
    assert np.allclose(parts, s["end_s"] - s["start_s"], atol=1e-9)


def test_kv_is_within_memory(records: Records, run: dict[str, Any]) -> None:
    blocks = run.get("backend", {}).get("kv", {}).get("blocks")
    ranks = run.get("backend", {}).get("parallel", {}).get("dp", 1)
    if blocks is not None:  # that each rank stays within its own is asserted by its pool
        assert records.steps["kv_blocks"].max() <= blocks * ranks


def test_no_kv_is_left_over(run: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """After the run, running requests hold exactly their blocks: none once all have finished."""
    kept: list[Admission] = []

    class Kept(Admission):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            kept.append(self)

    monkeypatch.setattr(simulated, "Admission", Kept)
    simulate(Head(), **run)
    assert kept
    for admission in kept:
        assert admission.pool.private == admission.batch.held.sum()
        assert admission.pool.used + admission.pool.free == admission.pool.total
        if run.get("workload", closed()).get("drain", True):
            assert admission.pool.used == 0


def test_short_memory_evicts_and_still_gives_the_same_output() -> None:
    roomy = simulate(Head(), workload=RUNS["short of memory"]["workload"])
    short = simulate(Head(), **RUNS["short of memory"])
    assert short.requests["evictions"].sum() > 0
    assert roomy.requests["evictions"].sum() == 0
    assert roomy.requests["tokens"].tolist() == short.requests["tokens"].tolist()


def test_kv_pool_accounts_for_everything() -> None:
    """private + cached + free = total through sharing, caching and eviction."""
    pool = KvPool(KvMemory(blocks=200, block_tokens=16, prefix_cache=True))
    pool.share([1, 2])
    pool.take(30)
    assert (pool.used, pool.free, pool.available) == (94, 106, 106)
    pool.share([1, 3])
    assert pool.used == 126
    pool.unshare([1, 2])
    assert (pool.used, pool.available) == (126, 74 + 32)  # 1 is still used, 2 is idle
    assert pool.hits([1, 2, 9]) == 2
    pool.take(100)  # needs the idle block of 2
    assert (pool.used, pool.free) == (194, 6)
    assert pool.hits([1, 2]) == 1
    with pytest.raises(AssertionError, match="overflow"):
        pool.take(7)


class Watch(Policy):
    """Notes what L it sees at every position of every request."""

    kind: str = "watch"
    lengths: int = 4

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"truth"})

    def model_post_init(self, context: object) -> None:
        object.__setattr__(self, "_seen", {})

    @property
    def seen(self) -> dict[tuple[int, int], int]:
        seen: dict[tuple[int, int], int] = object.__getattribute__(self, "_seen")
        return seen

    def verify_lens(self, batch: BatchView, draft: DraftView) -> IntArray:
        assert draft.truth is not None
        for request, position, run in zip(batch.request_ids, batch.context_lens, draft.truth, strict=True):
            self.seen[int(request), int(position)] = int(run)
        return np.full(len(batch), self.lengths)


def test_luck_belongs_to_the_text() -> None:
    """Two policies that meet at the same position of the same request see the same L."""
    short, long = Watch(lengths=3), Watch(lengths=16)
    for policy in (short, long):
        simulate(policy, seed=5)
    meet = short.seen.keys() & long.seen.keys()
    assert len(meet) > 300
    assert all(short.seen[k] == long.seen[k] for k in meet)
    other = Watch(lengths=3)
    simulate(other, seed=6)
    assert any(short.seen[k] != other.seen[k] for k in short.seen.keys() & other.seen.keys())


def test_a_cut_does_not_make_good_tokens_bad() -> None:
    """From t, L drafts are good. After a cut to j of them, at least L - j - 1 are good from t + j + 1."""
    watch = Watch(lengths=3)
    simulate(watch, seed=1)
    checked = 0
    for (request, position), run in watch.seen.items():
        after = watch.seen.get((request, position + 3))
        if run >= 3 and after is not None:
            assert after >= run - 3
            checked += 1
    assert checked > 100


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    """Records, tables, figures and pages of two runs are the same bytes; one or two workers alike."""
    p = plan(sweep={"workload.concurrency": [1, 4]}, slo={"ttft_ms": 100.0, "tpot_ms": 10.0})
    contents = []
    for name, workers in (("a", 1), ("b", 2)):
        out = tmp_path / name
        todo = prepare(p, out, resume=False, overwrite=False)
        assert not Local(workers).run(todo, out, trace=True, progress=lambda _: None).failures
        trials, notes = collect(p, out)
        report.write(trials, tell(p, len(trials), notes), out)
        contents.append({f.relative_to(out): f.read_bytes() for f in sorted(out.rglob("*")) if f.is_file()})
    for content in contents:
        del content[Path("manifest.json")]
    assert len(contents[0]) > 40
    assert contents[0] == contents[1]


def test_same_seed_same_requests_for_every_policy() -> None:
    runs = [simulate(p, workload=closed(prompt_len=LENGTHS, output_len=LENGTHS)).requests for p in POLICIES]
    for other in runs[1:]:
        pd.testing.assert_frame_equal(
            runs[0][["domain", "prompt_len", "output_len"]], other[["domain", "prompt_len", "output_len"]]
        )
