"""A run as a Chrome trace, for Perfetto: what the engine did, and the life of each request."""

import json
from typing import Any

import pandas as pd

from adasim.records import Records

ENGINE, REQUESTS, COUNTERS = 1, 2, 3
PARTS = ("prefill", "draft", "verify", "overhead")


def trace_events(records: Records) -> str:
    """JSON in the trace event format; microseconds."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
        for pid, name in ((ENGINE, "engine"), (REQUESTS, "requests"), (COUNTERS, "counters"))
    ]
    for step in records.steps.to_dict("records"):
        at = step["start_s"]
        for part in PARTS:
            if seconds := step[f"{part}_s"]:
                args = {k: step[k] for k in ("step", "decoding", "draft_tokens", "verify_tokens", "emitted")}
                events.append(_slice(part, ENGINE, 0, at, at + seconds, args))
                at += seconds
        for name in ("decoding", "queued", "kv_blocks"):
            events.append(
                {
                    "ph": "C",
                    "pid": COUNTERS,
                    "name": name,
                    "ts": 1e6 * step["end_s"],
                    "args": {name: step[name]},
                }
            )
    for request in records.requests.to_dict("records"):
        times = [request[k] for k in ("arrival_s", "admitted_s", "first_token_s", "finish_s")]
        for name, start, end in zip(("queued", "prefill", "decode"), times, times[1:], strict=False):
            if pd.notna(start) and pd.notna(end):
                args = {k: request[k] for k in ("domain", "prompt_len", "tokens", "rounds", "evictions")}
                events.append(_slice(name, REQUESTS, request["request"], start, end, args))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


def _slice(name: str, pid: int, tid: int, start_s: float, end_s: float, args: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": 1e6 * start_s, "dur": 1e6 * (end_s - start_s)}
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, **times, "args": args}
