"""Tensor parallelism and data-parallel attention: closed forms, limits, and what is refused."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from adasim.calibration.cost import TableCost
from adasim.calibration.parallel import Assumed, Load, Parallel, Split
from adasim.calibration.parallel_cost import cost_on
from adasim.calibration.roofline import LayersDraft, RooflineCost
from adasim.calibration.specs import HARDWARE, MODELS
from adasim.errors import InputError
from adasim.policies.dcut import DCut
from adasim.policies.fixed import Fixed
from adasim.policies.head import Head
from adasim.policies.scheduler import Fcfs
from adasim.records import Records
from adasim.serving.admission import Admission
from adasim.serving.kv import KvMemory
from adasim.serving.lives import Lives
from adasim.serving.ranks import Ranks
from adasim.simulator.backend import SimBackend
from adasim.simulator.lock_step import BalancedRanks, LockStep
from adasim.types import BatchView, EngineCaps, IntArray, Request
from tests.build import FREE_COST, OFF, backend, closed, scenario, simulate

FREE_LINKS: dict[str, Any] = {"collective_us": 0.0, "link_gb_s": 1e12}
ROOFLINE = {"kind": "roofline", "hardware": "h100", "model": "qwen3-8b", "draft": {"kind": "layers", "layers": 2}}
MOE = ROOFLINE | {"model": "qwen3-30b-a3b"}
LENGTHS = {"kind": "lognormal", "mean": 60, "cv": 1.0, "minimum": 1, "maximum": 200}


def tables(records: Records) -> dict[str, str]:
    names = ("steps", "requests", "blocks", "gaps", "events")
    return {name: getattr(records, name).to_csv(float_format="%.17g") for name in names}


# tensor parallelism


@pytest.mark.parametrize("policy", [OFF, Fixed(verify_len=8), Head(), DCut()], ids=lambda p: p.kind)
@pytest.mark.parametrize("cost", [ROOFLINE, MOE, FREE_COST], ids=["layers", "experts", "linear draft"])
def test_one_gpu_is_as_before(policy: Any, cost: dict[str, Any]) -> None:
    load = closed(prompt_len=LENGTHS, output_len=LENGTHS)
    plain = simulate(policy, workload=load, backend=backend(cost=cost))
    one = simulate(policy, workload=load, backend=backend(cost=cost, parallel={"tp": 1, "dp": 1}))
    assert tables(plain) == tables(one)


@pytest.mark.parametrize("tokens", [1, 16, 20_000], ids=["weights", "weights and KV", "compute"])
@pytest.mark.parametrize("model", ["qwen3-8b", "qwen3-30b-a3b"])
def test_two_gpus_without_communication_take_half_the_time(tokens: int, model: str) -> None:
    cost = RooflineCost(model=model, launch_ms=0.0)
    two = cost.on(Parallel(tp=2, **FREE_LINKS))
    for context in (0.0, 5000.0):
        assert two.verify_s(tokens, tokens, context) == pytest.approx(
            cost.verify_s(tokens, tokens, context) / 2, rel=1e-6
        )
    assert two.draft_s(4, 4 * tokens, 3, 100.0) == pytest.approx(cost.draft_s(4, 4 * tokens, 3, 100.0) / 2, rel=1e-6)
    assert two.prefill_s(tokens, 10.0, 0) == pytest.approx(cost.prefill_s(tokens, 10.0, 0) / 2, rel=1e-6)


def test_launches_are_not_divided() -> None:
    cost = RooflineCost(launch_ms=2.0)
    two = cost.on(Parallel(tp=2, **FREE_LINKS))
    assert two.verify_s(1, 1, 0.0) - 0.002 == pytest.approx((cost.verify_s(1, 1, 0.0) - 0.002) / 2, rel=1e-6)


def test_kv_is_divided_by_no_more_than_its_heads() -> None:
    """Four KV heads: 8 GPUs hold two copies of each, of its cache and of its projections."""
    cost = RooflineCost(model="qwen3-30b-a3b")

    def kv_s(tp: int) -> float:
        of = cost.on(Parallel(tp=tp, **FREE_LINKS))
        return of.verify_s(64, 64, 20_000.0) - of.verify_s(64, 64, 0.0)

    assert kv_s(2) == pytest.approx(kv_s(1) / 2)
    assert kv_s(4) == pytest.approx(kv_s(1) / 4)
    assert kv_s(8) == pytest.approx(kv_s(1) / 4)
    m = MODELS["qwen3-30b-a3b"]
    assert m.attention_params_on(8) == m.hidden * m.head_dim * (2 * 4 + 2 * 1)


@pytest.mark.parametrize("tp", [2, 4])
def test_communication_of_a_pass(tp: int) -> None:
    """Two ring all-reduces a layer move 2 (tp - 1) / tp of the hidden states; then the logits are gathered."""
    cost, m, tokens = RooflineCost(), MODELS["qwen3-8b"], 128
    links: dict[str, Any] = {"collective_us": 7.0, "link_gb_s": 200.0}
    free, real = (cost.on(Parallel(tp=tp, **how)) for how in (FREE_LINKS, links))
    part, per_byte = (tp - 1) / tp, 1 / 200e9
    layers = 2 * m.layers * (7e-6 + 2 * part * tokens * m.hidden * 2 * per_byte)
    logits = 7e-6 + part * tokens * m.vocabulary * 2 * per_byte
    assert real.verify_s(8, tokens, 0.0) - free.verify_s(8, tokens, 0.0) == pytest.approx(layers + logits, rel=1e-4)
    small = LayersDraft(layers=3)
    drafts = [c.model_copy(update={"draft": small}).draft_s(8, tokens, 15, 0.0) for c in (real, free)]
    assert drafts[0] - drafts[1] == pytest.approx(3 / m.layers * layers + logits, rel=1e-4)


def test_link_of_the_hardware_by_default() -> None:
    given = Parallel(tp=2, link_gb_s=0.8 * 450.0)
    assert RooflineCost().on(Parallel(tp=2)).verify_s(8, 64, 9.0) == RooflineCost().on(given).verify_s(8, 64, 9.0)


def test_kv_memory_is_what_weights_leave() -> None:
    """H100, Qwen3-8B: 80 GiB x 0.9 less 16.4 GB of weights on one GPU, 8.2 GB on each of two."""
    m, draft = MODELS["qwen3-8b"], LayersDraft(layers=4)
    cost = RooflineCost(draft=draft)
    per_layer = m.attention_params + m.mlp_params
    weights = 2 * (m.layers * per_layer + 2 * m.head_params)
    assert weights == pytest.approx(16.4e9, rel=0.01)
    kv = m.layers * 2 * 8 * 128 * 2
    memory = 0.9 * 80 * 2**30
    assert cost.memory(drafter_loaded=False).kv_tokens(0.9) == int((memory - weights) / kv)
    two = cost.on(Parallel(tp=2))
    assert two.memory(drafter_loaded=False).kv_tokens(0.9) == int((memory - weights / 2) / (kv / 2))
    assert two.memory(drafter_loaded=True).kv_tokens(0.9) == int(
        (memory - (weights + 2 * 4 * per_layer) / 2) / (kv / m.layers * (m.layers + 4) / 2)
    )
    ranks = cost.on(Parallel(tp=2, dp=2))  # attention, embedding and KV whole on each, the rest divided
    whole = 2 * (m.layers * m.attention_params + m.head_params)
    assert ranks.memory(drafter_loaded=False).kv_tokens(0.9) == int((memory - whole - (weights - whole) / 2) / kv)


def test_memory_fraction_sizes_the_memory_of_a_run() -> None:
    of = backend(cost=MOE, parallel={"tp": 2}, memory_fraction=0.5)
    memory = RooflineCost.model_validate(MOE).on(Parallel(tp=2)).memory
    blocks = {loaded: memory(drafter_loaded=loaded).kv_tokens(0.5) // 16 for loaded in (False, True)}
    assert blocks[False] > blocks[True] > 0
    for policy, loaded in ((OFF, False), (Fixed(verify_len=8), True)):
        seen: list[int] = []

        class Spy(Fcfs):
            def admit(self, queue: Any, running: Any, kv_free: int, caps: EngineCaps, seen: list[int] = seen) -> IntArray:
                seen.append(kv_free)
                return super().admit(queue, running, kv_free, caps)

        model = scenario(backend=of).backend.model_copy(update={"scheduler": Spy()})
        records = model.run(scenario().workload, policy, 0)
        assert seen[0] == blocks[loaded]
        beside = "weights and drafter" if loaded else "the weights"
        assert f"KV memory holds {16 * blocks[loaded]:,} tokens beside {beside} (memory_fraction)" in records.notes
    with pytest.raises(InputError, match=r"less than or equal to 1"):
        scenario(backend=of | {"memory_fraction": 2.0})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"parallel": {"tp": 3}}, "parallel: 3 GPUs a rank do not divide the model's 32 attention heads"),
        ({"parallel": {"tp": 3}}, "parallel: 3 GPUs a rank neither divide nor copy the model's 8 KV heads"),
        (
            {"parallel": {"tp": 7, "dp": 7}, "max_running_requests": 7},
            "parallel: 7 GPUs do not divide the model's MLP width of 12288",
        ),
        ({"parallel": {"tp": 3, "dp": 3}}, "max_running_requests: 8 cannot be divided among 3 attention ranks"),
        ({"parallel": {"tp": 4, "dp": 3}}, "dp: 3 attention ranks cannot divide 4 GPUs (tp) among themselves"),
        ({"parallel": {"tp": 2, "assume": {"verify": 0.6}}}, "parallel.assume has no effect on a roofline"),
        (
            {"cost": ROOFLINE | {"model": "qwen3-235b-a22b"}, "parallel": {"tp": 4}},
            "parallel: tp 4, dp 1 leaves 109 GiB of weights on every GPU, which has 80 GiB",
        ),
        (
            {"cost": ROOFLINE | {"model": "qwen3-30b-a3b"}, "memory_fraction": 0.5},
            "memory_fraction: 0.5 of 80 GiB does not hold the",
        ),
        (
            {"cost": ROOFLINE | {"hardware": {"tflops": 1.0, "tb_per_s": 1.0}}, "parallel": {"tp": 2}},
            "parallel.link_gb_s: unknown for this hardware",
        ),
        ({"kv": {"blocks": 100}, "memory_fraction": 0.9}, "memory_fraction has no effect: kv.blocks is given"),
        (
            {"cost": {"kind": "table", "verify": "dcut_h20_verify.csv"}, "memory_fraction": 0.9},
            "memory_fraction needs a cost of kind roofline",
        ),
        (
            {"cost": {"kind": "table", "verify": "dcut_h20_verify.csv"}, "parallel": {"tp": 2}},
            "cost.measured_on: say under which tp and dp the times were measured",
        ),
        (
            {"cost": {"kind": "formula", "base_ms": 1.0, "measured_on": {"tp": 4}}, "parallel": {"tp": 8}},
            "parallel: the cost was measured under tp 4, dp 1, not tp 8, dp 1; measure there or give factors",
        ),
        (
            {"cost": {"kind": "formula", "measured_on": {"tp": 4, "dp": 2}}},
            "parallel: the cost was measured on attention ranks; say so here (tp 4, dp 2)",
        ),
        (
            {"cost": {"kind": "formula", "measured_on": {"tp": 4}}, "parallel": {"tp": 4, "link_gb_s": 50.0}},
            "parallel.link_gb_s has no effect: measured times hold their communication",
        ),
        (
            {"believed": {"kind": "formula"}, "parallel": {"tp": 4}},
            "believed: cost.measured_on: say under which tp and dp the times were measured",
        ),
        (
            {
                "cost": {"kind": "formula", "measured_on": {"tp": 4, "dp": 4}},
                "parallel": {"tp": 4, "dp": 4, "assume": {}},
            },
            "parallel.assume has no effect: the cost was measured under tp 4, dp 4",
        ),
    ],
)
def test_what_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        scenario(backend=backend(**fields))
    assert message in "\n".join(error.value.problems)


def test_measured_times_elsewhere_only_by_assumed_factors() -> None:
    table = TableCost(verify="dcut_h20_verify.csv", measured_on=Split(tp=1))
    assert cost_on(table, Parallel()) is table
    moved = cost_on(table, Parallel(tp=2, assume=Assumed(verify=0.6, prefill=0.5)))
    assert moved.verify_s(8, 64, 1.0) == pytest.approx(0.6 * table.verify_s(8, 64, 1.0))
    assert moved.notes[-1] == (
        "assumed: times under tp 2, dp 1 are those measured under tp 1, dp 1, times verify 0.6, draft 1, prefill 0.5"
    )


def test_the_report_says_what_is_assumed() -> None:
    notes = simulate(OFF, backend=backend(cost=FREE_COST, parallel={"tp": 4, "dp": 2})).notes
    assert any("nothing overlaps" in note for note in notes)
    assert any("draft times are linear: taken as they are" in note for note in notes)


# data-parallel attention


class World:
    """Requests on ranks, priced together."""

    def __init__(self, prompts: Sequence[int], dp: int, model: str = "qwen3-30b-a3b", **links: Any) -> None:
        requests = [Request(i, 0, prompt, 100) for i, prompt in enumerate(prompts)]
        lives = Lives(requests, np.zeros(len(requests), dtype=np.int64))
        self.caps = EngineCaps(max_draft_len=7, max_running_requests=len(requests))
        one = [
            Admission(requests, lives.base, Fcfs(), KvMemory(), self.caps, lives=lives, prefilled=lambda _: None)
            for _ in range(dp)
        ]
        self.ranks = Ranks(one, "round_robin")
        for i in range(len(requests)):
            self.ranks.join(i)
        self.ranks.admit(0.0)
        self.cost = RooflineCost(model=model, draft=LayersDraft(layers=2)).on(Parallel(tp=dp, dp=dp, **links))
        self.lock_step = LockStep(self.cost, self.ranks, ragged=True)

    def verify_s(self, verify_lens: IntArray) -> float:
        """Seconds of verifying ``verify_lens`` [n] by request."""
        ids = self.ranks.batch.decoding
        lens = verify_lens[ids]
        view = BatchView(0, 0.0, self.caps, ids, self.ranks.lives.context[ids], 0)
        step = self.lock_step.round(view, np.zeros_like(lens), lens).step(
            len(ids), 0, int(lens.sum()), float(view.context_lens.mean())
        )
        return step.total


def attention_s(cost: RooflineCost, tokens: int, kv_tokens: float) -> float:
    """One rank's attention over ``tokens``, by hand."""
    m, h = MODELS["qwen3-30b-a3b"], HARDWARE["h100"]
    bandwidth, flops = h.bytes_per_s * cost.memory_efficiency, h.flop_per_s * cost.compute_efficiency
    weights = m.layers * m.attention_params
    linear = max(2 * weights / bandwidth, 2 * weights * tokens / flops)
    return linear + max(m.layers * m.kv_bytes_per_layer * kv_tokens / bandwidth, 0.0)


