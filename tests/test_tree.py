"""Draft trees: EAGLE's steps, top-k and tokens as cost and acceptance."""

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from adasim import metrics
from adasim.calibration.roofline import LayersDraft, RooflineCost
from adasim.calibration.survival import Tree
from adasim.calibration.tree import choice_chances, fit_tree, solve_alpha, tree_survival, tree_tau
from adasim.errors import InputError
from adasim.policies.fixed import Fixed
from tests.build import backend, closed, config, plan, simulate

# AngelSlim issue 163, one model and drafter: (steps, top_k, tokens, accept length)
SMALL, LARGE = (3, 3, 4, 2.017), (4, 4, 16, 2.578)
OTHERS = [(3, 2, 8, 2.216), (7, 10, 64, 3.034)]


def test_a_tree_without_branches_is_a_chain() -> None:
    chain = tree_survival(0.8, 0.5, steps=5, top_k=1, tokens=6)
    assert chain == pytest.approx(0.8 ** np.arange(1, 6))


def test_hand_worked_tree() -> None:
    """Two steps, two branches: second choices have (1 - a) w; the best three of six nodes are kept."""
    a, second = choice_chances(0.5, 0.37, 2)
    assert a + second < 1
    survival = tree_survival(0.5, 0.37, steps=2, top_k=2, tokens=4)
    # nodes: a, second | a a, a second, second a, second second; kept are a = .5, a a = .25 and second = .17
    assert survival == pytest.approx([a + second, a * a])
    assert tree_tau(0.5, 0.37, 2, 2, 7) == pytest.approx(1 + (a + second) + (a + second) ** 2)


def test_chances_are_a_distribution() -> None:
    assert choice_chances(0.6, 0.5, 100_000).sum() == pytest.approx(1.0, abs=2e-3)


def test_more_of_anything_accepts_more() -> None:
    base = tree_tau(0.6, 0.4, 4, 4, 16)
    assert base < tree_tau(0.6, 0.4, 5, 4, 16)
    assert base < tree_tau(0.6, 0.4, 4, 8, 16) + 1e-12
    assert base < tree_tau(0.6, 0.4, 4, 4, 32)
    assert np.all(np.diff(tree_survival(0.6, 0.4, 6, 10, 32)) < 0)


def test_two_trees_predict_the_others() -> None:
    """Fitted on 4 and 16 tokens, the trees of 8 and 64 tokens are met within 4.5 %."""
    alpha, tail = fit_tree([SMALL, LARGE])
    for *shape, tau in (SMALL, LARGE):
        assert tree_tau(alpha, tail, *shape) == pytest.approx(tau, rel=1e-4)
    for *shape, tau in OTHERS:
        assert tree_tau(alpha, tail, *shape) == pytest.approx(tau, rel=0.045)
    with pytest.raises(InputError, match="no tail explains"):
        fit_tree([SMALL, (4, 4, 16, 1.9)])
    for rows in ([SMALL], [SMALL, SMALL]):
        with pytest.raises(InputError, match="needs two different trees"):
            fit_tree(rows)


def test_small_trees_are_overrated() -> None:
    """The known limit: SpecForge measures 2.87 for 6 tokens of 5 x 3 where its chain of 6 gives 3.21."""
    alpha = solve_alpha(3.21, 0.37, 5, 1, 6)
    assert tree_tau(alpha, 0.37, 5, 3, 6) >= 3.21


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "give alpha or tau"),
        ({"alpha": 0.5, "tau": 3.0}, "give alpha or tau"),
        ({"tau": 8.0}, r"tau 8 cannot be met by this tree; allowed"),
    ],
)
def test_impossible_trees_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Tree(steps=6, top_k=10, tokens=32, **fields)


def test_a_tree_in_the_simulator() -> None:
    """32 tokens are verified, 7 at most come out, and tau is the published one."""
    tree = {"kind": "tree", "steps": 6, "top_k": 10, "tokens": 32, "tau": 4.4}
    drafter = {"max_draft_len": 31, "acceptance": {"kind": "curves", "curves": {"default": tree}}}
    records = simulate(
        Fixed(verify_len=32, drafter="eagle3"),
        workload=closed(requests=24, output_len={"kind": "fixed", "tokens": 512}),
        backend=backend(drafters={"eagle3": drafter}),
    )
    assert metrics.verify_len(records) == 32
    assert records.blocks["accepted"].max() == 6
    assert metrics.tau(records) == pytest.approx(4.4, rel=0.02)


def test_a_tree_needs_room_and_a_known_drafter() -> None:
    tree = {"kind": "curves", "curves": {"default": {"kind": "tree", "steps": 3, "top_k": 2, "tokens": 32, "alpha": 0.6}}}
    with pytest.raises(InputError, match="a tree of 32 tokens needs max_draft_len 31, not 15"):
        plan(backend=backend(drafters={"eagle3": {"acceptance": tree}}))
    with pytest.raises(InputError, match="drafter eagle3; the engine has mtp"):
        plan(
            backend=backend(drafters={"mtp": {"max_draft_len": 3}}),
            policies=[{"kind": "fixed", "verify_len": 4, "drafter": "eagle3"}],
        )
    with pytest.raises(InputError, match="drafter eagle3; the engine has only its own"):
        plan(policies=[{"kind": "fixed", "verify_len": 4, "drafter": "eagle3"}])
    with pytest.raises(InputError, match="give at least one of"):
        plan(**config(backend=backend(drafters={"mtp": {}})))


def test_tree_drafts_pay_per_pass() -> None:
    """Six passes over ten leaves of each request, each of one layer and a small LM head."""
    fields: dict[str, Any] = {"layers": 1, "autoregressive": True, "vocabulary": 32000}
    tree = RooflineCost(draft=LayersDraft(passes=6, top_k=10, **fields))
    chain = RooflineCost(draft=LayersDraft(**fields))
    assert tree.draft_s(1, 32, 31, 0) == pytest.approx(chain.draft_s(1, 7, 6, 0))  # both bound by memory
    assert tree.draft_s(128, 4096, 31, 0) > 2 * chain.draft_s(128, 896, 6, 0)
    with pytest.raises(ValidationError, match="no effect unless autoregressive"):
        LayersDraft(passes=6)
