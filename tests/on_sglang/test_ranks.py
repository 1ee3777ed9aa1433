"""Three tensor-parallel ranks decide and answer as one does."""

import json
from typing import Any

import pytest

from adasim.policies.base import Policy
from adasim.policies.fixed import Fixed
from adasim.policies.head import Head
from adasim.policies.off import Off
from adasim.real.sglang_plugin import cpu
from tests.on_sglang.conftest import TOKENS
from tests.on_sglang.serving import Served, Server, given, run

RANKS = 3  # divides SmolLM2's 9 heads and 3 KV heads
POLICIES: list[Policy] = [Off(), Fixed(verify_len=8), Head()]


@pytest.fixture(scope="module")
def on_ranks(prompts: list[list[int]]) -> dict[str, Any]:
    arguments = (json.dumps(v) for v in (RANKS, prompts, TOKENS, [given(p) for p in POLICIES]))
    return dict(run("ranks.py", *arguments, timeout_s=900, environment=cpu.environment(RANKS)))


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.kind)
def test_tokens_and_rounds_are_those_of_one_rank(
    policy: Policy, on_ranks: dict[str, Any], server: Server, prompts: list[list[int]], plain: Served
) -> None:
    """Drafts over a head of which each rank holds a third; lengths of rank 0."""
    alone, found = server.serve(policy, prompts, TOKENS), on_ranks[policy.kind]
    assert found["tokens"] == alone.tokens == plain.tokens
    assert found["rounds"] == [[list(r) for r in alone.of(i)] for i in range(len(prompts))]