def shared_s(cost: RooflineCost, tokens: int, gpus: int) -> float:
    """MLPs and LM head of ``tokens`` of all ranks, by hand."""
    m, h = MODELS["qwen3-30b-a3b"], HARDWARE["h100"]
    touched = 128 * (1 - (1 - 8 / 128) ** tokens)
    weights = m.layers * touched * m.mlp_params + m.head_params
    work = 2 * tokens * (m.layers * 8 * m.mlp_params + m.head_params)
    bandwidth, flops = h.bytes_per_s * cost.memory_efficiency, h.flop_per_s * cost.compute_efficiency
    return max(2 * weights / gpus / bandwidth, work / gpus / flops)


def test_equal_ranks_take_what_the_formula_says() -> None:
    world = World([1000] * 8, dp=4, **FREE_LINKS)
    expected = attention_s(world.cost, 6, 2 * 1000) + shared_s(world.cost, 24, 4) + 0.0005
    assert world.verify_s(np.full(8, 3)) == pytest.approx(expected, rel=1e-6)


def test_exchange_between_attention_and_experts() -> None:
    """An all-gather and a reduce-scatter a layer move (G - 1) / G of all ranks' tokens; the logits are gathered."""
    m, tokens, part = MODELS["qwen3-30b-a3b"], 24, 3 / 4
    free = World([1000] * 8, dp=4, **FREE_LINKS)
    real = World([1000] * 8, dp=4, collective_us=7.0, link_gb_s=200.0)
    layers = 2 * m.layers * (7e-6 + part * tokens * m.hidden * 2 / 200e9)
    logits = 7e-6 + part * tokens * m.vocabulary * 2 / 200e9
    more = real.verify_s(np.full(8, 3)) - free.verify_s(np.full(8, 3))
    assert more == pytest.approx(layers + logits, rel=1e-4)


