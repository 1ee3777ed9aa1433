"""Has a new drafter version made tau worse?"""

from dataclasses import dataclass, field
from math import sqrt
from typing import NamedTuple

from pydantic import Field

from adasim.types import Component


@dataclass(slots=True)
class Tally:
    """Mean and spread of the taus of requests."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared distances from the mean

    def add(self, value: float) -> None:
        """One more request."""
        self.count += 1
        step = value - self.mean
        self.mean += step / self.count
        self.squares += step * (value - self.mean)


@dataclass(slots=True)
class Served:
    """Requests that one version served from beginning to end, by domain."""

    domains: dict[int, Tally] = field(default_factory=dict)

    def add(self, domain: int, tau: float) -> None:
        """One more request: its tokens per round."""
        self.domains.setdefault(domain, Tally()).add(tau)


class Change(NamedTuple):
    """Difference of tau with its half-width."""

    tau: float
    half_width: float


class Rollback(Component):
    """Goes back to the version before when the new one's tau is lower by more than the interval of the difference.

    A version is judged once, by the first ``requests`` requests that begin under it, when all have finished (those that
    finish first are the easy and short ones), against those of the version before: within domains, weighted as the new
    version met them, so that a change of mix is not its fault. Until then no other version is loaded. A version that is
    as good falls with probability (1 - confidence) / 2.
    """

    requests: int = Field(default=64, ge=4)
    confidence: float = Field(default=0.99, gt=0.5, lt=1)

    def change(self, new: Served, old: Served) -> Change | None:
        """What the new version changed; None where both served too little of the same domains to tell."""
        from scipy.special import stdtrit  # slow to import, not always needed

        both = [d for d, t in new.domains.items() if t.count >= 2 and d in old.domains and old.domains[d].count >= 2]
        total = sum(new.domains[d].count for d in both)
        if not total:
            return None
        mean, variance, weakest = 0.0, 0.0, 0.0
        for d in both:
            n, o = new.domains[d], old.domains[d]
            weight = n.count / total
            mean += weight * (n.mean - o.mean)
            for t in (n, o):
                part = weight**2 * t.squares / (t.count - 1) / t.count
                variance += part
                weakest += part**2 / (t.count - 1)
        freedom = variance**2 / weakest if weakest else 1.0  # Welch and Satterthwaite
        return Change(mean, float(stdtrit(freedom, (1 + self.confidence) / 2)) * sqrt(variance))

    def is_worse(self, change: Change | None) -> bool:
        """Whether to go back."""
        return change is not None and change.tau + change.half_width < 0
