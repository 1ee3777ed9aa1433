"""Advice in sentences."""

from math import inf, isnan
from typing import Any

import pandas as pd

from adasim.advice.choice import Loop, regions
from adasim.advice.memory import GIB
from adasim.advice.money import Money
from adasim.advice.sharpen import Next
from adasim.advice.study import Findings
from adasim.tables import MATERIAL

BURST = 1.10  # ITL p99 beyond plain decoding's by this factor is named
UNMEASURED = "UNMEASURED"


def sentences(found: Findings, following: Next | None, money: Money | None) -> list[str]:
    """The answer, the most important first."""
    says = _memory(found)
    if not found.loops:
        return says
    if not found.known.measured:
        facts = found.known.profile.provenance
        says.append(
            f"{UNMEASURED}: all that follows rests on a {facts.how} of {facts.model} on {facts.hardware} and on "
            "published acceptance; no run on this hardware was ever compared with it."
        )
    for kind, loop in found.loops.items():
        if (crossing := found.crossovers.get(kind)) is not None:
            unit = "requests at a time" if kind == "closed" else _rate_unit(found)
            says.append(f"{kind.capitalize()} loop: the best fixed length beats plain decoding {crossing.says()} {unit}.")
        says += _by_load(found, loop)
        says += _bursts(loop)
        says += _slo(loop)
        if money is not None:
            says += _money(found, loop, money)
    if following is not None:
        says.append(f"Next measurement: {following.why}.")
    return says


def _memory(found: Findings) -> list[str]:
    plain, drafted = found.misfits
    if plain:
        return [f"Infeasible: {line}." for line in plain] + ["Nothing was simulated."]
    if drafted:
        lines = [f"Infeasible with a drafter: {line}." for line in drafted]
        return [*lines, "Plain decoding fits: it alone was simulated."]
    if found.memory is None:
        return ["Memory was not checked: --hardware and --model would tell what the GPUs hold."]
    m = found.memory
    weights = m.speculative.weight_bytes / GIB
    return [f"Memory: {weights:.1f} of {m.size_gib:g} GiB are weights and drafter; {'; '.join(found.room)}."]


def _rate_unit(found: Findings) -> str:
    return "times the trace's speed" if found.traffic.is_trace else "requests per second"


def _span(loads: "list[float]", loop: Loop) -> str:
    text = f"{loads[0]:g}" if len(loads) == 1 else f"{loads[0]:g} to {loads[-1]:g}"
    unit = "at a time" if loop.kind == "closed" else "x speed" if loop.x.endswith("speed") else "per second"
    return f"At {text} {unit}"


def _by_load(found: Findings, loop: Loop) -> list[str]:
    says = []
    words = loop.design.goal.words
    for loads, part in regions(found.choices[found.choices["loop"] == loop.kind]):
        start = _span(list(loads), loop)
        first = part.iloc[0]
        if not first["take"]:
            says.append(f"{start}: no policy meets the limits.")
            continue
        if first["take"] == "off":
            doubtful = part[part["best"] != "off"]
            text = f"{start}: plain decoding"
            if len(doubtful) and doubtful["best_gain"].abs().max() <= MATERIAL:
                text += f"; nothing gains 1 % in {words}"
                text += _latency(loop, doubtful.iloc[-1])
            elif len(doubtful):
                top = doubtful.sort_values("best_gain").iloc[-1]
                text += (
                    f"; whether speculation pays we cannot tell: {top['best']} gains {top['best_gain']:+.1%} "
                    f"± {_width(top['best_error'])} in {words}, within the error"
                )
            else:
                text += _alike(part)
            says.append(f"{text}.")
            continue
        ends = part["gain"].iloc[0], part["gain"].iloc[-1]
        gains = f"{ends[0]:+.0%}" if len(part) == 1 else f"{ends[0]:+.0%} to {ends[1]:+.0%}"
        text = f"{start}: {first['take']}, {gains} in {words} over plain decoding (± {_width(part['error'].max())})"
        says.append(f"{text}{_alike(part)}.")
    return says


