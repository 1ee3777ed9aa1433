"""Prefill-decode disaggregation: what requests wait for, by closed forms, and what is refused."""

from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from adasim import metrics
from adasim.calibration.parallel import Parallel
from adasim.calibration.roofline import RooflineCost
from adasim.errors import InputError
from adasim.files import load_yaml
from adasim.policies.base import Policy
from adasim.policies.fixed import Fixed
from adasim.policies.head import Head
from adasim.records import Records
from adasim.scenario import find_scenario, validate
from tests.build import FREE_COST, OFF, backend, closed, scenario, simulate

PREFILL = {
    "kind": "table",
    "verify": "dcut_h20_verify.csv",
    "extrapolate": True,
    "prefill": {"base_ms": 5.0, "per_token_ms": 0.1},
}
AT_ONCE = {"transfer_gb_s": 1e12, "transfer_ms": 0.0, "kv_bytes_per_token": 1.0}
LENGTHS = {"kind": "lognormal", "mean": 60, "cv": 1.0, "minimum": 1, "maximum": 200}


def of(tokens: int) -> dict[str, Any]:
    return {"kind": "fixed", "tokens": tokens}


def pool(**fields: Any) -> dict[str, Any]:
    """A backend whose prompts of n tokens take 5 + 0.1 n ms and are sent at once."""
    own = fields.pop("disaggregation", {})
    return backend(cost=PREFILL, disaggregation=AT_ONCE | own, **fields)


def prefills(records: Records) -> pd.DataFrame:
    assert records.prefills is not None
    return records.prefills.set_index("request").sort_index()


def test_ttft_is_queue_and_prefill_and_transfer() -> None:
    """Three prompts of 200 tokens on one engine, one a prefill of 25 ms; 1 MB a token at 50 GB/s takes 4 ms, and 2 ms."""
    sent = {"kv_bytes_per_token": 1e6, "transfer_gb_s": 50.0, "transfer_ms": 2.0}
    load = closed(concurrency=3, requests=3, prompt_len=of(200), output_len=of(2))
    records = simulate(OFF, workload=load, backend=pool(disaggregation=sent, max_prefill_tokens=200))
    assert metrics.ttft_s(records.requests).to_numpy() == pytest.approx([0.031, 0.056, 0.081])
    table = prefills(records)
    assert table["start_s"].to_numpy() == pytest.approx([0.0, 0.025, 0.050])
    assert table["end_s"].to_numpy() == pytest.approx([0.025, 0.050, 0.075])
    assert table["landed_s"].tolist() == records.requests["first_token_s"].tolist()
    assert records.requests["admitted_s"].tolist() == table["start_s"].tolist()


def test_transfers_of_an_engine_go_one_after_the_other() -> None:
    """Two prompts prefilled together: the second's KV cache waits for the first's to be sent."""
    sent = {"kv_bytes_per_token": 1e6, "transfer_gb_s": 1.0, "transfer_ms": 0.0}
    load = closed(concurrency=2, requests=2, prompt_len=of(100), output_len=of(2))
    records = simulate(OFF, workload=load, backend=pool(disaggregation=sent))
    assert prefills(records)["landed_s"].to_numpy() == pytest.approx([0.025 + 0.1, 0.025 + 0.2])


def test_bytes_of_a_transfer_come_from_the_model() -> None:
    """36 layers x 2 x 8 heads x 128 values x 2 bytes; a drafter of 5 layers keeps 5 more."""
    cost = {"kind": "roofline", "draft": {"kind": "layers", "layers": 5}}
    load = closed(concurrency=1, requests=1, prompt_len=of(1000), output_len=of(4))
    how = {"transfer_gb_s": 10.0, "transfer_ms": 0.0}
    for policy, layers in ((OFF, 36), (Fixed(verify_len=4), 41)):
        table = prefills(simulate(policy, workload=load, backend=backend(cost=cost, disaggregation=how)))
        sent_s = (table["landed_s"] - table["end_s"]).iloc[0]
        assert sent_s == pytest.approx(1000 * layers * 2 * 8 * 128 * 2 / 10e9)


SERVICE_S = 0.01


