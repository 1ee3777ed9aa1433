"""One function a metric: records in, number out. NaN where nothing was measured.

All but ``backlog`` take records already cut to the measured window; rates divide by the window's length.
"""

from dataclasses import dataclass, replace
from math import nan
from typing import TYPE_CHECKING, Literal

import numpy as np

from adasim.records import Records
from adasim.statistics import BATCHES, mser5
from adasim.types import FloatArray, Slo

if TYPE_CHECKING:
    import pandas as pd

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Window:
    """The measured part of a run, seconds; ``by`` says which of its requests count."""

    start_s: float
    end_s: float
    by: Literal["arrival", "finish"] = "finish"

    @property
    def seconds(self) -> float:
        """Length."""
        return self.end_s - self.start_s


def window(records: Records, warmup_requests: int, *, open_loop: bool, until_last_arrival: bool) -> Window:
    """The measured part of a run.

    A closed loop is measured from the finish of the ``warmup_requests``-th request (0: from the start) and counts
    what finishes inside. An open loop is measured from the arrival after the ``warmup_requests``-th and counts what
    arrives inside: the same requests for every policy. Both end with the last arrival or the last step.
    """
    last_s = float(records.steps["end_s"].iloc[-1]) if len(records.steps) else 0.0
    end_s = min(last_s, records.last_arrival_s) if until_last_arrival else last_s
    column = "arrival_s" if open_loop else "finish_s"
    times = np.sort(records.requests[column].dropna().to_numpy())
    if open_loop:
        start_s = float(times[warmup_requests]) if len(times) > warmup_requests else end_s
    elif warmup_requests == 0:
        start_s = 0.0
    else:
        start_s = float(times[warmup_requests - 1]) if len(times) >= warmup_requests else end_s
    return Window(start_s, max(end_s, start_s), "arrival" if open_loop else "finish")


def warmup_by_mser5(records: Records, *, open_loop: bool, until_last_arrival: bool) -> int | None:
    """Requests at the start that MSER-5 takes for warm-up; None: too few to tell.

    An observation is a request's time per output token, from arrival to last token: in the order of arrival (open
    loops) or of finish, up to the end of the window.
    """
    requests = records.requests[records.requests["finish_s"].notna() & (records.requests["tokens"] > 0)]
    if not open_loop and until_last_arrival:
        requests = requests[requests["finish_s"] <= records.last_arrival_s]
    ordered = requests.sort_values("arrival_s" if open_loop else "finish_s", kind="stable")
    return mser5((e2e_s(ordered) / ordered["tokens"]).to_numpy(dtype=float))


def batches(records: Records, part: Window, slo: Slo | None, count: int = BATCHES) -> dict[str, list[float]]:
    """Metrics of ``count`` consecutive parts of one run, [count] each: its noise, where there is no second seed.

    Throughput is over parts of equal work (output tokens), the others are over equal numbers of requests in order of
    arrival or finish, so that a part of one policy's run and the same part of another's hold nearly the same luck.
    Empty when there are fewer tokens or requests than parts.
    """
    steps, requests = _inside(records, part)
    tokens = (steps["emitted"] + steps["first_tokens"]).to_numpy(dtype=float)
    if tokens.sum() < count or len(requests) < count:
        return {}
    done = np.concatenate([[0.0], np.cumsum(tokens)])
    clock = np.concatenate([[part.start_s], steps["end_s"].to_numpy(dtype=float)])
    seconds = np.diff(np.interp(np.linspace(0, done[-1], count + 1), done, clock))
    ordered = requests.sort_values("arrival_s" if part.by == "arrival" else "finish_s", kind="stable")
    tpots = np.array_split(tpot_s(ordered).to_numpy(dtype=np.float64), count)
    found = {
        "output_tok_s": [_ratio(done[-1] / count, s) for s in seconds.tolist()],
        "tpot_p50_ms": [1e3 * percentile(of_part, 50) for of_part in tpots],
    }
    if slo is not None:
        met = np.array_split(slo_met(ordered, slo).to_numpy(), count)
        found["goodput_rps"] = [_ratio(of_part.mean() * len(ordered), part.seconds) for of_part in met]
    return found


def cut(records: Records, part: Window) -> Records:
    """Steps that end inside the window, and the requests that count. Blocks stay whole: they have no time."""
    steps, requests = _inside(records, part)
    gaps = records.gaps[records.gaps["step"].isin(steps["step"])]
    return replace(records, steps=steps, requests=requests, gaps=gaps)


def _inside(records: Records, part: Window) -> "tuple[pd.DataFrame, pd.DataFrame]":
    steps, requests = records.steps, records.requests
    steps = steps[(steps["end_s"] > part.start_s) & (steps["end_s"] <= part.end_s)]
    if part.by == "arrival":
        counts = (requests["arrival_s"] >= part.start_s) & (requests["arrival_s"] <= part.end_s)
    else:
        counts = (requests["finish_s"] > part.start_s) & (requests["finish_s"] <= part.end_s)
    return steps, requests[counts]


def output_tok_s(records: Records, part: Window) -> float:
    """Output tokens per second, prefills' first tokens included."""
    tokens = records.steps["emitted"].sum() + records.steps["first_tokens"].sum()
    return _ratio(tokens, part.seconds)


def requests_per_s(records: Records, part: Window) -> float:
    """Requests that count per second: those that finished (closed loop) or arrived (open loop)."""
    return _ratio(len(records.requests), part.seconds)


def tau(records: Records) -> float:
    """Tokens per request and round, pooled; the bonus token counted, the prefill's not."""
    return _ratio(records.steps["emitted"].sum(), records.steps["decoding"].sum())


