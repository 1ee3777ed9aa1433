"""The tables every importer fills, with one definition of each metric. None: the file does not tell.

- ``k``: drafts verified per request and round; 0 = plain decoding. ``depth``: the longest run of drafts that can be
  accepted: ``k`` for chains, the tree's depth for trees.
- ``tau``: tokens per request and round, the bonus token counted, the prefill's token not (types.py).
- ``acceptance_rate``: drafts accepted / drafts *verified*, no bonus token in either.
- ``survival``: P(the first ``position`` drafts are all accepted).
- ``ttft``: sending the request to its first token. ``tpot``: first to last token / (tokens - 1).
- ``itl``: time between two chunks of a request (a round gives one chunk). ``e2e``: sending to last token.
- ``concurrency``: the client's limit or the engine's batch; ``concurrency_mean``: what was in flight on average.

Seconds for single requests and steps, milliseconds in run tables.
"""

from typing import NamedTuple, get_type_hints

import pyarrow as pa


class RunRow(NamedTuple):
    """One benchmark run, one row of a throughput table, or what a log or a pair of scrapes says as a whole."""

    file: str
    run: int  # counts within the file, from 0
    label: str = ""  # what tells it from its neighbours: policy, data set, hardware
    engine: str | None = None
    version: str | None = None
    model: str | None = None
    dataset: str | None = None
    k: int | None = None
    depth: int | None = None
    topk: int | None = None  # choices a node of the draft tree has; 1 or None = a chain
    concurrency: float | None = None
    concurrency_mean: float | None = None
    request_rate_rps: float | None = None  # None: as fast as the client could
    requests: int | None = None  # finished
    failed: int | None = None
    duration_s: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    output_tok_s: float | None = None  # of the whole engine
    tau: float | None = None
    acceptance_rate: float | None = None
    rounds: int | None = None  # request-rounds that verified drafts
    drafted: int | None = None  # drafts verified
    accepted: int | None = None  # drafts accepted
    ttft_mean_ms: float | None = None
    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = None
    tpot_mean_ms: float | None = None
    tpot_p50_ms: float | None = None
    tpot_p99_ms: float | None = None
    itl_mean_ms: float | None = None
    itl_p50_ms: float | None = None
    itl_p99_ms: float | None = None
    e2e_mean_ms: float | None = None
    e2e_p50_ms: float | None = None
    e2e_p99_ms: float | None = None
    context: float | None = None  # mean tokens of a request in the KV cache, where a table says so


class RequestRow(NamedTuple):
    """One request of a run."""

    file: str
    run: int
    request: int
    status: str  # finished, failed, or unfinished: in flight when the run ended
    prompt_len: int | None = None
    output_len: int | None = None
    arrival_s: float | None = None  # on the file's own clock
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    itl_p50_s: float | None = None
    itl_max_s: float | None = None
    chunks: int | None = None  # pieces it was streamed in, the first token's included
    rounds: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    tau: float | None = None


class StepRow(NamedTuple):
    """One line of a server's log: the state at that moment and rates over the interval before it."""

    file: str
    line: int
    time_s: float | None  # since the first such line
    running: int | None = None
    queued: int | None = None
    tokens: int | None = None  # in the KV cache
    gen_tok_s: float | None = None
    tau: float | None = None
    acceptance_rate: float | None = None
    verify_len: float | None = None  # mean tokens verified per request and round, where the engine cuts
    drafted: int | None = None
    accepted: int | None = None


class AcceptanceRow(NamedTuple):
    """Survival at one position, pooled over a run."""

    file: str
    run: int
    label: str
    position: int  # 1 = the first draft
    survival: float
    rounds: int | None = None  # request-rounds it was counted over


class CostRow(NamedTuple):
    """Measured milliseconds of a pass over ``tokens`` tokens of ``batch`` requests."""

    file: str
    part: str  # verify, draft, or step (all of a round)
    batch: int | None
    tokens: int | None
    context: int | None
    ms: float
    note: str = ""


class WorkloadRow(NamedTuple):
    """One request of a trace, in the file's order."""

    file: str
    request: int
    arrival_s: float | None
    prompt_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()  # one id per 512 prompt tokens


Row = RunRow | RequestRow | StepRow | AcceptanceRow | CostRow | WorkloadRow
TABLES: dict[type[tuple[object, ...]], str] = {
    RunRow: "runs",
    RequestRow: "requests",
    StepRow: "steps",
    AcceptanceRow: "acceptance",
    CostRow: "costs",
    WorkloadRow: "workload",
}
ARROW = {int: pa.int64(), float: pa.float64(), str: pa.string(), tuple[int, ...]: pa.list_(pa.int64())}


def schema(kind: type) -> pa.Schema:
    """Columns of a table, nullable where the row's type is."""
    fields = []
    for name, hint in get_type_hints(kind).items():
        options = [a for a in getattr(hint, "__args__", ()) if a is not type(None) and a in ARROW]
        base = hint if hint in ARROW else options[0]
        fields.append(pa.field(name, ARROW[base]))
    return pa.schema(fields)
