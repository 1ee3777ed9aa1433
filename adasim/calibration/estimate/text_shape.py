"""Spread, correlation and range of the text, from whole sequences of rounds."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import gammaln, logsumexp
from scipy.stats import qmc

from adasim.calibration.estimate.part import DRAWS, weights
from adasim.calibration.estimate.text_model import Sequences, Shape, TextModel
from adasim.types import FloatArray, IntArray

MOST_SHARE = 0.95  # of spread + correlation: tokens have luck of their own
RANGES = (1.0, 20.0)  # tokens; beyond 20 a range is hardly told from a spread
FIRST, MORE, STAGES = 64, 32, 4  # shapes tried: evenly, then near the likely ones
LEAST_LIKE = 12.0  # effective number of shapes that each stage goes by
FREEDOM = 5.0  # of the t distribution that stages draw from
ZERO = 0.1  # a lower limit below this share of the upper one is 0


@dataclass(frozen=True, slots=True)
class Told:
    """What rounds of one domain tell about the text.

    Attributes:
        sequences: of its requests.
        hazards: rates of acceptance by distance, [K'], as far as they are known.
        rounds: verify_len -> rounds of runs that always verified so much.
        texts: a number of each sequence's text, [requests]; several of one text count as one.
        tokens: mean answer.
    """

    sequences: Sequences
    hazards: FloatArray
    rounds: dict[int, float]
    texts: IntArray
    tokens: float


@dataclass(frozen=True, slots=True)
class Posterior:
    """Shapes that fit, and how likely each request finds them.

    Attributes:
        shapes: [shapes, 3] spread, correlation, log of the range.
        fits: log likelihood, [shapes, texts]; the mean of a text's sequences, which are no samples of their own.
        density: log density that the shapes were drawn with, [shapes].
    """

    shapes: FloatArray
    fits: FloatArray
    density: FloatArray

    def weights(self, requests: FloatArray | None = None) -> FloatArray:
        """Posterior probability of each shape where requests count so often, [shapes]."""
        logs = (self.fits.sum(axis=1) if requests is None else self.fits @ requests) - self.density
        return np.exp(logs - logsumexp(logs))

    def mean(self) -> Shape:
        """The expected shape."""
        spread, correlation, log_range = (self.weights() @ self.shapes).tolist()
        return Shape(spread, correlation, float(np.exp(log_range)))

    def draws(self, seed: int, count: int = DRAWS) -> list[Shape]:
        """Shapes drawn from posteriors of bootstrap samples of the requests ("BayesBag").

        Wider than one posterior: also right where the text is not made as the model says.
        """
        rng = np.random.default_rng([seed, 1])
        out = []
        for w in weights(self.fits.shape[1], seed, count):
            i = int(rng.choice(len(self.shapes), p=self.weights(w)))
            spread, correlation, log_range = self.shapes[i].tolist()
            out.append(Shape(spread, correlation, float(np.exp(log_range))))
        return out


def posterior(told: Sequence[Told], seed: int = 0) -> Posterior:
    """Explore shapes under a flat prior: first evenly, then where they are likely.

    The flat prior is over spread + correlation below 0.95 and the logarithm of ranges of 1 to 20 tokens. Adaptive
    importance sampling; all shapes that were tried count, by the mixture they were drawn from.
    """
    rng = np.random.default_rng([seed, 2])
    shapes = _even(seed)
    fits = np.stack([_fits(told, s) for s in shapes])
    parts: list[tuple[float, FloatArray, FloatArray]] = []
    for _ in range(STAGES):
        logs = fits.sum(axis=1) - _density(shapes, parts)
        w = _tempered(logs)
        centre = w @ shapes
        spread = shapes - centre
        cov = 1.5 * (spread.T * w) @ spread + np.diag([1e-4, 1e-4, 1e-3])
        new = _drawn(rng, centre, cov)
        parts.append((float(len(new)), centre, cov))
        shapes = np.concatenate([shapes, new])
        fits = np.concatenate([fits, [_fits(told, s) for s in new]])
    return Posterior(shapes, fits, _density(shapes, parts))


def low_limit(low: float, high: float) -> float:
    """0 where a share cannot be told from 0."""
    return 0.0 if low < ZERO * high else low


def _fits(told: Sequence[Told], shape: FloatArray) -> FloatArray:
    spread, correlation, log_range = shape.tolist()
    model = TextModel(Shape(spread, correlation, float(np.exp(log_range))))
    parts = []
    for domain in told:
        thresholds = model.solve(domain.hazards, domain.rounds, domain.tokens)
        found = model.log_likelihood(domain.sequences, thresholds)
        _, text, count = np.unique(domain.texts, return_inverse=True, return_counts=True)
        parts.append(np.bincount(text, weights=found) / count)
    return np.concatenate(parts)


def _inside(shapes: FloatArray) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    spread, correlation, log_range = shapes.T
    low, high = np.log(RANGES)
    ok: np.ndarray[tuple[int], np.dtype[np.bool_]] = (spread >= 0) & (correlation >= 0)
    return ok & (spread + correlation < MOST_SHARE) & (log_range >= low) & (log_range <= high)


def _even(seed: int) -> FloatArray:
    cube = qmc.Sobol(3, seed=seed).random(FIRST)
    low = cube[:, 0] + cube[:, 1] > 1  # fold the square onto the triangle
    cube[low, :2] = 1 - cube[low, :2]
    edges = np.log(RANGES)
    shapes = cube * [MOST_SHARE, MOST_SHARE, edges[1] - edges[0]] + [0, 0, edges[0]]
    return np.asarray(shapes[_inside(shapes)], dtype=np.float64)


def _drawn(rng: np.random.Generator, centre: FloatArray, cov: FloatArray) -> FloatArray:
    """Of a t distribution, those that are possible."""
    kept = np.empty((0, 3))
    root = np.linalg.cholesky(cov)
    for _ in range(200):
        z = rng.standard_normal((MORE, 3)) / np.sqrt(rng.chisquare(FREEDOM, (MORE, 1)) / FREEDOM)
        new = centre + z @ root.T
        kept = np.concatenate([kept, new[_inside(new)]])
        if len(kept) >= MORE:
            break
    return kept[:MORE]


def _density(shapes: FloatArray, parts: Sequence[tuple[float, FloatArray, FloatArray]]) -> FloatArray:
    """Log density of the mixture that shapes were drawn from; the cut at the edges of what is possible is neglected."""
    low, high = np.log(RANGES)
    flat = -np.log(MOST_SHARE**2 / 2 * (high - low))
    first = len(shapes) - sum(n for n, _, _ in parts)
    logs = [np.full(len(shapes), flat + np.log(first))]
    for n, centre, cov in parts:
        off = shapes - centre
        distance = np.einsum("ij,jk,ik->i", off, np.linalg.inv(cov), off)
        scale = gammaln((FREEDOM + 3) / 2) - gammaln(FREEDOM / 2) - 1.5 * np.log(FREEDOM * np.pi)
        scale -= np.linalg.slogdet(cov)[1] / 2
        logs.append(np.log(n) + scale - (FREEDOM + 3) / 2 * np.log1p(distance / FREEDOM))
    total: FloatArray = logsumexp(np.stack(logs), axis=0)
    return total


def _tempered(logs: FloatArray) -> FloatArray:
    """Weights, flattened until enough shapes count."""
    for heat in np.geomspace(1, 1e4, 60):
        w = np.exp((logs - logs.max()) / heat)
        w /= w.sum()
        if 1 / (w**2).sum() >= min(LEAST_LIKE, len(logs) / 3):
            break
    return w