def test_lock_step_waits_for_the_slowest() -> None:
    """One long context costs as much as a long context on every rank; so do many tokens, but for the MLPs."""
    one_long = World([64, 20_000, 64, 64], dp=4, **FREE_LINKS)
    all_long = World([20_000] * 4, dp=4, **FREE_LINKS)
    ones = np.full(4, 1)
    assert one_long.verify_s(ones) == pytest.approx(all_long.verify_s(ones), rel=1e-9)
    world, uneven = World([64] * 4, dp=4, **FREE_LINKS), np.array([1, 8, 1, 1])
    expected = attention_s(world.cost, 8, 64) + shared_s(world.cost, 11, 4) + 0.0005
    assert world.verify_s(uneven) == pytest.approx(expected, rel=1e-6)
    assert world.verify_s(uneven) <= world.verify_s(np.full(4, 8))


def test_idle_ranks_wait() -> None:
    """One request on four ranks: its rank reads all attention weights, the experts it touches are spread."""
    world = World([500], dp=4, **FREE_LINKS)
    expected = attention_s(world.cost, 1, 500) + shared_s(world.cost, 1, 4) + 0.0005
    assert world.verify_s(np.array([1])) == pytest.approx(expected, rel=1e-6)


def test_a_prompt_on_one_rank_stops_the_others() -> None:
    """2,000 tokens on one of two ranks: its attention alone, MLPs on both GPUs; nobody decodes meanwhile."""
    m, h, tokens = MODELS["qwen3-30b-a3b"], HARDWARE["h100"], 2000
    parallel: dict[str, Any] = {"tp": 2, "dp": 2, **FREE_LINKS}
    load = closed(concurrency=1, requests=1, prompt_len={"kind": "fixed", "tokens": tokens})
    records = simulate(OFF, workload=load, backend=backend(cost=MOE, parallel=parallel))
    flops = h.flop_per_s * RooflineCost().compute_efficiency
    attention = 2 * m.layers * m.attention_params * tokens + 4 * tokens * tokens / 2 * m.layers * m.heads * m.head_dim
    work = 2 * (m.layers * 8 * m.mlp_params * tokens + m.head_params) / 2
    read = 2 * (m.layers * 128 * m.mlp_params + m.head_params) / 2 / (h.bytes_per_s * RooflineCost().memory_efficiency)
    expected = attention / flops + max(work / flops, read) + 0.0005
    assert records.steps["prefill_s"][0] == pytest.approx(expected, rel=1e-6)
    assert records.steps["decoding"][0] == 0