def short_prompts(engines: int, load: float, requests: int) -> Records:
    """Poisson arrivals of prompts that each take one of the engines for ``SERVICE_S``, and one token each."""
    cost = PREFILL | {"prefill": {"base_ms": 1e3 * SERVICE_S}}
    workload = {"kind": "poisson", "rate_rps": engines * load / SERVICE_S, "requests": requests}
    of_pool = AT_ONCE | {"prefill_engines": engines}
    return simulate(
        OFF,
        workload=workload | {"prompt_len": of(8), "output_len": of(1)},
        backend=backend(cost=cost, disaggregation=of_pool, max_prefill_tokens=8),
    )


@pytest.mark.parametrize("engines", [1, 2])
def test_mean_waiting_for_a_pool(engines: int) -> None:
    """M/D/c: exact for c = 1, Cosmetatos' approximation (1975, within 1 %) for c = 2."""
    load = 0.7
    records = short_prompts(engines, load, 30_000)
    waited = prefills(records)["start_s"] - records.requests["arrival_s"]
    offered = engines * load
    terms = np.cumprod([1.0] + [offered / k for k in range(1, engines + 1)])
    busy = terms[-1] / (1 - load) / (terms[:-1].sum() + terms[-1] / (1 - load))  # Erlang's C
    mmc = busy * SERVICE_S / (engines * (1 - load))
    more = (1 - load) * (engines - 1) * (np.sqrt(4 + 5 * engines) - 2) / (16 * load * engines)
    assert waited.mean() == pytest.approx(mmc / 2 * (1 + more), rel=0.05)


@pytest.mark.parametrize("engines", [1, 3, 8])
def test_every_wait_for_a_pool(engines: int) -> None:
    """First come, first served: each prompt starts when it is there and the first engine is free."""
    records = short_prompts(engines, 0.9, 2_000)
    free_s, expected = [0.0] * engines, []
    for arrival_s in records.requests["arrival_s"]:
        expected.append(max(heappop(free_s), arrival_s))
        heappush(free_s, expected[-1] + SERVICE_S)
    table = prefills(records)
    assert table["start_s"].to_numpy() == pytest.approx(np.array(expected), abs=1e-9)
    assert table["engine"].nunique() == engines


def test_free_engines_share_what_waits() -> None:
    load = closed(concurrency=4, requests=4, prompt_len=of(100), output_len=of(2))
    two = prefills(simulate(OFF, workload=load, backend=pool(disaggregation={"prefill_engines": 2})))
    assert two["engine"].tolist() == [0, 0, 1, 1]
    assert two["end_s"].to_numpy() == pytest.approx(0.025)
    limited = simulate(OFF, workload=load, backend=pool(max_prefill_tokens=250))
    assert prefills(limited)["end_s"].to_numpy() == pytest.approx([0.025, 0.025, 0.05, 0.05])


@pytest.mark.parametrize("policy", [OFF, Fixed(verify_len=8), Head()], ids=lambda p: p.kind)
def test_a_pool_without_limits_is_decoding_without_prefill(policy: Any) -> None:
    """Prefills that take no time, sent at once: the rounds are those of an engine whose prefills are not modelled."""
    load = {"kind": "poisson", "rate_rps": 15.0, "requests": 60, "prompt_len": of(64), "output_len": LENGTHS}
    free = {"kind": "formula", "base_ms": 5.0, "per_token_ms": 0.05, "per_request_ms": 0.1}
    cost = free | {"prefill": {"per_token_ms": 1e-9}}
    alone = simulate(policy, workload=load, backend=backend(cost=free))
    no_limits = AT_ONCE | {"prefill_engines": 60}
    apart = simulate(policy, workload=load, backend=backend(cost=cost, disaggregation=no_limits))
    rounds = alone.steps[alone.steps["decoding"] > 0]
    assert apart.requests["finish_s"].to_numpy() == pytest.approx(alone.requests["finish_s"].to_numpy(), rel=1e-6)
    assert apart.requests["rounds"].tolist() == alone.requests["rounds"].tolist()
    columns = ["decoding", "verify_tokens", "accepted", "emitted"]
    assert apart.steps[columns].to_numpy().tolist() == rounds[columns].to_numpy().tolist()


