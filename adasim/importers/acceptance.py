"""Accept length and acceptance rate: differing definitions brought to one."""

import math
from typing import NamedTuple

from adasim.importers.fields import Malformed
from adasim.importers.source import Source


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
    """From two reported numbers and the configured length: the definition that gives this rate, two decimals printed."""

    def gives(drafts: float, of: int) -> bool:
        return abs(rate - drafts / of) <= 0.0055 + 0.006 / of

    if gives(tau - 1, k):
        return tau, rate
    if gives(tau, k):
        source.note("the accept length leaves out the bonus token (it is rate x k): one was added")
        return tau + 1, rate
    if gives(tau, k + 1):
        source.note("the acceptance rate counts the bonus token: (accept length - 1) / k is used")
        return tau, (tau - 1) / k
    if tau > 1 and rate > (tau - 1) / k:
        source.note("the acceptance rate is over fewer drafts than configured: lengths were cut, or k changed")
    else:
        source.note("accept length, acceptance rate and k fit no one definition")
    return tau, rate


def _alike(a: float, b: float) -> bool:
    """Equal but for two printed decimals."""
    return abs(a - b) <= 0.006 + 0.005 * abs(b)