def test_policies_believe_in_balanced_ranks() -> None:
    world = World([300] * 8, dp=4)
    believed = BalancedRanks(world.cost, 4)
    assert believed.round_s(8, 0, 24, 300.0) == pytest.approx(world.verify_s(np.full(8, 3)), rel=1e-12)
    five, eight = (believed.round_s(n, 8 * n, 4 * n, 300.0) for n in (5, 8))
    assert five <= eight  # two requests on the fullest rank in both


@pytest.mark.parametrize("drafter", [LayersDraft(layers=2), LayersDraft(autoregressive=True, top_k=2, layers=1)])
def test_padding_is_what_balanced_ranks_cost_more(drafter: LayersDraft) -> None:
    """Without padding rows there is nothing to take off; with them, no part becomes negative."""
    cost = RooflineCost(model="qwen3-30b-a3b", draft=drafter).on(Parallel(tp=4, dp=4))
    rank = Load(requests=3, positions=24, verified=12)
    assert cost.padding(rank, Load(12, 96, 48), 7) == (0.0, 0.0, 0.0, 0.0)
    step = cost.step(3, 24, 12, 100.0, longest_draft=7)
    off = cost.padding(rank, Load(3, 24, 12), 7)
    assert all(-s < p <= 0 for s, p in zip((step.draft, step.verify), (off.draft, off.verify), strict=True))
    assert off.draft < 0
    assert off.verify < 0


