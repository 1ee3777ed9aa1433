"""AIPerf ``profile_export.jsonl``: a request a line, metrics with their units.

Its inter-token latency is (last token - first token) / (tokens - 1), TPOT here; its inter-chunk latencies are ITL here.
Source: ai-dynamo/aiperf, docs/tutorials/working-with-profile-exports.md and spec-decode-metrics.md.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from adasim.importers.acceptance import acceptance
from adasim.importers.aiperf_metrics import count_of, histogram_of, seconds_of, seconds_per_unit, value_of
from adasim.importers.checks import run_of, times, warm_up
from adasim.importers.fields import Malformed, mapping, number, numbers, text, whole
from adasim.importers.head import Head
from adasim.importers.quantiles import Quantiles
from adasim.importers.sink import Sink
from adasim.importers.source import Source
from adasim.importers.tables import AcceptanceRow, RequestRow, RunRow

NAMES = ("ttft", "tpot", "e2e")


def recognises(head: Head) -> bool:
    """Objects of metadata and metrics, as AIPerf names them."""
    return {"metadata", "metrics"} <= head.keys and '"request_start_ns"' in head.text


class _Run:
    """What is gathered over the lines."""

    def __init__(self) -> None:
        self.latency = {n: Quantiles() for n in (*NAMES, "itl")}
        self.pooled: Counter[str] = Counter()
        self.accepted_lens: Counter[int] = Counter()
        self.k = 0
        self.began_s, self.ended_s = np.inf, -np.inf
        self.first_ttft: list[float] = []


def read(source: Source, sink: Sink) -> None:
    """Fill requests, one run, and survival where requests tell their acceptance."""
    run, line = _Run(), 0
    for line, record in source.objects():
        with source.guard(line):
            about = mapping(record, "metadata")
            if text(about, "benchmark_phase") == "warmup":
                run.pooled["warm-up"] += 1
                continue
            row = request_row(source, record, run)
            run.pooled["finished" if row.status == "finished" else "failed"] += 1
            sink.add(row)
    if not run.pooled["finished"]:
        source.note("no request finished")
        return
    if not run.pooled["warm-up"]:
        warm_up(source, run.first_ttft, None)
    with source.guard(line):
        sink.add(run_of(source, run_row(source, run)))
    for position in range(1, max(run.accepted_lens, default=0) + 1):
        reached = sum(n for drafts, n in run.accepted_lens.items() if drafts >= position)
        rounds = run.accepted_lens.total()
        sink.add(AcceptanceRow(source.name, 0, "", position, reached / rounds, rounds))


def request_row(source: Source, record: Mapping[str, Any], run: _Run) -> RequestRow:
    """One line."""
    about, metrics = mapping(record, "metadata"), mapping(record, "metrics")
    request = run.pooled["finished"] + run.pooled["failed"]
    began, ended = number(about, "request_start_ns"), number(about, "request_end_ns")
    if began is None or ended is None or ended < began:
        raise Malformed("metadata: request_start_ns and request_end_ns must be there, in this order")
    began_s, ended_s = began / 1e9, ended / 1e9
    prompt, output = count_of(metrics, "input_sequence_length"), count_of(metrics, "output_sequence_length")
    if record.get("error") is not None or about.get("was_cancelled"):
        return RequestRow(source.name, 0, request, "failed", prompt, output, began_s)
    seconds = {
        n: seconds_of(metrics, m)
        for n, m in zip(NAMES, ("time_to_first_token", "inter_token_latency", "request_latency"), strict=True)
    }
    gaps = [
        seconds_per_unit(metrics, "inter_chunk_latency") * g
        for g in numbers(value_of(metrics, "inter_chunk_latency"), "inter_chunk_latency")
    ]
    spec = mapping(record, "spec_decode_acceptance")
    rounds, drafted = whole(spec, "num_spec_steps"), whole(spec, "num_draft_tokens")
    accepted, k = whole(spec, "num_accepted_draft_tokens"), whole(spec, "num_spec_tokens")
    histogram = histogram_of(mapping(spec, "acceptance_histogram"))
    found = acceptance(
        source,
        tau=number(spec, "mean_acceptance_length"),
        rate=number(spec, "draft_acceptance_rate"),
        rounds=rounds,
        drafted=drafted,
        accepted=accepted,
        k=k,
    )
    row = times(
        RequestRow(
            source.name,
            0,
            request,
            "finished",
            prompt,
            output,
            began_s,
            seconds["ttft"],
            seconds["tpot"],
            seconds["e2e"],
            float(np.median(gaps)) if gaps else None,
            max(gaps, default=None),
            len(gaps) + 1 if gaps else None,
            rounds,
            drafted,
            accepted,
            found.tau,
        )
    )
    run.began_s, run.ended_s = min(run.began_s, began_s), max(run.ended_s, ended_s)
    run.k = max(run.k, k or 0)
    for name, value in seconds.items():
        if value is not None:
            run.latency[name].add(value)
    run.latency["itl"].extend(np.array(gaps))
    if row.ttft_s is not None and len(run.first_ttft) < 10_000:
        run.first_ttft.append(row.ttft_s)
    run.pooled.update({"prompt": prompt or 0, "output": output or 0})
    if rounds is not None and drafted is not None and accepted is not None:
        run.pooled.update({"rounds": rounds, "drafted": drafted, "accepted": accepted})
    run.accepted_lens.update(histogram)
    return row


def run_row(source: Source, run: _Run) -> RunRow:
    """The run that the finished requests make."""
    pooled, duration = run.pooled, run.ended_s - run.began_s
    rounds, drafted = pooled["rounds"] or None, pooled["drafted"] or None
    found = acceptance(source, rounds=rounds, drafted=drafted, accepted=pooled["accepted"], k=run.k or None)
    latencies: dict[str, Any] = {}
    for name, values in run.latency.items():
        of = {"mean": values.mean, "p50": values.at(50), "p99": values.at(99)}
        latencies |= {f"{name}_{q}_ms": None if v is None else 1e3 * v for q, v in of.items()}
    busy = (run.latency["e2e"].mean or 0.0) * run.latency["e2e"].count
    return RunRow(
        source.name,
        0,
        k=run.k or None,
        depth=run.k or None,
        concurrency_mean=busy / duration if duration > 0 and busy else None,
        requests=pooled["finished"],
        failed=pooled["failed"],
        duration_s=duration,
        prompt_tokens=pooled["prompt"],
        output_tokens=pooled["output"],
        output_tok_s=pooled["output"] / duration if duration > 0 else None,
        tau=found.tau,
        acceptance_rate=found.rate,
        rounds=rounds,
        drafted=drafted,
        accepted=pooled["accepted"] if rounds else None,
        **latencies,
    )
