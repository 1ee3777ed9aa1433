"""Two live servers under the same traffic: is the second better?"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isnan, log, nan

import numpy as np

from adasim.deploy.blocks import SIDES, Half, order_of, run_half
from adasim.deploy.client import Ask, Server
from adasim.statistics import Interval, ratio_interval, relative, simultaneous
from adasim.tables import verdict

LEAST_PAIRS = 3  # blocks that both finished; fewer tell nothing
ALIKE_TO = 20  # characters at the start of two outputs that must agree
LOWER_IS_BETTER = frozenset({"ttft_p50_ms", "tpot_p50_ms", "itl_p50_ms"})
WORDS = {
    "output_tok_s": "output tokens/s",
    "ttft_p50_ms": "median TTFT, ms",
    "tpot_p50_ms": "median TPOT, ms",
    "itl_p50_ms": "median gap between chunks, ms",
    "tau": "tau",
}
Advance = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Compared:
    """A metric on both servers.

    Attributes:
        metric: its name.
        a, b: geometric means over blocks.
        gain: of B over A, relative, above 0 = better; the intervals of all metrics hold together.
        verdict: of B: better, worse or cannot tell.
    """

    metric: str
    a: float
    b: float
    gain: Interval
    verdict: str


@dataclass(slots=True)
class Canary:
    """What the blocks say so far.

    Attributes:
        servers: A and B.
        goal: the metric that the verdict is about.
        halves: blocks in the order of time, warm-up included.
        stopped: why it ended before its last block; "" = it did not.
    """

    servers: tuple[Server, Server]
    goal: str
    halves: list[Half] = field(default_factory=list)
    stopped: str = ""

    @property
    def pairs(self) -> list[tuple[Half, Half]]:
        """Blocks that both servers finished whole, warm-up left out."""
        found = []
        for block in sorted({h.block for h in self.halves} - {0}):
            both = {h.side: h for h in self.halves if h.block == block}
            if len(both) == len(SIDES) and not any(h.failed for h in both.values()):
                found.append((both["A"], both["B"]))
        return found

    def failures(self, side: str) -> list[str]:
        """What went wrong on a server, one entry a request, warm-up included."""
        return [r.error for h in self.halves if h.side == side for r in h.failed]

    @property
    def compared(self) -> list[Compared]:
        """Every metric that both servers tell."""
        pairs = [(a.metrics, b.metrics) for a, b in self.pairs]
        told = [m for m in WORDS if any(not (isnan(a[m]) or isnan(b[m])) for a, b in pairs)]
        return [_compare(m, pairs, simultaneous(len(told))) for m in told]

    @property
    def verdict(self) -> str:
        """Of B against A in the goal, in one sentence."""
        found = {c.metric: c for c in self.compared}.get(self.goal)
        pairs = len(self.pairs)
        dead = f"; {self.stopped}" if self.stopped else ""
        if found is None or pairs < LEAST_PAIRS:
            return f"cannot tell: {pairs} blocks were finished by both servers, {LEAST_PAIRS} are needed{dead}"
        gain = f"{found.gain.estimate:+.1%} ({found.gain.low:+.1%} to {found.gain.high:+.1%})"
        says = {"better": "B is better than A", "worse": "B is worse than A"}.get(found.verdict, "cannot tell")
        return f"{says}: {gain} in {WORDS[self.goal]}, {pairs} paired blocks{dead}"

    @property
    def warnings(self) -> list[str]:
        """Why the comparison may be unfair."""
        a, b = self.servers
        found = [f"the servers say that they serve different models: {a.model}, {b.model}"] * (a.model != b.model)
        same, begins = self.agreement
        if begins < 0.5:
            found.append(
                f"outputs differ from the start in {1 - begins:.0%} of the requests: other weights, or not greedy"
            )
        elif same < 1:
            found.append(f"{1 - same:.0%} of the greedy outputs differ somewhere; near ties in reduced precision do that")
        for side in SIDES:
            errors = self.failures(side)
            common = max(set(errors), key=errors.count) if errors else ""
            found += [f"{side}: {len(errors)} requests failed, like: {common}; their blocks do not count"] * bool(errors)
        tokens = [sum(r.tokens for pair in self.pairs for r in pair[i].replies) for i in range(len(SIDES))]
        if tokens[0] != tokens[1]:
            found.append(f"the same requests gave {tokens[0]} tokens on A and {tokens[1]} on B")
        return found

    @property
    def agreement(self) -> tuple[float, float]:
        """Share of requests with the same whole output, and with the same beginning, on both servers; 1 without any."""
        texts = [(x.text, y.text) for a, b in self.pairs for x, y in zip(a.replies, b.replies, strict=True)]
        if not texts:
            return 1.0, 1.0
        begins = [x[:ALIKE_TO] == y[:ALIKE_TO] for x, y in texts]
        return float(np.mean([x == y for x, y in texts])), float(np.mean(begins))


def run(
    canary: Canary,
    blocks: Sequence[Sequence[Ask]],
    clients: int | None,
    timeout_s: float,
    advance: Advance = lambda: None,
) -> None:
    """Send block after block, until all are done, a server is dead (a whole block fails), or Ctrl-C.

    Args:
        canary: takes what comes back; block 0 is its warm-up.
        blocks: requests, the warm-up's first.
        clients: of a closed loop; None = requests are sent at times of their own.
        timeout_s: without a byte from the server, and a request has failed.
        advance: called after every block of one server.
    """
    try:
        for number, asks in enumerate(blocks):
            for i in order_of(number):
                half = run_half(canary.servers[i], SIDES[i], number, asks, clients, timeout_s)
                canary.halves.append(half)
                advance()
                if len(half.failed) == len(asks):
                    canary.stopped = f"{half.side} answered no request of block {number}: {half.failed[0].error}"
                    return
    except KeyboardInterrupt:
        canary.stopped = f"interrupted in block {canary.halves[-1].block if canary.halves else 0}"


def _compare(metric: str, pairs: Sequence[tuple[dict[str, float], dict[str, float]]], confidence: float) -> Compared:
    a, b = (np.array([p[i][metric] for p in pairs]) for i in (0, 1))
    over, under = (a, b) if metric in LOWER_IS_BETTER else (b, a)
    ratio = ratio_interval(over, under, confidence, series=True)
    logs = Interval(*(log(x) if x > 0 else nan for x in ratio))  # there the interval is symmetric, however large the gain
    says = verdict(logs.estimate, logs.half_width, nan) if len(pairs) >= LEAST_PAIRS else "cannot tell"
    return Compared(metric, _mean(a), _mean(b), relative(ratio), says)


def _mean(values: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> float:
    known = values[~np.isnan(values)]
    return float(np.exp(np.mean(np.log(known)))) if len(known) and (known > 0).all() else nan
