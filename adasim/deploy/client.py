"""Requests to a live server, streamed and timed: SGLang's own /generate, or OpenAI's /v1/completions.

Text is sent as it is, sampled greedily, to an output of the length that was asked for (``ignore_eos``, which SGLang and
vLLM know).
"""

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from math import nan
from typing import Any, Literal, NamedTuple

import httpx2

from adasim.errors import InputError

Api = Literal["sglang", "openai"]
KNOWN: tuple[tuple[Api, str], ...] = (
    ("sglang", "/model_info"),
    ("sglang", "/get_model_info"),  # of older versions
    ("openai", "/v1/models"),
)
FAILURES = (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError)  # of the network, the server, or its JSON


class Ask(NamedTuple):
    """One request: a prompt, output tokens wanted, and seconds after the block's start at which it is sent."""

    text: str
    tokens: int
    at_s: float = 0.0


@dataclass(slots=True)
class Reply:
    """What came of a request. Seconds are of one clock; tokens are the server's own count.

    ``rounds``: request-rounds that verified, where the server says; ``error``: what went wrong, "" = nothing.
    """

    sent_s: float
    arrivals_s: list[float] = field(default_factory=list)  # of the chunks that brought text
    text: str = ""
    tokens: int = 0
    rounds: int | None = None
    error: str = ""

    @property
    def ttft_s(self) -> float:
        """Sending to the first chunk; NaN without one."""
        return self.arrivals_s[0] - self.sent_s if self.arrivals_s else nan

    @property
    def tpot_s(self) -> float:
        """First to last chunk, a token; NaN for fewer than two tokens."""
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.tokens - 1) if self.tokens > 1 else nan


@dataclass(frozen=True, slots=True)
class Server:
    """A live server: where it is, how it is spoken to, and which model it says it serves."""

    url: str
    api: Api
    model: str

    def request(self, ask: Ask) -> tuple[str, dict[str, Any]]:
        """Address and body."""
        if self.api == "sglang":
            sampling = {"temperature": 0.0, "max_new_tokens": ask.tokens, "ignore_eos": True}
            return f"{self.url}/generate", {"text": ask.text, "sampling_params": sampling, "stream": True}
        body = {"model": self.model, "prompt": ask.text, "max_tokens": ask.tokens, "temperature": 0.0}
        body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        return f"{self.url}/v1/completions", body


def discover(url: str, timeout_s: float) -> Server:
    """The server at a URL.

    Raises:
        InputError: nobody answers there, or nothing that is known.
    """
    base = url.rstrip("/").removesuffix("/v1")
    said = []
    with httpx2.Client(timeout=timeout_s) as client:
        for api, path in KNOWN:
            try:
                answer = client.get(base + path)
                answer.raise_for_status()
                facts = answer.json()
                model = facts["model_path"] if api == "sglang" else facts["data"][0]["id"]
            except (*FAILURES, KeyError, IndexError, TypeError) as error:
                said.append(f"{path}: {error}")
                continue
            return Server(base, api, str(model))
    raise InputError(f"{url}: no SGLang or OpenAI-compatible server answers ({'; '.join(said)})")


async def send(client: httpx2.AsyncClient, server: Server, ask: Ask) -> Reply:
    """Send a request and time its chunks. What goes wrong is in the reply."""
    url, body = server.request(ask)
    reply = Reply(time.perf_counter())
    try:
        async with client.stream("POST", url, json=body) as answer:
            if answer.status_code != httpx2.codes.OK:
                reply.error = f"HTTP {answer.status_code}: {(await answer.aread())[:200].decode(errors='replace')}"
                return reply
            async for chunk in _events(answer):
                _take(reply, chunk, server.api)
    except FAILURES as error:
        reply.error = f"{type(error).__name__}: {error}".rstrip(": ")
        return reply
    if not reply.tokens or not reply.arrivals_s:
        reply.error = "the answer holds no token count" if reply.arrivals_s else "the answer is empty"
    return reply


async def _events(answer: httpx2.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events."""
    async for line in answer.aiter_lines():
        if line.startswith("data:") and (data := line.removeprefix("data:").strip()) != "[DONE]":
            chunk = json.loads(data)
            if not isinstance(chunk, dict):
                raise ValueError(f"an event holds {type(chunk).__name__}, not an object")
            yield chunk


def _take(reply: Reply, chunk: dict[str, Any], api: Api) -> None:
    """Add a chunk. SGLang repeats the text so far, OpenAI sends what is new."""
    if error := chunk.get("error"):
        raise ValueError(str(error)[:200])
    if api == "sglang":
        text, meta = str(chunk.get("text", "")), chunk.get("meta_info") or {}
        new = len(text) > len(reply.text)
        reply.text, reply.tokens = text, int(meta.get("completion_tokens", reply.tokens))
        if (rounds := meta.get("spec_verify_ct")) is not None:
            reply.rounds = int(rounds)
    else:
        added = "".join(str(c.get("text") or "") for c in chunk.get("choices") or [])
        new = bool(added)
        reply.text += added
        if usage := chunk.get("usage"):
            reply.tokens = int(usage["completion_tokens"])
    if new:
        reply.arrivals_s.append(time.perf_counter())
