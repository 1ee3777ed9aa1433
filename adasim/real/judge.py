"""Whether a drafter version is worse than the one before it, domain by domain.

tau is a ratio of sums over requests: its rounds are not independent, its requests are. The interval is that of a
ratio estimator with requests as clusters (Cochran, Sampling Techniques, 1977, ch. 6).
"""

from collections import defaultdict
from math import inf, sqrt
from typing import NamedTuple

import numpy as np
from scipy.stats import t as student

from adasim.real.samples import Sample


class Estimate(NamedTuple):
    """tau with the half-width of its 95 % interval."""

    tau: float
    half: float
    rounds: int


class Fall(NamedTuple):
    """A version that accepts less than the one before."""

    domain: int
    now: Estimate
    before: Estimate


class Judge:
    """Counts rounds and tokens of every request by version and domain."""

    def __init__(self, rounds: int) -> None:
        """Args: rounds in a domain that a verdict needs."""
        self.rounds = rounds
        self._counts: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)  # rounds, tokens a request
        self._done: set[tuple[int, int]] = set()  # version and domain: one look each, or chance would find a fall

    def add(self, sample: Sample) -> None:
        """A finished request; its rounds may belong to several versions."""
        for version in {r.version for r in sample.rounds}:
            accepted = [r.accepted for r in sample.rounds if r.version == version]
            self._counts[version, sample.lesson.text.domain].append((len(accepted), len(accepted) + sum(accepted)))

    def estimate(self, version: int, domain: int) -> Estimate | None:
        """tau of a version in a domain; None without rounds."""
        counts = np.array(self._counts.get((version, domain), []), dtype=float)
        if not len(counts):
            return None
        rounds, tokens = counts.T
        tau, n = tokens.sum() / rounds.sum(), len(counts)
        if n < 2:
            return Estimate(tau, inf, int(rounds.sum()))
        error = sqrt(n / (n - 1) * ((tokens - tau * rounds) ** 2).sum()) / rounds.sum()
        return Estimate(tau, float(student.ppf(0.975, n - 1)) * error, int(rounds.sum()))

    def judged(self, version: int) -> bool:
        """Whether some domain has seen enough rounds of a version."""
        return any(v == version and sum(c[0] for c in self._counts[v, d]) >= self.rounds for v, d in self._counts)

    def falls(self, version: int, before: int) -> list[Fall]:
        """Domains where a version's tau lies below that of the version before by more than both intervals allow.

        A domain is judged once, when both versions have their rounds there.
        """
        found = []
        for domain in sorted(d for v, d in self._counts if v == version):
            now, then = self.estimate(version, domain), self.estimate(before, domain)
            if now is None or then is None or min(now.rounds, then.rounds) < self.rounds:
                continue
            if (version, domain) in self._done:
                continue
            self._done.add((version, domain))
            if then.tau - now.tau > sqrt(now.half**2 + then.half**2):
                found.append(Fall(domain, now, then))
        return found
