"""Reports of a length head as they were seen, domain by domain, and how much they say of L, whatever their form."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.special import ndtr

from adasim.calibration.estimate.head_likelihood import ODD, HeadLikelihood
from adasim.calibration.head_quality import LEAST_VARIANCE, HeadQuality, Reports
from adasim.types import FloatArray

LEVELS = 41  # quantiles, evenly spaced
NOISES = np.geomspace(0.1, 30.0, 40)  # standard deviations of L that are tried
LOOKS = 2000  # that the rank of a look is computed for
LEAST_GAP = 1e-3  # tokens between quantiles, below which reports count as alike


@dataclass(frozen=True, slots=True)
class Seen:
    """A head as it was seen.

    Attributes:
        domains: names.
        domain: of each round, [rounds].
        noise: of the look, standard deviations of the domain's L, [domains].
        quantiles: of the reports, [domains, LEVELS].
        fits: log P(accepted | report) by domain's noise tried, [NOISES, rounds].
        believed: P(L = l | report), [rounds, K + 1].
        log_likelihood: of all rounds, as :class:`HeadLikelihood` has it.
    """

    domains: list[str]
    domain: "np.ndarray[tuple[int], np.dtype[np.int64]]"
    noise: FloatArray
    quantiles: FloatArray
    fits: FloatArray
    believed: FloatArray
    log_likelihood: float

    @property
    def parameters(self) -> int:
        """Numbers that were fitted."""
        return self.noise.size + self.quantiles.size

    @property
    def quality(self) -> HeadQuality:
        """As a component."""
        rows = zip(self.domains, self.noise.tolist(), self.quantiles.tolist(), strict=True)
        found = {d: Reports(noise=round(n, 4), quantiles=[round(x, 4) for x in q]) for d, n, q in rows}
        return HeadQuality(noise=1.0, bias=0.0, reports="measured", measured=found)

    def noises(self, weight: FloatArray) -> FloatArray:
        """The likeliest noise of every domain where rounds count so often, [domains]."""
        every = [self.fits[:, self.domain == d] @ weight[self.domain == d] for d in range(len(self.domains))]
        return np.array([_highest(total) for total in every])


def seen_in(rounds: pd.DataFrame, likelihood: HeadLikelihood) -> Seen:
    """The reports of rounds, and the noise under which what was accepted behind each is likeliest.

    A report is taken for a look at L of equal rank: which values a head reports says nothing of what it knows, only what
    it reports the more of. What was accepted is censored by the length that was verified, as in :class:`HeadLikelihood`,
    which gives the distribution of L.

    Args:
        rounds: with accept_len and, of what the design repeats, how much a round counts (``share``).
        likelihood: of them.
    """
    share, report, domain = (
        rounds["share"].to_numpy(dtype=float),
        rounds["accept_len"].to_numpy(dtype=float),
        likelihood.domain,
    )
    names, levels = likelihood.names, np.linspace(0, 1, LEVELS)
    quantiles = np.stack([quantiles_of(report[domain == d], share[domain == d], levels) for d in range(len(names))])
    fits, believed, ranks = (
        np.empty((len(NOISES), len(report))),
        np.empty(likelihood.possible.shape),
        np.empty(len(report)),
    )
    noise, density = np.empty(len(names)), np.empty(len(report))
    for d in range(len(names)):
        mine = domain == d
        ranks[mine] = np.interp(report[mine], quantiles[d], levels)
        part = [_posterior(ranks[mine], likelihood.masses[d], float(n)) for n in NOISES]
        inside = [(p * likelihood.possible[mine]).sum(axis=1) for p in part]
        fits[:, mine] = np.log(np.maximum(inside, 1e-300))
        noise[d] = _highest(fits[:, mine] @ share[mine])
        believed[mine] = _posterior(ranks[mine], likelihood.masses[d], noise[d])
        gap = np.maximum(np.diff(quantiles[d]), LEAST_GAP)
        place = np.searchsorted(quantiles[d], report[mine], side="right") - 1
        density[mine] = 1 / (LEVELS - 1) / gap[place.clip(0, LEVELS - 2)]
    prior = np.where(likelihood.possible, likelihood.masses[domain], 0.0).sum(axis=1)
    usual = (1 - ODD) * density * (believed * likelihood.possible).sum(axis=1)
    total = float(np.log(np.maximum(usual + ODD / likelihood.run.size * prior, 1e-300)).sum())
    return Seen(names, domain, noise, quantiles, fits, believed, total)


def _posterior(rank: FloatArray, mass: FloatArray, noise: float) -> FloatArray:
    """P(L = l | a look of this rank among all), [rounds, K + 1]."""
    run = np.arange(len(mass))
    mean = mass @ run
    sigma = noise * np.sqrt(max(float(mass @ run**2 - mean**2), LEAST_VARIANCE))
    looks = np.linspace(-6 * sigma, run[-1] + 6 * sigma, LOOKS)
    look = np.interp(rank, ndtr((looks[:, None] - run) / sigma) @ mass, looks)
    logs = np.log(mass) - (((look[:, None] - run) / sigma) ** 2) / 2
    like = np.exp(logs - logs.max(axis=1, keepdims=True))
    return np.asarray(like / like.sum(axis=1, keepdims=True), dtype=np.float64)


def quantiles_of(values: FloatArray, weight: FloatArray, levels: FloatArray) -> FloatArray:
    """Of values [n] that count so often [n], at ``levels``."""
    order = np.argsort(values)
    values, weight = values[order], weight[order]
    return np.interp(levels, (np.cumsum(weight) - weight / 2) / weight.sum(), values)


def _highest(fits: FloatArray) -> float:
    """The noise where a curve over ``NOISES`` is highest, by a parabola through its top."""
    i = int(np.argmax(fits))
    logs = np.log(NOISES)
    if not 0 < i < len(NOISES) - 1:
        return float(NOISES[i])
    before, top, after = fits[i - 1 : i + 2]
    bend = before - 2 * top + after
    shift = 0.5 * (before - after) / bend if bend < 0 else 0.0
    return float(np.exp(logs[i] + shift * (logs[1] - logs[0])))
