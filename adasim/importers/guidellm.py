"""GuideLLM's benchmark report (JSON): a benchmark a run, its requests by status.

GuideLLM's time per output token includes the first token; its *inter-token latency*, a request's mean after the first, is
what is called TPOT here. GuideLLM's statistics of it weight requests by their tokens; a run's are therefore taken from
the requests in the report, which count alike. It keeps no gaps between chunks.
Source: vllm-project/guidellm, docs/guides/metrics and src/guidellm/schemas.
"""

from collections.abc import Mapping
from typing import Any

from adasim.importers.checks import run_of, times, warm_up
from adasim.importers.fields import Malformed, mapping, number, text, whole
from adasim.importers.head import Head
from adasim.importers.json_stream import JsonStream
from adasim.importers.quantiles import Quantiles
from adasim.importers.sink import Sink
from adasim.importers.source import Source
from adasim.importers.tables import RequestRow, RunRow

LATENCIES = {
    "ttft": ("time_to_first_token_ms", 1.0),
    "tpot": ("inter_token_latency_ms", 1.0),
    "e2e": ("request_latency", 1e3),
}
STATUS = {"successful": "finished", "errored": "failed", "incomplete": "unfinished"}


def recognises(head: Head) -> bool:
    """A report that holds benchmarks."""
    told = "guidellm_version" in str(head.first.get("metadata"))
    return "benchmarks" in head.keys and (told or '"request_totals"' in head.text or '"metrics"' in head.text)


def read(source: Source, sink: Sink) -> None:
    """Fill runs and requests."""
    for stream in source.documents():
        with source.guard(stream):
            about: dict[str, Any] = {}
            for name in stream.members():
                if name == "benchmarks":
                    for run in stream.items():
                        _benchmark(source, sink, stream, run, about)
                elif name in {"metadata", "args", "config"}:
                    about[name] = stream.value()
                else:
                    stream.skip()


def _benchmark(source: Source, sink: Sink, stream: JsonStream, run: int, about: Mapping[str, Any]) -> None:
    found: dict[str, Any] = {}
    first_ttft: list[float] = []
    tpot_ms = Quantiles()
    for name in stream.members():
        if name == "requests" and stream.peek() == "{":
            for status in stream.members():
                if status not in STATUS or stream.peek() != "[":
                    stream.skip()
                    continue
                for i in stream.items():
                    record = stream.value()
                    with source.guard(stream):
                        row = request_row(source, record, run, i, STATUS[status])
                        if row.ttft_s is not None:
                            first_ttft.append(row.ttft_s)
                        if row.tpot_s is not None and row.status == "finished":
                            tpot_ms.add(1e3 * row.tpot_s)
                        sink.add(row)
        else:
            found[name] = stream.value()
    with source.guard(stream):
        whole_run = run_of(source, _with_tpot(source, run_row(source, found, run, about), tpot_ms))
        warm_up(source, first_ttft, whole_run.concurrency)
        sink.add(whole_run)


def _with_tpot(source: Source, run: RunRow, tpot_ms: Quantiles) -> RunRow:
    """The run with TPOT over its requests, where the report holds any."""
    if not tpot_ms.count:
        if run.tpot_mean_ms is not None:
            source.note("no requests in the report: TPOT is GuideLLM's, weighted by tokens")
        return run
    if run.requests and tpot_ms.count < 0.9 * run.requests:
        source.note("the report holds only some of the requests: TPOT is of these")
    return run._replace(tpot_mean_ms=tpot_ms.mean, tpot_p50_ms=tpot_ms.at(50), tpot_p99_ms=tpot_ms.at(99))


def run_row(source: Source, benchmark: Mapping[str, Any], run: int, about: Mapping[str, Any]) -> RunRow:
    """One benchmark's summary over its successful requests."""
    config, metrics = mapping(benchmark, "config") or mapping(benchmark, "args"), mapping(benchmark, "metrics")
    strategy = mapping(config, "strategy")
    kind = text(strategy, "type_") or text(strategy, "kind") or "unknown"
    totals = mapping(metrics, "request_totals") or mapping(mapping(benchmark, "run_stats"), "requests_made")
    arguments = mapping(about, "args")
    if "prompt_tokens" in str(arguments.get("data")) or "prompt_tokens" in str(mapping(about, "config")):
        source.note("prompts are synthetic: acceptance and speed-up mean little for real text")
    if "time_per_output_token_ms" in metrics:
        source.note("GuideLLM's TPOT includes the first token: its inter-token latency is used for TPOT")
    streams = number(strategy, "streams") or number(strategy, "max_concurrency")
    latencies: dict[str, Any] = {}
    for name, (theirs, factor) in LATENCIES.items():
        good = mapping(mapping(metrics, theirs), "successful")
        tail = mapping(good, "percentiles") or good  # older versions have them beside the mean
        values = {"mean": number(good, "mean"), "p50": number(good, "median"), "p99": number(tail, "p99")}
        latencies |= {f"{name}_{q}_ms": None if v is None else factor * v for q, v in values.items()}
    rate = mapping(mapping(metrics, "output_tokens_per_second"), "successful")
    in_flight = mapping(mapping(metrics, "request_concurrency"), "successful")
    return RunRow(
        source.name,
        run,
        kind,
        None,
        None,
        text(arguments, "model"),
        None,
        concurrency=1.0 if kind == "synchronous" else streams,
        concurrency_mean=number(in_flight, "mean"),
        request_rate_rps=number(strategy, "rate"),
        requests=whole(totals, "successful"),
        failed=whole(totals, "errored"),
        duration_s=number(benchmark, "duration"),
        prompt_tokens=_total(metrics, "prompt_token_count"),
        output_tokens=_total(metrics, "output_token_count"),
        output_tok_s=number(rate, "mean"),
        **latencies,
    )


def request_row(source: Source, record: Any, run: int, request: int, status: str) -> RequestRow:
    """One request.

    Raises:
        Malformed: no object, or impossible values.
    """
    if not isinstance(record, dict):
        raise Malformed(f"holds {type(record).__name__}, allowed: a request")
    ttft, tpot = number(record, "time_to_first_token_ms"), number(record, "inter_token_latency_ms")
    timings = mapping(mapping(record, "info"), "timings")
    return times(
        RequestRow(
            source.name,
            run,
            request,
            status,
            whole(record, "prompt_tokens"),
            whole(record, "output_tokens"),
            number(record, "request_start_time"),
            None if ttft is None else ttft / 1e3,
            None if tpot is None else tpot / 1e3,
            number(record, "request_latency"),
            chunks=whole(timings, "token_iterations"),
        )
    )


def _total(metrics: Mapping[str, Any], name: str) -> int | None:
    total = number(mapping(mapping(metrics, name), "successful"), "total_sum")
    return None if total is None else round(total)
