"""Sampling stays lossless: the output follows the target's distribution, whatever is drafted and cut."""

from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

torch = pytest.importorskip("torch")

from adasim.real.sampling import Sampling  # noqa: E402
from adasim.real.verify import accept_greedy, accept_sampled  # noqa: E402

V, LONGEST, DRAWS = 5, 3, 6000
RNG = np.random.default_rng(7)
P = RNG.dirichlet(np.ones(V), size=V)  # target: next token given the last one
Q = RNG.dirichlet(np.ones(V), size=LONGEST)  # drafter: one distribution a position, as in one-pass drafting


def chain(first: int, length: int) -> np.ndarray:
    """P(tokens after ``first``) for every sequence of ``length``, flattened."""
    joint = P[first]
    for _ in range(length - 1):
        joint = (joint[..., None] * P).reshape(*joint.shape, V)
    return np.asarray(joint).ravel()


def speculate(anchor: int, verify_len: int, generator: Any, vocab: Any = None) -> list[int]:
    q = torch.from_numpy(Q[: verify_len - 1])
    if vocab is not None:
        q = q[:, vocab] / q[:, vocab].sum(-1, keepdim=True)
    rows = torch.multinomial(q, 1, generator=generator)[:, 0] if verify_len > 1 else torch.empty(0, dtype=torch.int64)
    drafts = (rows if vocab is None else vocab[rows]).tolist()
    p = torch.from_numpy(P[[anchor, *drafts]])
    (verdict,) = accept_sampled(p, [q], [drafts], generator, vocab)
    return [*drafts[: verdict.accepted], verdict.token]


@pytest.mark.parametrize("vocab", [None, [1, 3, 4]], ids=["full vocabulary", "reduced draft vocabulary"])
@pytest.mark.parametrize("verify_len", [1, 2, 3, 4])
def test_two_tokens_follow_the_target(verify_len: int, vocab: list[int] | None) -> None:
    generator = torch.Generator().manual_seed(verify_len)
    ids = None if vocab is None else torch.tensor(vocab)
    counts = np.zeros(V * V)
    for _ in range(DRAWS):
        tokens = speculate(0, verify_len, generator, ids)
        while len(tokens) < 2:
            tokens += speculate(tokens[-1], verify_len, generator, ids)
        counts[tokens[0] * V + tokens[1]] += 1
    expected = chain(0, 2) * DRAWS
    assert chisquare(counts, expected).pvalue > 1e-3


def test_a_cut_that_reads_the_drawn_token_is_not_lossless() -> None:
    """p(A) = .3, q(A) = .6, verified only when the draft is A: then P(A) = .6 * .5 + .4 * .3 = .42."""
    p, q = torch.tensor([0.3, 0.7]), torch.tensor([0.6, 0.4])
    generator, hits = torch.Generator().manual_seed(0), 0
    for _ in range(DRAWS):
        draft = int(torch.multinomial(q, 1, generator=generator))
        drafts = [draft] if draft == 0 else []
        (verdict,) = accept_sampled(p.expand(2, 2)[: len(drafts) + 1], [q[None][: len(drafts)]], [drafts], generator)
        hits += (drafts[:1] if verdict.accepted else [verdict.token]) == [0]
    assert hits / DRAWS == pytest.approx(0.42, abs=0.02)


def test_greedy_accepts_the_run_that_matches() -> None:
    best = [4, 5, 6, 7, 1, 2, 9]
    assert accept_greedy(best, [[4, 5, 0], [1], []]) == [(2, 6), (1, 2), (0, 9)]


def test_temperature_and_top_p_shape_distributions() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    assert Sampling(temperature=1.0).probabilities(logits)[0].tolist() == pytest.approx([0.5, 0.3, 0.15, 0.05])
    assert Sampling(temperature=1.0, top_p=0.7).probabilities(logits)[0].tolist() == pytest.approx([0.625, 0.375, 0, 0])
    assert Sampling(temperature=1.0, top_p=0.01).probabilities(logits)[0].tolist() == pytest.approx([1, 0, 0, 0])
    sharp = Sampling(temperature=0.5).probabilities(logits)[0]
    assert sharp.tolist() == pytest.approx((np.array([0.25, 0.09, 0.0225, 0.0025]) / 0.365).tolist())
