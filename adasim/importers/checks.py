"""What makes a measurement suspicious."""

from collections.abc import Sequence

import numpy as np

from adasim.importers.fields import Malformed
from adasim.importers.source import Source
from adasim.importers.tables import RequestRow, RunRow

RANDOM = {"random", "random-ids", "random-image", "random-mm", "random-rerank", "synthetic"}
RETOKENISED = 0.02  # relative difference worth a word
WARM = 2.0  # first requests this many times slower than the rest


def times(request: RequestRow) -> RequestRow:
    """The request, if its times can be.

    Raises:
        Malformed: the first token came after the last.
    """
    if request.ttft_s is not None and request.e2e_s is not None and request.ttft_s > request.e2e_s * (1 + 1e-6) + 1e-6:
        raise Malformed(f"ttft {request.ttft_s:.4g} s is longer than the whole request, {request.e2e_s:.4g} s")
    return request


def prompts(source: Source, dataset: str | None) -> None:
    """Note prompts that are no text: what a drafter does with them says nothing."""
    if dataset is not None and dataset.lower() in RANDOM:
        source.note(f"prompts are random tokens (dataset {dataset}): acceptance and speed-up mean nothing for real text")


def run_of(source: Source, run: RunRow, retokenised: int | None = None) -> RunRow:
    """Note what is odd about a run, and give it back.

    Raises:
        Malformed: percentiles that fall, or a median time to first token above the median of the whole.
    """
    prompts(source, run.dataset)
    if run.dataset is None and _even(run.prompt_tokens, run.requests) and _even(run.output_tokens, run.requests):
        source.note("prompts and outputs seem to be equally long: if they are random tokens, acceptance means nothing")
    if run.engine and run.version:
        source.engines.add((run.engine, run.version))
    for name in ("ttft", "tpot", "itl", "e2e"):
        p50, p99 = getattr(run, f"{name}_p50_ms"), getattr(run, f"{name}_p99_ms")
        if p50 is not None and p99 is not None and p50 > p99 * (1 + 1e-6):
            raise Malformed(f"{name}: the median {p50:.4g} ms is above the 99th percentile {p99:.4g} ms")
    for part in ("mean", "p50"):
        first, whole = getattr(run, f"ttft_{part}_ms"), getattr(run, f"e2e_{part}_ms")
        if first is not None and whole is not None and first > whole * (1 + 1e-6):
            raise Malformed(f"ttft {part} {first:.4g} ms is above e2e {part} {whole:.4g} ms")
    if run.requests and run.concurrency and run.requests < 4 * run.concurrency:
        source.note("fewer than four requests per client: mostly ramp-up and drain")
    if run.failed:
        source.note("requests failed: rates count only the finished ones")
    if retokenised and run.output_tokens and abs(retokenised / run.output_tokens - 1) > RETOKENISED:
        source.note("counts of generated and retokenised tokens differ: generated ones are used")
    return run


def _even(tokens: int | None, requests: int | None) -> bool:
    """Whether so many requests can have the same number of tokens; by chance one set in ``requests`` does."""
    return bool(tokens) and requests is not None and requests >= 16 and (tokens or 0) % requests == 0


def warm_up(source: Source, ttft_s: Sequence[float], concurrency: float | None) -> None:
    """Note when the first requests of a run waited much longer than the others did."""
    first = max(3, min(round(concurrency or 3), len(ttft_s) // 4))
    if len(ttft_s) < 4 * first:
        return
    early, late = float(np.median(ttft_s[:first])), float(np.median(ttft_s[first:]))
    if early > WARM * late > 0:
        source.note("the first requests waited far longer than the rest: no warm-up, or all clients started at once")
