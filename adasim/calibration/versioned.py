"""Luck under a drafter that changes: every version throws the same dice.

A token's hardness belongs to the text; a version only moves the thresholds. A version with a higher tau accepts, at every
position, a superset of what a lower one accepts, and two versions are compared on common random numbers.
"""

from collections.abc import Sequence
from math import exp, floor, log

import numpy as np

from adasim.calibration.acceptance import BINS_PER_TOKEN, CurveAcceptance, request_rng
from adasim.calibration.survival import harden, tau
from adasim.calibration.text import runs
from adasim.types import FloatArray, IntArray, Request

GRID = 0.05  # step between solved factors, in log tau; see Thresholds
NEVER = -1


class Thresholds:
    """Acceptance thresholds of one domain by factor of its tau.

    Independent text: exact. Correlated text, where one solution takes a tenth of a second: solved on a grid of factors
    5 % apart and interpolated, never falling with the factor.

    Args:
        model: the text.
        curve: survival as loaded, [K].
    """

    def __init__(self, model: CurveAcceptance, curve: FloatArray) -> None:
        self.model, self.curve = model, curve
        self.exact = not model.spread and not model.correlation
        self._lowest, self._highest = log(1 / tau(curve)), log((len(curve) + 1) / tau(curve))
        self._solved: dict[int, FloatArray] = {}

    def at(self, factor: float) -> FloatArray:
        """Thresholds by distance, [K], where tau is ``factor`` times that as loaded."""
        if self.exact or factor == 1:
            return self.model.thresholds(harden(self.curve, factor))
        place = log(factor) / GRID
        low = floor(place)
        if not self._lowest < low * GRID or not (low + 1) * GRID < self._highest:  # the grid ends before tau's limits
            return self.model.thresholds(harden(self.curve, factor))
        below, above = self._node(low), self._node(low + 1)
        return below + (place - low) * np.maximum(above - below, 0.0)

    def _node(self, i: int) -> FloatArray:
        if i not in self._solved:
            self._solved[i] = self.model.thresholds(harden(self.curve, exp(i * GRID)))
        return self._solved[i]


class VersionedLuck:
    """The luck of all requests of a run, like :class:`~adasim.calibration.acceptance.Luck`, made when it is read.

    ``run`` and ``signal`` of a request hold what the version in use makes of its text; ``refresh`` before reading them.

    Args:
        model: curves and text.
        requests: by index.
        domains: names that ``Request.domain`` indexes.
        seed: of the run.
        max_draft_len: K.
        heads_know_text: False = heads know each domain's level and nothing of the text.
    """

    def __init__(
        self,
        model: CurveAcceptance,
        requests: Sequence[Request],
        domains: Sequence[str],
        seed: int,
        max_draft_len: int,
        *,
        heads_know_text: bool = True,
    ) -> None:
        self.model, self.requests, self.seed, self.max_draft_len = model, requests, seed, max_draft_len
        self.heads_know_text = heads_know_text
        lengths = np.array([r.output_len for r in requests], dtype=np.int64)
        self.base: IntArray = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
        self.run: IntArray = np.zeros(int(lengths.sum()), dtype=np.int64)
        self.signal: FloatArray = np.zeros(len(self.run))
        self.curves = [model.survival(d, max_draft_len) for d in domains]
        self.loaded_tau = np.array([tau(c) for c in self.curves])  # [domains] of full blocks, as loaded
        self.bins_from = float(model.head.bins(max_draft_len)[0])
        self._thresholds = [Thresholds(model, c) for c in self.curves]
        self._powers = model.powers(self.curves)
        self._version_of = np.full(len(requests), NEVER, dtype=np.int64)
        self._texts: dict[int, tuple[FloatArray, FloatArray]] = {}  # hardness and head noise of requests lately read
        self._version, self._keep = 0, False
        self.switch(np.ones(len(self.curves)), np.full(len(self.curves), model.head.bias))

    def switch(self, factors: FloatArray, bias: FloatArray, *, keep: bool = False) -> None:
        """Put a version into use.

        Args:
            factors: tau of each domain, as a factor of that as loaded, [domains].
            bias: tokens that the head reports too much for each domain, [domains].
            keep: requests that were read before keep the luck they have.
        """
        self._version, self._keep = self._version + 1, keep
        self.tau, self.bias = self.loaded_tau * factors, bias
        self._limits = [t.at(f) for t, f in zip(self._thresholds, factors.tolist(), strict=True)]
        # what a confidence head believes about a domain moves with the level that it reports
        believed = self.tau + bias - self.model.head.bias
        highest = self.max_draft_len + 1
        lowest = 1 + (highest - 1) * 1e-3
        believed = np.where(believed == self.loaded_tau, believed, believed.clip(lowest, highest - 1e-3))
        self._believed = np.stack(
            [harden(c, b / t) for c, b, t in zip(self.curves, believed, self.loaded_tau, strict=True)]
        )
        self.posterior = np.stack([self.model.head.posterior(c) for c in self._believed])

    def refresh(self, requests: IntArray) -> None:
        """Make ``run`` and ``signal`` of these requests current."""
        made = self._version_of[requests]
        stale = made == NEVER if self._keep else made != self._version
        if not stale.any():
            return
        if len(self._texts) > 4 * len(requests) + 64:  # finished requests are not read again
            kept = set(requests.tolist())
            self._texts = {i: t for i, t in self._texts.items() if i in kept}
        for index in requests[stale].tolist():
            self._make(index)
        self._version_of[requests[stale]] = self._version

    def _make(self, index: int) -> None:
        request = self.requests[index]
        domain, at = request.domain, int(self.base[index])
        if index not in self._texts:
            self._texts[index] = (
                self.model.hardness(request, self.seed, self.max_draft_len, self._powers[domain]),
                self.model.head.noise * request_rng(self.seed, request.id, 1).standard_normal(request.output_len),
            )
        hardness, noise = self._texts[index]
        run = runs(hardness, self._limits[domain], request.output_len)
        span = slice(at, at + request.output_len)
        self.run[span] = run
        if self.heads_know_text:
            self.signal[span] = run + self.bias[domain] + noise
        else:
            self.signal[span] = self.tau[domain] - 1 + self.bias[domain]

    def level(self) -> FloatArray:
        """What the length head reports on average, tokens with the anchor counted, [domains]."""
        return self.tau + self.bias

    def survival(self, domains: IntArray, at: IntArray) -> FloatArray:
        """Confidence curves [n, K] of requests in ``domains`` [n] at flat positions ``at`` [n]."""
        if not self.heads_know_text:
            return self._believed[domains]
        rows = np.rint((self.signal[at] - self.bins_from) * BINS_PER_TOKEN).astype(np.int64)
        return self.posterior[domains, rows.clip(0, self.posterior.shape[1] - 1)]

    def margin(self, domains: IntArray, at: IntArray) -> FloatArray:
        """The drafter's margins [n, K] at the same positions."""
        return self.model.head.margin(self.survival(domains, at))
