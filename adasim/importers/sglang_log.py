"""SGLang server logs: a line every so many decode iterations, as ``name: value`` pairs in any order.

The accept length counts the bonus token. Some versions divide accepted tokens *with* the bonus by the full width for the
rate; with the width from the start-up line this is seen and undone. A log without that line keeps no rates; its width is
the one whole number that explains all of them, if there is just one. Prefill lines are passed over.
Source: sgl-project/sglang, scheduler metrics (``Decode batch``), server_args at start-up.
"""

import re
from collections.abc import Mapping

from adasim.importers.acceptance import acceptance
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


WIDEST = 128  # drafts a round


class _Width:
    """Widths that explain every accept length and rate seen, printed with two decimals."""

    def __init__(self) -> None:
        self.seen = False
        self.plain = set(range(1, WIDEST))  # drafts, of which the rate is
        self.bonus = set(range(2, WIDEST))  # the same with the bonus token

    def see(self, tau: float, rate: float) -> None:
        """One more pair."""
        self.seen = True
        self.plain = {k for k in self.plain if abs(rate - (tau - 1) / k) <= 0.005 * (1 + 1 / k) + 1e-9}
        self.bonus = {n for n in self.bonus if abs(rate - tau / n) <= 0.005 * (1 + 1 / n) + 1e-9}

    @property
    def fitting(self) -> list[int]:
        """Drafts a round that explain all."""
        return sorted(self.plain | {n - 1 for n in self.bonus}) if self.seen else []

    def __str__(self) -> str:
        if not self.seen:
            return "its lines hold no rates"
        if len(self.fitting) == 1:
            return f"the rates fit {self.fitting[0]}"
        return "several fit its rates" if self.fitting else "no single number fits its rates"


def recognises(head: Head) -> bool:
    """Lines about batches."""
    return re.search(r"(Decode|Prefill) batch[.,]? ?(\[\d+\])?[.,]? #", head.text) is not None


def read(source: Source, sink: Sink) -> None:
    """Fill steps, and one run of all lines, weighted by running requests: each line covers as many iterations."""
    clock, arguments = LogClock(), dict[str, str]()
    running = rounds = tokens = generated = seconds = 0.0  # per decode iteration and line
    lines, width = 0, _Width()
    for line_number, line in source.lines():
        if "speculative_" in line and "=" in line:
            arguments |= {n: quoted or plain for n, quoted, plain in ARGUMENT.findall(line)}
        if (found := DECODE.search(line)) is None:
            continue
        with source.guard(line_number):
            time_s = clock.seconds(line)
            pairs = dict(PAIR.findall(found[1]))
            row = step_row(source, line_number, time_s, pairs, arguments)
            sink.add(row)
            lines += 1
            running += row.running or 0
            if row.gen_tok_s and row.running:
                generated += row.running * (row.tau or 1.0)
                seconds += row.running * (row.tau or 1.0) / row.gen_tok_s
            if row.tau is not None and row.running:
                rounds += row.running
                tokens += row.tau * row.running
                if (rate := number(pairs, "accept rate")) is not None:
                    width.see(row.tau, rate)
    if not lines:
        return
    k, depth = speculation(arguments) if arguments else (None, None)
    if not arguments and rounds:
        k = depth = width.fitting[0] if len(width.fitting) == 1 else None
        source.note(f"the log does not show how many drafts were configured ({width}), acceptance rates are left out")
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
            topk=whole(arguments, "speculative_eagle_topk") if k else None,
            concurrency_mean=running / lines,
            output_tok_s=generated / seconds if seconds else None,
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
    found = acceptance(source, tau=tau, rate=rate if arguments else None, k=k if cap is None else None, depth=depth)
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
