"""ADAFLASH on the real SGLang: lossless under every policy, and the same decisions as elsewhere."""

import re
from collections import Counter

import numpy as np
import pytest

from adasim.policies.base import Policy
from adasim.policies.dcut import DCut
from adasim.policies.driver import PolicyDriver
from adasim.policies.fixed import Fixed
from adasim.policies.head import Head
from adasim.policies.off import Off
from adasim.policies.smartspec import SmartSpec
from adasim.policies.threshold import Threshold
from adasim.policies.vllm_adaptive import VllmAdaptive
from adasim.types import BatchView, DraftView, EngineCaps
from tests.on_sglang.conftest import TOKENS
from tests.on_sglang.serving import RUNNING, Served, Server, torch_rounds

POLICIES = [
    Fixed(verify_len=16),
    Fixed(verify_len=4),
    Fixed(verify_len=4, draft_len=15),
    Head(),
    Head(gamma=1.3, rounding="floor"),
    Threshold(threshold=0.3),
    DCut(keep_ratio=0.5),
]
PER_REQUEST = [p for p in POLICIES if p.kind != "dcut"]  # whose lengths do not depend on who else runs


@pytest.fixture(scope="module")
def served(server: Server, prompts: list[list[int]]) -> dict[str, Served]:
    return {p.label: server.serve(p, prompts, TOKENS) for p in POLICIES}


@pytest.fixture(scope="module")
def elsewhere(prompts: list[list[int]]) -> dict[str, list[tuple[list[int], list[tuple[int, int, int]]]]]:
    """The torch engine's answers to the same prompts."""
    return {p.label: [torch_rounds(p, prompt, TOKENS) for prompt in prompts] for p in PER_REQUEST}


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.label)
def test_tokens_are_those_of_plain_decoding(policy: Policy, served: dict[str, Served], plain: Served) -> None:
    assert served[policy.label].tokens == plain.tokens


def test_a_plain_round_drafts_nothing(plain: Served) -> None:
    assert {(k, v) for r in plain.rounds for k, v in zip(r.draft_lens, r.verify_lens, strict=True)} == {(0, 1)}


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.label)
def test_cap_lengths_are_what_the_policy_said(policy: Policy, served: dict[str, Served]) -> None:
    run = served[policy.label]
    for i, meta in enumerate(run.meta):
        rounds = run.of(i)[: meta["spec_verify_ct"]]
        counts = Counter(v for _, v, _ in rounds)
        reported = {length: n for length, n in enumerate(meta["spec_cap_lens_histogram"]) if n}
        assert reported == counts
        assert sum(a for *_, a in rounds) == meta["spec_num_correct_drafts"]


def test_lengths_of_one_round_differ(served: dict[str, Served]) -> None:
    """The head's rounds are ragged, in drafting as full blocks and in verification as it says."""
    assert any(len(set(r.verify_lens)) > 1 for r in served[Head().label].rounds)


def test_prompts_that_plain_decoding_left_in_the_prefix_cache_are_drafted_for_as_well(
    server: Server, prompts: list[list[int]], elsewhere: dict[str, list[tuple[list[int], list[tuple[int, int, int]]]]]
) -> None:
    policy = POLICIES[0]
    server.serve(Off(), prompts, TOKENS)
    run = server.serve(policy, prompts, TOKENS)
    for i, (_, rounds) in enumerate(elsewhere[policy.label]):
        assert run.of(i)[: len(rounds)] == rounds


@pytest.mark.parametrize("policy", PER_REQUEST, ids=lambda p: p.label)
def test_rounds_are_those_of_the_torch_engine(
    policy: Policy,
    served: dict[str, Served],
    elsewhere: dict[str, list[tuple[list[int], list[tuple[int, int, int]]]]],
) -> None:
    """Token for token, draft length, verify length and acceptance of every round: so acceptance is the same."""
    run = served[policy.label]
    for i, (tokens, rounds) in enumerate(elsewhere[policy.label]):
        assert run.tokens[i] == tokens
        assert run.of(i)[: len(rounds)] == rounds


