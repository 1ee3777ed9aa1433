"""Files of other tools: recognised by content, read with one definition of each metric, refused where malformed."""

import gzip
import io
import json
import re
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adasim.errors import InputError
from adasim.importers import json_stream, sps
from adasim.importers.columns import column_of, k_of, variant_of
from adasim.importers.fields import Malformed
from adasim.importers.head import Head
from adasim.importers.json_stream import JsonStream
from adasim.importers.quantiles import EXACT, Quantiles
from adasim.importers.registry import IMPORTERS, KINDS, Imported, import_files, recognise
from adasim.importers.sink import Sink
from adasim.importers.tables import CostRow, RunRow
from tests import import_samples as samples

NAMES = sorted(samples.texts())


def read(*paths: Path, kind: str | None = None, keep_going: bool = False) -> tuple[Sink, list[Imported]]:
    sink = Sink(hold=True)
    return sink, import_files(paths, sink, kind=kind, keep_going=keep_going)


def notes(found: list[Imported]) -> str:
    return "\n".join(n for i in found for n in i.source.notes)


def sample(tmp_path: Path, name: str) -> tuple[Sink, list[Imported]]:
    return read(samples.write(tmp_path, name))


def lines(tmp_path: Path, *records: dict[str, Any], name: str = "x") -> Path:
    path = tmp_path / name
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def table(tmp_path: Path, text: str) -> tuple[Sink, list[Imported]]:
    path = tmp_path / "t.csv"
    path.write_text(text)
    return read(path)


# --- recognition -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_exactly_one_importer_knows_a_sample(tmp_path: Path, name: str) -> None:
    head = Head(samples.write(tmp_path, name))
    assert [i.kind for i in IMPORTERS if i.recognises(head)] == [samples.texts()[name][0]]


def test_every_kind_has_a_sample() -> None:
    assert {kind for kind, _ in samples.texts().values()} == set(KINDS)


@pytest.mark.parametrize("name", NAMES)
def test_packed_files_are_read_like_plain_ones(tmp_path: Path, name: str) -> None:
    path = samples.write(tmp_path, name)
    plain = read(path)[0]
    content = path.read_bytes()
    for packed in (
        gzip.compress(content, mtime=0),
        pa.Codec("zstd").compress(content, asbytes=True),
        b"\xef\xbb\xbf" + content,
    ):
        path.write_bytes(packed)
        sink, found = read(path)
        assert sink.counts == plain.counts
        assert (sink.runs, sink.requests, sink.workload) == (plain.runs, plain.requests, plain.workload)
        assert found[0].source.bytes == len(packed)


def test_unknown_content_lists_what_was_tried(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"hello": 1}')
    with pytest.raises(InputError, match="none of the known formats") as error:
        recognise(tmp_path / "x.json")
    assert all(kind in str(error.value) for kind in KINDS)


def test_ambiguous_content_asks_for_as(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text(samples.SGLANG_LOG + samples.VLLM_LOG)
    with pytest.raises(InputError, match="sglang-log or vllm-log; say which with --as"):
        read(path)
    assert len(read(path, kind="vllm-log")[0].steps) == 2


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"\0\1\2", "no text"),
        (b"\x1f\x8bgarbage", "cannot be read"),
        (gzip.compress(b'{"a": 1}' * 99, mtime=0)[:-12], "cannot be read"),
        (pa.Codec("zstd").compress(b"x" * 999, asbytes=True)[:9] + b"???", "cannot be read"),
        (None, "no such file"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, content: bytes | None, says: str) -> None:
    if content is not None:
        (tmp_path / "x").write_bytes(content)
    with pytest.raises(InputError, match=f"x: .*{says}"):
        read(tmp_path / "x")


# --- the right values, by hand ---------------------------------------------------------------------------------


def test_sglang_bench_without_details(tmp_path: Path) -> None:
    sink, found = sample(tmp_path, "sglang_plain")
    first, second = sink.runs
    assert (first.engine, first.version, first.model, first.k, first.depth) == ("sglang", "0.5.23", "Qwen/Qwen3-8B", 3, 3)
    assert (first.concurrency, second.concurrency, second.run, first.request_rate_rps) == (1, 2, 1, None)
    assert (first.tau, first.output_tok_s, first.ttft_p50_ms, first.tpot_p99_ms, first.e2e_mean_ms) == (
        2.5,
        40,
        50,
        30,
        1100,
    )
    assert first.itl_p50_ms is None
    assert "spread over the tokens of a chunk" in notes(found)
    assert "average since its start" in notes(found)


def test_sglang_details_put_chunks_together_again(tmp_path: Path) -> None:
    sink, _ = sample(tmp_path, "sglang_details")
    first, second, failed = sink.requests
    assert (first.prompt_len, first.output_len, first.chunks) == (100, 7, 4)
    assert first.ttft_s == 0.5
    assert first.e2e_s == pytest.approx(0.5 + 0.2 + 0.3 + 0.12)
    assert first.tpot_s == pytest.approx(0.62 / 6)
    assert [first.itl_p50_s, first.itl_max_s] == pytest.approx([0.2, 0.3])
    assert [second.chunks, second.itl_max_s, second.tpot_s] == pytest.approx([2, 0.12, 0.06])
    assert (failed.status, failed.ttft_s) == ("failed", None)
    (run,) = sink.runs
    assert [run.itl_mean_ms, run.itl_p50_ms] == pytest.approx([185, 160])
    assert (run.requests, run.failed) == (2, 1)


def test_vllm_gaps_are_chunks_already(tmp_path: Path) -> None:
    """The same lists from vLLM's client: each ITL is a gap, equal or not."""
    sink, _ = sample(tmp_path, "vllm_details")
    assert [r.chunks for r in sink.requests] == [7, 3, None]
    assert sink.runs[0].itl_p50_ms == pytest.approx(60)


