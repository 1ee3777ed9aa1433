"""Prometheus text of vLLM's or SGLang's ``/metrics``: differences of counters between two scrapes.

Give the scrapes in order, as files or one after another in one file. One alone is an average since the server's start.
Counters are summed over label sets (engines, ranks, streaming or not); gauges show one moment and are only noted.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from adasim.importers.acceptance import acceptance
from adasim.importers.fields import Malformed, number
from adasim.importers.head import Head
from adasim.importers.sink import Sink
from adasim.importers.source import Source
from adasim.importers.tables import AcceptanceRow, RunRow

SAMPLE = re.compile(r"((?:vllm|sglang):\w+)(?:\{(.*)\})?\s+(\S+)(?:\s+(-?\d+))?\s*$")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
MEANS = {  # histograms whose mean over the window is a column, by engine
    "vllm": {
        "ttft_mean_ms": "time_to_first_token_seconds",
        "tpot_mean_ms": "request_time_per_output_token_seconds",
        "e2e_mean_ms": "e2e_request_latency_seconds",
    },
    "sglang": {"ttft_mean_ms": "time_to_first_token_seconds", "e2e_mean_ms": "e2e_request_latency_seconds"},
}


class Scrape(NamedTuple):
    """One scrape: values summed over label sets, accepted drafts by position, and the moment, where it is told."""

    source: Source
    line: int
    values: dict[str, float]
    positions: dict[int, float]
    model: str | None
    time_ms: int | None


def recognises(head: Head) -> bool:
    """Samples of either engine."""
    return any(SAMPLE.match(line) for line in head.text.splitlines()[:5000] if not line.startswith("#"))


def read(sources: Sequence[Source], sink: Sink) -> None:
    """Fill a run and survival for every pair of neighbouring scrapes."""
    scrapes = [s for source in sources for s in scrapes_of(source)]
    if len(scrapes) == 1:
        scrapes[0].source.note("one scrape alone: averages since the server's start; give a second one from later")
        scrapes.insert(0, Scrape(scrapes[0].source, 1, {}, {}, None, None))
    for run, (before, after) in enumerate(pairwise(scrapes)):
        with after.source.guard(after.line):
            if before.source is not after.source:
                after.source.note(f"differences are over {before.source.name}")
            sink.extend(difference(run, before, after))


def difference(run: int, before: Scrape, after: Scrape) -> list[RunRow | AcceptanceRow]:
    """What happened in between.

    Raises:
        Malformed: a counter went back.
    """

    def grown(name: str) -> int | None:
        if name not in after.values:
            return None
        found = after.values[name] - before.values.get(name, 0.0)
        if found < 0:
            raise Malformed(f"{name} went back by {-found:g}: the server was restarted, or the scrapes are out of order")
        return round(found)

    engine = "vllm" if any(n.startswith("vllm:") for n in after.values) else "sglang"
    source = after.source
    tokens = grown(f"{engine}:generation_tokens_total")
    drafted = accepted = None
    if engine == "vllm":
        rounds = grown("vllm:spec_decode_num_drafts_total")
        drafted = grown("vllm:spec_decode_num_draft_tokens_total")
        accepted = grown("vllm:spec_decode_num_accepted_tokens_total")
        requests = grown("vllm:request_success_total")
        k = len(after.positions) or None
    else:
        rounds, requests = grown("sglang:spec_verify_calls_total"), grown("sglang:num_requests_total")
        k = (
            round(after.values["sglang:spec_num_draft_tokens"]) - 1
            if "sglang:spec_num_draft_tokens" in after.values
            else None
        )
        if rounds and tokens is not None and requests is not None:
            accepted = max(tokens - requests - rounds, 0)  # a prefill gives the first token, a round one of its own
            source.note(
                "accepted drafts are generated tokens - first tokens - rounds: ends that were cut off lower them a little"
            )
        elif "sglang:spec_accept_length" in after.values:
            source.note("the accept length gauge shows the last interval only: it is not used as an average")
    found = acceptance(source, rounds=rounds, drafted=drafted, accepted=accepted, k=k)
    seconds = (after.time_ms - before.time_ms) / 1e3 if after.time_ms and before.time_ms else None
    means: dict[str, Any] = {}
    for column, name in MEANS[engine].items():
        total, count = f"{engine}:{name}_sum", grown(f"{engine}:{name}_count")
        if count and total in after.values:
            means[column] = 1e3 * (after.values[total] - before.values.get(total, 0.0)) / count
    rows: list[RunRow | AcceptanceRow] = [
        RunRow(
            source.name,
            run,
            "scrapes",
            engine,
            model=after.model,
            k=k,
            depth=k,
            requests=requests,
            duration_s=seconds,
            prompt_tokens=grown(f"{engine}:prompt_tokens_total"),
            output_tokens=tokens,
            output_tok_s=tokens / seconds if tokens is not None and seconds else None,
            tau=found.tau,
            acceptance_rate=found.rate,
            rounds=rounds,
            drafted=drafted,
            accepted=accepted,
            **means,
        )
    ]
    for position, reached in sorted(after.positions.items()):
        if rounds:
            share = (reached - before.positions.get(position, 0.0)) / rounds
            rows.append(AcceptanceRow(source.name, run, "scrapes", position + 1, share, rounds))
    return rows


def scrapes_of(source: Source) -> Iterator[Scrape]:
    """The scrapes of a file: a series that comes again begins the next one."""
    seen: set[str] = set()
    values, positions = defaultdict[str, float](float), defaultdict[int, float](float)
    model, time_ms, began = None, None, 1
    for line_number, line in source.lines():
        if line.startswith("#") or (found := SAMPLE.match(line)) is None:
            continue
        name, labels, value, stamp = found[1], dict(LABEL.findall(found[2] or "")), found[3], found[4]
        series = f"{name}{found[2]}"
        if series in seen:
            yield Scrape(source, began, dict(values), dict(positions), model, time_ms)
            for gathered in (values, positions, seen):
                gathered.clear()
            time_ms, began = None, line_number
        seen.add(series)
        with source.guard(line_number):
            amount = number({name: value}, name, low=-1e300) or 0.0
            model = labels.get("model_name", model)
            time_ms = int(stamp) if stamp else time_ms
            if name == POSITION:
                positions[int(_label(labels, "position"))] += amount
            elif "le" not in labels:
                values[name] += amount
    if seen:
        yield Scrape(source, began, dict(values), dict(positions), model, time_ms)


def _label(labels: Mapping[str, str], name: str) -> str:
    if not labels.get(name, "").isdigit():
        raise Malformed(f"the label {name} is {labels.get(name)!r}, allowed: a whole number >= 0")
    return labels[name]
