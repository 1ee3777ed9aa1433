"""Runs that were recorded before, taken for those of a plan: only where they ran as the plan says."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from adasim.backends import AnyBackend
from adasim.errors import InputError
from adasim.experiment import TRIALS
from adasim.plan import Plan, Trial
from adasim.validation.blocks import Block
from adasim.validation.run import Run, read_manifest

BELIEFS = {"cost", "profile"}  # what policies of a real engine know of time
CONTEXT = 64.0  # tokens, at which beliefs are compared


def runs_recorded(folder: Path, plan: Plan, known: Collection[str] = ()) -> list[Run]:
    """What a folder of ``adasim record`` or ``validate`` holds of a plan, by policy, point and seed; in order of time.

    A policy that asks for a cost is taken to believe what it believed when it ran, not what the plan says.

    Args:
        folder: where to look.
        plan: of the scenario.
        known: keys of runs to leave out.

    Raises:
        InputError: no such records, or made with other settings than the scenario states.
    """
    manifest = read_manifest(folder)
    rules = manifest["scenario"].get("measure"), plan.scenario.measure.model_dump(mode="json")
    problems = {f"measure{line}": "" for line in differing(*rules)}
    trials = {_name(t.policy, t.point, t.seed): t for t in plan.trials}
    found = []
    for row in manifest["trials"]:
        trial, place = trials.get(_name(row["policy"], row["point"], row["seed"])), folder / TRIALS / row["key"]
        if trial is None or row["key"] in known or not (place / "trial.json").is_file():
            continue
        run = Run.read(replace(trial, repeat=row.get("repeat")), place)
        problems |= {line: run.name for line in differences(run.config, trial) if line not in problems}
        found.append(_believing(run))
    listed = {row["key"] for row in manifest["trials"]} | set(known)
    found += _references(folder, [t for t in plan.trials if t.repeat is None], listed)
    if problems:
        raise InputError(*(f"{folder}: was made with {line}" + f" ({at})" * bool(at) for line, at in problems.items()))
    return sorted(found, key=lambda run: 0.0 if np.isnan(run.at_s) else run.at_s)


def _references(folder: Path, trials: Sequence[Trial], listed: Collection[str]) -> list[Run]:
    """Plain decoding that a measurement made since it last wrote its manifest: how often it does is not known before."""
    found: list[Run] = []
    for path in sorted((folder / TRIALS).glob("[!.]*/trial.json")):
        if path.parent.name not in listed and (trial := _ran(json.loads(path.read_text()), trials)) is not None:
            run = Run.read(replace(trial, repeat=len(listed) + len(found)), path.parent)
            if run.is_reference and not differences(run.config, trial):
                found.append(run)
    return found


def _ran(facts: Mapping[str, Any], trials: Iterable[Trial]) -> Trial | None:
    """Which of some trials a trial.json is about, by policy, point and seed."""
    ran = facts["metrics"].items()
    return next((t for t in trials if {"policy": t.policy, "seed": t.seed, **t.point}.items() <= ran), None)


def strangers(out: Path, kept: Iterable[str], blocks: Sequence[Block]) -> tuple[int, int]:
    """Runs in a folder that are none of ``blocks``: those of policies that believed another cost, and all others.

    Args:
        out: of ``adasim validate``.
        kept: keys of its runs.
        blocks: of the scenario.
    """
    trials = [t for block in blocks for t in (*block.references(out), *block.trials)]
    believed, others = 0, 0
    for key in set(kept) - {t.key for t in trials}:
        facts = json.loads((out / TRIALS / key / "trial.json").read_text())
        trial = _ran(facts, (t for t in trials if t.repeat is None))
        asks = trial is not None and "cost" in trial.scenario().policies[0].needs
        if trial is not None and asks and not differences(facts.get("config"), trial):
            believed += 1
        else:
            others += 1
    return believed, others


def differences(config: Mapping[str, Any] | None, trial: Trial) -> list[str]:
    """How a run, by the ``config`` in its trial.json, differs from what ``trial`` would run; beliefs about time aside."""
    if config is None:
        return ["no configuration in trial.json (an older adasim): measure it again"]
    scenario = trial.scenario()
    real = scenario.backend.mark == "measured"
    mine = {
        f"policies.{trial.policy}": scenario.policies[0].model_dump(mode="json", exclude={"name"}),
        "workload": scenario.workload.model_dump(mode="json"),
        "backend": scenario.backend.model_dump(mode="json", exclude=BELIEFS if real else set()),
    }
    theirs = dict(zip(mine, (dict(config[part]) for part in ("policy", "workload", "backend")), strict=True))
    theirs[f"policies.{trial.policy}"].pop("name", None)
    for name in BELIEFS if real else ():
        theirs["backend"].pop(name, None)
    return [f"{part}{line}" for part in mine for line in differing(theirs[part], mine[part])]


def _believing(run: Run) -> Run:
    """The run with a trial whose policy believes of time what it believed then; a simulation's beliefs were compared."""
    raw, then = run.trial.config["backend"], (run.config or {}).get("backend", {})
    if raw["kind"] == "sim":
        return run
    backend = {k: v for k, v in raw.items() if k not in BELIEFS} | {k: then[k] for k in BELIEFS & set(then)}
    return replace(run, trial=replace(run.trial, config=run.trial.config | {"backend": backend}))