def verify_len(records: Records) -> float:
    """Mean verified tokens per request and round, padding counted."""
    return _ratio(records.steps["verify_tokens"].sum(), records.steps["decoding"].sum())


def verify_tokens_per_round(records: Records) -> float:
    """Mean tokens of a verification pass."""
    return _ratio(records.steps["verify_tokens"].sum(), (records.steps["decoding"] > 0).sum())


def acceptance_rate(records: Records) -> float:
    """Accepted drafts / drafts verified. Rises when blocks are cut: never judge by it alone."""
    drafts = records.steps["verify_tokens"].sum() - records.steps["decoding"].sum()
    return _ratio(records.steps["accepted"].sum(), drafts)


def batch(records: Records) -> float:
    """Mean requests per round."""
    return _ratio(records.steps["decoding"].sum(), (records.steps["decoding"] > 0).sum())


def ttft_s(requests: "pd.DataFrame") -> "pd.Series[float]":
    """Time to first token of each request: arrival to first token, queueing included."""
    return requests["first_token_s"] - requests["arrival_s"]


def tpot_s(requests: "pd.DataFrame") -> "pd.Series[float]":
    """Time per output token of each request, the first token excluded; NaN for one-token outputs."""
    after_first = (requests["tokens"] - 1).where(requests["tokens"] > 1)
    return (requests["finish_s"] - requests["first_token_s"]) / after_first


def e2e_s(requests: "pd.DataFrame") -> "pd.Series[float]":
    """Arrival to last token of each request."""
    return requests["finish_s"] - requests["arrival_s"]


def percentile(values: "pd.Series[float] | FloatArray", q: float) -> float:
    """Percentile of the values that exist."""
    known = np.asarray(values, dtype=float)
    known = known[~np.isnan(known)]
    return float(np.percentile(known, q)) if len(known) else nan


def itl_s(gaps: "pd.DataFrame", q: float) -> float:
    """Percentile of the time between two chunks of a request (a round gives one chunk of several tokens)."""
    if gaps.empty:
        return nan
    ordered = gaps.sort_values("gap_s")
    reached = ordered["chunks"].cumsum() >= q / 100 * ordered["chunks"].sum()
    return float(ordered["gap_s"].to_numpy()[int(np.argmax(reached.to_numpy()))])


def slo_met(requests: "pd.DataFrame", slo: Slo) -> "pd.Series[bool]":
    """Which finished requests met every limit; a one-token output has no TPOT to miss."""
    met = requests["finish_s"].notna()
    if slo.ttft_ms is not None:
        met &= 1e3 * ttft_s(requests) <= slo.ttft_ms
    if slo.tpot_ms is not None:
        met &= ~(1e3 * tpot_s(requests) > slo.tpot_ms)
    if slo.e2e_ms is not None:
        met &= 1e3 * e2e_s(requests) <= slo.e2e_ms
    return met


def goodput_rps(records: Records, part: Window, slo: Slo) -> float:
    """Requests per second that met every limit of the SLO."""
    return _ratio(slo_met(records.requests, slo).sum(), part.seconds)


def backlog(records: Records, part: Window) -> float:
    """Share of the requests that arrived by the end of the window and had not finished then: overload shows here."""
    requests = records.requests
    arrived = requests["arrival_s"] <= part.end_s
    return _ratio((arrived & ~(requests["finish_s"] <= part.end_s)).sum(), arrived.sum())


def time_shares(records: Records, part: Window) -> dict[str, float]:
    """Share of the window spent in draft, verify, overhead, prefill, and idle."""
    steps = records.steps
    shares = {name: _ratio(steps[f"{name}_s"].sum(), part.seconds) for name in ("draft", "verify", "overhead", "prefill")}
    return shares | {"idle": max(0.0, 1 - sum(shares.values()))}


def summary(records: Records, part: Window, slo: Slo | None) -> dict[str, float]:
    """Every metric of one run; seconds as milliseconds where the name ends in _ms."""
    inside = cut(records, part)
    latencies = {
        "ttft": ttft_s(inside.requests),
        "tpot": tpot_s(inside.requests),
        "e2e": e2e_s(inside.requests),
    }
    row = {
        "window_s": part.seconds,
        "requests": float(len(inside.requests)),
        "rounds": float((inside.steps["decoding"] > 0).sum()),
        "output_tok_s": output_tok_s(inside, part),
        "requests_per_s": requests_per_s(inside, part),
        "tau": tau(inside),
        "verify_len": verify_len(inside),
        "verify_tokens_per_round": verify_tokens_per_round(inside),
        "acceptance_rate": acceptance_rate(inside),
        "batch": batch(inside),
    }
    for name, values in latencies.items():
        row |= {f"{name}_p{q}_ms": 1e3 * percentile(values, q) for q in PERCENTILES}
    row |= {f"itl_p{q}_ms": 1e3 * itl_s(inside.gaps, q) for q in PERCENTILES}
    if slo is not None:
        row["goodput_rps"] = goodput_rps(inside, part, slo)
        row["slo_met"] = _ratio(slo_met(inside.requests, slo).sum(), len(inside.requests))
    row |= {f"share_{name}": share for name, share in time_shares(inside, part).items()}
    row["backlog"] = backlog(records, part)
    row["evictions"] = float(inside.steps["evicted"].sum())
    row["kv_blocks_peak"] = float(inside.steps["kv_blocks"].max()) if len(inside.steps) else nan
    prompts = inside.requests["prompt_len"].sum()
    row["prefix_hit_rate"] = _ratio(inside.requests["cached_tokens"].sum(), prompts)
    return row


def _ratio(over: float, under: float) -> float:
    return float(over / under) if under else nan