@pytest.mark.parametrize("policy", [Head(), Head(gamma=1.3, rounding="floor")], ids=lambda p: p.label)
def test_the_driver_decides_the_same_under_the_simulators_limits(policy: Policy, served: dict[str, Served]) -> None:
    """SGLang's rounds, put before the driver with the simulator's limits."""
    caps = EngineCaps(15, RUNNING, provides=frozenset({"survival", "accept_len", "truth", "predicted_len"}))
    driver = PolicyDriver(policy, caps)
    rounds = served[policy.label].rounds
    assert rounds
    for r in rounds:
        view = BatchView(r.step, r.start_s, caps, np.array(r.requests), np.array(r.context_lens), r.queued)
        draft = DraftView(driver.draft_lens(view), accept_len=np.array(r.accept_lens))
        assert draft.draft_lens.tolist() == r.draft_lens
        assert driver.verify_lens(view, draft).tolist() == r.verify_lens


@pytest.mark.parametrize("policy", [SmartSpec(), VllmAdaptive()], ids=lambda p: p.label)
def test_policies_that_need_costs_are_refused_without_them(policy: Policy, server: Server) -> None:
    with pytest.raises(AssertionError, match="needs cost"):
        server.use(policy)


def test_log_probabilities_are_those_of_plain_decoding(server: Server, prompts: list[list[int]]) -> None:
    def logprobs(policy: Policy) -> list[float]:
        server.use(policy)
        out = server.engine.generate(
            input_ids=prompts[0], sampling_params={"temperature": 0, "max_new_tokens": 12, "ignore_eos": True},
            return_logprob=True,
        )  # fmt: skip
        return [p for p, *_ in out["meta_info"]["output_token_logprobs"]]

    assert logprobs(Head()) == pytest.approx(logprobs(Fixed(verify_len=1, draft_len=0)), abs=1e-3)


def test_a_grammar_binds_drafts_too(server: Server, prompts: list[list[int]]) -> None:
    allowed = "(red|green|blue)( (red|green|blue)){5}"
    shape = {"regex": allowed, "ignore_eos": False}
    one, other = (server.serve(policy, prompts, TOKENS, **shape).tokens for policy in (Off(), Fixed(verify_len=16)))
    assert one == other
    tokenizer = server.engine.tokenizer_manager.tokenizer
    assert all(re.fullmatch(allowed, tokenizer.decode(tokens, skip_special_tokens=True)) for tokens in one)


def test_draws_follow_the_target_wherever_blocks_are_cut(server: Server) -> None:
    """Many answers to one prompt: all but the first token are drawn in rounds, against the target's distribution."""
    import torch
    from scipy.stats import chisquare

    from adasim.real.kv import Span
    from adasim.real.weights import load_target

    prompt, top, count = [504, 3575, 282], 3, 192
    out = server.serve(Head(), [prompt] * count, 3, temperature=1.0, top_k=top, top_p=1.0)
    target = load_target("smollm2-135m", torch.float32)

    def likeliest(tokens: list[int]) -> tuple[list[int], list[float]]:
        hidden, _ = target.forward(torch.tensor(tokens), [Span(0, 0, len(tokens))], target.cache(1, 8))
        values, ids = target.logits(hidden[-1:])[0].topk(top)
        return ids.tolist(), torch.softmax(values, -1).tolist()

    expected = {
        (a, b, c): count * p * q * r
        for a, p in zip(*likeliest(prompt), strict=True)
        for b, q in zip(*likeliest([*prompt, a]), strict=True)
        for c, r in zip(*likeliest([*prompt, a, b]), strict=True)
    }
    seen = Counter((a, b, c) for a, b, c in out.tokens)
    assert set(seen) <= set(expected)
    common = [pair for pair, n in expected.items() if n >= 5]
    observed = [seen[pair] for pair in common] + [count - sum(seen[pair] for pair in common)]
    wanted = [expected[pair] for pair in common] + [count - sum(expected[pair] for pair in common)]
    if wanted[-1] < 1e-9:
        observed, wanted = observed[:-1], wanted[:-1]
    assert chisquare(observed, wanted).pvalue > 1e-6  # the server's draws depend on what it has served before
