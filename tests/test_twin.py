"""The twin of a run: the same engine, the requests as served, what policies believe."""

from typing import Any

import pytest

from adasim.calibration.adjust import Adjust
from adasim.errors import InputError
from adasim.policies.smartspec import SmartSpec
from adasim.records import Records
from adasim.scenario import Scenario
from adasim.validation.twin import Twin, as_served, luck_seeds, twin_of
from tests.validating import plan, profile


def trial(policy: dict[str, Any], **fields: Any) -> tuple[Scenario, Records]:
    scenario = plan(policies=[{"kind": "off"}, policy], sweep={}, **fields).trials[-1].scenario()
    return scenario, scenario.backend.run(scenario.workload, scenario.policies[0], 2)


@pytest.mark.parametrize("policy", [{"kind": "head"}, {"kind": "dspark"}, {"kind": "fixed", "verify_len": 5}])
def test_a_true_profile_with_the_same_luck_gives_the_same_bytes(policy: dict[str, Any]) -> None:
    scenario, records = trial(policy)
    twin = Twin.of(scenario, profile(), records.requests, records.events)
    again = twin.run(2)
    assert again.steps.equals(records.steps)
    assert again.requests.equals(records.requests)


def test_requests_are_those_that_were_served() -> None:
    """A model that ended early gave fewer tokens: the twin is asked for so many."""
    scenario, records = trial({"kind": "head"})
    third, fourth = (records.requests["request"] == i for i in (3, 4))
    changed = records.requests.assign(
        tokens=records.requests["tokens"].mask(third | fourth, 11),
        prompt_len=records.requests["prompt_len"].mask(third, 99),
        status=records.requests["status"].mask(fourth, "running"),
    )
    served = as_served(changed, scenario.workload)
    assert [(r.prompt_len, r.output_len) for r in served[2:5]] == [(64, 48), (99, 11), (64, 48)]
    assert [r.id for r in served] == list(range(12))


def test_the_limits_of_the_engine_are_kept() -> None:
    limits = {"max_running_requests": 5, "lag_steps": 2, "max_prefill_tokens": 128, "kv": {"blocks": 500}}
    scenario, _ = trial({"kind": "head"}, backend=plan().scenario.backend.model_dump() | limits)
    twin = twin_of(scenario.backend, profile())
    assert (twin.max_running_requests, twin.lag_steps, twin.max_prefill_tokens, twin.kv.blocks) == (5, 2, 128, 500)
    assert twin.max_draft_len == scenario.backend.caps().max_draft_len


def test_policies_go_on_believing_what_they_believed() -> None:
    """Draft time tenfold: a policy that knew would stop drafting; one that believes the old cost goes on."""
    scenario, records = trial({"kind": "smartspec"})
    twin = Twin.of(scenario, profile(), records.requests, records.events)
    slow = twin.moved("draft", 100.0)
    assert slow.run(2).steps["draft_tokens"].equals(records.steps["draft_tokens"])
    knows = slow.backend.model_copy(update={"believed": None})
    assert knows.run(slow.workload, SmartSpec(), 2).steps["draft_tokens"].sum() < records.steps["draft_tokens"].sum() / 2


def test_what_the_profile_does_not_cover_is_refused() -> None:
    scenario, records = trial({"kind": "head"})
    only = {"kind": "curves", "curves": {"chat": {"kind": "geometric", "alpha": 0.5}}}
    twin = Twin.of(scenario, profile(acceptance=only), records.requests, records.events)
    with pytest.raises(InputError, match="no curve for domain code"):
        twin.check()


def test_luck_of_different_runs_differs() -> None:
    assert len({s for seed in range(50) for s in luck_seeds(seed, 5)}) == 250
    assert luck_seeds(3, 4) == luck_seeds(3, 9)[:4]
    assert Adjust() == Adjust.model_validate({})
