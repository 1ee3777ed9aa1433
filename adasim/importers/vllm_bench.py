"""vLLM ``bench serve`` JSON: a document a run, several in a file with ``--append-result``.

``--save-detailed`` adds requests. Acceptance is of the benchmark's own window (counter differences); the rate is in
percent, per-position rates are survival.
Source: vllm-project/vllm, vllm/benchmarks/serve.py.
"""

from collections.abc import Mapping
from typing import Any

from adasim.importers.acceptance import acceptance
from adasim.importers.bench_details import read_document
from adasim.importers.checks import run_of
from adasim.importers.fields import Malformed, number, numbers, text, whole
from adasim.importers.head import Head
from adasim.importers.sglang_bench import percentiles, rate_rps
from adasim.importers.sink import Sink
from adasim.importers.source import Source
from adasim.importers.tables import AcceptanceRow, RunRow


def recognises(head: Head) -> bool:
    """A document with vLLM's own names."""
    return {"model_id", "num_prompts"} <= head.keys or "spec_decode_num_drafts" in head.keys


def read(source: Source, sink: Sink) -> None:
    """Fill runs and survival, and with details requests."""
    run = 0
    for stream in source.documents():
        with source.guard(stream):
            record, details = read_document(stream)
            row = run_of(source, run_row(source, record, run))
            curve = survival_of(record)
            if details:
                sink.extend(details.requests(source, run, stream.line))
                row = row._replace(**details.summary(source, row.concurrency))
            sink.add(row)
            sink.extend(
                AcceptanceRow(source.name, run, row.label, i, s, row.rounds) for i, s in enumerate(curve, start=1)
            )
            run += 1


def run_row(source: Source, record: Mapping[str, Any], run: int) -> RunRow:
    """The summary of a run."""
    rounds, drafted = whole(record, "spec_decode_num_drafts"), whole(record, "spec_decode_draft_tokens")
    accepted, rate = whole(record, "spec_decode_accepted_tokens"), number(record, "spec_decode_acceptance_rate", high=100)
    survival = survival_of(record)
    k = len(survival) or (-(-drafted // rounds) if rounds and drafted else None)
    found = acceptance(
        source,
        tau=number(record, "spec_decode_acceptance_length"),
        rate=None if rate is None else rate / 100,
        rounds=rounds,
        drafted=drafted,
        accepted=accepted,
        k=k,
    )
    if survival and found.tau is not None and abs(1 + sum(survival) - found.tau) > 0.02 * found.tau:
        source.note("per-position rates do not add up to the accept length less the bonus: they may not be survival")
    if k is None:
        source.note("no speculation counters: plain decoding, or they were not exported")
    return RunRow(
        source.name,
        run,
        text(record, "label") or "",
        "vllm",
        text(record, "version"),
        text(record, "model_id"),
        text(record, "dataset_name"),
        k,
        k,
        None,
        number(record, "max_concurrency"),
        None,
        rate_rps(record),
        whole(record, "completed"),
        whole(record, "failed"),
        number(record, "duration"),
        whole(record, "total_input_tokens"),
        whole(record, "total_output_tokens"),
        number(record, "output_throughput"),
        found.tau,
        found.rate,
        rounds,
        drafted,
        accepted,
        **percentiles(record, {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2e": "e2el"}),
    )


def survival_of(record: Mapping[str, Any]) -> list[float]:
    """P(first i drafts accepted), i = 1..

    Raises:
        Malformed: outside 0..1, or rising.
    """
    name = "spec_decode_per_position_acceptance_rates"
    return falling(numbers(record.get(name), name, high=1.0), name)


def falling(survival: list[float], name: str) -> list[float]:
    """The curve, if it falls.

    Raises:
        Malformed: a later position is accepted more often than an earlier one: conditional rates, not survival.
    """
    for i in range(1, len(survival)):
        if survival[i] > survival[i - 1] + 0.0015:
            raise Malformed(f"{name}: position {i + 1} is accepted more often than position {i}: not survival")
    return survival
