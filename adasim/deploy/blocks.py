"""Blocks of a canary: the same requests to one server and to the other, in turn, and what each block says."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx2
import numpy as np

from adasim.deploy.client import Ask, Reply, Server, send
from adasim.types import FloatArray

SIDES = ("A", "B")


@dataclass(frozen=True, slots=True)
class Half:
    """A block on one server.

    Attributes:
        side: A or B.
        block: its number; 0 is warm-up.
        replies: in the order of the requests.
        seconds: from the first request to the last answer.
    """

    side: str
    block: int
    replies: Sequence[Reply]
    seconds: float

    @property
    def failed(self) -> list[Reply]:
        """Requests without a whole answer."""
        return [r for r in self.replies if r.error]

    @property
    def metrics(self) -> dict[str, float]:
        """Of the block; NaN where nothing tells. Times in milliseconds; an inter-token gap is one between chunks."""
        done = [r for r in self.replies if not r.error]
        tokens, spec = sum(r.tokens for r in done), [r for r in done if r.rounds]
        gaps = [np.diff(r.arrivals_s) for r in done]
        rounds = sum(r.rounds or 0 for r in spec)
        return {
            "output_tok_s": tokens / self.seconds if done else np.nan,
            "ttft_p50_ms": 1e3 * _median(np.array([r.ttft_s for r in done])),
            "tpot_p50_ms": 1e3 * _median(np.array([r.tpot_s for r in done])),
            "itl_p50_ms": 1e3 * _median(np.concatenate(gaps) if gaps else np.empty(0)),
            "tau": sum(r.tokens - 1 for r in spec) / rounds if rounds else np.nan,  # the first is the prefill's
        }


def _median(values: FloatArray) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else np.nan


def order_of(block: int) -> tuple[int, int]:
    """Who comes first: A B, B A, A B, ...: what drifts steadily cancels."""
    return (0, 1) if block % 2 == 0 else (1, 0)


def run_half(server: Server, side: str, block: int, asks: Sequence[Ask], clients: int | None, timeout_s: float) -> Half:
    """Send a block and wait for all of it.

    Args:
        server: who answers.
        side: its letter.
        block: the block's number.
        asks: its requests.
        clients: of a closed loop; None = requests are sent at times of their own.
        timeout_s: without a byte from the server, and the request has failed.
    """
    replies, seconds = asyncio.run(_drive(server, asks, clients, timeout_s))
    return Half(side, block, replies, seconds)


async def _drive(server: Server, asks: Sequence[Ask], clients: int | None, timeout_s: float) -> tuple[list[Reply], float]:
    """Replies in the order of the requests, and the seconds that all took; making the client is not counted."""
    replies: dict[int, Reply] = {}
    waiting = iter(enumerate(asks))
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)

    async with httpx2.AsyncClient(timeout=timeout_s, limits=limits) as client:
        start = time.perf_counter()

        async def one_client() -> None:
            for i, ask in waiting:  # shared: each takes the next when its last is done
                replies[i] = await send(client, server, ask)

        async def on_time(i: int, ask: Ask) -> None:
            await asyncio.sleep(max(start + ask.at_s - time.perf_counter(), 0.0))
            replies[i] = await send(client, server, ask)

        tasks = [one_client() for _ in range(clients)] if clients else [on_time(i, a) for i, a in waiting]
        await asyncio.gather(*tasks)
        seconds = time.perf_counter() - start
    return [replies[i] for i in range(len(asks))], seconds