def test_vllm_bench(tmp_path: Path) -> None:
    sink, found = sample(tmp_path, "vllm")
    (run,) = sink.runs
    assert (run.engine, run.k, run.tau, run.acceptance_rate) == ("vllm", 3, 2.5, 0.5)
    assert (run.rounds, run.drafted, run.accepted) == (100, 300, 150)
    assert (run.concurrency, run.request_rate_rps, run.output_tok_s, run.e2e_p99_ms) == (8, None, 400, 3000)
    assert [(a.position, a.survival, a.rounds) for a in sink.acceptance] == [(1, 0.8, 100), (2, 0.5, 100), (3, 0.2, 100)]
    assert not found[0].source.notes
    assert [r.label for r in sample(tmp_path, "vllm_appended")[0].runs] == ["k3", "again"]


@pytest.mark.parametrize("name", ["sglang_meta", "sglang_meta_list", "sglang_meta_bare"])
def test_sglang_meta(tmp_path: Path, name: str) -> None:
    sink, found = sample(tmp_path, name)
    first, second = sink.requests
    assert (first.prompt_len, first.output_len, first.e2e_s, first.rounds) == (20, 12, 0.75, 4)
    assert (first.tau, second.tau) == (1 + 7 / 4, 1 + 1 / 4)
    (run,) = sink.runs
    assert (run.tau, run.acceptance_rate, run.k) == (1 + 8 / 8, 8 / 24, 3)  # pooled, not a mean of means
    assert [a.survival for a in sink.acceptance] == [4 / 8, 3 / 8, 1 / 8]  # of [4, 1, 2, 1] rounds
    assert not found[0].source.notes


@pytest.mark.parametrize("name", ["guidellm", "guidellm_pretty"])
def test_guidellm_tpot_excludes_the_first_token(tmp_path: Path, name: str) -> None:
    sink, found = sample(tmp_path, name)
    (run,) = sink.runs
    assert (run.concurrency, run.concurrency_mean, run.output_tok_s, run.output_tokens) == (2, 1.5, 44, 22)
    assert [run.tpot_p50_ms, run.ttft_p99_ms, run.e2e_p50_ms, run.itl_p50_ms] == pytest.approx([11, 70, 170, None])
    assert [(r.ttft_s, r.tpot_s, r.e2e_s, r.chunks) for r in sink.requests] == [
        (0.05, 0.01, 0.15, 5),
        (0.07, 0.012, 0.19, 5),
    ]
    assert "includes the first token" in notes(found)
    assert "synthetic" in notes(found)


def test_guidellm_of_older_versions(tmp_path: Path) -> None:
    """Strategy under args, percentiles beside the mean, counts under run_stats."""
    new = samples.GUIDELLM["benchmarks"][0]
    flat = {n: {"successful": {"mean": 5.0, "median": 4.0, "p99": 9.0}} for n in new["metrics"] if n != "request_totals"}
    old = {"args": {"strategy": {"type_": "synchronous"}}, "metrics": flat}
    old["run_stats"] = {"requests_made": {"successful": 7, "errored": 1}}
    (run,) = read(lines(tmp_path, {"benchmarks": [old]}))[0].runs
    assert (run.concurrency, run.requests, run.failed) == (1, 7, 1)
    assert (run.tpot_mean_ms, run.tpot_p99_ms, run.e2e_p99_ms) == (5, 9, 9000)


def test_guidellm_requests_count_alike(tmp_path: Path) -> None:
    """10 and 40 ms a token: 25 ms a request, though 90 of 100 tokens took 40 ms; cut-off requests do not count."""
    report = json.loads(json.dumps(samples.GUIDELLM))
    (benchmark,) = report["benchmarks"]
    one = benchmark["requests"]["successful"][0]
    benchmark["requests"] = {
        "successful": [one, one | {"inter_token_latency_ms": 40.0, "output_tokens": 91}],
        "incomplete": [one | {"inter_token_latency_ms": 900.0}],
        "errored": [],
    }
    benchmark["metrics"]["inter_token_latency_ms"]["successful"] |= {
        "mean": 37.0,
        "median": 40.0,
        "percentiles": {"p99": 40.0},
    }
    sink, _ = read(lines(tmp_path, report))
    (run,) = sink.runs
    assert [run.tpot_mean_ms, run.tpot_p50_ms, run.tpot_p99_ms] == pytest.approx([25, 25, 39.7])
    assert [r.status for r in sink.requests] == ["finished", "finished", "unfinished"]
    assert run.failed == 0
    del benchmark["requests"]
    sink, found = read(lines(tmp_path, report))
    assert sink.runs[0].tpot_mean_ms == 37
    assert "weighted by tokens" in notes(found)


def test_aiperf(tmp_path: Path) -> None:
    sink, _ = sample(tmp_path, "aiperf")
    first, second, failed = sink.requests
    assert [first.ttft_s, first.e2e_s, first.tpot_s] == pytest.approx([0.08, 0.4, 0.04])
    assert [first.chunks, first.itl_p50_s, first.tau] == pytest.approx([5, 0.08, 2.0])
    assert failed.status == "failed"
    assert second.tau is None
    (run,) = sink.runs
    assert (run.requests, run.failed, run.output_tokens, run.k) == (2, 1, 18, 3)
    assert run.duration_s == pytest.approx(0.8)  # 10.0 to 10.8 s
    assert run.output_tok_s == pytest.approx(18 / 0.8)
    assert run.concurrency_mean == pytest.approx((0.4 + 0.6) / 0.8)
    assert [run.ttft_p50_ms, run.e2e_p50_ms] == pytest.approx([100, 500])
    assert [run.tau, run.acceptance_rate] == pytest.approx([2.0, 1 / 3])
    assert [a.survival for a in sink.acceptance] == [3 / 4, 1 / 4]


def test_aiperf_leaves_its_warm_up_out(tmp_path: Path) -> None:
    warm = samples.aiperf(1.0, 9000.0, 8000.0)
    warm["metadata"]["benchmark_phase"] = "warmup"
    sink, _ = read(lines(tmp_path, warm, *samples.AIPERF))
    assert len(sink.requests) == 3
    assert sink.runs[0].duration_s == pytest.approx(0.8)


