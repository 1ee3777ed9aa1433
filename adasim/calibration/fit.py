"""Fits of the few constants that published tables leave open. Each needs no more data than it has unknowns."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize_scalar, nnls

from adasim.calibration.head_quality import HeadQuality
from adasim.calibration.text import shorter_block_tau
from adasim.errors import InputError
from adasim.types import FloatArray


class RoundCell(NamedTuple):
    """One measured cell: a batch that decodes steadily."""

    batch: int
    draft_positions: int  # of the batch, anchors included
    verified: float  # tokens of the batch
    tokens_per_round: float  # emitted by the batch
    tok_s: float  # measured
    verify_ms: float  # of its verification pass


def fit_overhead(cells: Sequence[RoundCell]) -> tuple[float, float, float]:
    """a, b, c in milliseconds: a round costs a + b x draft positions + c x verified tokens beyond its verification.

    Least squares, none below 0.

    Raises:
        InputError: fewer than three cells, or cells that cannot tell the three apart.
    """
    design = np.array([[1.0, c.draft_positions, c.verified] for c in cells])
    if len(cells) < 3 or np.linalg.matrix_rank(design) < 3:
        raise InputError("overhead: needs three cells with different drafted and verified tokens")
    beyond_ms = np.array([1e3 * c.tokens_per_round / c.tok_s - c.verify_ms for c in cells])
    a, b, c = nnls(design, beyond_ms)[0].tolist()
    return a, b, c


def fit_head_noise(
    survival: FloatArray, batch: int, kept: Mapping[int, float], *, rounds: int = 4000, seed: int = 0
) -> float:
    """Noise of the heads, tokens, from what a global top-K keeps of full rounds.

    Args:
        survival: full-block survival curve, [K].
        batch: requests that share the budget.
        kept: verified tokens of the batch (anchors counted) -> accepted tokens of the batch (bonus counted).
        rounds: simulated rounds.
        seed: of the simulated rounds.
    """
    rng = np.random.default_rng(seed)
    mass = -np.diff(np.concatenate([[1.0], survival, [0.0]]))
    run = rng.choice(len(mass), size=(rounds, batch), p=mass / mass.sum())
    look = rng.standard_normal((rounds, batch))

    def miss(noise: float) -> float:
        head = HeadQuality(noise=noise)
        bins = head.bins(len(survival))
        row = np.rint((run + noise * look - bins[0]) / (bins[1] - bins[0])).astype(np.int64)
        curves = head.posterior(survival)[row.clip(0, len(bins) - 1)].reshape(rounds, -1)
        order = np.argsort(-curves, axis=1, kind="stable")
        good = (np.arange(1, len(survival) + 1) <= run[:, :, None]).reshape(rounds, -1)
        gained = np.cumsum(np.take_along_axis(good, order, axis=1), axis=1).mean(axis=0)
        return sum((batch + gained[budget - batch - 1] - tokens) ** 2 for budget, tokens in kept.items())

    return float(minimize_scalar(miss, bounds=(0.3, 8.0), method="bounded", options={"xatol": 0.02}).x)


def fit_correlation(runs: Sequence[tuple[FloatArray, int, float]], range_tokens: float) -> tuple[float, float]:
    """Correlation along the text, and the root mean square relative error it leaves.

    Args:
        runs: (full-block survival curve [K], a shorter verify_len, tau measured when always verifying that).
        range_tokens: assumed; a single ratio per run cannot tell range and share apart.
    """

    def miss(share: float) -> float:
        errors = [shorter_block_tau(s, n, 0.0, share, range_tokens) / tau - 1 for s, n, tau in runs]
        return float(np.sqrt(np.mean(np.square(errors))))

    best = minimize_scalar(miss, bounds=(0.0, 0.9), method="bounded", options={"xatol": 0.01})
    return float(best.x), float(best.fun)
