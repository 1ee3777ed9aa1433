"""Scenarios that answer the question: which policies, under which loads, on which engine."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from adasim.advice.known import Known
from adasim.advice.memory import Memory, whole
from adasim.advice.traffic import Traffic
from adasim.calibration.cost import TableCost
from adasim.calibration.fitted import FittedCost
from adasim.calibration.roofline import RooflineCost

SIMPLE = ("off", "fixed", "schedule", "smartspec", "head", "dspark")  # the simplest first: it is taken when in doubt
MAX_LENGTHS = 3
REQUESTS = 200  # of an open loop
PER_CLIENT, LEAST = 6, 40  # requests of a closed loop: a client, and in all


def policies_of(known: Known, lengths: pd.DataFrame, loads: Sequence[int], *, drafter: bool) -> list[dict[str, Any]]:
    """Plain decoding, fixed lengths, the table of the best length by batch, and rules that the data can drive.

    Fixed lengths are those that the formula ranks first at some load, and the full block.
    """
    found: list[dict[str, Any]] = [{"kind": "off"}]
    if not drafter:
        return found
    full = known.max_draft_len
    if known.chains:
        found += [_fixed(k, full, one_pass=known.one_pass) for k in _lengths(lengths, loads, full)]
        table = _schedule(lengths)
        if len(set(table.values())) > 1:
            found.append({"kind": "schedule", "name": "schedule", "drafts": table, "draft_block": known.one_pass})
        found.append({"kind": "smartspec", "name": "smartspec", "draft_block": known.one_pass})
        if known.has_head:
            found += [{"kind": "head", "name": "head"}, {"kind": "dspark", "name": "dspark"}]
    for name, own in known.profile.drafters.items():
        block = own.max_draft_len or full
        found.append({"kind": "fixed", "name": f"drafter {name}", "drafter": name, "verify_len": block + 1})
    return found


def _fixed(k: int, full: int, *, one_pass: bool) -> dict[str, Any]:
    return {"kind": "fixed", "name": f"k={k}", "verify_len": k + 1, "draft_len": full if one_pass else k}


def _lengths(table: pd.DataFrame, loads: Sequence[int], full: int) -> list[int]:
    """At most ``MAX_LENGTHS`` of the best lengths, evenly chosen, and the full block."""
    if table.empty:
        return sorted({max(1, full // 4), max(1, full // 2), full})
    first = table[table["context"] == table["context"].iloc[0]]
    near = first[first["batch"].isin([_nearest(first["batch"].tolist(), n) for n in loads])]
    best = sorted({int(k) for k in near["best_drafts"] if k})
    if len(best) > MAX_LENGTHS:
        best = [best[round(i * (len(best) - 1) / (MAX_LENGTHS - 1))] for i in range(MAX_LENGTHS)]
    return sorted({*best, full})


def _nearest(batches: list[int], load: int) -> int:
    return min(batches, key=lambda b: abs(b - load))


def _schedule(table: pd.DataFrame) -> dict[int, int]:
    """The best length from each batch on; rows that repeat the one before are left out."""
    drafts: dict[int, int] = {}
    if table.empty:
        return drafts
    first = table[table["context"] == table["context"].iloc[0]]
    for batch, k in zip(first["batch"], first["k"], strict=True):
        if not drafts or drafts[max(drafts)] != int(k):
            drafts[int(batch) if drafts else 1] = int(k)
    return drafts


def engine_of(
    known: Known, traffic: Traffic, file: str, memory: Memory | None, gpus: int, *, drafter: bool, extrapolate: bool
) -> dict[str, Any]:
    """The simulated engine: the data's cost and acceptance, the scenario's limits, the GPUs' memory."""
    cost = known.profile.cost
    limits = {"max_running_requests": max([*traffic.closed, 64 if known.batches is None else known.batches[1]])}
    raw: dict[str, Any] = {"kind": "sim", "profile": file, "max_draft_len": known.max_draft_len} | limits | traffic.engine
    if cost.captured_lens is not None:
        raw["ragged"] = False
    if extrapolate and isinstance(cost, TableCost | FittedCost) and not cost.extrapolate and not _unfitted(cost):
        whole_cost = cost.inline() if isinstance(cost, TableCost) else cost
        raw["cost"] = whole_cost.model_dump(mode="json", exclude_none=True) | {"extrapolate": True}
    if isinstance(cost, RooflineCost) and gpus > 1:
        raw.setdefault("parallel", {"tp": gpus})
    if memory is not None and not raw.get("kv", {}).get("blocks") and "memory_fraction" not in raw:
        if isinstance(cost, RooflineCost) and drafter:
            raw["memory_fraction"] = memory.fraction
        else:
            raw["kv"] = raw.get("kv", {}) | {"blocks": blocks(raw, memory, drafter=drafter)}
    return raw