def test_sglang_log(tmp_path: Path) -> None:
    sink, found = sample(tmp_path, "sglang_log")
    first, second = sink.steps
    assert (first.time_s, second.time_s, first.line) == (0, 2, 4)
    assert (second.running, second.queued, second.tokens, second.gen_tok_s) == (3, 2, 400, 320)
    assert (first.tau, first.acceptance_rate) == (2.5, 0.5)
    (run,) = sink.runs
    assert (run.k, run.model) == (3, "Qwen/Qwen3-8B")
    assert run.tau == pytest.approx((1 * 2.5 + 3 * 1.9) / 4)  # each line covers as many iterations of its requests
    assert not found[0].source.notes


def test_sglang_log_with_cut_lengths_rates_what_was_verified(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("Decode batch. #running-req: 2, accept len: 2.50, accept rate: 0.10, cap len: 4.00, #queue-req: 0\n")
    (step,) = read(path)[0].steps
    assert [step.verify_len, step.acceptance_rate, step.time_s] == pytest.approx([4, 1.5 / 3, None])


@pytest.mark.parametrize(
    ("arguments", "k", "rate"),
    [("speculative_algorithm='EAGLE', speculative_num_draft_tokens=4\n", 3, 1.17 / 3), ("", 3, None)],
)
def test_sglang_rates_that_count_the_bonus_token(tmp_path: Path, arguments: str, k: int, rate: float | None) -> None:
    """A line as SGLang printed it: 0.54 is 2.17 / 4, bonus token and anchor counted."""
    path = tmp_path / "log"
    line = "Decode batch. #running-req: 1, #token: 108, token usage: 0.00, accept len: 2.17, accept rate: 0.54, "
    path.write_text(f"{arguments}{line}cuda graph: True, gen throughput (token/s): 178.86, #queue-req: 0\n")
    sink, found = read(path)
    assert sink.runs[0].k == k
    assert [sink.steps[0].tau, sink.steps[0].acceptance_rate] == pytest.approx([2.17, rate])
    assert ("the rates fit 3" in notes(found)) == (not arguments)


def test_vllm_log(tmp_path: Path) -> None:
    sink, found = sample(tmp_path, "vllm_log")
    first, second = sink.steps
    assert (first.running, first.queued, first.gen_tok_s, second.time_s) == (4, 1, 250, 10)
    assert (first.tau, second.tau, second.accepted, second.drafted) == (2.5, 2.2, 120, 300)
    (run,) = sink.runs
    assert (run.version, run.k, run.rounds, run.concurrency_mean) == ("0.14.0", 3, 200, 3)
    assert run.tau == pytest.approx(1 + 270 / 200)
    assert [a.survival for a in sink.acceptance] == pytest.approx([0.7, 0.45, 0.2])
    assert not found[0].source.notes


def test_vllm_log_line_with_fields_left_out(tmp_path: Path) -> None:
    """96 rounds of two drafts: 1 + 156 / 96 = 2.625."""
    path = tmp_path / "log"
    path.write_text(
        "SpecDecoding metrics: Mean acceptance length: 2.62, Accepted: 156 tokens, Drafted: 192 tokens, "
        "Per-position acceptance rate: 0.885, 0.740\n"
    )
    sink, found = read(path)
    assert (sink.runs[0].rounds, sink.runs[0].tau, sink.steps[0].acceptance_rate) == (96, 2.625, 156 / 192)
    assert not notes(found)


def test_vllm_log_with_cut_lengths(tmp_path: Path) -> None:
    """100 rounds of 7 configured drafts verified 300: the rounds come from the accept length, the rate is over 300."""
    path = tmp_path / "log"
    path.write_text(
        "SpecDecoding metrics: Mean acceptance length: 2.50, Current speculative depth: 7, Accepted: 150 tokens, "
        "Drafted: 300 tokens, Per-position acceptance rate: 0.800, 0.500, 0.200, 0.000, 0.000, 0.000, 0.000, Avg Draft "
        "acceptance rate: 50.0%\n"
    )
    sink, found = read(path)
    assert (sink.steps[0].verify_len, sink.steps[0].acceptance_rate, sink.runs[0].rounds) == (4, 0.5, 100)
    assert "lower bound" in notes(found)


def test_prometheus_counts_between_two_scrapes(tmp_path: Path) -> None:
    before, after = tmp_path / "a", tmp_path / "b"
    before.write_text(samples.vllm_scrape(200, 600, 500, [190, 170, 140], 900))
    after.write_text(samples.vllm_scrape(300, 900, 650, [270, 220, 160], 1200))
    sink, found = read(before, after)
    (run,) = sink.runs
    assert (run.rounds, run.drafted, run.accepted, run.tau, run.acceptance_rate) == (100, 300, 150, 2.5, 0.5)
    assert (run.model, run.k, run.output_tokens, run.output_tok_s) == ("Qwen/Qwen3-8B", 3, 300, None)
    assert [a.survival for a in sink.acceptance] == [0.8, 0.5, 0.2]
    assert "since the server's start" not in notes(found)
    after.write_text(before.read_text() + after.read_text())  # one file, one after another
    assert read(after)[0].runs[0].tau == 2.5


def test_prometheus_of_sglang(tmp_path: Path) -> None:
    """260 tokens for 10 requests in 100 rounds: 250 from rounds."""
    before, after = tmp_path / "a", tmp_path / "b"
    before.write_text(samples.sglang_scrape(1000, 3000, 50))
    after.write_text(samples.sglang_scrape(1100, 3260, 60))
    (run,) = read(before, after)[0].runs
    assert (run.engine, run.tau, run.k, run.requests) == ("sglang", 2.5, 3, 10)


def test_prometheus_alone_is_a_lifetime_average(tmp_path: Path) -> None:
    sink, found = sample(tmp_path, "vllm_metrics")
    assert sink.runs[0].tau == 2.5
    assert "since the server's start" in notes(found)


def test_prometheus_refuses_counters_that_went_back(tmp_path: Path) -> None:
    before, after = tmp_path / "a", tmp_path / "b"
    before.write_text(samples.sglang_scrape(1100, 3260, 60))
    after.write_text(samples.sglang_scrape(1000, 3000, 50))
    with pytest.raises(InputError, match=r"b:1: .*went back by .*restarted"):
        read(before, after)


def test_traces_can_be_replayed(tmp_path: Path) -> None:
    sink, _ = sample(tmp_path, "mooncake")
    assert [(w.arrival_s, w.prompt_len, w.output_len, w.hash_ids) for w in sink.workload] == [
        (0, 655, 52, (46,)),  # the block that is not full is not shared
        (1.5, 100, 5, ()),
    ]
    assert [w.arrival_s for w in sample(tmp_path, "azure")[0].workload] == [0, pytest.approx(1)]
    assert [(w.arrival_s, w.output_len) for w in sample(tmp_path, "vidur")[0].workload] == [(0, 20), (1.5, 40)]


@pytest.mark.parametrize("name", ["sharegpt", "sharegpt_lines"])
def test_sharegpt_prompts_are_all_that_was_said(tmp_path: Path, name: str) -> None:
    sink, found = sample(tmp_path, name)
    assert [(w.prompt_len, w.output_len) for w in sink.workload] == [(10, 20), (10 + 20 + 2, 3)]
    assert "four" in notes(found) or "4 characters a token" in notes(found)


def test_cost_tables(tmp_path: Path) -> None:
    sink, _ = sample(tmp_path, "cost")
    assert [(c.batch, c.tokens, c.context, c.ms) for c in sink.costs] == [
        (4, 16, 512, 8.2),
        (4, 32, 512, 8.7),
        (8, 32, 512, 10.6),
    ]
    text = "curve,stat,tokens_or_requests,cost_ms\n"
    text += "draft,raw,1,9\ndraft,median,1,0.883\nverify,raw,8,7\nverify,median,8,5.5\n"
    sink, found = table(tmp_path, text)
    assert [(c.part, c.batch, c.tokens, c.ms) for c in sink.costs] == [
        ("draft", 1, None, 0.883),
        ("verify", None, 8, 5.5),
    ]
    assert "medians are taken" in notes(found)


def test_sps_tables_go_both_ways(tmp_path: Path) -> None:
    sink, _ = sample(tmp_path, "sps")
    points = {(c.batch, c.tokens): c.ms for c in sink.costs}
    assert points[2, 4] == pytest.approx(10 + 1 + 2)
    assert (4, 1) not in points  # four requests verify four tokens at least
    written = sps.table_of(sink.costs)
    again = {(c.batch, c.tokens): c.ms for c in sps.points("x", written)}
    assert again == pytest.approx(points)
    assert sample(tmp_path, "sps_plain")[0].costs[1].ms == pytest.approx(2)


def test_sps_needs_points_that_tell_requests_from_tokens() -> None:
    with pytest.raises(InputError, match="tell requests and tokens apart"):
        sps.table_of([CostRow("x", "step", b, 4 * b, None, 1.0 + b) for b in (1, 2, 4)])


# --- tables that people write ----------------------------------------------------------------------------------


def test_throughput_table_with_trees(tmp_path: Path) -> None:
    sink, _ = sample(tmp_path, "throughput")
    off, chain, tree = sink.runs
    assert (off.k, off.tau, off.output_tok_s, off.concurrency) == (0, 1, 218.89, 1)
    assert (chain.k, chain.depth, chain.tau) == (3, 3, 2.017)
    assert (tree.k, tree.depth, tree.topk) == (15, 4, 4)


@pytest.mark.parametrize(
    ("text", "cells"),
    [  # header shapes of public tables: sglang#22246, the vLLM blog of 2026-08-14, lm-sys 2025-07-17, InferenceX
        (
            "model,num_steps(topk=1),batch_size,throughput_tok_s\nq,1,8,823\nq,autospec,8,900\n",
            [(1, 8, 823, None), (None, 8, 900, None)],
        ),
        (
            "policy,max_concurrency,interactivity_tok_s_user,aggregate_output_tok_s\nfixed_k3,16,90.71,1408.2\nno_spec,1,50,50\nadaptive_k7,1,60,60\n",
            [(3, 16, 1408.2, None), (0, 1, 50, None), (None, 1, 60, None)],
        ),
        (
            "overlap,mtp_window,tok_s_per_rank,AL\noff,0,51.0,1\noff,3,81.5,2.18\n",
            [(0, None, 51, 1), (3, None, 81.5, 2.18)],
        ),
        ("file,model,thinking,K,AL\nx,m,thinking_on,2,2.51\n", [(2, None, None, 2.51)]),
        ("source,model,draft,domain,AL\nblog,M3,EAGLE3 k=3 (amd),coding,3.32\n", [(3, None, None, 3.32)]),
        ("c,k7_tok_s,k5_tok_s\n1,44.75,42.18\n", [(7, 1, 44.75, None), (5, 1, 42.18, None)]),
        ("c,baseline_tok_s,dflash_tok_s\n4,100,180\n", [(0, 4, 100, None), (None, 4, 180, None)]),
        ("domain,K,AL_qwen3arch,AL_llamaarch\nmath,1,1.83,1.81\n", [(1, None, None, 1.83), (1, None, None, 1.81)]),
        ("model,concurrency,best_K(non-listed=3)\nm,4,6\nm,<=8,7\n", [(6, 4, None, None), (7, None, None, None)]),
    ],
)
def test_throughput_headers_in_use(tmp_path: Path, text: str, cells: list[tuple[Any, ...]]) -> None:
    assert [(r.k, r.concurrency, r.output_tok_s, r.tau) for r in table(tmp_path, text)[0].runs] == cells


def test_plain_decoding_beside_every_length_is_kept_once(tmp_path: Path) -> None:
    """vllm#20780's shape: the plain TPOT stands in every row."""
    sink, found = table(tmp_path, "K,AL_eagle3,TPOT_ms_vanilla,TPOT_ms_eagle3\n2,2.36,7.07,4.32\n3,2.79,7.07,4.09\n")
    assert [(r.label, r.k, r.tau, r.tpot_mean_ms) for r in sink.runs] == [
        ("eagle3", 2, 2.36, 4.32),
        ("vanilla", 0, None, 7.07),
        ("eagle3", 3, 2.79, 4.09),
    ]
    assert "kept once" in notes(found)


def test_a_table_turned_round(tmp_path: Path) -> None:
    """vllm#48892's shape, its numbers: counters give the accept length."""
    text = "metric,mtp1,mtp8\noutput_tok_s,1646.15,2148.42\nmedian_itl_ms,22.4,159.6\n"
    text += "acceptance_rate_pct,83.59,42.53\nAL,1.84,4.4\n"
    text += "draft_tokens,246348,839040\naccepted_tokens,205916,356839\npos0_pct,83.59,75.68\npos1_pct,,60.11\n"
    sink, found = table(tmp_path, text)
    one, eight = sink.runs
    assert (one.k, eight.k, eight.rounds, eight.itl_p50_ms) == (1, 8, 104880, 159.6)
    assert eight.tau == pytest.approx(1 + 356839 / 104880)
    assert [(a.run, a.position) for a in sink.acceptance] == [(0, 1), (1, 1), (1, 2)]
    assert [a.survival for a in sink.acceptance] == pytest.approx([0.8359, 0.7568, 0.6011])
    assert not notes(found)


def test_counters_and_wall_times(tmp_path: Path) -> None:
    """vllm#24243's shape and numbers: 259326 drafts in 43221 rounds are 6 a round."""
    text = "samples,concurrency,output_tokens,drafts,draft_tokens,accepted_tokens,AL,pos0,baseline_s,spec_s\n"
    sink, _ = table(tmp_path, text + "200,10,106678,43221,259326,63669,2.47,0.58,215.84,133.24\n")
    plain, spec = sink.runs
    assert (plain.k, plain.duration_s, plain.tau, plain.output_tokens) == (0, 215.84, None, None)
    assert [spec.k, spec.output_tok_s] == pytest.approx([6, 106678 / 133.24])
    assert spec.tau == pytest.approx(2.473, abs=1e-3)


def test_columns_that_may_mean_two_things_are_said(tmp_path: Path) -> None:
    sink, found = table(tmp_path, "num_requests,k,tok_s_gpu\n8,0,100\n8,3,150\n")
    assert [(r.concurrency, r.output_tok_s) for r in sink.runs] == [(8, 100), (8, 150)]
    assert "num_requests is taken for the concurrency" in notes(found)
    assert "tok_s_gpu is of one gpu, not of the whole engine" in notes(found)
    sink, found = table(tmp_path, "num_requests,concurrency,k,tok_s\n100,8,3,150\n")
    assert (sink.runs[0].concurrency, sink.runs[0].requests) == (8, 100)
    assert not notes(found)


def test_imported_runs_are_read_again(tmp_path: Path) -> None:
    sink, _ = sample(tmp_path, "runs")
    assert sink.runs == [
        RunRow("a.json", 0, "x", engine="vllm", k=3, concurrency=8.0, output_tok_s=700.5, tau=2.4),
    ]
    with pytest.raises(InputError, match=":2: unknown columns colour: another version's"):
        table(tmp_path, "file,run,label,output_tok_s,colour\na,0,,5,red\n")


def test_column_names() -> None:
    assert column_of("num_steps(topk=1)") == "steps"
    assert column_of("pos0_pct") == "position_1"
    assert variant_of("TPOT_ms_eagle1") == ("tpot_mean_ms", "eagle1")
    assert variant_of("accept_len") == variant_of("total_tok_s") == (None, "")
    assert [k_of(n) for n in ("fixed_k3", "MTP-1", "EAGLE3 k=3 (amd)", "Qwen3")] == [3, 1, 3, None]


# --- what is suspicious ----------------------------------------------------------------------------------------

COUNTERS = {k: None for k in samples.VLLM_BENCH if k.startswith("spec_decode_")}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"spec_decode_acceptance_length": 1.5}, "leaves out the bonus token: counted anew"),
        ({"spec_decode_acceptance_length": 2.9}, "differs from 1 \\+ accepted / rounds"),
        ({"spec_decode_acceptance_rate": 62.5}, "counts the bonus token: counted anew"),  # 250 / 400
        ({"spec_decode_acceptance_rate": 20.0}, "differs from accepted / verified"),
        ({"spec_decode_draft_tokens": 200, "spec_decode_acceptance_rate": 50.0}, "configured width, not the verified"),
        ({"spec_decode_draft_tokens": 200, "spec_decode_acceptance_rate": 75.0}, "lower bound"),
        ({"spec_decode_per_position_acceptance_rates": [0.8, 0.8, 0.8]}, "may not be survival"),
        ({"dataset_name": "random"}, "random tokens"),
        ({"total_input_tokens": 6400}, "equally long"),
        ({"completed": 31}, "four requests per client"),
        ({"failed": 2}, "requests failed"),
        (COUNTERS, "no speculation counters"),
    ],
)
def test_suspicious_vllm_runs_are_said_and_converted(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    sink, found = read(lines(tmp_path, samples.VLLM_BENCH | change))
    assert re.search(says, notes(found))
    if change is not COUNTERS:
        assert sink.runs[0].tau == 2.5
        assert sink.runs[0].acceptance_rate == (150 / change.get("spec_decode_draft_tokens", 300))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dataset_name": "random-ids"}, "random tokens"),
        ({"total_output_tokens_retokenized": 300}, "retokenised tokens differ"),
        ({"max_concurrency": 4}, "four requests per client"),
    ],
)
def test_suspicious_sglang_runs_are_said(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    assert says in notes(read(lines(tmp_path, samples.SGLANG_BENCH | change))[1])


def test_a_missing_warm_up_is_said(tmp_path: Path) -> None:
    many = {
        "input_lens": [9] * 40,
        "output_lens": [1] * 40,
        "itls": [[]] * 40,
        "errors": [""] * 40,
        "generated_texts": [""] * 40,
    }
    slow = samples.SGLANG_BENCH | many | {"max_concurrency": 4, "ttfts": [2.0] * 4 + [0.5] * 36}
    assert "no warm-up" in notes(read(lines(tmp_path, slow))[1])
    assert "no warm-up" not in notes(read(lines(tmp_path, slow | {"ttfts": [0.6] * 4 + [0.5] * 36}))[1])


def test_engine_versions_that_differ_are_said(tmp_path: Path) -> None:
    newer = samples.SGLANG_BENCH | {"server_info": samples.SERVER | {"version": "0.6.0"}}
    one, two = lines(tmp_path, samples.SGLANG_BENCH, name="a"), lines(tmp_path, newer, name="b")
    assert "versions of sglang differ: 0.5.23, 0.6.0" in notes(read(one, two)[1])
    assert "differ" not in notes(read(one, one)[1])


@pytest.mark.parametrize(
    ("row", "tau", "rate", "says"),
    [
        ("3,1.5,0.50", 2.5, 0.5, "leaves out the bonus token"),  # rate x k
        ("3,2.5,0.50", 2.5, 0.5, ""),
        ("15,7.05,0.40", 7.05, 0.4, ""),  # 6.05 of 15, rounded
        ("3,2.5,0.10", 2.5, 0.1, "fit no one definition"),
        ("3,2.5,0.625", 2.5, 0.5, "rate counts the bonus token"),  # 2.5 of 4
        ("7,2.5,0.80", 2.5, 0.8, "over fewer drafts than configured"),
    ],
)
def test_bonus_token_or_not(tmp_path: Path, row: str, tau: float, rate: float, says: str) -> None:
    sink, found = table(tmp_path, f"k,accept_length,acceptance_rate\n{row}\n")
    assert (sink.runs[0].tau, sink.runs[0].acceptance_rate) == (tau, rate)
    assert says in notes(found)
    assert bool(notes(found)) == bool(says)


def test_sglang_meta_with_cut_lengths_rates_what_was_verified(tmp_path: Path) -> None:
    """4 rounds of 4.5 tokens verified 14 drafts, not 28; the histogram is censored."""
    cut = samples.META[0]["meta_info"] | {
        "spec_num_proposed_drafts": 28,
        "spec_accept_rate": 0.25,
        "spec_cap_length": 4.5,
    }
    sink, found = read(lines(tmp_path, {"meta_info": cut}))
    assert (sink.requests[0].drafted, sink.requests[0].tau) == (14, 2.75)
    assert not sink.acceptance
    assert "configured width, not the verified" in notes(found)
    assert "censored" in notes(found)


def test_aborted_responses_are_not_pooled(tmp_path: Path) -> None:
    cut = meta(finish_reason={"type": "abort"}, completion_tokens=500, spec_num_correct_drafts=0, spec_accept_length=1.0)
    cut["meta_info"]["spec_accept_rate"] = 0.0
    sink, found = read(lines(tmp_path, *samples.META, cut))
    whole = sample(tmp_path, "sglang_meta")[0].runs[0]
    (run,) = sink.runs
    assert run._replace(file="", failed=0) == whole._replace(file="")
    assert (run.requests, run.failed) == (2, 1)
    assert [r.status for r in sink.requests] == ["finished", "finished", "failed"]
    assert "requests failed" in notes(found)


def test_only_responses_that_count_their_drafts_are_pooled(tmp_path: Path) -> None:
    """With another's 40 accepted drafts but not its verified ones, 48 of 24 would be accepted."""
    half = {"meta_info": {"completion_tokens": 51, "spec_verify_ct": 10}}
    sink, found = read(lines(tmp_path, *samples.META, half))
    (run,) = sink.runs
    assert (run.accepted, run.drafted, run.rounds, run.tau) == (8, 24, 8, 2.0)
    assert "some responses do not count their drafts" in notes(found)
    line = json.loads(json.dumps(samples.AIPERF[0]))
    del line["spec_decode_acceptance"]["num_draft_tokens"]
    pooled, alone = (read(lines(tmp_path, *r))[0].runs[0] for r in ([*samples.AIPERF, line], samples.AIPERF))
    assert (pooled.drafted, pooled.accepted, pooled.rounds) == (alone.drafted, alone.accepted, alone.rounds)


def test_a_run_that_cannot_be_is_a_problem_of_its_file(tmp_path: Path) -> None:
    """Each request can be, but together they accept 3 drafts a round where one was configured."""

    def request(drafts: int, **told: int) -> dict[str, Any]:
        spec = {"num_accepted_draft_tokens": drafts, "num_draft_tokens": drafts, "num_spec_steps": 1}
        return samples.aiperf(10.0, 400.0, 80.0) | {"spec_decode_acceptance": spec | told}

    path = lines(tmp_path, request(5), request(1, num_spec_tokens=1))
    with pytest.raises(InputError, match=r"x:2: accept length 4 is impossible.*1\.\.2 for 1 drafts"):
        read(path)
    sink, (found,) = read(path, keep_going=True)
    assert (len(sink.requests), sink.runs, found.source.skipped) == (2, [], 1)


def test_chunks_are_put_together_after_a_first_of_several_tokens(tmp_path: Path) -> None:
    """Ten tokens, the first three in one chunk: seven ITLs in chunks of 4 and 3."""
    record = samples.SGLANG_BENCH | samples.DETAILS
    record |= {"input_lens": [5], "output_lens": [10], "ttfts": [0.1], "itls": [[0.01] * 4 + [0.02] * 3]}
    record |= {n: [record[n][0]] for n in ("generated_texts", "errors") if n in record}
    sink, found = read(lines(tmp_path, record))
    assert sink.requests[0].chunks == 3
    assert sink.requests[0].itl_max_s == pytest.approx(0.06)
    assert "one a token" not in notes(found)


@pytest.mark.parametrize(
    ("pairs", "k", "says"),
    [
        ([(2.5, 0.5), (1.9, 0.3)], 3, "the rates fit 3"),
        ([(1.0, 0.0)], None, "several fit its rates"),
        ([(2.5, 0.5), (2.5, 0.9)], None, "no single number fits its rates"),
        ([(2.5, None)], None, "its lines hold no rates"),
    ],
)
def test_the_width_of_a_log_without_arguments(
    tmp_path: Path, pairs: list[tuple[float, float | None]], k: int | None, says: str
) -> None:
    path = tmp_path / "log"
    rates = ["" if rate is None else f"accept rate: {rate:.2f}, " for _, rate in pairs]
    said = zip(pairs, rates, strict=True)
    path.write_text(
        "".join(f"Decode batch. #running-req: 2, accept len: {tau:.2f}, {r}#queue-req: 0\n" for (tau, _), r in said)
    )
    sink, found = read(path)
    assert sink.runs[0].k == k
    assert says in notes(found)


# --- what is malformed -----------------------------------------------------------------------------------------


def changed(record: dict[str, Any], **change: Any) -> dict[str, Any]:
    return record | change


def meta(**change: Any) -> dict[str, Any]:
    return {"meta_info": samples.META[0]["meta_info"] | change}


@pytest.mark.parametrize(
    ("good", "bad", "says"),
    [
        (
            samples.SGLANG_BENCH,
            changed(samples.SGLANG_BENCH, accept_length=4.5),
            "accept length 4.5 is impossible.*allowed: 1..4 for 3",
        ),
        (samples.SGLANG_BENCH, changed(samples.SGLANG_BENCH, accept_length=0.7), "accept length 0.7 is impossible"),
        (
            samples.SGLANG_BENCH,
            changed(samples.SGLANG_BENCH, mean_ttft_ms=-3),
            "mean_ttft_ms is -3, allowed: a number >= 0",
        ),
        (
            samples.SGLANG_BENCH,
            changed(samples.SGLANG_BENCH, median_ttft_ms=1200, p99_ttft_ms=1200),
            "ttft p50 1200 ms is above e2e p50",
        ),
        (
            samples.SGLANG_BENCH,
            changed(samples.SGLANG_BENCH, p99_tpot_ms=5),
            "median 20 ms is above the 99th percentile 5",
        ),
        (samples.SGLANG_BENCH, changed(samples.SGLANG_BENCH, completed=2.5), "completed is 2.5, allowed: a whole number"),
        (
            samples.SGLANG_BENCH,
            changed(samples.SGLANG_BENCH, server_info="gone"),
            "server_info is 'gone', allowed: an object",
        ),
        (samples.SGLANG_BENCH, samples.SGLANG_BENCH | samples.DETAILS | {"ttfts": [0.1]}, "lists of different lengths"),
        (
            samples.SGLANG_BENCH,
            samples.SGLANG_BENCH | samples.DETAILS | {"itls": [[0.1], ["x"], []]},
            r"itls\[1\]\[0\] is 'x'",
        ),
        (samples.VLLM_BENCH, changed(samples.VLLM_BENCH, spec_decode_acceptance_rate=120), "allowed: 0..100"),
        (samples.VLLM_BENCH, changed(samples.VLLM_BENCH, spec_decode_accepted_tokens=400), "400 drafts accepted of 300"),
        (
            samples.VLLM_BENCH,
            changed(samples.VLLM_BENCH, spec_decode_per_position_acceptance_rates=[0.5, 0.8, 0.2]),
            "position 2 is accepted more often than position 1",
        ),
        (meta(), meta(completion_tokens=None), "completion_tokens is missing"),
        (meta(), meta(ttft=0.9), "ttft 0.9 s is longer than the whole request"),
        (meta(), meta(spec_verify_ct="four"), "spec_verify_ct is 'four'"),
        (samples.AIPERF[0], changed(samples.AIPERF[0], metadata={}), "request_start_ns and request_end_ns"),
        (
            samples.AIPERF[0],
            samples.aiperf(10.0, 100.0, 300.0),
            "longer than the whole request|inter_chunk_latency|inter_token_latency",
        ),
    ],
)
def test_a_bad_line_is_named_and_can_be_left_out(
    tmp_path: Path, good: dict[str, Any], bad: dict[str, Any], says: str
) -> None:
    path = lines(tmp_path, good, bad, good)
    with pytest.raises(InputError, match=rf"x:2: .*({says})"):
        read(path)
    sink, (found,) = read(path, keep_going=True)
    assert found.source.skipped == len(found.source.problems) == 1
    assert len(sink.runs) == (2 if good in (samples.SGLANG_BENCH, samples.VLLM_BENCH) else 1)


@pytest.mark.parametrize(
    "broken", ['{"backend": "sglang", "dataset', "{'backend': 1}", '["a list"]', "nothing at all", '{"a": [1, 2}']
)
def test_a_broken_line_of_json_is_named_and_left_out(tmp_path: Path, broken: str) -> None:
    good = json.dumps(samples.SGLANG_BENCH)
    path = tmp_path / "x"
    path.write_text("\n".join([good, broken, good]) + "\n")
    with pytest.raises(InputError, match=r"x:[23]: not JSON"):
        read(path)
    sink, (found,) = read(path, keep_going=True)
    assert found.source.skipped == 1
    assert len(sink.runs) == 2


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("throughput", samples.THROUGHPUT + "2,3,1,4,1.0,-5,2.0\n", ":5: throughput_tok_s is '-5'"),
        ("throughput", samples.THROUGHPUT + "2,3,1\n", ":5: 3 fields, allowed: 7"),
        ("throughput", samples.THROUGHPUT + "2,3,1,4,1.0,100,4.2\n", ":5: accept length 4.2 is impossible"),
        ("cost", samples.COST + "8,8,512,0\n", ":5: ms is 0"),
        ("cost", samples.COST + "8,many,512,3\n", ":5: tokens_per_request is 'many'"),
        (
            "mooncake",
            samples.texts()["mooncake"][1] + '{"timestamp": 1, "input_length": 5, "output_length": 5}\n',
            ":3: arrives before",
        ),
        ("azure", samples.texts()["azure"][1] + "yesterday,1,1\n", ":4: 'yesterday' is not a time"),
        (
            "sglang_log",
            samples.SGLANG_LOG + "Decode batch. #running-req: 1, accept len: 5.50, #queue-req: 0\n",
            ":6: accept length 5.5",
        ),
        (
            "vllm_log",
            samples.VLLM_LOG + "SpecDecoding metrics: Mean acceptance length: 2.0\n",
            ":6: Accepted and Drafted",
        ),
        (
            "sharegpt_lines",
            samples.texts()["sharegpt_lines"][1] + '{"conversations": [{"from": "human"}]}\n',
            ":3: conversations.0. needs",
        ),
    ],
)
def test_a_bad_row_is_named_and_can_be_left_out(tmp_path: Path, name: str, text: str, says: str) -> None:
    whole = sample(tmp_path, name)[0].counts
    path = tmp_path / "x"
    path.write_text(text)
    with pytest.raises(InputError, match=says):
        read(path)
    sink, (found,) = read(path, keep_going=True)
    assert found.source.skipped == 1
    assert sink.counts == whole