def test_no_engines_are_no_pool() -> None:
    none = simulate(Head(), backend=pool(disaggregation={"prefill_engines": 0}, chunked_prefill=32))
    plain = simulate(Head(), backend=backend(cost=PREFILL, chunked_prefill=32))
    assert none.prefills is None
    assert none.steps.equals(plain.steps)


def test_decoding_never_prefills() -> None:
    """No gap is longer than two rounds, where prefills between rounds make some wait."""
    load = {"kind": "poisson", "rate_rps": 20.0, "requests": 80, "prompt_len": of(400), "output_len": of(60)}
    roomy = {"max_running_requests": 64}
    apart, together = (simulate(OFF, workload=load, backend=b) for b in (pool(**roomy), backend(cost=PREFILL, **roomy)))
    assert apart.steps["prefill_s"].sum() == 0
    assert apart.steps["prefill_tokens"].sum() == 80 * 400
    assert apart.steps["first_tokens"].sum() == 80
    longest = (apart.steps["end_s"] - apart.steps["start_s"]).max()
    assert apart.gaps["gap_s"].max() <= 2 * longest  # the first one: from the middle of a round to the end of the next
    assert together.gaps["gap_s"].max() > longest + 0.045  # a prefill of 400 tokens
    assert metrics.tpot_s(apart.requests).mean() < metrics.tpot_s(together.requests).mean()


def test_evicted_requests_come_back_without_a_prefill() -> None:
    load = closed(prompt_len=LENGTHS, output_len=LENGTHS, concurrency=8)
    short: dict[str, Any] = {"kv": {"blocks": 30}}
    records = simulate(Fixed(verify_len=16), workload=load, backend=pool(**short))
    assert records.requests["evictions"].sum() > 0
    assert (records.requests["tokens"] == records.requests["output_len"]).all()
    assert records.steps["prefill_tokens"].sum() == records.requests["prompt_len"].sum()
    assert records.steps["first_tokens"].sum() == len(records.requests)
    roomy = simulate(Fixed(verify_len=16), workload=load, backend=pool())
    assert records.requests["rounds"].tolist() == roomy.requests["rounds"].tolist()
    slow = pool(disaggregation={"transfer_ms": 50.0}, **short)
    later = simulate(Fixed(verify_len=16), workload=load, backend=slow)
    gone = later.requests["evictions"] > 0
    assert gone.any()
    assert later.gaps["gap_s"].max() > 0.05  # nobody returns before a transfer


def test_prefill_engines_of_their_own_kind() -> None:
    load = closed(concurrency=1, requests=1, prompt_len=of(4000), output_len=of(2))
    for fields, cost in (
        ({"parallel": {"tp": 2}}, RooflineCost.model_validate(FREE_COST)),
        ({"cost": {"kind": "roofline", "hardware": "b200"}}, RooflineCost(hardware="b200")),
    ):
        records = simulate(OFF, workload=load, backend=backend(disaggregation=AT_ONCE | fields))
        own = cost.on(Parallel(tp=2)) if "parallel" in fields else cost
        expected = own.step(0, 0, 0, 0.0, prefill=4000, prefill_context=2000.0).total
        assert metrics.ttft_s(records.requests)[0] == pytest.approx(expected)


def test_what_prefill_engines_assume_is_said() -> None:
    table = PREFILL | {"measured_on": {"tp": 1}}
    apart = AT_ONCE | {"parallel": {"tp": 2, "assume": {"prefill": 0.6}}}
    load = closed(concurrency=1, requests=1, prompt_len=of(200), output_len=of(2))
    records = simulate(OFF, workload=load, backend=backend(cost=table, disaggregation=apart))
    assert metrics.ttft_s(records.requests)[0] == pytest.approx(0.6 * 0.025)
    assert any(note.startswith("prefill engines: assumed: times under tp 2, dp 1 are") for note in records.notes)


