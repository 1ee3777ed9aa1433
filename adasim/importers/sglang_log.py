"""SGLang server logs: a line every so many decode iterations, as ``name: value`` pairs in any order.

The accept length counts the bonus token. Some versions divide accepted tokens *with* the bonus by the full width for the
rate; with the width from the start-up line this is seen and undone.
Source: sgl-project/sglang, scheduler metrics (``Decode batch``), server_args at start-up.
"""

import re
from collections.abc import Mapping

from adasim.importers.checks import acceptance
from adasim.importers.clock import LogClock
from adasim.importers.fields import number, whole
from adasim.importers.head import Head
from adasim.importers.sglang_bench import speculation
from adasim.importers.sink import Sink
from adasim.importers.source import Source
from adasim.importers.tables import RunRow, StepRow

DECODE = re.compile(r"Decode batch[.,]?(?: \[\d+\])?[.,]?\s*(.*)")
PAIR = re.compile(r"\s*([^:,]+?):\s*([^,]*?)\s*(?:,|$)")
ARGUMENT = re.compile(r"\b(speculative_\w+|model_path|version)=(?:'([^']*)'|([^,\s)]+))")


def recognises(head: Head) -> bool:
    """Lines about batches."""
    return re.search(r"(Decode|Prefill) batch[.,]? ?(\[\d+\])?[.,]? #", head.text) is not None


def read(source: Source, sink: Sink) -> None:
    """Fill steps, and one run of all lines, weighted by running requests: each line covers as many iterations."""
    clock, arguments = LogClock(), dict[str, str]()
    running = rounds = tokens = 0.0
    lines = 0
    for line_number, line in source.lines():
        if "speculative_" in line and "=" in line:
            arguments |= {n: quoted or plain for n, quoted, plain in ARGUMENT.findall(line)}
        if (found := DECODE.search(line)) is None:
            continue
        with source.guard(line_number):
            time_s = clock.seconds(line)
            row = step_row(source, line_number, time_s, dict(PAIR.findall(found[1])), arguments)
            sink.add(row)
            lines += 1
            running += row.running or 0
            if row.tau is not None and row.running:
                rounds += row.running
                tokens += row.tau * row.running
    if not lines:
        return
    k, depth = speculation(arguments) if arguments else (None, None)
    if k is None and rounds:
        source.note("the log does not show how many drafts were configured: begin it at the server's start")
    sink.add(
        RunRow(
            source.name,
            0,
            "log",
            "sglang",
            arguments.get("version"),
            arguments.get("model_path"),
            k=k,
            depth=depth,
            concurrency_mean=running / lines,
            tau=tokens / rounds if rounds else None,
        )
    )


def step_row(
    source: Source, line: int, time_s: float | None, pairs: Mapping[str, str], arguments: Mapping[str, str]
) -> StepRow:
    """One line."""
    k, depth = speculation(arguments) if arguments else (None, None)
    tau = number(pairs, "accept len") or None
    rate = number(pairs, "accept rate") if tau else None
    cap = number(pairs, "cap len")
    found = acceptance(source, tau=tau, rate=rate, k=k if cap is None else None, depth=depth)
    if cap is not None and found.tau is not None:
        found = found._replace(rate=(found.tau - 1) / (cap - 1) if cap > 1 else None)
    return StepRow(
        source.name,
        line,
        time_s,
        whole(pairs, "#running-req"),
        whole(pairs, "#queue-req"),
        whole(pairs, "#token"),
        number(pairs, "gen throughput (token/s)"),
        found.tau,
        found.rate,
        cap,
    )