def test_ten_problems_are_enough_and_all_files_are_named(tmp_path: Path) -> None:
    bad = samples.SGLANG_BENCH | {"duration": -1}
    one, two = lines(tmp_path, *[bad] * 30, name="a"), lines(tmp_path, bad, name="b")
    with pytest.raises(InputError) as error:
        read(one, two)
    assert len(error.value.problems) == 11


# --- large files -----------------------------------------------------------------------------------------------


def peak_of(path: Path) -> int:
    """Bytes that reading takes at most, the file's own text included."""
    tracemalloc.start()
    try:
        import_files([path], Sink())
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def vllm_of(path: Path, requests: int) -> None:
    """One document, one line."""
    gaps = json.dumps([round(0.01 + i * 1e-5, 6) for i in range(40)])
    with path.open("w") as file:
        file.write(json.dumps(samples.VLLM_BENCH)[:-1])
        for name, item in (
            ("input_lens", "100"),
            ("output_lens", "41"),
            ("ttfts", "0.05"),
            ("itls", gaps),
            ("generated_texts", '"' + "x" * 1800 + '"'),
        ):
            file.write(f', "{name}": [{", ".join([item] * requests)}]')
        file.write("}")


def guidellm_of(path: Path, requests: int) -> None:
    whole = json.dumps(samples.GUIDELLM)
    one = json.dumps(samples.GUIDELLM["benchmarks"][0]["requests"]["successful"][0] | {"output": "y" * 2000})
    start = whole.index('"successful": [{"type_"') + len('"successful": [')
    with path.open("w") as file:
        file.write(whole[:start] + ", ".join([one] * requests) + ", " + whole[start:])


