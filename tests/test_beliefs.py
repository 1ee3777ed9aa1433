"""Records outlive the profile they were made with: policies of twins believe what was believed then."""

from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import pytest

from adasim.metrics import Window
from adasim.plan import Plan, Trial
from adasim.validation.recorded_runs import beliefs, differences
from adasim.validation.run import Run
from adasim.validation.twin import twin_of
from tests.validating import plan, profile


def scenario(base_ms: float) -> Plan:
    """A real engine that is never run, whose policies believe so many milliseconds a pass."""
    cost = {"kind": "formula", "base_ms": base_ms}
    engine = {"kind": "torch", "target": "random-tiny", "drafter": "smollm2-135m", "cost": cost}
    return plan(policies=[{"kind": "off"}, {"kind": "smartspec"}], sweep={}, seeds=[0], backend=engine)


def run(trial: Trial) -> Run:
    return Run(trial, Path(), nan, Window(0.0, 1.0, "finish"), None)


def test_what_was_believed_is_said_where_it_is_no_longer_the_profiles() -> None:
    """By hand: 10 ms then, 20 now: every round was believed to take half as long."""
    then, now = scenario(10.0), scenario(20.0)
    (told,) = beliefs([run(t) for t in then.trials if t.policy == "smartspec"], now)
    assert told.startswith("smartspec decided by a cost of then, not by the profile's: -50.0% for a plain round of 1, ")
    assert told.count("-50.0%") == 4
    assert beliefs([run(t) for t in now.trials], now) == []


def test_beliefs_of_then_are_no_other_settings() -> None:
    then, now = scenario(10.0), scenario(20.0)
    old, new = (next(t for t in p.trials if t.policy == "smartspec") for p in (then, now))
    made = old.scenario()
    config: dict[str, Any] = {
        "policy": made.policies[0].model_dump(mode="json"), "workload": made.workload.model_dump(mode="json"),
        "backend": made.backend.model_dump(mode="json"),
    }  # fmt: skip
    assert differences(config, new) == []
    config["backend"] = config["backend"] | {"max_running_requests": 7}
    assert len(differences(config, new)) == 1


def test_the_twin_pays_the_profiles_cost_and_believes_its_own() -> None:
    backend = replace(scenario(10.0).trials[1]).scenario().backend
    twin = twin_of(backend, profile())
    believed = twin.caps().cost
    assert believed is not None
    assert believed.round_s(1, 0, 1, 64.0) == pytest.approx(0.010)
    assert twin.calibrated_cost == profile().cost