def test_policies_believe_in_the_gpus_of_the_engine() -> None:
    """What they believe is divided like the truth."""
    fields: dict[str, Any] = {"cost": MOE, "parallel": {"tp": 4, "dp": 4}}
    true, believed = (scenario(backend=backend(**fields | more)).backend.caps().cost for more in ({}, {"believed": MOE}))
    assert true is not None
    assert believed is not None
    assert believed.round_s(8, 128, 64, 300.0) == true.round_s(8, 128, 64, 300.0)


def test_padding_begins_at_the_graph_that_was_paid() -> None:
    """Three tokens on each rank and a graph of eight: attention pays for eight a rank, experts for what there is."""
    world = World([1000] * 4, dp=4, **FREE_LINKS)
    world.lock_step.cost = world.cost.model_copy(update={"captured_tokens": [8]})
    expected = attention_s(world.cost, 8, 1000) + shared_s(world.cost, 12, 4) + 0.0005
    assert world.verify_s(np.full(4, 3)) == pytest.approx(expected, rel=1e-6)


def test_evicted_requests_return_to_their_rank() -> None:
    world = World([64] * 4, dp=2)
    world.ranks.join(2, first=True)
    world.ranks.join(1, first=True)
    assert world.ranks.rank.tolist() == [0, 1, 0, 1]
    assert [list(rank.queue) for rank in world.ranks.ranks] == [[2], [1]]


