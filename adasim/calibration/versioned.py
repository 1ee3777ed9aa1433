"""Luck under a drafter that changes: every version throws the same dice.

A token's hardness belongs to the text; a version only moves the thresholds. A version with a higher tau accepts, at every
position, a superset of what a lower one accepts, and two versions are compared on common random numbers.
"""

from collections.abc import Sequence
from math import exp, floor, log

import numpy as np

from adasim.calibration.acceptance import CurveAcceptance, Text
from adasim.calibration.luck import NOT_DRAWN, Luck
from adasim.calibration.survival import harden, tau
from adasim.calibration.text import runs
from adasim.types import FloatArray, IntArray, Request

GRID = 0.05  # step between solved factors, in log tau; see Thresholds


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


class VersionedLuck(Luck):
    """The luck of all requests of a run under the drafter version in use; drawn anew after every switch.

    Args:
        model: curves and text.
        requests: by index.
        domains: names that ``Request.domain`` indexes.
        seed: of the run.
        max_draft_len: K.
        heads_know_text: False = heads know each domain's level and nothing of the text.
    """

    ahead = 0  # who comes later may come under another version

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
        super().__init__(requests, seed, model.head, domains, [model.survival(d, max_draft_len) for d in domains])
        self.max_draft_len, self.heads_know_text = max_draft_len, heads_know_text
        self.loaded_tau = np.array([tau(c) for c in self.curves])  # [domains] of full blocks, as loaded
        self._solved = [Thresholds(model, c) for c in self.curves]
        self._tokens = Text(model, self.curves, seed)
        self._level = np.zeros(len(requests))  # what heads say but for L and noise, of the version a request has
        self.switch(np.ones(len(self.curves)), np.full(len(self.curves), model.head.bias))

    def switch(self, factors: FloatArray, bias: FloatArray, *, keep: bool = False) -> None:
        """Put a version into use.

        Args:
            factors: tau of each domain, as a factor of that as loaded, [domains].
            bias: tokens that the head reports too much for each domain, [domains].
            keep: requests that were looked at before keep the luck they have.
        """
        if not keep:
            self._text[:] = NOT_DRAWN
        self.tau, self.bias = self.loaded_tau * factors, bias
        self.thresholds = [t.at(f) for t, f in zip(self._solved, factors.tolist(), strict=True)]
        # what a confidence head believes about a domain moves with the level that it reports
        believed = self.tau + bias - self.head.bias
        highest = self.max_draft_len + 1
        lowest = 1 + (highest - 1) * 1e-3
        believed = np.where(believed == self.loaded_tau, believed, believed.clip(lowest, highest - 1e-3))
        self._believed = np.stack(
            [harden(c, b / t) for c, b, t in zip(self.curves, believed, self.loaded_tau, strict=True)]
        )
        self.posterior = np.stack([self.head.posterior(c) for c in self._believed])

    def text(self, request: Request) -> IntArray:
        """L at every position: two versions may be in flight, and grades tell nothing of other thresholds."""
        g = self._tokens.hardness(request, request.output_len + self.beyond)
        return runs(g, self.thresholds[request.domain], request.output_len)

    def _draw(self, ids: IntArray) -> None:
        super()._draw(ids)
        domains = [self.requests[i].domain for i in ids.tolist()]
        self._level[ids] = self.bias[domains] if self.heads_know_text else self.tau[domains] - 1 + self.bias[domains]

    def signal(self, ids: IntArray, at: IntArray, run: IntArray) -> FloatArray:
        """See :meth:`Luck.signal`; heads that know nothing of the text see L + bias on average."""
        if not self.heads_know_text:
            return self._level[ids]
        self._draw_noise(ids)
        return run + self._level[ids] + self.head.noise * self._noise[at]

    def survival(self, domains: IntArray, signal: FloatArray) -> FloatArray:
        """See :meth:`Luck.survival`."""
        return super().survival(domains, signal) if self.heads_know_text else self._believed[domains]

    def level(self) -> FloatArray:
        """What the length head reports on average, tokens with the anchor counted, [domains]."""
        return self.tau + self.bias
