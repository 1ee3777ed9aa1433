"""The twin of a run: the same engine, the requests as served, what policies believe."""

from math import nan
from typing import Any

import pandas as pd
import pytest

from adasim.calibration.acceptance import CurveAcceptance
from adasim.calibration.adjust import Adjust
from adasim.calibration.labels import HeadLearning
from adasim.calibration.rollback import Rollback
from adasim.errors import InputError
from adasim.policies.smartspec import SmartSpec
from adasim.real.backend import TorchBackend
from adasim.records import Records
from adasim.scenario import Scenario
from adasim.validation.twin import Twin, as_served, farthest, luck_seeds, notes_of, twin_of
from tests.recordings import ENGINE
from tests.validating import acceptance, plan, profile


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


def engine(**fields: Any) -> dict[str, Any]:
    """A real engine that is never run."""
    return {"kind": "torch", "target": "random-tiny", "drafter": "smollm2-135m"} | fields


def test_acceptance_is_that_of_the_temperature_sampled_at() -> None:
    knows = profile(acceptance=acceptance(tau_by_temperature={0.0: 1.0, 1.0: 0.8}))
    for heat in (0.0, 0.7):
        hot = TorchBackend.model_validate(engine(sampling={"temperature": heat}))
        model = twin_of(hot, knows).calibrated_acceptance
        assert isinstance(model, CurveAcceptance)
        assert model.temperature == heat
    with pytest.raises(InputError, match=r"measured at temperatures 0..1, backend.sampling.temperature is 1.3"):
        twin_of(TorchBackend.model_validate(engine(sampling={"temperature": 1.3})), knows)
    hot = TorchBackend.model_validate(engine(sampling={"temperature": 0.7}))
    assert "taken to hold at 0.7" in notes_of(hot, profile())[0]
    assert notes_of(TorchBackend.model_validate(engine()), profile()) == ()
    with pytest.raises(InputError, match=r"measured at temperatures 0..0, backend.sampling.temperature is 0.7"):
        twin_of(hot, profile(identity=ENGINE))  # calibrated, and nothing but 0 was recorded
    assert twin_of(TorchBackend.model_validate(engine()), profile(identity=ENGINE)).acceptance == profile().acceptance


ON_SGLANG = {"kind": "sglang", "drafter": "smollm2-135m", "kv": {"blocks": 4096, "block_tokens": 1}}


def distilled(policy: dict[str, Any], trained_s: list[float], on: dict[str, Any] | None = None, **opd: Any) -> Twin:
    """The twin of a run during which training rounds of so many seconds ended."""
    records = trial({"kind": "head"})[1]
    policies = [policy, {"kind": "head"}]
    scenario = plan(policies=policies, sweep={}, backend=(on or engine()) | {"opd": opd}).trials[0].scenario()
    events = pd.DataFrame({"kind": ["trained"] * len(trained_s), "seconds": trained_s})
    return Twin.of(scenario, profile(learning={"code": {}}), records.requests, events)


def test_the_twin_of_a_distilling_engine_goes_back_and_verifies_whole_blocks_as_it_does() -> None:
    fixed = {"kind": "fixed", "verify_len": 4}
    learning = distilled(fixed, [2.0, 4.0], full_verify_share=0.1, rollback={"requests": 9}).backend.learning
    assert learning is not None
    assert learning.rollback == Rollback(requests=9)
    assert learning.head == HeadLearning(label="full_verify", full_verify_share=0.1)
    assert learning.setup_s == 3.0


def test_whole_blocks_are_verified_before_any_training_has_ended() -> None:
    fixed = {"kind": "fixed", "verify_len": 4}
    blocks = distilled(fixed, [], full_verify_share=0.5).run(2).blocks
    whole = blocks.loc[blocks["verify_len"] == 16, "blocks"].sum() / blocks["blocks"].sum()
    assert whole == pytest.approx(0.5, abs=0.15)
    assert distilled(fixed, [], full_verify_share=0.0).backend.learning is None
    assert distilled(fixed, [], enabled=False).backend.learning is None


def test_plain_decoding_pays_for_a_drafter_only_where_one_is_trained() -> None:
    off = {"kind": "off", "name": "plain"}
    assert distilled(off, [], enabled=True).policy.loads_drafter
    assert distilled(off, [], enabled=True).policy.label == "plain"
    assert not distilled(off, [], enabled=False).policy.loads_drafter
    assert not distilled(off, [], ON_SGLANG).policy.loads_drafter


def test_an_input_is_moved_as_far_as_it_goes() -> None:
    """By hand: nothing above 0.3 is possible; bisection finds it to 1/64 of the way."""

    def up_to(limit: float) -> Any:
        def at(value: float) -> float:
            if value > limit:
                raise InputError("too much")
            return value

        return at

    assert farthest(up_to(1.0), 0.0, 1.0) == (1.0, 1.0)
    found, share = farthest(up_to(0.3), 0.0, 1.0) or (nan, nan)
    assert found == share == pytest.approx(0.3, abs=1 / 64)
    assert farthest(up_to(-1.0), 0.0, 1.0) is None


def test_luck_of_different_runs_differs() -> None:
    assert len({s for seed in range(50) for s in luck_seeds(seed, 5)}) == 250
    assert luck_seeds(3, 4) == luck_seeds(3, 9)[:4]
    assert Adjust() == Adjust.model_validate({})