def test_memory_of_the_decoding_engine_is_needed_to_go_on() -> None:
    """First tokens come from the pool; with memory for one request, the second waits for the first to finish."""
    load = closed(concurrency=2, requests=2, prompt_len=of(100), output_len=of(50))
    records = simulate(OFF, workload=load, backend=pool(kv={"blocks": 12}, max_draft_len=1))
    first, second = records.requests["first_token_s"]
    assert first == second
    assert records.steps["decoding"].max() == 1
    assert records.steps["queued"].max() == 1
    assert any(
        note.startswith("requests waited for the decoding engine with their KV cache sent") for note in records.notes
    )


@pytest.mark.parametrize("routing", ["round_robin", "least_requests"])
def test_pool_before_attention_ranks(routing: str) -> None:
    parts: dict[str, Any] = {
        "cost": {"kind": "roofline", "model": "qwen3-30b-a3b"},
        "parallel": {"tp": 4, "dp": 4, "routing": routing},
        "disaggregation": {"prefill_engines": 2, "parallel": {"tp": 2}},
    }
    records = simulate(Head(), workload=closed(concurrency=8), backend=backend(**parts))
    assert (records.requests["status"] == "finished").all()
    assert records.steps["prefill_s"].sum() == 0


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    load = closed(prompt_len=LENGTHS, output_len=LENGTHS)
    of = pool(kv={"blocks": 40}, disaggregation={"prefill_engines": 2})
    contents = []
    for run in "ab":
        (tmp_path / run).mkdir()
        simulate(Head(), workload=load, backend=of).write(tmp_path / run)
        contents.append({p.name: p.read_bytes() for p in sorted((tmp_path / run).iterdir())})
    assert contents[0] == contents[1]
    assert "prefills.parquet" in contents[0]


def test_the_scenario_claims_what_the_model_says() -> None:
    """A prompt on one of eight ranks stops all; with prefill apart they keep up; one prefill engine caps speculation."""
    raw = load_yaml(find_scenario("dp_attention"))
    raw |= {"policies": [{"kind": "off"}], "sweep": {}}

    def tok_s(dp: int, engines: int, policy: Policy) -> float:
        raw["backend"]["parallel"]["dp"], raw["backend"]["disaggregation"]["prefill_engines"] = dp, engines
        raw["workload"] |= {"concurrency": 128, "requests_per_client": 2}
        s = validate(raw)
        steps = s.backend.run(s.workload, policy, 0).steps
        return float((steps["emitted"] + steps["first_tokens"]).sum() / steps["end_s"].iloc[-1])

    assert tok_s(8, 0, OFF) < 0.75 * tok_s(1, 0, OFF)
    assert tok_s(8, 2, OFF) > 0.9 * tok_s(1, 2, OFF)
    gains = [tok_s(8, engines, Fixed(verify_len=4)) / tok_s(8, engines, OFF) for engines in (1, 2)]
    assert 1 < gains[0] < 0.9 * gains[1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chunked_prefill": 64}, "chunked_prefill has no effect with disaggregation"),
        ({"kv": {"prefix_cache": True}}, "kv.prefix_cache is not modelled with disaggregation"),
        ({"parallel": {"tp": 2, "dp": 2}}, "disaggregation.parallel: give the GPUs of a prefill engine"),
        ({"cost": {"kind": "formula"}}, "disaggregation needs a cost that prices prefill"),
        (
            {"cost": {"kind": "formula", "prefill": {"per_token_ms": 1.0}}},
            "disaggregation.kv_bytes_per_token: give it; only a cost of kind roofline knows",
        ),
        (
            {"disaggregation": {"parallel": {"tp": 2, "dp": 2}}},
            "prefill engines have one attention rank; use more engines instead",
        ),
        (
            {"disaggregation": {"parallel": {"tp": 2, "routing": "least_requests"}}},
            "parallel.routing has no effect: a free prefill engine takes from one queue",
        ),
        ({"disaggregation": {"prefill_engines": -1}}, "prefill_engines"),
        ({"disaggregation": {"transfer_gb_s": 0.0}}, "transfer_gb_s"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        scenario(backend=backend(**({"disaggregation": {}} | fields)))
    assert message in "\n".join(error.value.problems)