def test_batches_of_a_rank_are_checked() -> None:
    """A table up to 8 requests a rank serves 16 on two."""
    points = [{"batch": b, "tokens_per_request": t, "ms": 1.0 + b + t} for b in (1, 8) for t in (1, 16)]
    cost = {"kind": "table", "points": points, "measured_on": {"tp": 2, "dp": 2}}
    fields: dict[str, Any] = {"backend": ranked(cost=cost, max_running_requests=64)}
    simulate(OFF, workload=closed(concurrency=16), **fields)
    too_many = scenario(workload=closed(concurrency=18), **fields)
    with pytest.raises(InputError, match="batch 9"):
        too_many.backend.check_workload(too_many.workload, 0)


def ranked(**fields: Any) -> dict[str, Any]:
    return backend(**({"cost": MOE, "parallel": {"tp": 2, "dp": 2}} | fields))


def test_one_decision_for_all_ranks() -> None:
    seen: list[tuple[int, ...]] = []

    class Spy(Fixed):
        def draft_lens(self, batch: BatchView) -> IntArray:
            seen.append(tuple(batch.request_ids.tolist()))
            return super().draft_lens(batch)

    simulate(Spy(verify_len=4), backend=ranked())
    assert (0, 2, 1, 3) in seen  # round robin: even ones on the first rank, odd ones on the second