def _unfitted(cost: TableCost | FittedCost) -> bool:
    return isinstance(cost, FittedCost) and cost.fitted_tokens is None


def blocks(engine: dict[str, Any], memory: Memory, *, drafter: bool) -> int:
    """KV blocks that the GPUs hold."""
    return max(1, memory.kv_tokens(drafter=drafter) // engine.get("kv", {}).get("block_tokens", 16))


def scenario_of(
    traffic: Traffic,
    engine: dict[str, Any],
    policies: list[dict[str, Any]],
    *,
    loop: str,
    loads: Sequence[float],
    seeds: int,
    assumptions: list[str],
) -> dict[str, Any]:
    """A raw scenario of the closed loop, or of the open one."""
    if loop == "closed":
        kind = {"kind": "closed", "concurrency": int(loads[0]), "drain": False}
        cases = {
            int(n): {"workload.concurrency": int(n), "workload.requests": max(PER_CLIENT * int(n), LEAST)} for n in loads
        }
        sweep: dict[str, Any] = {"concurrency": cases}
    elif traffic.is_trace:
        kind, sweep = {}, {"workload.speed": [float(n) for n in loads]}
    else:
        kind = {"kind": "poisson", "rate_rps": float(loads[0]), "requests": REQUESTS}
        sweep = {"workload.rate_rps": [float(n) for n in loads]}
    raw: dict[str, Any] = {
        "name": f"advice-{loop}",
        "title": f"Does speculation pay? ({loop} loop)",
        "description": f"Made by adasim advise for {traffic.title}.",
        "workload": kind | traffic.lengths,
        "backend": engine,
        "policies": policies,
        "sweep": sweep,
        "seeds": list(range(seeds)),
        "assumptions": assumptions,
    }
    if traffic.slo is not None:
        raw["slo"] = traffic.slo.model_dump(exclude_none=True)
    return raw


def loads_of(known: Known, traffic: Traffic, default: Sequence[int]) -> tuple[tuple[int, ...], list[str]]:
    """Concurrencies that are looked at, and what must be said of them."""
    if traffic.closed:
        return traffic.closed, []
    if known.batches is None:
        return tuple(n for n in default if n <= 64), []
    low, high = known.batches
    inside = sorted({low, high, *(n for n in default if low <= n <= high)})
    return tuple(inside), [
        f"loads of {low} to {high} at a time are looked at: what was measured (--concurrency for others)"
    ]


def room(memory: Memory | None, traffic: Traffic, loads: Sequence[int]) -> list[str]:
    """What KV memory means for the loads, a sentence each."""
    if memory is None:
        return []
    plain, with_drafter = (memory.holds(whole(traffic), drafter=d) for d in (False, True))
    short = [n for n in loads if n > with_drafter]
    tokens = f"{whole(traffic):,.0f} tokens"
    says = [f"KV cache holds {plain:,} requests of {tokens} at a time, {with_drafter:,} beside the drafter"]
    if short:
        some = ", ".join(map(str, short))
        says.append(f"at {some} concurrent requests some wait for memory beside the drafter, as simulated")
    return says
