"""Runs what advice needs: both loops, with the inputs as given and as they might be instead."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from adasim.advice.choice import Crossover, Loop, choose, contenders, crossover, speed_curve
from adasim.advice.doubt import DRAWS, FIT, VALIDATION, variations_of, varied
from adasim.advice.known import Known
from adasim.advice.memory import Memory, whole
from adasim.advice.setup import blocks, engine_of, loads_of, policies_of, room, scenario_of
from adasim.advice.steady import BATCHES, CONTEXTS, best_lengths, context_matters, worlds_of
from adasim.advice.traffic import CLOSED, Traffic
from adasim.calibration.throughput_profile import as_yaml
from adasim.errors import InputError
from adasim.files import write_atomic
from adasim.plan import Plan, Trial, load
from adasim.session import Session
from adasim.story import design as design_of
from adasim.tables import GOODPUT, summarise, with_speedup

SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)  # of plain decoding's capacity: rates of open loops where nobody says
LEAST_SEEDS = 3  # two make a t-interval five times as wide
ALWAYS = 3  # inputs that are varied whatever the time
Begin = Callable[[Plan], Session]


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user said beside data and traffic.

    Attributes:
        gpus: of the engine.
        seeds: of every run.
        budget_s: wall-clock time for simulations.
        extrapolate: go on beyond what was measured.
        validation: errors of a validation by loop.
    """

    gpus: int = 1
    seeds: int = 4
    budget_s: float = 60.0
    extrapolate: bool = False
    validation: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Findings:
    """All that advice is made of.

    Attributes:
        misfits: why it does not fit at all: without a drafter, with one.
        lengths: best draft lengths by batch and context, see ``steady.best_lengths``.
        loops: by kind; none where nothing fits.
        choices: what to take, both loops.
        curves: speed-up of the best fixed length, by kind.
        crossovers: by kind.
        notes: what must be known of it.
        room: what KV memory means.
        method: what was not varied, and why.
        sessions: that ran the loops.
    """

    known: Known
    traffic: Traffic
    memory: Memory | None
    misfits: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))
    lengths: pd.DataFrame = field(default_factory=pd.DataFrame)
    loops: dict[str, Loop] = field(default_factory=dict)
    choices: pd.DataFrame = field(default_factory=pd.DataFrame)
    curves: dict[str, pd.DataFrame] = field(default_factory=dict)
    crossovers: dict[str, Crossover | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    room: list[str] = field(default_factory=list)
    method: list[str] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)


def study(known: Known, traffic: Traffic, asked: Asked, memory: Memory | None, out: Path, begin: Begin) -> Findings:
    """Everything there is to say.

    Args:
        known: of cost and acceptance.
        traffic: what is asked for.
        asked: limits of the study.
        memory: of the GPUs; None = not known.
        out: a folder that is ready; the scenarios that were simulated are written into it.
        begin: a session for a plan.

    Raises:
        InputError: the scenarios cannot be run as asked.
    """
    loads, notes = loads_of(known, traffic, CLOSED)
    most = max(loads) if loads else 64
    found = Findings(known, traffic, memory, notes=[*known.notes, *traffic.notes, *notes])
    if memory is not None:
        plain, drafted = (memory.misfits(whole(traffic), most, drafter=d) for d in (False, True))
        found.misfits, found.room = (plain, drafted), room(memory, traffic, loads)
        if plain:
            return found
    if traffic.is_trace:
        beside = {"path": os.path.relpath(traffic.lengths["path"], out)}
        traffic = found.traffic = replace(traffic, lengths=traffic.lengths | beside)
    drafter = not found.misfits[1]
    found.lengths = _lengths(known, traffic)
    file = known.file or "profile.yaml"
    if known.file is None:
        write_atomic(out / file, as_yaml(known.profile))
    elif file.endswith((".yaml", ".yml")):
        file = os.path.relpath(file, out)
    engine = engine_of(known, traffic, file, memory, asked.gpus, drafter=drafter, extrapolate=asked.extrapolate)
    policies = policies_of(known, found.lengths, loads or BATCHES, drafter=drafter)
    own = traffic.engine.get("kv", {}).get("blocks") is not None
    deadline = time.monotonic() + asked.budget_s
    for kind in _loops(traffic):
        these: Sequence[float] = loads if kind == "closed" else traffic.rates or _rates(found)
        if not these:
            found.notes.append("no open loop was looked at: the closed one tells no capacity to choose rates by (--rate)")
            continue
        raw = scenario_of(traffic, engine, policies, loop=kind, loads=these, seeds=asked.seeds, assumptions=found.notes)
        write_atomic(out / f"{kind}.yaml", yaml.safe_dump(raw, sort_keys=False, allow_unicode=True, width=120))
        try:
            plan = load(str(out / f"{kind}.yaml"))
        except InputError as error:
            if kind == "closed" or traffic.rates:
                raise
            found.notes.append(f"no open loop was looked at: {'; '.join(error.problems)} (--extrapolate goes on beyond)")
            continue
        share = 0.6 if kind == "closed" and len(_loops(traffic)) > 1 else 1.0
        until = time.monotonic() + share * (deadline - time.monotonic())
        loop = _run(_with_memory(plan, engine, memory, own=own), found, asked, until, begin, kind)
        found.loops[kind] = loop
    found.choices = pd.concat([choose(loop) for loop in found.loops.values()], ignore_index=True)
    for kind, loop in found.loops.items():
        found.curves[kind] = speed_curve(loop)
        found.crossovers[kind] = crossover(found.curves[kind])
    return found


