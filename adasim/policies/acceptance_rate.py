"""One acceptance rate for all requests and positions, estimated while serving."""

import numpy as np

from adasim.types import FloatArray, StepOutcome


class AcceptanceRate:
    """a = accepted drafts / drafts that were decided on, both forgotten exponentially, round by round.

    A draft is decided on when all before it were accepted: a round that accepts 2 of 5 tells of 3 drafts, the
    others say nothing (counting them as failures would shrink a with k). Rounds without drafts teach nothing.

    Args:
        prior: a before anything was seen; weighs as much as one round of one draft.
        weight: share of a new round, 0..1.
    """

    def __init__(self, prior: float, weight: float) -> None:
        self._weight, self._accepted, self._decided = weight, prior, 1.0

    @property
    def value(self) -> float:
        """The rate, 0..1."""
        return self._accepted / self._decided

    def observe(self, outcome: StepOutcome) -> None:
        """Count one round."""
        drafts = outcome.verify_lens - 1
        if not drafts.any():
            return
        accepted = int(outcome.accepted.sum())
        refused = int((outcome.accepted < drafts).sum())
        self._accepted += self._weight * (accepted - self._accepted)
        self._decided += self._weight * (accepted + refused - self._decided)


def expected_tokens(rate: float, max_draft_len: int) -> FloatArray:
    """(1 - a^(k+1)) / (1 - a): tokens a request is expected to get from k = 0, 1, ... drafts, [max_draft_len + 1]."""
    return np.cumsum(rate ** np.arange(max_draft_len + 1))
