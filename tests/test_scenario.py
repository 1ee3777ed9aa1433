"""Scenarios: what is refused and how, overrides, sweeps, groups."""

from pathlib import Path
from typing import Any

import pytest

from adasim.errors import InputError
from adasim.files import parse_yaml
from adasim.plan import assign, expand, load
from adasim.scenario import packaged, validate
from adasim.simulator.backend import SimBackend
from tests.build import backend, closed, config, plan


def problems(raw: dict[str, Any]) -> list[str]:
    with pytest.raises(InputError) as error:
        expand(raw, Path())
    return list(error.value.problems)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"polices": []}, "polices: unknown key; did you mean policies? Allowed: name, title"),
        ({"workload": closed(concurency=3)}, "workload.concurency: unknown key; did you mean concurrency?"),
        (
            {"workload": closed(concurrency="many")},
            "workload.concurrency: got 'many', input should be a valid integer",
        ),
        (
            {"workload": closed(concurrency=-1)},
            "workload.concurrency: got -1, input should be greater",
        ),
        ({"workload": closed(kind="open")}, "workload: kind 'open'; allowed: closed, poisson, bursty, trace"),
        ({"workload": {"concurrency": 1}}, "workload: kind is missing"),
        (
            {"workload": closed(prompt_len={"kind": "fixed", "tokens": 0})},
            "workload.prompt_len.tokens: got 0, input should be greater than or equal to 1",
        ),
        ({"policies": [{"kind": "head", "gama": 1}]}, "policies.0.gama: unknown key; did you mean gamma?"),
        ({"policies": [{"kind": "head", "gamma": float("nan")}]}, "policies.0.gamma: got nan, input should be"),
        ({"policies": []}, "policies: got list, list should have at least 1 item"),
        ({"policies": [{"kind": "off"}, {"kind": "off"}]}, "policies: off stands twice; give each a name"),
        ({"policies": [{"kind": "fixed", "each": {"verify_len": 4}}]}, "policies.0.each: must map fields to lists"),
        ({"policies": [{"kind": "fixed", "verify_len": 17}]}, "fixed(verify_len=17): verify_len 17"),
        (
            {"sweep": {"workload.concurency": [1]}},
            "sweep (workload.concurency=1): workload.concurency: unknown key",
        ),
        ({"sweep": {"name.first": [1]}}, "sweep.name.first: cannot be swept"),
        ({"sweep": {"policies.slow.gamma": [1]}}, "no item slow; there are off, fixed(verify_len=4) (0..1)"),
        ({"seeds": [1, 1]}, "seeds: each may stand once"),
        ({"sweep": {"workload.concurrency": [4, 4]}}, "sweep.workload.concurrency: each value may stand once"),
        ({"sweep": {"policies.0.name": ["a"]}}, "sweep.policies.0.name: cannot be swept"),
        ({"slo": {"p99": 1.0}}, "slo.p99: unknown key. Allowed: ttft_ms, tpot_ms, e2e_ms"),
        ({"slo": {}}, "slo: give at least one of ttft_ms, tpot_ms, e2e_ms"),
        ({"measure": {"warmup_requests": 40}}, "measure: nothing to measure: 40 requests, 40 of them warm-up"),
        ({"policies": [{"kind": "fixed", "name": "off"}]}, "policies: the label off belongs to kind off"),
        ({"policies": [{"kind": "dcut", "keep_ratio": 0}]}, "policies.0.keep_ratio: got 0, input should be greater than"),
        (
            {"workload": closed(domains={"kind": "ramp", "points": [{"at": 0, "mix": {"a": 1.0}}] * 2, "speed": 3})},
            "workload.domains.speed: unknown key. Allowed: kind, points, period",
        ),
        (
            {"backend": {"kind": "sim", "profile": "dcut_h20"}, "workload": closed(drain=False, concurrency=2)},
            "cost.verify dcut_h20_verify.csv: batch 2 is outside the measured 4..64",
        ),
        ({"seeds": [-1]}, "seeds.0: got -1"),
        ({"backend": backend(profile="dcut_h20")}, "profile has no effect: cost and acceptance are both given"),
        ({"backend": {"kind": "sim"}}, "backend: give a profile, or both cost and acceptance"),
        (
            {"backend": {"kind": "sim", "profile": "dcut_h21"}},
            "unknown 'dcut_h21'; allowed: adaflash_qwen3_8b, angelslim_qwen3_30b, ",
        ),
        (
            {"backend": backend(acceptance={"kind": "curves", "curves": {"x": {"kind": "geometric", "alpha": 0.5}}})},
            "acceptance: no curve for domain default; there are x",
        ),
        (
            {"backend": backend(kv={"blocks": 5})},
            "workload: request 0 needs 144 tokens of KV memory (prompt 64, output 64, block 16); backend.kv holds",
        ),
        ({"workload": {"kind": "trace", "path": "nowhere.csv"}}, "workload: path: no file nowhere.csv"),
    ],
)
def test_bad_scenarios_say_what_where_and_what_is_allowed(fields: dict[str, Any], message: str) -> None:
    assert any(message in p for p in problems(config(**fields))), problems(config(**fields))


def test_mser5_is_for_closed_loops() -> None:
    """There it sets the warm-up of each run; in an open loop policies would be measured on different requests."""
    measure = {"warmup_requests": "mser5"}
    assert plan(measure=measure).scenario.warmup_requests == 4  # where the rule cannot tell: as many as clients
    with pytest.raises(InputError, match=r"measure.warmup_requests: mser5 is for closed loops"):
        plan(workload={"kind": "poisson", "rate_rps": 1.0}, measure=measure)
    with pytest.raises(InputError, match=r"measure.warmup_requests: got 'mser'"):
        plan(measure={"warmup_requests": "mser"})


