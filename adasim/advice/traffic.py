"""Which traffic advice is asked for, from a scenario or from options."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from adasim.errors import InputError
from adasim.files import find, loading_from, parse_yaml
from adasim.plan import Plan
from adasim.scenario import find_scenario
from adasim.types import Slo
from adasim.workload import Closed, Trace

CLOSED = (1, 2, 4, 8, 16, 32, 64, 128)  # concurrencies looked at where nobody says
LIMITS = (
    *("max_running_requests", "ragged", "lag_steps", "chunked_prefill", "max_prefill_tokens", "kv", "memory_fraction"),
    *("parallel", "scheduler", "predictor", "disaggregation"),
)  # of a scenario's engine, that are kept
LOADS = ("concurrency", "rate_rps", "speed")  # fields of a workload that say how much is asked
CV = 0.5  # of lengths, where nobody says


@dataclass(frozen=True, slots=True)
class Traffic:
    """What is asked of the engine.

    Attributes:
        lengths: raw fields of a workload: prompt_len, output_len, domains; of a trace all of its fields.
        closed: concurrencies of closed loops.
        rates: requests per second of open loops (a trace: factors of its speed); None = chosen by the engine's capacity.
        slo: latency limits.
        engine: raw fields of the engine, that the scenario states.
        prompt, output: mean tokens.
        title: in words.
        real_scenario: the scenario it comes from, where that runs a real engine.
    """

    lengths: dict[str, Any]
    closed: tuple[int, ...]
    rates: tuple[float, ...] | None
    slo: Slo | None
    prompt: float
    output: float
    title: str
    engine: dict[str, Any] = field(default_factory=dict)
    real_scenario: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def is_trace(self) -> bool:
        """Recorded arrivals."""
        return "path" in self.lengths


def numbers(text: str | None, option: str, *, whole: bool) -> tuple[float, ...] | None:
    """Rising numbers above 0 of a list like ``1,4,16``; None without one.

    Raises:
        InputError: it is no such list.
    """
    if text is None:
        return None
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or any(not 0 < n < 1e6 or (whole and n % 1) for n in found):
        raise InputError(
            f"{option} {text}: expected {'whole ' * whole}numbers above 0, like {'1,4,16' if whole else '0.5,2'}"
        )
    return tuple(sorted(set(found)))


def slo_of(ttft_ms: float | None, tpot_ms: float | None) -> Slo | None:
    """Limits that were given; None without any."""
    return None if ttft_ms is None and tpot_ms is None else Slo(ttft_ms=ttft_ms, tpot_ms=tpot_ms)


def mix_of(given: Sequence[str], known: Sequence[str]) -> tuple[dict[str, float], list[str]]:
    """Domain weights of ``NAME=WEIGHT`` options, and what must be said of them.

    Raises:
        InputError: not of that form, or a domain without acceptance.
    """
    if not given:
        says = [f"the traffic is taken for equal parts of {', '.join(known)}: say yours with --domain"] * (len(known) > 1)
        return dict.fromkeys(known or ["default"], 1.0), says
    problems, mix = [], dict[str, float]()
    for text in given:
        name, sep, value = text.partition("=")
        weight = parse_yaml(value, f"--domain {name}") if sep else 1.0
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight > 0:
            problems.append(f"--domain {text}: expected NAME or NAME=WEIGHT with a weight above 0")
        elif known and name not in known:
            problems.append(f"--domain {name}: the data hold no acceptance of it; there are {', '.join(known)}")
        else:
            mix[name] = float(weight)
    if problems:
        raise InputError(*problems)
    return mix, []


def from_options(
    input_len: float | None, output_len: float | None, cv: float | None, mix: dict[str, float], slo: Slo | None
) -> Traffic:
    """Traffic of drawn lengths; the loads are still to be said."""
    prompt, output, spread = input_len or 512.0, output_len or 256.0, CV if cv is None else cv
    lengths = {"prompt_len": _length(prompt, spread), "output_len": _length(output, spread), "domains": mix}
    words = f"prompts of {prompt:g} and answers of {output:g} tokens"
    notes = []
    if input_len is None or output_len is None:
        notes.append(f"lengths were not all given: {words} are assumed (--input-len, --output-len)")
    if cv is None:
        notes.append(f"lengths vary with a coefficient of variation of {CV:g} (--length-cv)")
    return Traffic(lengths, (), (), slo, prompt, output, words, notes=notes)


def _length(mean: float, cv: float) -> dict[str, Any]:
    if cv == 0:
        return {"kind": "fixed", "tokens": round(mean)}
    return {"kind": "lognormal", "mean": mean, "cv": cv}


def from_plan(name: str, plan: Plan, slo: Slo | None) -> Traffic:
    """The traffic of a scenario: its loads, lengths, domains and limits; its policies and cost are left behind."""
    scenario = plan.scenario
    workload, engine = scenario.workload, scenario.backend
    raw = workload.model_dump(mode="json", exclude_none=True)
    requests = workload.requests_of(scenario.seeds[0])
    prompt, output = (sum(n) / len(requests) for n in zip(*((r.prompt_len, r.output_len) for r in requests), strict=True))
    loads = sorted({_load(trial.config["workload"]) for trial in plan.trials})
    swept = sorted(n for n in plan.trials[0].point if n.rsplit(".", 1)[-1] not in LOADS)
    notes = [f"the scenario sweeps {', '.join(swept)}: only its first value is looked at"] * bool(swept)
    limits = engine.model_dump(mode="json", exclude_none=True, include=set(LIMITS))
    if isinstance(workload, Trace):
        with loading_from(find_scenario(name).parent):
            path = str(find(workload.path, "workload: path").resolve())
        lengths: dict[str, Any] = {k: v for k, v in raw.items() if k != "speed"} | {"path": path}
    else:
        lengths = {k: raw[k] for k in ("prompt_len", "output_len", "domains")}
    closed = isinstance(workload, Closed)
    return Traffic(
        lengths,
        tuple(int(n) for n in loads) if closed else (),
        () if closed else tuple(float(n) for n in loads),
        slo or scenario.slo,
        prompt,
        output,
        f"the traffic of {scenario.name}: {prompt:.0f} prompt and {output:.0f} output tokens on average",
        engine=limits,
        real_scenario=name if engine.mark == "measured" else None,
        notes=notes,
    )


def with_domains(traffic: Traffic, known: Sequence[str]) -> Traffic:
    """The traffic in domains that the data tell apart: all are taken for the only one, where there is but one.

    Raises:
        InputError: the data tell several apart, and not these.
    """
    mix = traffic.lengths["domains"]
    names = {d for p in mix["points"] for d in p["mix"]} if "kind" in mix else set(mix)
    unknown = sorted(names - set(known))
    if not unknown or not known:
        return traffic
    if len(known) > 1:
        allowed = ", ".join(known)
        raise InputError(f"workload.domains: the data hold no acceptance of {', '.join(unknown)}; there are {allowed}")
    note = f"the data tell no domains apart: all of {', '.join(sorted(names))} is taken for what was measured"
    lengths = traffic.lengths | {"domains": {known[0]: 1.0}}
    return replace(traffic, lengths=lengths, notes=[*traffic.notes, note])


def _load(workload: dict[str, Any]) -> float:
    """What a scenario sweeps of its workload."""
    return float(next((workload[name] for name in LOADS if name in workload), 1.0))
