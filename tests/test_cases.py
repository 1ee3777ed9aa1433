"""Sweeps whose cases set several fields, and what hangs on the profile that policies believe."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from adasim.commands.validation import plan_of
from adasim.errors import InputError
from adasim.plan import load
from adasim.real.backend import TorchBackend
from tests.validating import COST, acceptance, plan, profile, raw


def written(folder: Path, **fields: Any) -> str:
    path = folder / "s.yaml"
    path.write_text(yaml.safe_dump(raw(**fields)))
    return str(path)


def test_a_case_sets_all_its_fields_and_is_called_by_its_label() -> None:
    trials = plan(seeds=[0]).trials
    assert [t.point for t in trials[::3]] == [{"domain": d, "load": n} for d in ("code", "chat") for n in (1, 8)]
    last = trials[-1].scenario().workload
    assert last.domain_names == ["chat"]
    assert (last.clients, len(last.generate(0))) == (8, 12)
    assert len(trials[0].scenario().workload.generate(0)) == 6


def test_cases_are_chosen_by_their_labels(tmp_path: Path) -> None:
    found = load(written(tmp_path), ["sweep.load=[8]", "sweep.domain=[chat]"])
    assert {tuple(t.point.values()) for t in found.trials} == {("chat", 8)}


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("sweep.load=[2]", "no case 2; there are 1, 8"),
        ("workload.concurrency=4", "has no effect, sweep.load sets it"),
        ("sweep.workload.requests=[4, 8]", "workload.requests is already set by sweep.load"),
        ("sweep.more={a: {}}", "sweep.more.a: sets nothing"),
        ("sweep.more={a: {seeds: [1]}}", "seeds cannot be swept"),
        ("sweep.more={a: {workload.nothing: 1}}", "unknown key"),
    ],
)
def test_cases_that_cannot_be(tmp_path: Path, setting: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        load(written(tmp_path), [setting])


def profiles(folder: Path, **fields: Any) -> str:
    path = folder / "p.yaml"
    path.write_text(yaml.safe_dump(profile(**fields).model_dump(mode="json", exclude_none=True)))
    return str(path)


def test_a_real_engine_believes_a_profile(tmp_path: Path) -> None:
    believes = TorchBackend(target="random-tiny", profile=profiles(tmp_path))
    assert believes.caps().cost == profile().cost
    assert "cost" in believes.caps().provides
    with pytest.raises(ValueError, match="give cost or profile, not both"):
        TorchBackend(target="random-tiny", profile=profiles(tmp_path), cost=profile().cost)


def test_only_policies_that_ask_for_a_cost_depend_on_the_profile(tmp_path: Path) -> None:
    """Another profile keeps the measurements of all others."""
    backend = {"kind": "torch", "target": "random-tiny", "cost": COST}
    policies = [{"kind": "off"}, {"kind": "fixed", "verify_len": 1}, {"kind": "smartspec"}]
    scenario = written(tmp_path, backend=backend, policies=policies, seeds=[0])
    keys = []
    for base_ms in (1.0, 2.0):
        known = profiles(tmp_path, cost=COST | {"draft": {"kind": "linear", "base_ms": base_ms}})
        found, _ = plan_of(scenario, [], known)
        assert "policies that ask for a cost were given the profile's, not backend.cost" in found.notes
        keys.append({t.policy: t.key for t in found.trials})
    changed = {name for name in keys[0] if keys[0][name] != keys[1][name]}
    assert changed == {"smartspec"}
    other = profiles(
        tmp_path, cost=COST | {"draft": {"kind": "linear", "base_ms": 2.0}}, acceptance=acceptance(head={"noise": 1.0})
    )
    assert {t.policy: t.key for t in plan_of(scenario, [], other)[0].trials} == keys[1]  # only its cost is believed


def test_the_twin_of_a_real_run_meets_its_requests() -> None:
    pytest.importorskip("torch")
    from adasim.policies.off import Off
    from adasim.scenario import validate
    from adasim.validation.twin import Twin

    fields = raw(backend={"kind": "torch", "target": "random-tiny", "dtype": "float32"}, policies=[{"kind": "off"}])
    fields["workload"] |= {"output_len": {"kind": "fixed", "tokens": 5}}
    scenario = validate({k: v for k, v in fields.items() if k != "sweep"})
    backend = scenario.backend
    assert isinstance(backend, TorchBackend)
    records = backend.run(scenario.workload, Off(), 4)
    expected = backend.served_requests(scenario.workload, 4)
    twin = Twin.of(scenario, profile(), records.requests, records.events)
    assert twin.workload.generate(0) == expected
    again = twin.run(0)
    assert again.requests["prompt_len"].equals(records.requests["prompt_len"])
    assert again.steps["emitted"].sum() == records.steps["emitted"].sum()
