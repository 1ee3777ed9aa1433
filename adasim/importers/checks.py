"""What makes a measurement suspicious, and how differing definitions are brought to one."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from adasim.importers.fields import Malformed
from adasim.importers.source import Source
from adasim.importers.tables import RequestRow, RunRow

RANDOM = {"random", "random-ids", "random-image", "random-mm", "random-rerank", "synthetic"}
RETOKENISED = 0.02  # relative difference worth a word
WARM = 2.0  # first requests this many times slower than the rest


class Accepted(NamedTuple):
    """Acceptance by our definitions."""

    tau: float | None
    rate: float | None


def acceptance(
    source: Source,
    *,
    tau: float | None = None,
    rate: float | None = None,
    rounds: int | None = None,
    drafted: int | None = None,
    accepted: int | None = None,
    k: int | None = None,
    depth: int | None = None,
) -> Accepted:
    """Accept length with the bonus token, and rate over verified drafts; what was converted is noted.

    Args:
        source: takes the notes.
        tau: accept length as reported.
        rate: acceptance rate as reported, 0..1.
        rounds: request-rounds counted.
        drafted: drafts counted.
        accepted: drafts accepted, counted.
        k: drafts configured per round.
        depth: most drafts a round can accept; None = ``k``.

    Raises:
        Malformed: impossible, whatever the definition.
    """
    if rounds and accepted is not None:
        tau, rate = _counted(source, tau, rate, rounds, drafted, accepted, k)
    elif tau is not None and rate is not None and k:
        tau, rate = _reported(source, tau, rate, k)
    depth = k if depth is None else depth
    most = math.inf if depth is None else depth + 1
    if tau is not None and not 1 <= tau <= most * 1.001 + 0.005:
        limit = "1 or more" if most == math.inf else f"1..{most:g} for {depth} drafts"
        raise Malformed(f"accept length {tau:.4g} is impossible with the bonus token counted, allowed: {limit}")
    if rate is not None and not 0 <= rate <= 1.001:
        raise Malformed(f"acceptance rate {rate:.4g} is impossible, allowed: 0..1")
    return Accepted(tau, rate)


def _counted(
    source: Source,
    tau: float | None,
    rate: float | None,
    rounds: int,
    drafted: int | None,
    accepted: int,
    k: int | None,
) -> tuple[float, float | None]:
    """From counters, held against what was reported beside them."""
    counted = 1 + accepted / rounds
    if tau is not None and not _alike(tau, counted):
        bonus = _alike(tau, counted - 1)
        source.note(
            "the accept length leaves out the bonus token: counted anew with it"
            if bonus
            else "the accept length differs from 1 + accepted / rounds of the counters: the counters are used"
        )
    if not drafted:
        return counted, rate
    if accepted > drafted:
        raise Malformed(f"{accepted} drafts accepted of {drafted} verified, allowed: no more than verified")
    verified = accepted / drafted
    if k and drafted / rounds < k * 0.99:
        source.note("fewer drafts were verified than configured: survival of late positions is a lower bound")
    if rate is not None and not _alike(rate, verified):
        if k and _alike(rate, accepted / (rounds * k)):
            source.note("the acceptance rate is divided by the configured width, not the verified one: counted anew")
        elif _alike(rate, (accepted + rounds) / (drafted + rounds)):
            source.note("the acceptance rate counts the bonus token: counted anew without it")
        else:
            source.note("the acceptance rate differs from accepted / verified of the counters: the counters are used")
    return counted, verified


def _reported(source: Source, tau: float, rate: float, k: int) -> tuple[float, float]:
    """From two reported numbers and the configured length, which only fit one definition."""
    if _alike(tau, 1 + rate * k):
        return tau, rate
    if _alike(tau, rate * k):
        source.note("the accept length leaves out the bonus token (it is rate x k): one was added")
        return tau + 1, rate
    if _alike(rate, tau / (k + 1)):
        source.note("the acceptance rate counts the bonus token: (accept length - 1) / k is used")
        return tau, (tau - 1) / k
    if tau > 1 and rate > (tau - 1) / k * 1.02:
        source.note("the acceptance rate is over fewer drafts than configured: lengths were cut, or k changed")
    else:
        source.note("accept length, acceptance rate and k fit no one definition")
    return tau, rate


def _alike(a: float, b: float) -> bool:
    """Equal but for two printed decimals."""
    return abs(a - b) <= 0.006 + 0.005 * abs(b)


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
