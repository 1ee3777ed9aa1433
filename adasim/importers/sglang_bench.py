"""SGLang ``bench_serving`` JSON lines: a run a line, with or without ``--output-details``.

Its accept length is the server's average since start. With its own ``/generate`` endpoint a chunk's gap is spread over
the chunk's tokens; with details the gaps are put together again, without them its ITL is left out.
Source: sgl-project/sglang, python/sglang/bench_serving.py.
"""

from collections.abc import Mapping
from typing import Any

from adasim.importers.acceptance import acceptance
from adasim.importers.bench_details import SPREADS, read_document
from adasim.importers.checks import run_of
from adasim.importers.fields import mapping, number, text, whole
from adasim.importers.head import Head
from adasim.importers.sink import Sink
from adasim.importers.source import Source
from adasim.importers.tables import RunRow


def recognises(head: Head) -> bool:
    """A document that names backend and data set, as only SGLang's does."""
    own = {"sharegpt_output_len", "random_range_ratio", "random_input_len", "accept_length", "server_info"}
    return {"backend", "dataset_name"} <= head.keys and bool(own & head.keys)


def read(source: Source, sink: Sink) -> None:
    """Fill runs, and with details requests."""
    run = 0
    for stream in source.documents():
        with source.guard(stream):
            record, details = read_document(stream)
            row = run_of(source, run_row(source, record, run), whole(record, "total_output_tokens_retokenized"))
            if details:
                sink.extend(details.requests(source, run, stream.line))
                row = row._replace(**details.summary(source, row.concurrency))
            elif text(record, "backend") in SPREADS and row.itl_mean_ms is not None:
                source.note(
                    "ITL is spread over the tokens of a chunk and left out: record with --output-details to have it"
                )
                row = row._replace(itl_mean_ms=None, itl_p50_ms=None, itl_p99_ms=None)
            sink.add(row)
            run += 1


def run_row(source: Source, record: Mapping[str, Any], run: int) -> RunRow:
    """The summary of a run."""
    server = mapping(record, "server_info")
    server = {**server, **mapping(server, "server_args")}
    k, depth = speculation(server) if server else (None, None)
    tau = number(record, "accept_length")
    if tau is not None:
        source.note("the accept length is the server's average since its start, warm-up and earlier runs included")
    found = acceptance(source, tau=tau, k=k, depth=depth)
    return RunRow(
        source.name,
        run,
        text(record, "tag") or "",
        "sglang" if "sglang" in (text(record, "backend") or "") else text(record, "backend"),
        text(server, "version"),
        text(server, "model_path"),
        text(record, "dataset_name"),
        k,
        depth,
        whole(server, "speculative_eagle_topk") if k else None,
        number(record, "max_concurrency"),
        number(record, "concurrency"),
        rate_rps(record),
        whole(record, "completed"),
        None,
        number(record, "duration"),
        whole(record, "total_input_tokens"),
        whole(record, "total_output_tokens"),
        number(record, "output_throughput"),
        found.tau,
        **percentiles(record, {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2e": "e2e_latency"}),
    )


def speculation(arguments: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Drafts and depth of SGLang's server arguments: the first of ``num_draft_tokens`` is the anchor."""
    if text(arguments, "speculative_algorithm") in {None, "None"}:
        return 0, 0
    verified, depth = whole(arguments, "speculative_num_draft_tokens"), whole(arguments, "speculative_num_steps")
    k = depth if not verified else verified - 1
    tree = (whole(arguments, "speculative_eagle_topk") or 1) > 1
    return k, depth if tree else k


def rate_rps(record: Mapping[str, Any]) -> float | None:
    """Requests per second; None for "inf" and for traces."""
    given = record.get("request_rate")
    unlimited = given in {"inf", "trace", float("inf")} if isinstance(given, str | float) else False
    return None if unlimited else number(record, "request_rate")


def percentiles(record: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """``mean_ttft_ms`` and its like as columns of a run."""
    kinds = {"mean": "mean", "p50": "median", "p99": "p99"}
    return {f"{n}_{q}_ms": number(record, f"{theirs}_{m}_ms") for n, m in names.items() for q, theirs in kinds.items()}