def aiperf_of(path: Path, requests: int) -> None:
    with path.open("w") as file:
        for i in range(requests):
            file.write(json.dumps(samples.aiperf(10.0 + i, 400.0, 80.0) | {"trace": "z" * 2000}) + "\n")


@pytest.mark.parametrize("make", [vllm_of, guidellm_of, aiperf_of])
def test_memory_hardly_grows_with_the_file(tmp_path: Path, make: Callable[[Path, int], None]) -> None:
    """Eight times the file, at most 1.5 times the memory, and less than the file."""
    small, large = tmp_path / "small", tmp_path / "large"
    make(small, 500)
    make(large, 4000)
    assert large.stat().st_size > 7.5 * small.stat().st_size
    assert large.stat().st_size > 8e6
    peak_of(small)  # caches
    least, most = peak_of(small), peak_of(large)
    assert most < 1.5 * least + 1e6
    assert most < large.stat().st_size


# --- tools -----------------------------------------------------------------------------------------------------

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


def taken(stream: JsonStream) -> Any:
    """A value, piece by piece."""
    first = stream.peek()
    if first == "[":
        return [taken(stream) for _ in stream.items()]
    if first == "{":
        return {key: taken(stream) for key in stream.members()}
    return stream.value()


@pytest.fixture
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "CHUNK", 3)