def _alike(part: pd.DataFrame) -> str:
    """Policies that cannot be told from the one to take."""
    ahead = {str(b) for b, t in zip(part["best"], part["take"], strict=True) if b != t}
    alike = sorted(ahead | {p for line in part["alike"] for p in line.split(", ") if p})
    return f"; from it we cannot tell {', '.join(alike)}" if alike else ""


def _latency(loop: Loop, row: "pd.Series[float]") -> str:
    """What a policy that gains nothing in the goal does for TPOT."""
    tpot = loop.at(float(row["load"])).set_index("policy")["tpot_p50_ms"]
    name = str(row["best"])
    return f" ({name} has {tpot[name]:.3g} ms of median TPOT, plain decoding {tpot['off']:.3g})"


def _width(value: float) -> str:
    return "any" if value == inf or isnan(value) else f"{value:.1%}"


def _bursts(loop: Loop) -> list[str]:
    """The load at which the fastest policy loses most ITL against plain decoding."""
    worst: tuple[float, str] | None = None
    for load in loop.loads:
        at = loop.at(load).set_index("policy")
        if "off" not in at.index or at["output_tok_s"].isna().all():
            continue
        best = str(at["output_tok_s"].idxmax()) if loop.kind == "closed" else str(at["tpot_p50_ms"].idxmin())
        rows: dict[Any, Any] = at.to_dict("index")
        fast, plain = rows[best], rows["off"]
        ratio = float(fast["itl_p99_ms"]) / float(plain["itl_p99_ms"])
        if best == "off" or not ratio > BURST or (worst is not None and ratio <= worst[0]):
            continue
        wins = "tokens per second" if loop.kind == "closed" else "median TPOT"
        text = (
            f"{_span([load], loop)}, {best} wins {wins} and loses ITL: its p99 is {fast['itl_p99_ms']:.3g} ms "
            f"against {plain['itl_p99_ms']:.3g} ms of plain decoding ({ratio:.1f}x), since tokens come in bursts."
        )
        worst = ratio, text
    return [worst[1]] if worst else []


def _slo(loop: Loop) -> list[str]:
    """Where the limits choose another policy than tokens per second do."""
    if loop.plan.scenario.slo is None:
        return []
    says = []
    for load in loop.loads:
        at = loop.at(load).set_index("policy")
        best = loop.design.goal.best(loop.at(load))
        fast = str(at["output_tok_s"].idxmax())
        if best is None or str(best["policy"]) == fast:
            continue
        met = at["slo_met"]
        name = str(best["policy"])
        if met[fast] < met[name] - 0.01:
            says.append(
                f"{_span([load], loop)}, {fast} has the most tokens per second, but only {met[fast]:.0%} of its "
                f"requests meet the limits; {name} meets them for {met[name]:.0%}."
            )
    return says


def _money(found: Findings, loop: Loop, money: Money) -> list[str]:
    rows = found.choices[(found.choices["loop"] == loop.kind) & (found.choices["take"] != "")]
    if rows.empty:
        return []
    top = rows.iloc[-1]
    at = loop.at(float(top["load"])).set_index("policy")["output_tok_s"]
    take, parts = str(top["take"]), []
    for name in dict.fromkeys([take, "off"]):
        if name in at:
            parts.append(f"{name} {money.per_million(float(at[name]), drafts=name != 'off'):.3g}")
    trainer = f", {money.trainer_gpus:g} trainer GPUs included where it drafts" if money.trainer_gpus else ""
    return [f"{_span([float(top['load'])], loop)}, a million output tokens cost in USD: {', '.join(parts)}{trainer}."]


def table_of_costs(loop: Loop, money: Money) -> pd.DataFrame:
    """US dollars per million output tokens by policy and load."""
    costs = loop.summary.assign(usd_per_million=money.column(loop.summary))
    return costs[["policy", loop.x, "usd_per_million"]].rename(columns={loop.x: "load"}).assign(loop=loop.kind)
