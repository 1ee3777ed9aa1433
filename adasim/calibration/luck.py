"""The luck of a run's requests, drawn when it is first looked at."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from adasim.calibration.head_quality import BINS_PER_TOKEN, HeadQuality
from adasim.kernels import kernels
from adasim.kernels.form import BASE, DONE, Int16Array
from adasim.types import FloatArray, IntArray, Request

NOT_DRAWN = -1
TOKENS, HEADS, COMMON, LENGTHS = range(4)  # streams of a request: tokens, heads, what tokens share, its predictor


class RequestRng:
    """One random stream of every request: Philox keyed by (seed and stream, request), read from its start."""

    def __init__(self, seed: int, stream: int) -> None:
        self._key, self._kernels = (seed << 2) + stream, kernels()
        self._bits = np.random.Philox(key=[self._key, 0])
        self._rng, self._start = np.random.Generator(self._bits), self._bits.state

    def __call__(self, request: int) -> np.random.Generator:
        """The request's stream; the generator of the one before ends. Six times as fast as making a new generator."""
        self._start["state"]["key"][1] = request
        self._bits.state = self._start
        return self._rng

    def normals(self, requests: Sequence[Request], counts: IntArray, draws: FloatArray, starts: IntArray) -> None:
        """The first ``counts`` [m] standard normal numbers of each request, to ``draws`` from ``starts`` [m] on."""
        ids = np.array([r.id for r in requests], dtype=np.int64)
        self._kernels.normals(self._key, ids, starts, counts, draws)


