"""What rounds teach the length head."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from adasim.calibration.labels import HeadLearning, labels
from adasim.simulator.learning import Sample
from adasim.types import FloatArray, IntArray


class HeadLabels:
    """Labels of running requests, summed over their rounds.

    Args:
        learning: which labels, and how fast they are learned.
        requests: of the whole run.
        block: positions of a full block, the anchor counted.
        seed: of the run.
    """

    def __init__(self, learning: HeadLearning, requests: int, block: int, seed: int) -> None:
        self.learning, self.block = learning, block
        self._told, self._said = np.zeros(requests), np.zeros(requests)
        self._rounds = np.zeros(requests, dtype=np.int64)  # labelled ones
        self._rng = np.random.default_rng([seed, 4])
        self._whole = np.zeros(0, dtype=bool)  # of the round under way: who is verified in full to be labelled

    def whole_blocks(self, verify_lens: IntArray, draft_lens: IntArray) -> IntArray:
        """Verify lengths [n], some raised to the full block to show uncensored lengths."""
        if not self.learning.full_verify_share:
            return verify_lens
        self._whole = self._rng.random(len(verify_lens)) < self.learning.full_verify_share
        return np.where(self._whole, draft_lens + 1, verify_lens)

    def whole(self, verify_lens: IntArray) -> NDArray[np.bool_] | None:
        """Who of the round under way was drawn to be verified in full, and is, [n]; None = nobody is drawn."""
        return self._whole & (verify_lens == self.block) if self.learning.full_verify_share else None

    def note(self, requests: IntArray, run: IntArray, said: FloatArray, verify_lens: IntArray) -> None:
        """A round: L, what the head said less its level, and what was verified, [n] each."""
        told = labels(self.learning.label, run, verify_lens, self.block)
        if self.learning.label == "full_verify":
            whole = self.whole(verify_lens)  # by chance: where a policy chose it, L tends to be long
            requests, said, told = requests[whole], said[whole], told[whole]
        self._told[requests] += told
        self._said[requests] += said
        self._rounds[requests] += 1

    def sample(self, request: int, domain: int, tokens: int) -> Sample:
        """A finished request for the buffer."""
        sums = float(self._told[request]), float(self._said[request]), int(self._rounds[request])
        return Sample(domain, tokens, *sums)

    def levels(self, samples: Sequence[Sample], levels: FloatArray, rounds: float) -> FloatArray:
        """What the head reports on average, [domains], after ``rounds`` of training on these samples."""
        after = levels.copy()
        for d in range(len(levels)):
            mine = [s for s in samples if s.domain == d]
            count = sum(s.rounds for s in mine)
            if count:
                error = sum(s.labels - s.reports for s in mine) / count - levels[d]
                after[d] = self.learning.level(levels[d], error, rounds)
        return after
