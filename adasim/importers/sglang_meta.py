"""SGLang responses kept with their ``meta_info``: one JSON object a line, or documents and lists of them.

Accept length and rate are counted anew from the request's own counters. ``spec_cap_length`` (where lengths are cut) is
the mean number of tokens verified, the anchor counted; proposed drafts there follow the configured width. Aborted
responses count as failed and are not pooled.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from adasim.importers.acceptance import acceptance
from adasim.importers.checks import run_of, times
from adasim.importers.fields import Malformed, mapping, number, numbers, whole
from adasim.importers.head import Head
from adasim.importers.json_stream import JsonStream
from adasim.importers.sink import Sink
from adasim.importers.source import Source
from adasim.importers.tables import AcceptanceRow, RequestRow, RunRow


def recognises(head: Head) -> bool:
    """A response, or its ``meta_info`` alone."""
    return "meta_info" in head.keys or {"completion_tokens", "e2e_latency"} <= head.keys or "spec_verify_ct" in head.keys


def read(source: Source, sink: Sink) -> None:
    """Fill requests, one run of all of them, and survival where every round verified the full block."""
    pooled, accepted_lens, cut, k, line = Counter[str](), Counter[int](), False, 0, 0
    counters = {True: Counter[str](), False: Counter[str]()}  # of responses with all of them; without drafts verified
    for stream in source.documents():
        with source.guard(stream):
            for record in _records(stream):
                with source.guard(stream):
                    meta = mapping(record, "meta_info") or record
                    row = request_row(source, meta, pooled["finished"] + pooled["failed"])
                    histogram = numbers(meta.get("spec_correct_drafts_histogram"), "histogram")
                    pooled[row.status] += 1
                    sink.add(row)
                    if row.status == "failed":
                        continue
                    cut |= number(meta, "spec_cap_length") is not None
                    k = max(k, round((whole(meta, "spec_num_proposed_drafts") or 0) / (row.rounds or 1)))
                    accepted_lens.update({drafts: int(count) for drafts, count in enumerate(histogram)})
                    pooled += Counter(prompt=row.prompt_len or 0, output=row.output_len or 0)
                    if row.rounds and row.accepted is not None:
                        sums = {"rounds": row.rounds, "drafted": row.drafted or 0, "accepted": row.accepted}
                        counters[row.drafted is not None].update(sums)
            line = stream.line
    if not pooled["finished"]:
        if pooled["failed"]:
            source.note("no request finished")
        return
    if all(counters.values()):
        source.note("some responses do not count their drafts: acceptance is of the others")
    of = counters[True] or counters[False]
    rounds, drafted = of["rounds"] or None, of["drafted"] or None
    drafts = k or (None if rounds else 0)
    with source.guard(line):
        found = acceptance(source, rounds=rounds, drafted=drafted, accepted=of["accepted"])
        run = RunRow(
            source.name,
            0,
            engine="sglang",
            k=drafts,
            depth=drafts,
            requests=pooled["finished"],
            failed=pooled["failed"],
            prompt_tokens=pooled["prompt"] or None,
            output_tokens=pooled["output"],
            tau=found.tau,
            acceptance_rate=found.rate,
            rounds=rounds,
            drafted=drafted,
            accepted=of["accepted"] if rounds else None,
        )
        sink.add(run_of(source, run))
    if cut and accepted_lens:
        source.note("lengths were cut: the histogram of accepted drafts is censored, no survival is made of it")
    elif total := sum(accepted_lens.values()):
        for position in range(1, max(accepted_lens) + 1):
            reached = sum(n for drafts, n in accepted_lens.items() if drafts >= position)
            sink.add(AcceptanceRow(source.name, 0, "", position, reached / total, total))


def request_row(source: Source, meta: Mapping[str, Any], request: int) -> RequestRow:
    """One response.

    Raises:
        Malformed: no token count, or impossible values.
    """
    tokens = whole(meta, "completion_tokens")
    if tokens is None:
        raise Malformed("meta_info: completion_tokens is missing")
    if isinstance(versions := meta.get("weight_versions"), list) and len(versions) > 1:
        source.note("weights changed during requests: acceptance is of several versions")
    rounds, accepted = whole(meta, "spec_verify_ct"), whole(meta, "spec_num_correct_drafts")
    drafted = whole(meta, "spec_num_proposed_drafts")
    width, cap = (drafted / rounds if drafted and rounds else None), number(meta, "spec_cap_length")
    if rounds and cap is not None:
        drafted = round(rounds * max(cap - 1, 0))
    elif accepted is None and rounds:
        accepted = max(tokens - 1 - rounds, 0)  # the first token is the prefill's, one a round the bonus
    found = acceptance(
        source,
        tau=number(meta, "spec_accept_length") if rounds else None,
        rate=number(meta, "spec_accept_rate"),
        rounds=rounds,
        drafted=drafted,
        accepted=accepted,
        k=None if width is None else round(width),
    )
    e2e_s = number(meta, "e2e_latency")
    ttft_s = number(meta, "ttft") if "ttft" in meta else number(meta, "first_token_latency")
    after = None if e2e_s is None or ttft_s is None or tokens < 2 else (e2e_s - ttft_s) / (tokens - 1)
    status = "failed" if "abort" in str(meta.get("finish_reason")) else "finished"
    return times(
        RequestRow(
            source.name,
            0,
            request,
            status,
            whole(meta, "prompt_tokens"),
            tokens,
            None,
            ttft_s,
            after,
            e2e_s,
            rounds=rounds,
            drafted=drafted,
            accepted=accepted,
            tau=found.tau if rounds else None,
        )
    )


def _records(stream: JsonStream) -> Iterator[dict[str, Any]]:
    """Objects of a document, or of a list of them."""
    if stream.peek() == "[":
        for _ in stream.items():
            yield _object(stream)
    else:
        yield _object(stream)


def _object(stream: JsonStream) -> dict[str, Any]:
    found = stream.value()
    if not isinstance(found, dict):
        raise Malformed(f"holds {type(found).__name__}, allowed: an object with meta_info")
    return found
