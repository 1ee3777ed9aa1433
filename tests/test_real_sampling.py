"""At temperature 1 the engine's text follows the target's distribution for every policy, and cheats are seen."""

from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from scipy.stats import chisquare

torch = pytest.importorskip("torch")

import adasim.real.engine as engine_module  # noqa: E402
from adasim.policies.base import Policy  # noqa: E402
from adasim.real.draft import Drafter  # noqa: E402
from adasim.real.drafter import DrafterShape  # noqa: E402
from adasim.real.kv import Span  # noqa: E402
from adasim.real.proposal import Proposal, propose  # noqa: E402
from adasim.real.sampling import Sampling  # noqa: E402
from adasim.real.target import Target  # noqa: E402
from adasim.real.weights import random_target  # noqa: E402
from adasim.types import BatchView, DraftView, IntArray  # noqa: E402
from tests.test_real_engine import ARCH, BLOCK, DRAFT, POLICIES, serve  # noqa: E402

V, REQUESTS, PROMPT, WANT = 5, 4000, [1, 3, 2], 3


@pytest.fixture(scope="module")
def target() -> Target:
    return random_target(replace(ARCH, layers=2, vocab=V), seed=3)


@pytest.fixture(scope="module")
def drafter(target: Target) -> Drafter:
    shape = DrafterShape(replace(DRAFT, layers=1, vocab=V), (0, 1), 2, BLOCK, mask_token=0)
    return Drafter(shape, shape.fresh(0), target, torch.tensor([0, 1, 3, 4]))


@pytest.fixture(scope="module")
def expected(target: Target) -> dict[tuple[int, ...], float]:
    """Exact probability of every output of three tokens."""
    probabilities = {}
    for tokens in product(range(V), repeat=WANT):
        ids = torch.tensor([*PROMPT, *tokens])
        hidden, _ = target.forward(ids, [Span(0, 0, len(ids))], target.cache(1, 16))
        p = torch.softmax(target.logits(hidden).double(), -1)
        steps = [float(p[len(PROMPT) - 1 + i, t]) for i, t in enumerate(tokens)]
        probabilities[tokens] = float(np.prod(steps))
    return probabilities


def misfit(target: Target, drafter: Drafter, policy: Policy, expected: dict[tuple[int, ...], float]) -> float:
    """p-value that the engine's outputs follow the target."""
    run = serve(target, drafter, policy, [PROMPT] * REQUESTS, want=WANT, running=500, sampling=Sampling(temperature=1.0))
    seen = Counter(tuple(t) for t in run.texts)
    likely = [t for t, p in expected.items() if p * REQUESTS >= 5]
    observed = [seen[t] for t in likely] + [REQUESTS - sum(seen[t] for t in likely)]
    model = [expected[t] * REQUESTS for t in likely]
    return float(chisquare(observed, [*model, REQUESTS - sum(model)]).pvalue)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.label)
def test_sampled_text_follows_the_target(
    target: Target, drafter: Drafter, policy: Policy, expected: dict[tuple[int, ...], float]
) -> None:
    assert misfit(target, drafter, policy, expected) > 1e-3


class Anticipating(Policy):
    """Verifies the first draft only when it is token 1, which no DraftView tells it."""

    kind: str = "anticipating"

    def verify_lens(self, batch: BatchView, draft: DraftView) -> IntArray:
        return np.array([1 + (tokens[:1] == [1]) for tokens in leaked], dtype=np.int64)


leaked: list[list[int]] = []


def test_a_policy_that_reads_the_drawn_tokens_is_caught(
    target: Target, drafter: Drafter, expected: dict[tuple[int, ...], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def leaking(*args: object, **kwargs: object) -> Proposal:
        proposal = propose(*args, **kwargs)  # type: ignore[arg-type]
        leaked[:] = proposal.tokens
        return proposal

    monkeypatch.setattr(engine_module, "propose", leaking)
    assert misfit(target, drafter, Anticipating(), expected) < 1e-6