def test_routing() -> None:
    """Each in turn, or to whoever has the fewest."""
    world = World([64] * 6, dp=3)
    assert world.ranks.rank.tolist() == [0, 1, 2, 0, 1, 2]
    world.ranks.routing = "least_requests"
    world.ranks.ranks[1].batch.keep(np.array([], dtype=np.int64))
    world.ranks.join(0)
    world.ranks.join(3)
    assert world.ranks.rank[[0, 3]].tolist() == [1, 1]


def test_balanced_routing_serves_faster() -> None:
    load = closed(concurrency=16, requests=160, output_len=LENGTHS | {"maximum": 600, "cv": 1.5})
    ends = {
        routing: simulate(
            OFF, workload=load, backend=ranked(parallel={"tp": 4, "dp": 4, "routing": routing}, max_running_requests=64)
        ).steps["end_s"].iloc[-1]
        for routing in ("round_robin", "least_requests")
    }  # fmt: skip
    assert ends["least_requests"] < ends["round_robin"]


def test_no_rank_holds_more_than_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    most: dict[int, int] = {}
    take = Admission.reserve

    def watched(self: Admission, ids: IntArray, draft_lens: IntArray) -> Any:
        kept = take(self, ids, draft_lens)
        most[id(self)] = max(most.get(id(self), 0), self.pool.used)
        return kept

    monkeypatch.setattr(Admission, "reserve", watched)
    load = closed(prompt_len=LENGTHS, output_len=LENGTHS, concurrency=8)
    records = simulate(Fixed(verify_len=16), workload=load, backend=ranked(kv={"blocks": 30}))
    assert len(most) == 2
    assert 20 < max(most.values()) <= 30
    assert records.requests["evictions"].sum() > 0
    assert (records.requests["status"] == "finished").all()


def test_running_requests_are_divided_among_ranks() -> None:
    records = simulate(OFF, workload=closed(concurrency=8), backend=ranked(max_running_requests=4))
    assert records.steps["decoding"].max() == 4


def test_measured_ranks_are_priced_as_their_slowest() -> None:
    """A table over one of two balanced ranks: 3 requests on two ranks cost what 2 + 2 would."""
    cost = {
        "kind": "formula",
        "base_ms": 1.0,
        "per_request_ms": 0.5,
        "per_token_ms": 0.25,
        "measured_on": {"tp": 2, "dp": 2},
    }
    records = simulate(OFF, workload=closed(concurrency=3, requests=3), backend=ranked(cost=cost))
    rounds = records.steps[records.steps["decoding"] == 3]
    assert rounds["verify_s"].to_numpy() == pytest.approx(1e-3 * (1.0 + 2 * 0.5 + 2 * 0.25))


@pytest.mark.parametrize("policy", [Head(), DCut()], ids=lambda p: p.kind)
def test_same_seed_same_bytes(policy: Any) -> None:
    fields: dict[str, Any] = {
        "workload": closed(prompt_len=LENGTHS, output_len=LENGTHS),
        "backend": ranked(kv={"blocks": 60}, parallel={"tp": 8, "dp": 4}, scheduler={"kind": "ema"}),
    }
    assert tables(simulate(policy, **fields)) == tables(simulate(policy, **fields))
    assert tables(simulate(policy, **fields)) != tables(simulate(policy, seed=1, **fields))


def test_text_does_not_depend_on_parallelism() -> None:
    """Luck belongs to the text: the same requests take the same rounds, wherever they run."""
    one = simulate(Fixed(verify_len=8), backend=backend(cost=MOE))
    many = simulate(Fixed(verify_len=8), backend=ranked(parallel={"tp": 16, "dp": 4}))
    assert one.requests["rounds"].tolist() == many.requests["rounds"].tolist()


def test_torch_engine_refuses_parallelism() -> None:
    fields = {"parallel": {"tp": 2}, "disaggregation": {}, "memory_fraction": 0.8}
    with pytest.raises(InputError) as error:
        scenario(backend={"kind": "torch"} | fields)
    assert {p.split(": ")[0] for p in error.value.problems} >= {f"backend.{name}" for name in fields}
    assert set(fields) <= set(SimBackend.model_fields)
