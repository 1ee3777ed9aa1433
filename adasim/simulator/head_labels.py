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
        self.whole = np.zeros(0, dtype=bool)  # of the round under way: who is verified in full to be labelled

    def draw_whole(self, draft_lens: IntArray) -> IntArray:
        """Draft lengths [n], some raised to the full block, which is then verified: who drafts nothing is left alone."""
        self.whole = (draft_lens > 0) & (self._rng.random(len(draft_lens)) < self.learning.full_verify_share)
        return np.where(self.whole, self.block - 1, draft_lens)

    def keep(self, kept: NDArray[np.bool_]) -> None:
        """Some of those drawn, [n], left the round: memory was short."""
        self.whole = self.whole[kept]

    def whole_blocks(self, verify_lens: IntArray) -> IntArray:
        """Verify lengths [n], those of whoever was drawn raised to the full block to show uncensored lengths."""
        return np.where(self.whole, self.block, verify_lens)

    def note(self, requests: IntArray, run: IntArray, said: FloatArray, verify_lens: IntArray) -> None:
        """A round: L, what the head said less its level, and what was verified, [n] each."""
        told = labels(self.learning.label, run, verify_lens, self.block)
        if self.learning.label == "full_verify":
            whole = self.whole  # by chance: where a policy chose it, L tends to be long
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