class Luck(ABC):
    """The luck of all requests of a run. A request's is drawn when somebody first looks: plain decoding needs none.

    Flat: what belongs to request i's output position t is at ``base[i] + t``; each request's part goes on for
    ``beyond`` positions, which its last drafts may reach.

    Args:
        requests: all requests of the run.
        seed: of the run.
        head: how well heads know L.
        domains: names that ``Request.domain`` indexes.
        curves: survival by domain, each [K].
    """

    ahead = 256  # requests that are drawn beside one that must be: they come next, and a span ends where they do

    def __init__(
        self, requests: Sequence[Request], seed: int, head: HeadQuality, domains: Sequence[str], curves: list[FloatArray]
    ) -> None:
        self.requests, self.head, self.domains, self.curves = requests, head, domains, curves
        self.beyond = curves[0].size + 1
        ends = list(accumulate((r.output_len + self.beyond for r in requests), initial=0))
        self.base: IntArray = np.array(ends[:-1], dtype=np.int64)
        self._counts: IntArray = np.array([r.output_len for r in requests], dtype=np.int64)
        self._text = np.full(ends[-1], NOT_DRAWN, dtype=np.int16)
        self._noise_rng = RequestRng(seed, HEADS)
        self._heads = False  # somebody asked what heads see, and will again
        self._kernels = kernels()

    @abstractmethod
    def text(self, request: Request) -> IntArray:
        """L at every output position, [output_len], or what ``_read`` reads it from, [<= output_len + beyond]; >= 0."""

    def _read(self, lives: IntArray, ids: IntArray, at: IntArray, run: IntArray) -> bool:
        """Position and L of each request, to ``at`` and ``run`` [n]; False: some is not drawn yet."""
        at[:] = lives[ids, BASE] + lives[ids, DONE]
        run[:] = self._text[at]
        return bool((run != NOT_DRAWN).all())

    def look_up(self, lives: IntArray, ids: IntArray) -> tuple[IntArray, IntArray]:
        """Where requests ``ids`` [n] of the table are now, and L there, [n] each."""
        at, run = np.empty(len(ids), dtype=np.int64), np.empty(len(ids), dtype=np.int64)
        if not self._read(lives, ids, at, run):
            self.draw(ids)
            self._read(lives, ids, at, run)
        return at, run

    def tables(self, *, heads: bool) -> tuple[Int16Array, IntArray, FloatArray] | None:
        """``grades``, ``limits`` and ``noise`` of kernels, the last where ``heads`` are read; None = of another form."""
        return None

    @cached_property
    def _noise(self) -> FloatArray:
        """Of heads; NaN = not drawn yet."""
        return np.full(len(self._text), np.nan)

    def draw(self, ids: IntArray, heads: bool = False) -> None:
        """Draw what was not drawn yet of requests ``ids`` [n], with ``heads`` also what their heads see."""
        new = self._with_next(ids, lambda at: self._text[at] == NOT_DRAWN)
        if len(new):
            self._draw(new)
        if heads or self._heads:
            self._draw_noise(ids if heads else new)

    def _with_next(self, ids: IntArray, missing: Callable[[IntArray], NDArray[np.bool_]]) -> IntArray:
        """Those of ``ids`` [n] whose first position is ``missing``, and of the requests that come next."""
        new = ids[missing(self.base[ids])]
        if not len(new):
            return new
        last = int(new.max()) + 1
        later = np.arange(last, min(last + self.ahead, len(self.base)))
        return np.concatenate([new, later[missing(self.base[later])]])

    def _draw(self, ids: IntArray) -> None:
        for i in ids.tolist():
            start, text = int(self.base[i]), self.text(self.requests[i])
            self._text[start : start + len(text)] = text

    def signal(self, ids: IntArray, at: IntArray, run: IntArray) -> FloatArray:
        """What heads see of L = ``run`` at ``at``: run + bias of the look + noise, [n]."""
        if self.head.reports != "truth":
            self._draw_noise(ids)
            return run + self.head.look_bias + self._sigma[ids] * self._noise[at]
        signal, kernel, head = np.empty(len(ids)), self._kernels.signal, self.head
        if not kernel(at, run, self._noise, head.bias, head.noise, signal):
            self._draw_noise(ids)
            kernel(at, run, self._noise, head.bias, head.noise, signal)
        return signal

    def _draw_noise(self, ids: IntArray) -> None:
        self._heads = True
        new = self._with_next(ids, lambda at: np.isnan(self._noise[at]))
        self._noise_rng.normals([self.requests[i] for i in new.tolist()], self._counts[new], self._noise, self.base[new])

    def report(self, domains: IntArray, signal: FloatArray) -> FloatArray:
        """What length heads of requests in ``domains`` [n] that see ``signal`` [n] report, the anchor counted, [n]."""
        if self.head.reports == "truth":
            return 1 + signal
        place = ((signal - self._bins_from) * BINS_PER_TOKEN).clip(0, self._reports.shape[1] - 1.001)
        low = place.astype(np.int64)
        below, above = self._reports[domains, low], self._reports[domains, low + 1]
        return below + (place - low) * (above - below)

    def confident(self, ids: IntArray, at: IntArray, run: IntArray, signal: FloatArray) -> FloatArray:
        """What confidences go by of L = ``run`` at ``at`` where heads see ``signal``, [n]."""
        if self.head.confidence is None:
            return signal
        self._draw_noise(ids)
        bias, sigma = self._confident
        return run + bias[ids] + sigma[ids] * self._noise[at]

    def survival(self, domains: IntArray, signal: FloatArray) -> FloatArray:
        """Confidence curves [n, K] of requests in ``domains`` [n] whose confidences go by ``signal`` [n]."""
        curves = np.empty((len(signal), self.posterior.shape[2]))
        self._kernels.curves(domains, signal, self.posterior, float(self._confident_bins[0]), BINS_PER_TOKEN, curves)
        return curves

    def margin(self, survival: FloatArray) -> FloatArray:
        """The drafter's margins [n, K] that go with those curves."""
        return self.head.margin(survival)

    @cached_property
    def posterior(self) -> FloatArray:
        """Confidence curves by domain and bin of what confidences go by, [domains, bins, K]."""
        looks, of = self._confident_bins, zip(self.domains, self.curves, strict=True)
        return np.stack([self.head.confidences(c, looks, d) for d, c in of])

    @cached_property
    def _by_domain(self) -> list[HeadQuality]:
        """Heads whose look confidences go by, [domains]."""
        return [self.head.confident(d) for d in self.domains]

    @cached_property
    def _confident_bins(self) -> FloatArray:
        """What confidences may go by, those of the domain that needs most."""
        return max((h.bins(self.curves[0].size) for h in self._by_domain), key=len)

    @cached_property
    def _confident(self) -> tuple[FloatArray, FloatArray]:
        """Bias and standard deviation of what confidences go by of each request, tokens, [requests] each."""
        of = zip(self._by_domain, self.domains, self.curves, strict=True)
        looks = np.array([(h.look_bias, h.sigma(c, d)) for h, d, c in of])[[r.domain for r in self.requests]]
        return looks[:, 0], looks[:, 1]

    @cached_property
    def _reports(self) -> FloatArray:
        """Reports of length heads by domain and bin of what they see, [domains, bins]."""
        return np.stack([self.head.report(c, d) for d, c in zip(self.domains, self.curves, strict=True)])

    @cached_property
    def _sigma(self) -> FloatArray:
        """Standard deviation of what heads see of each request, tokens, [requests]."""
        of_domain = np.array([self.head.sigma(c, d) for d, c in zip(self.domains, self.curves, strict=True)])
        return of_domain[[r.domain for r in self.requests]]

    @cached_property
    def _bins_from(self) -> float:
        return float(self.head.bins(self.curves[0].size)[0])