def _lengths(known: Known, traffic: Traffic) -> pd.DataFrame:
    mix = traffic.lengths.get("domains", {"default": 1.0})
    if "kind" in mix:  # it drifts
        mix = mix["points"][0]["mix"]
    worlds = worlds_of(known, mix)
    own = round(traffic.prompt + traffic.output / 2)
    low, high = known.batches or (BATCHES[0], BATCHES[-1])
    batches = sorted({b for b in BATCHES if low <= b <= high} | ({low, high} if known.batches else set()))
    table = best_lengths(worlds[:1], batches, [own])
    if table.empty:
        return table
    contexts = [own, *(c for c in CONTEXTS if c != own)] if context_matters(worlds, batches[0]) else [own]
    return best_lengths(worlds, batches, contexts)


def _loops(traffic: Traffic) -> list[str]:
    """Which loops are asked for; both where nobody says."""
    closed, opened = bool(traffic.closed), bool(traffic.rates)
    return ["closed", "open"] if closed == opened else ["closed"] if closed else ["open"]


def _rates(found: Findings) -> list[float]:
    """Shares of what plain decoding can do at the largest concurrency, two digits each."""
    loop = found.loops.get("closed")
    if loop is None:
        return []
    at = loop.at(loop.loads[-1])
    most = at.loc[at["policy"] == "off", "requests_per_s"]
    if most.empty or not float(most.iloc[0]) > 0:
        return []
    return sorted({float(f"{share * float(most.iloc[0]):.2g}") for share in SHARES})


def _with_memory(plan: Plan, engine: dict[str, Any], memory: Memory | None, *, own: bool) -> Plan:
    """Plain decoding has the drafter's memory to itself. A roofline knows; a scenario (``own``) may have said."""
    if memory is None or "memory_fraction" in engine or own:
        return plan
    more = blocks(engine, memory, drafter=False)

    def given(trial: Trial) -> Trial:
        if trial.policy != "off":
            return trial
        backend = trial.config["backend"]
        return replace(
            trial, config={**trial.config, "backend": {**backend, "kv": {**backend.get("kv", {}), "blocks": more}}}
        )

    return replace(plan, trials=[given(t) for t in plan.trials])


def _run(plan: Plan, found: Findings, asked: Asked, until: float, begin: Begin, kind: str) -> Loop:
    """Simulate a loop: the first seed, then as many others and variations as the time allows."""
    session = begin(plan)
    found.sessions.append(session)
    design = design_of(plan)
    if plan.scenario.slo is not None:
        design = replace(design, goal=GOODPUT)
    seeds = plan.scenario.seeds
    began = time.monotonic()
    first = [t for t in plan.trials if t.seed == seeds[0]]
    session.run(first, f"{kind} loop")
    each_s = (time.monotonic() - began) / len(first)
    count = len(seeds)
    while count > LEAST_SEEDS and each_s * len(first) * (count - 1) > max(until - time.monotonic(), 0.0) * 0.7:
        count -= 1
    if count < len(seeds):
        found.notes.append(f"{kind} loop: {count} of {len(seeds)} seeds, for lack of time (--budget)")
    kept = [t for t in plan.trials if t.seed in seeds[:count]]
    runs = session.run(kept, f"{kind} loop, {count} seeds")
    if runs.empty:
        raise InputError(*(f"{kind} loop: {f.error}" for f in session.failures[:5]))
    trials = with_speedup(runs, design)
    loop = Loop(kind, plan, design, trials, summarise(trials, design))
    if found.known.posterior is not None:
        loop.model[FIT] = found.known.posterior.rms
    if kind in asked.validation:
        loop.model[VALIDATION] = asked.validation[kind]
    _vary(loop, found, session, each_s, until)
    return loop


def _vary(loop: Loop, found: Findings, session: Session, each_s: float, until: float) -> None:
    """Run the contenders with the inputs varied, as far as the time allows."""
    variations, notes = variations_of(loop.plan, found.known)
    watched = contenders(loop)
    jobs = [(v.name, varied(loop.plan, v, watched)) for v in variations]
    left = until - time.monotonic()
    chosen: list[tuple[str, list[Trial]]] = []
    for name, trials in jobs:
        left -= each_s * len(trials)
        if len(chosen) >= ALWAYS and left < 0:
            skipped = [n for n, _ in jobs[len(chosen) :]]
            if name == DRAWS:
                found.notes.append(
                    f"{loop.kind} loop: {len(chosen)} of {len(jobs)} worlds, for lack of time (--budget): wider errors"
                )
                break
            what = ", ".join(skipped)
            found.notes.append(
                f"{loop.kind} loop: not varied for lack of time (--budget): {what}; errors are too small by it"
            )
            break
        chosen.append((name, trials))
    session.run([t for _, trials in chosen for t in trials], f"{loop.kind} loop, inputs varied")
    loop.moved = [(name, session.run(trials, "read")) for name, trials in chosen]
    found.method += [f"{loop.kind.capitalize()} loop: {note}." for note in notes]
