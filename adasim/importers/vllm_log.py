"""vLLM server logs: engine lines and, a line later, ``SpecDecoding metrics``, each over the interval before it.

Per-position rates are survival; the drafts counted are those verified. Fields are found by name, in any order.
Source: vllm-project/vllm, vllm/v1/metrics/loggers.py and vllm/v1/spec_decode/metrics.py.
"""

import re

from adasim.importers.acceptance import acceptance
from adasim.importers.clock import LogClock
from adasim.importers.fields import Malformed, number, whole
from adasim.importers.head import Head
from adasim.importers.sink import Sink
from adasim.importers.source import Source
from adasim.importers.tables import AcceptanceRow, RunRow, StepRow
from adasim.importers.vllm_bench import falling

ENGINE = "Avg generation throughput:"
SPEC = "SpecDecoding metrics:"
FIELDS = {
    "gen": re.compile(r"Avg generation throughput: ([\d.]+)"),
    "running": re.compile(r"Running: (\d+) reqs"),
    "queued": re.compile(r"Waiting: (\d+) reqs"),
    "tau": re.compile(r"Mean acceptance length: ([\d.]+)"),
    "rate": re.compile(r"Avg Draft acceptance rate: ([\d.]+)%"),
    "accepted": re.compile(r"Accepted: (\d+) tokens"),
    "drafted": re.compile(r"Drafted: (\d+) tokens"),
    "survival": re.compile(r"Per-position acceptance rate: \[?([\d., ]+)"),
    "version": re.compile(r"vLLM API server version ([\w.+]+)|LLM engine \(v([\w.+]+)\)"),
    "model": re.compile(r"\bmodel='([^']+)'"),
}


def recognises(head: Head) -> bool:
    """Engine or speculation lines."""
    return ENGINE in head.text or SPEC in head.text


class _Log:
    """What is gathered over the lines."""

    def __init__(self) -> None:
        self.waiting: StepRow | None = None  # an engine line whose speculation line may follow
        self.running: list[int] = []
        self.gen_tok_s: list[float] = []  # while requests ran
        self.rounds = self.drafted = self.accepted = 0
        self.reached: list[float] = []  # by position, rounds that accepted so far
        self.version: str | None = None
        self.model: str | None = None


def read(source: Source, sink: Sink) -> None:
    """Fill steps, survival pooled over the log, and one run of all of it."""
    clock, log = LogClock(), _Log()
    for line_number, line in source.lines():
        if log.version is None and (found := FIELDS["version"].search(line)):
            log.version = found[1] or found[2]
        if log.model is None and (found := FIELDS["model"].search(line)):
            log.model = found[1]
        if ENGINE not in line and SPEC not in line:
            continue
        with source.guard(line_number):
            found_in = {n: m[1] for n, p in FIELDS.items() if (m := p.search(line))}
            if ENGINE in line:
                _flush(log, sink)
                log.waiting = StepRow(
                    source.name,
                    line_number,
                    clock.seconds(line),
                    whole(found_in, "running"),
                    whole(found_in, "queued"),
                    None,
                    number(found_in, "gen"),
                )
                log.running.append(log.waiting.running or 0)
                if log.waiting.running and log.waiting.gen_tok_s is not None:
                    log.gen_tok_s.append(log.waiting.gen_tok_s)
            if SPEC in line:
                row = log.waiting or StepRow(source.name, line_number, clock.seconds(line))
                log.waiting = _speculation(source, log, row, found_in)
                _flush(log, sink)
    _flush(log, sink)
    _sum_up(source, sink, log)


def _speculation(source: Source, log: _Log, row: StepRow, found_in: dict[str, str]) -> StepRow:
    shares = [number({"rate": s}, "rate", high=1) for s in found_in.get("survival", "").replace(" ", "").split(",")]
    survival = falling([s for s in shares if s is not None], "per-position")
    accepted, drafted, tau = whole(found_in, "accepted"), whole(found_in, "drafted"), number(found_in, "tau")
    if accepted is None or drafted is None:
        raise Malformed("Accepted and Drafted tokens are missing")
    if not drafted:
        return row
    k = len(survival) or None
    rounds = round(drafted / k) if k else None
    if tau is not None and tau > 1 and (rounds is None or abs(1 + accepted / rounds - tau) > 0.01 * tau):
        rounds = round(accepted / (tau - 1))  # lengths were cut: fewer drafts a round than positions
    rate = number(found_in, "rate", high=100)
    found = acceptance(
        source,
        tau=tau,
        rate=None if rate is None else rate / 100,
        rounds=rounds,
        drafted=drafted,
        accepted=accepted,
        k=k,
    )
    log.rounds, log.drafted, log.accepted = log.rounds + (rounds or 0), log.drafted + drafted, log.accepted + accepted
    log.reached += [0.0] * (len(survival) - len(log.reached))
    for i, share in enumerate(survival):
        log.reached[i] += share * (rounds or 0)
    cut = rounds and k and drafted < 0.99 * rounds * k
    return row._replace(
        tau=found.tau,
        acceptance_rate=found.rate,
        verify_len=1 + drafted / rounds if cut and rounds else None,
        drafted=drafted,
        accepted=accepted,
    )


def _flush(log: _Log, sink: Sink) -> None:
    if log.waiting is not None:
        sink.add(log.waiting)
    log.waiting = None


def _sum_up(source: Source, sink: Sink, log: _Log) -> None:
    busy = [n for n in log.running if n]
    k = len(log.reached) or None
    sink.add(
        RunRow(
            source.name,
            0,
            "log",
            "vllm",
            log.version,
            log.model,
            k=k,
            depth=k,
            concurrency_mean=sum(busy) / len(busy) if busy else None,
            output_tok_s=sum(log.gen_tok_s) / len(log.gen_tok_s) if log.gen_tok_s else None,
            tau=1 + log.accepted / log.rounds if log.rounds else None,
            acceptance_rate=log.accepted / log.drafted if log.drafted else None,
            rounds=log.rounds or None,
            drafted=log.drafted or None,
            accepted=log.accepted if log.rounds else None,
        )
    )
    if log.version:
        source.engines.add(("vllm", log.version))
    for i, reached in enumerate(log.reached, start=1):
        if log.rounds:
            sink.add(AcceptanceRow(source.name, 0, "log", i, reached / log.rounds, log.rounds))