def test_all_problems_are_named_at_once() -> None:
    raw = config(
        workload=closed(concurrency=0, output_len={"kind": "uniform", "minimum": 1}),
        policies=[{"kind": "head", "gamma": -1.0}, {"kind": "nothing"}],
        colour="red",
        seeds=["x"],
    )
    del raw["title"]
    assert len(problems(raw)) == 7


def test_problems_of_settings_groups_and_models_are_named_together() -> None:
    raw = config(
        policies=[{"kind": "off"}, {"kind": "fixed", "each": 3}, {"kind": "fixed", "verify_len": 99}],
        backend=backend(kv={"blocks": 2}),
    )
    found = "\n".join(problems(raw))
    for part in ("policies.1.each", "verify_len 99", "tokens of KV memory"):
        assert part in found
    with pytest.raises(InputError) as error:
        load("smoke", ["nonsense", "seeds=[", "workload.colour=red"])
    assert len(error.value.problems) == 3


def test_one_missing_input_of_a_policy_is_named_once() -> None:
    raw = config(sweep={"workload.concurrency": [1, 2]}, policies=[{"kind": "fixed", "verify_len": 99}])
    assert len(problems(raw)) == 1


def test_sweep_times_policies_times_seeds() -> None:
    p = plan(sweep={"workload.concurrency": [1, 2], "backend.ragged": [True, False]})
    assert len(p.trials) == 2 * 2 * 2 * 2
    assert {t.key for t in p.trials}.__len__() == 16
    trial = p.trials[-1]
    assert trial.point == {"workload.concurrency": 2, "backend.ragged": False}
    s = trial.scenario()
    assert isinstance(s.backend, SimBackend)
    assert (s.workload.clients, s.backend.ragged, len(s.policies)) == (2, False, 1)


def test_sweep_reaches_into_a_policy() -> None:
    raw_policies = [{"kind": "off"}, {"kind": "head", "name": "mine"}]
    p = plan(policies=raw_policies, sweep={"policies.mine.gamma": [0.5, 2.0]})
    gammas = {t.scenario().policies[0].model_dump().get("gamma") for t in p.trials if t.policy == "mine"}
    assert gammas == {0.5, 2.0}


def test_each_stands_for_several_policies() -> None:
    p = plan(policies=[{"kind": "off"}, {"kind": "fixed", "name": "static", "each": {"verify_len": [2, 4]}}])
    assert [x.label for x in p.scenario.policies] == ["off", "static verify_len=2", "static verify_len=4"]
    assert p.groups == {"static": ["static verify_len=2", "static verify_len=4"]}


def test_settings_override_fields(tmp_path: Path) -> None:
    p = load("smoke", ["workload.concurrency=4", "seeds=[7]", "policies.1.verify_len=3"])
    assert {t.seed for t in p.trials} == {7}
    assert p.trials[0].scenario().workload.clients == 4
    assert p.notes == ["--set workload.concurrency: replaces the sweep over it"]
    p = load("smoke", ["sweep.workload.concurrency=[2, 3, 5]"])
    assert {t.point["workload.concurrency"] for t in p.trials} == {2, 3, 5}
    with pytest.raises(InputError, match="expected field=value"):
        load("smoke", ["workload.concurrency"])
    with pytest.raises(InputError, match=r"workload\.concurency: unknown key"):
        load("smoke", ["workload.concurency=4"])


def test_assign_refuses_paths_through_values() -> None:
    with pytest.raises(InputError, match="has no fields"):
        assign({"name": "x"}, "name.first.second", 1)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("off", "off"),
        ("on", "on"),
        ("true", True),
        ("1e-3", 0.001),
        ("0.5", 0.5),
        ("12", 12),
        ("1_000", 1000),
        ("null", None),
    ],
)
def test_yaml_scalars_are_what_they_look_like(text: str, value: object) -> None:
    assert parse_yaml(text, "test") == value


@pytest.mark.parametrize(
    ("text", "message"), [("a: 1\na: 2", "line 2, column 1: the key 'a' stands twice"), ("a: [1", "line 1, column")]
)
def test_bad_yaml_is_placed(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_yaml(text, "x.yaml")


def test_profiles_name_their_own_problems(tmp_path: Path) -> None:
    bad = tmp_path / "mine.yaml"
    bad.write_text("name: mine\ncost: {kind: tabel}\n")
    found = problems(config(backend={"kind": "sim", "profile": str(bad)}))
    assert f"backend: {bad}: cost: kind 'tabel'; allowed: table, roofline, formula, pass" in found
    assert f"backend: {bad}: provenance: is missing" in found


@pytest.mark.parametrize("path", packaged(), ids=lambda p: p.stem)
def test_shipped_scenarios_load(path: Path) -> None:
    if path.stem == "sglang_qwen3_8b":  # its models are the user's to bring; all else in it is sound
        with pytest.raises(InputError) as caught:
            load(str(path))
        assert all("backend.drafter: models/Qwen3-8B-DFlash holds no" in line for line in caught.value.problems)
        return
    p = load(str(path))
    assert p.trials
    assert p.scenario.name == path.stem
    assert f"scenarios/{path.name}" in p.files


def test_files_of_a_scenario_are_hashed() -> None:
    assert set(load("dcut_h20").files) == {
        "scenarios/dcut_h20.yaml",
        "scenarios/dcut_h20_speedup.csv",
        "profiles/dcut_h20.yaml",
        "profiles/dcut_h20_verify.csv",
    }


def test_a_scenario_is_its_own_json() -> None:
    s = validate(config())
    assert validate(s.model_dump(mode="json", exclude_none=True, exclude_unset=True)) == s
