"""Correlated text: why acceptance is not a coin thrown at every position.

Every output token i has a hardness g_i = sqrt(spread) r + sqrt(correlation) x_i + sqrt(rest) e_i, standard
normal, where r belongs to the request, x_i is a first-order autoregression along the text and e_i is the
token's own. A draft at distance d from its anchor is accepted when g_i <= threshold_d. So

- the same text gives every policy the same luck: L(t) depends on t only;
- a good draft that a cut left unverified is still good, seen from nearer by;
- hard passages take more rounds than easy ones, so cutting blocks short changes what the rounds see: fixed
  shorter blocks accept more than the full block's survival curve says, as measured engines do.

The thresholds are solved so that verifying full blocks reproduces the given survival curve, pooled over the
rounds of that run.
"""

from functools import lru_cache

import numpy as np

from adasim.kernels import kernels
from adasim.kernels.form import Int16Array
from adasim.types import FloatArray, IntArray


def hardness(
    own_draws: FloatArray, shared_draws: FloatArray | None, spread: float, correlation: float, range_tokens: float
) -> FloatArray:
    """Hardness of the first tokens of one request, [length], standard normal.

    Args:
        own_draws: standard normal numbers of its tokens, [length].
        shared_draws: of what tokens share, [length + 2]; None = they share nothing.
        spread: share of the variance that belongs to the request.
        correlation: share that is correlated along the text.
        range_tokens: tokens after which that correlation has fallen to 1/e.
    """
    own = np.sqrt(1 - spread - correlation) * own_draws
    if not spread and not correlation:
        return own
    assert shared_draws is not None
    of_request, before = shared_draws[:2]
    phi = float(np.exp(-1 / range_tokens))
    shared = kernels().autoregression(shared_draws[2:], phi, float(np.sqrt(1 - phi**2)), before)
    return own + np.sqrt(correlation) * shared + np.sqrt(spread) * of_request


def grade(hardness_t: FloatArray, thresholds: FloatArray) -> Int16Array:
    """How many of the thresholds [K] each hardness [length] exceeds: all that acceptance needs to know, in few bits.

    A token is accepted at a threshold when its grade is not above the threshold's own.
    """
    return np.searchsorted(np.sort(thresholds), hardness_t).astype(np.int16)


def runs(hardness_t: FloatArray, thresholds: FloatArray, length: int) -> IntArray:
    """L(t) for t = 0..length-1, [length]: how many drafts from output position t would be accepted.

    Args:
        hardness_t: hardness of output tokens 0..length + K, [>= length + K].
        thresholds: acceptance thresholds by distance 1..K, [K].
        length: positions wanted.
    """
    alive = np.ones(length, dtype=bool)
    run = np.zeros(length, dtype=np.int64)
    for d, threshold in enumerate(thresholds, start=1):
        alive &= hardness_t[d : d + length] <= threshold
        run += alive
    return run


def _bell(x: FloatArray) -> FloatArray:
    """The standard normal density, not normalised."""
    return np.exp(-(x**2) / 2)