def beliefs(runs: Sequence[Run], plan: Plan) -> list[str]:
    """What a report must say of policies that decided by another cost than the one that ``plan`` gives them.

    Their twins believe what they believed, so that records outlive the profile they were made with; how far the beliefs
    lie apart is told by the rounds that the engine's smallest and largest batch would take.
    """
    other = dict[str, tuple[AnyBackend, AnyBackend]]()
    now = {t.policy: t.config for t in plan.trials}
    for run in runs:
        mine, theirs = now[run.trial.policy]["backend"], run.trial.config["backend"]
        asks = mine["kind"] != "sim" and "cost" in mine and run.trial.policy not in other
        if asks and _parsed(mine) != _parsed(theirs):
            scenario = run.trial.scenario()
            asked = replace(run.trial, config=run.trial.config | {"backend": mine}).scenario()
            other[run.trial.policy] = scenario.backend, asked.backend
    return [
        f"{policy} decided by a cost of then, not by the profile's: {_apart(*pair)}" for policy, pair in other.items()
    ]


def _parsed(backend: Mapping[str, Any]) -> dict[str, Any]:
    return {name: backend.get(name) for name in BELIEFS}


def _apart(then: AnyBackend, now: AnyBackend) -> str:
    """How much longer rounds take by one backend's cost than by another's."""
    before, after, largest = then.caps().cost, now.caps().cost, now.caps().max_running_requests
    assert before is not None
    assert after is not None
    block, said = now.caps().block, []
    for batch in (1, largest):
        for name, positions, tokens in (("plain", 0, batch), ("full-block", block * batch, block * batch)):
            ratio = before.round_s(batch, positions, tokens, CONTEXT) / after.round_s(batch, positions, tokens, CONTEXT)
            said.append(f"{ratio - 1:+.1%} for a {name} round of {batch}")
    return ", ".join(said)


def differing(theirs: object, mine: object, who: str = "the scenario says") -> Iterator[str]:
    """Leaves of two JSON values that are not the same, as " value, ``who`` value" after their path; what is not there is
    null."""
    if isinstance(theirs, Mapping) and isinstance(mine, Mapping):
        theirs, mine = ({str(k): v for k, v in part.items()} for part in (theirs, mine))
        for name in sorted(set(theirs) | set(mine)):
            yield from (f".{name}{line}" for line in differing(theirs.get(name), mine.get(name), who))
    elif theirs != mine:
        yield f" {theirs!r}, {who} {mine!r}"


def _name(policy: str, point: dict[str, Any], seed: int) -> str:
    return json.dumps([policy, point, seed])