@given(values=st.lists(JSON_VALUES, min_size=1, max_size=3), indent=st.sampled_from([None, 2]), size=st.integers(1, 9))
def test_json_in_pieces_is_json_at_once(values: list[Any], indent: int | None, size: int) -> None:
    text = "\n".join(json.dumps(v, indent=indent) for v in values)
    before, json_stream.CHUNK = json_stream.CHUNK, size
    try:
        stream = JsonStream(io.StringIO(text))
        assert [taken(stream) for _ in iter(stream.peek, "")] == values
        stream, lines_seen = JsonStream(io.StringIO(text)), []
        while stream.peek():
            lines_seen.append(stream.line)
            stream.skip()
    finally:
        json_stream.CHUNK = before
    sizes = [json.dumps(v, indent=indent).count("\n") + 1 for v in values]
    assert lines_seen == [1 + sum(sizes[:i]) for i in range(len(values))]


@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize(
    "text", ['{"a" 1}', '{"a": 1 "b": 2}', "[1, 2", '{"a": tru}', "[1 2]", "{1: 2}", '"open', "{", "[1,, 2]"]
)
def test_what_is_not_json_is_refused(text: str) -> None:
    with pytest.raises(Malformed):
        taken(JsonStream(io.StringIO(text)))


def test_percentiles_are_exact_and_then_nearly_so() -> None:
    rng = np.random.default_rng(0)
    few, many = rng.lognormal(size=1000), rng.lognormal(size=EXACT + 50_000)
    exact, binned = Quantiles(), Quantiles()
    exact.extend(few)
    for part in np.array_split(many, 7):
        binned.extend(part)
    for q in (1, 50, 99):
        assert exact.at(q) == np.percentile(few, q)
        assert binned.at(q) == pytest.approx(float(np.percentile(many, q)), rel=0.002)
    assert binned.mean == pytest.approx(many.mean())
    assert Quantiles().at(50) is None


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    where=st.floats(0, 1),
    cut=st.integers(0, 12),
    put=st.sampled_from(
        ["", "null", "-1", "[]", "{}", '"x"', "1e400", "NaN", "\n", ",", "}", "0", "9" * 30, "true", "é"]
    ),
    keep_going=st.booleans(),
)
def test_damaged_files_are_read_or_refused(name: str, where: float, cut: int, put: str, keep_going: bool) -> None:
    """Whatever is cut out or put in: rows, or an InputError; never anything else."""
    kind, text = samples.texts()[name]
    at = round(where * len(text))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "x"
        path.write_text(text[:at] + put + text[at + cut :], encoding="utf-8")
        with suppress(InputError):
            read(path, kind=kind, keep_going=keep_going)
        with suppress(InputError):
            recognise(path)