class TextChain:
    """What the starts of rounds see, as a Markov chain over (request kind, shared hardness) on a grid.

    Args:
        spread: share of the hardness variance that belongs to the request, 0..1.
        correlation: share that is correlated along the text, 0..1.
        range_tokens: tokens after which that correlation has fallen to 1/e.
    """

    def __init__(self, spread: float, correlation: float, range_tokens: float) -> None:
        points = np.linspace(-4, 4, 33)
        phi = np.exp(-1 / range_tokens)
        move = _bell((points[None, :] - phi * points[:, None]) / np.sqrt(1 - phi**2))
        self.move = move / move.sum(axis=1, keepdims=True)  # [x, x] one token on
        nodes, weights = np.polynomial.hermite_e.hermegauss(9) if spread else (np.zeros(1), np.ones(1))
        self.share = weights / weights.sum()  # [r] share of tokens of each kind of request
        shift = np.sqrt(spread) * nodes[:, None] + np.sqrt(correlation) * points[None, :]
        self.shift, self.scale = shift, np.sqrt(1 - spread - correlation)  # [r, x]
        start = _bell(points) / _bell(points).sum()
        self.start = np.tile(start, (len(nodes), 1))  # [r, x] state of the anchor
        self.of_rounds = self.share  # [r] share of rounds

    def accept(self, threshold: float) -> FloatArray:
        """P(draft accepted | state of its token), [r, x]."""
        from scipy.special import ndtr  # slow to import, not always needed

        return ndtr((threshold - self.shift) / self.scale)

    def round(self, thresholds: FloatArray) -> FloatArray:
        """Move the starts on by one round with these thresholds; returns its survival curve, [K].

        The start of the next round is the token that was wrong, or the bonus token. Requests that accept less
        need more rounds for the same text, so their share of the rounds grows.
        """
        alive, after = self.start, np.zeros_like(self.start)
        survival = []
        for threshold in thresholds:
            here = alive @ self.move
            accept = self.accept(threshold)
            after = after + here * (1 - accept)
            alive = here * accept
            survival.append(alive.sum(axis=1))
        after = after + alive @ self.move
        curves = np.array(survival).reshape(len(thresholds), len(self.share))  # [K, r]
        pooled = curves @ self.of_rounds
        self.start = after / after.sum(axis=1, keepdims=True)
        of_rounds = self.share / (1 + curves.sum(axis=0))
        self.of_rounds = of_rounds / of_rounds.sum()
        return pooled

    def settle(self, thresholds: FloatArray) -> FloatArray:
        """Survival curve once rounds have settled, [K]."""
        survival = self.round(thresholds)
        for _ in range(500):
            before, survival = survival, self.round(thresholds)
            if np.abs(survival - before).max() < 1e-10:
                break
        return survival

    def thresholds(self, survival: FloatArray) -> FloatArray:
        """Thresholds by distance with which one round from the present starts has this survival, [K]."""
        alive = self.start * self.of_rounds[:, None]
        found = np.empty(len(survival))
        for d, wanted in enumerate(survival):
            here = alive @ self.move
            low, high = -9.0, 9.0
            for _ in range(60):  # the mass that survives rises with the threshold: bisect
                middle = (low + high) / 2
                low, high = (middle, high) if (here * self.accept(middle)).sum() < wanted else (low, middle)
            found[d] = high
            alive = here * self.accept(high)
        return found


@lru_cache(maxsize=256)
def _solve(survival: tuple[float, ...], spread: float, correlation: float, range_tokens: float) -> FloatArray:
    chain, wanted = TextChain(spread, correlation, range_tokens), np.array(survival)
    thresholds = chain.thresholds(wanted)
    for _ in range(500):
        chain.round(thresholds)
        before, thresholds = thresholds, chain.thresholds(wanted)
        if np.abs(thresholds - before).max() < 1e-9:
            break
    return thresholds


def solve_thresholds(survival: FloatArray, spread: float, correlation: float, range_tokens: float) -> FloatArray:
    """Thresholds by distance, [K], under which settled full-block rounds have exactly this survival curve.

    Without correlation they are the normal quantiles of the conditional rates. With it, what the starts of
    rounds see and the thresholds fix each other; solved by iteration. See :class:`TextChain`.

    Args:
        survival: P(first k drafts accepted), [K], positive.
        spread: share of the variance that belongs to the request, 0..1.
        correlation: share that is correlated along the text, 0..1.
        range_tokens: tokens after which that correlation has fallen to 1/e.
    """
    if not spread and not correlation:
        from scipy.special import ndtri

        return ndtri(survival / np.concatenate([[1.0], survival[:-1]]))
    return _solve(tuple(survival.tolist()), spread, correlation, range_tokens).copy()


def shorter_block_tau(
    survival: FloatArray, verify_len: int, spread: float, correlation: float, range_tokens: float
) -> float:
    """tau of a run that always verifies ``verify_len`` tokens, where full blocks have this survival curve."""
    thresholds = solve_thresholds(survival, spread, correlation, range_tokens)
    chain = TextChain(spread, correlation, range_tokens)
    return float(1 + chain.settle(thresholds[: verify_len - 1]).sum())
