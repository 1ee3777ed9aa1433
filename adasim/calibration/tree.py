"""What a draft tree accepts: EAGLE's steps, top-k and tokens as a survival curve over depth.

The drafter's r-th choice at a node is the target's token with probability alpha for r = 1 and (1 - alpha) times a
power law in r beyond: w_r = r^-(1 + tail) / sum over r >= 2. Nodes are independent. The tree grows as EAGLE-2's:
every step expands the ``top_k`` most probable leaves into ``top_k`` children each; in the end the most probable
``tokens - 1`` nodes are kept. Paths exclude each other, so P(a path of length d is accepted) is the sum over the
nodes of depth d.

Fitted on two rows of AngelSlim #163 (4 and 16 tokens, one model) it gives the accept lengths of the other two trees
(8 and 64 tokens) within 4.3 %. It believes in the drafter's probabilities: trees that are no larger than their chain
(SpecForge's 6 tokens of 5 x 3) measure less than the chain, where this gives at least as much.
"""

from collections.abc import Sequence

import numpy as np

from adasim.errors import InputError
from adasim.types import FloatArray


def choice_chances(alpha: float, tail: float, top_k: int) -> FloatArray:
    """P(the drafter's r-th choice is the target's token), r = 1..top_k, [top_k]."""
    from scipy.special import zeta  # slow to import, not always needed

    ranks = np.arange(2, top_k + 1, dtype=np.float64)
    return np.concatenate([[alpha], (1 - alpha) * ranks ** -(1 + tail) / (zeta(1 + tail) - 1)])


def tree_survival(alpha: float, tail: float, steps: int, top_k: int, tokens: int) -> FloatArray:
    """P(a path of d nodes is accepted), d = 1..steps, [steps].

    Args:
        alpha: chance of the first choice.
        tail: how fast the chances of further choices fall, > 0.
        steps: draft passes, the depth of the tree.
        top_k: leaves expanded per step, and children of each.
        tokens: nodes verified, the root counted.
    """
    chances = choice_chances(alpha, tail, top_k)
    leaves, nodes = np.ones(1), []
    for _ in range(steps):
        children = np.sort(np.outer(leaves, chances).ravel())[::-1]
        nodes.append(children)
        leaves = children[:top_k]
    depth = np.repeat(np.arange(steps), [len(n) for n in nodes])
    chance = np.concatenate(nodes)
    kept = np.argsort(-chance, kind="stable")[: tokens - 1]
    return np.bincount(depth[kept], weights=chance[kept], minlength=steps).astype(np.float64)


def tree_tau(alpha: float, tail: float, steps: int, top_k: int, tokens: int) -> float:
    """Tokens per round, the bonus token counted."""
    return float(1 + tree_survival(alpha, tail, steps, top_k, tokens).sum())


def solve_alpha(tau: float, tail: float, steps: int, top_k: int, tokens: int) -> float:
    """The chance of the first choice with which a tree gives ``tau``; no lower than the second choice's.

    Raises:
        InputError: no chance does.
    """
    from scipy.optimize import brentq  # slow to import, not always needed

    second = float(choice_chances(0.0, tail, 2)[1])
    least, most = second / (1 + second), 0.9999
    low, high = (tree_tau(a, tail, steps, top_k, tokens) for a in (least, most))
    if not low < tau < high:
        raise InputError(f"acceptance: tau {tau:g} cannot be met by this tree; allowed {low:.2f}..{high:.2f}")
    return float(brentq(lambda a: tree_tau(a, tail, steps, top_k, tokens) - tau, least, most))


def fit_tree(rows: Sequence[tuple[int, int, int, float]]) -> tuple[float, float]:
    """alpha and tail from two trees of one drafter: (steps, top_k, tokens, tau).

    Raises:
        InputError: not two trees, or two that no pair of numbers explains.
    """
    from scipy.optimize import brentq  # slow to import, not always needed

    if len(rows) != 2 or rows[0][:3] == rows[1][:3]:
        raise InputError("tree: needs two different trees with their tau")
    (*first, tau_a), (*second, tau_b) = rows

    def miss(tail: float) -> float:
        try:
            alpha = solve_alpha(tau_a, tail, first[0], first[1], first[2])
        except InputError:
            return np.nan
        return tree_tau(alpha, tail, second[0], second[1], second[2]) - tau_b

    tails = np.geomspace(0.02, 6, 25)
    misses = np.array([miss(t) for t in tails])
    turns = np.flatnonzero(misses[:-1] * misses[1:] <= 0)  # false where either is NaN
    if not len(turns):
        raise InputError("tree: no tail explains both trees; is one of them part of the other?")
    tail = float(brentq(miss, tails[turns[0]], tails[turns[0] + 1], xtol=1e-6))
    return solve_alpha(tau_a, tail, first[0], first[1], first[2]), tail
