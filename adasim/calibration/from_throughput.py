"""What a throughput table says about cost and acceptance, and what it leaves open.

A steady batch of n requests gives n x tau / round seconds tokens per second. As little as plain decoding at a few
loads and one speculative row is enough to start from; what it cannot tell stays as wide as it was believed to be
(``world.BELIEFS``), and so do the intervals. Answers are those of the most probable world; limits come from worlds
drawn in proportion to their probability, the noise of the table included.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from adasim.calibration.randomized import fits, freedom
from adasim.calibration.throughput_table import Row
from adasim.calibration.world import BELIEFS, NAMES, NOISES, Cells, Worlds
from adasim.errors import InputError
from adasim.statistics import CONFIDENCE, Interval
from adasim.types import FloatArray

DRAWS = 400
STARTS = 12  # from which the most probable world is sought
OPEN = 0.8  # a term whose spread is still that share of what was believed was not told by the table
MAX_BATCH = 4096
TERMS = len(NAMES) - len(NOISES)


class Crossover(NamedTuple):
    """From which batch on speculation no longer pays, and the limits of it; inf: at none that was looked at."""

    batch: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Posterior:
    """Worlds in proportion to their probability, given a table; the first is the most probable one."""

    rows: tuple[Row, ...]
    worlds: Worlds
    deviations: FloatArray  # the worlds' standard deviations from what was believed, [n, terms]
    one_pass: bool
    with_context: bool
    rms: float  # relative error of the most probable world on the fitted rows, root mean square
    seed: int

    def tok_s(self, rows: Sequence[Row]) -> list[Interval]:
        """Output tokens per second that would be measured at these rows' batch, length and context."""
        rows = list(rows)
        blind = [r for r in rows if r.tree and r.tau is None]
        if blind:
            raise InputError(f"throughput: a tree of {blind[0].k + 1} tokens needs its accept length")
        return self._intervals(self.worlds.tok_s(self._cells(rows)), "scatter")

    def tau(self, k: Sequence[int]) -> list[Interval]:
        """Tokens per request and round that would be measured with chains of k drafts, the bonus token counted."""
        lengths = np.array(k, dtype=np.float64)
        found = self._intervals(self.worlds.tau(lengths), "tau_scatter")
        return [Interval(i.estimate, max(i.low, 1.0), min(i.high, n + 1.0)) for i, n in zip(found, k, strict=True)]

    def term(self, name: str) -> Interval:
        """One of ``world.BELIEFS``: times in ms, the first acceptance as a probability."""
        values = self.worlds.terms[name]
        if name == "start":
            values = 1 / (1 + np.exp(-values))
        elif name not in {"slope", "sharpness", "share", *NOISES}:
            values = values * self.worlds.ms
        return _limits(values)

    @property
    def knee_tokens(self) -> Interval:
        """Tokens of a pass at which computing takes as long as reading the weights."""
        t = self.worlds.terms
        return _limits((t["base"] + t["experts"]) / t["token"])

    @property
    def left_open(self) -> list[str]:
        """What the table does not tell: terms as uncertain as before."""
        spread = self.deviations[1:].std(axis=0)
        names = [n for n, s in zip(NAMES, spread, strict=True) if s > OPEN and n not in NOISES]
        return [n for n in names if n != "context" or self.with_context]

    def extrapolated(self, row: Row) -> bool:
        """Whether a row lies outside the fitted batches, lengths or contexts."""
        timed = [r for r in self.rows if r.tok_s is not None]

        def outside(value: float, known: list[float]) -> bool:
            return not known or not min(known) <= value <= max(known)

        return (
            outside(row.batch, [r.batch for r in timed])
            or (row.k > 0 and outside(row.k, [0, *(r.k for r in self.rows)]))
            or (self.with_context and outside(row.context or 0, [r.context or 0 for r in timed]))
        )

    def best_k(self, batch: int, lengths: Sequence[int], context: float | None = None) -> tuple[int, float]:
        """The length with the most tokens per second at this batch, and in what share of the worlds it is the best."""
        rate = self.worlds.tok_s(self._cells([Row(batch, k, context=context) for k in lengths]))
        best = int(rate[0].argmax())
        return lengths[best], float((rate[1:].argmax(axis=1) == best).mean())

    def crossover(self, k: int, context: float | None = None, limit: int = MAX_BATCH) -> Crossover:
        """The smallest batch up to ``limit`` at which k drafts are no faster than plain decoding.

        Speculation may pay again beyond it (mixtures of experts); ``tok_s`` tells.
        """
        batches = np.unique(np.geomspace(1, limit, 121).round()).astype(int)
        both = [Row(int(b), n, context=context) for n in (0, k) for b in batches]
        rate = self.worlds.tok_s(self._cells(both))
        loses = rate[:, len(batches) :] <= rate[:, : len(batches)]
        first = np.where(loses.any(axis=1), batches[loses.argmax(axis=1)], np.inf)
        tail = (1 - CONFIDENCE) / 2
        low, high = np.quantile(first[1:], [tail, 1 - tail], method="nearest").tolist()
        return Crossover(float(first[0]), low, high)

    def _cells(self, rows: list[Row]) -> Cells:
        if self.with_context and any(r.context is None for r in rows):
            raise InputError("throughput: this table was measured at several contexts; say at which")
        return Cells.of(rows if self.with_context else _without_context(rows), one_pass=self.one_pass)

    def _intervals(self, values: FloatArray, noise_of: str) -> list[Interval]:
        """Limits of what would be measured, from values of every world, [n, c]."""
        noise = np.random.default_rng(self.seed).standard_normal(values[1:].shape)
        seen = values[1:] * np.exp(self.worlds.terms[noise_of][1:, None] * noise)
        return [_limits(np.concatenate([values[:1, i], seen[:, i]])) for i in range(values.shape[1])]


def fit_throughput_table(rows: Sequence[Row], *, one_pass: bool = False, seed: int = 0, draws: int = DRAWS) -> Posterior:
    """Worlds that explain a table.

    Args:
        rows: with ``tok_s``, ``tau`` or both; rows with tau alone tell of acceptance.
        one_pass: the drafter fills its block in one pass (DFlash), whatever the length.
        seed: of the draws.
        draws: behind the limits; the most probable world needs none.

    Raises:
        InputError: nothing about speculation, contexts missing, or a tree without its accept length.
    """
    rows = tuple(rows)
    contexts = {r.context for r in rows if r.tok_s is not None}
    problems = []
    if not any(r.k for r in rows):
        problems.append("throughput: no row with drafts (k > 0): nothing is said about speculation")
    if any(r.tok_s is None and r.tau is None for r in rows):
        problems.append("throughput: a row needs tok_s or an accept length")
    if any(r.tree and r.tau is None for r in rows):
        problems.append("throughput: a tree needs its accept length")
    if len(contexts) > 1 and None in contexts:
        problems.append("throughput: some rows tell their context, others do not")
    if problems:
        raise InputError(*problems)
    with_context = len(contexts) > 1
    table = _Table(list(rows) if with_context else _without_context(rows), one_pass)
    rng = np.random.default_rng(seed)
    best = table.most_probable(rng)
    deviations = np.vstack([best, table.draw(best, rng, draws)])
    return Posterior(
        rows,
        Worlds.at(deviations, table.ms),
        deviations,
        one_pass,
        with_context,
        rms=float(np.sqrt(np.mean(table.miss(best[None]) ** 2))),
        seed=seed,
    )


class _Table:
    """The rows as a likelihood."""

    def __init__(self, rows: list[Row], one_pass: bool) -> None:
        timed = [r for r in rows if r.tok_s is not None]
        # a measured tau is what that row's rounds gave
        self._cells = Cells.of(timed, one_pass=one_pass, taus=[r.tau if r.k else 1.0 for r in timed])
        self._log_tok_s = np.log([r.tok_s for r in timed if r.tok_s is not None])
        accepted = [r for r in rows if r.k and not r.tree and r.tau is not None]
        self._k = np.array([r.k for r in accepted], dtype=np.float64)
        self._log_tau = np.log([r.tau for r in accepted if r.tau is not None])
        guess = [1e3 * r.batch * (r.tau or _usual_tau(r.k)) / r.tok_s for r in timed if r.tok_s is not None]
        self.ms = min(guess, default=1.0)

    def miss(self, z: FloatArray) -> FloatArray:
        """log(world / measured), [n, tok_s and tau]."""
        worlds = Worlds.at(z, self.ms)
        return np.hstack(
            [
                np.log(worlds.tok_s(self._cells)) - self._log_tok_s,
                np.log(worlds.tau(self._k)) - self._log_tau,
            ]
        )

    def most_probable(self, rng: np.random.Generator) -> FloatArray:
        """The deviations of the most probable world, [terms]; noise is as believed."""
        starts = np.vstack([np.zeros((1, TERMS)), rng.standard_normal((STARTS - 1, TERMS))])
        noise = np.tile(self._noise(np.zeros((1, len(NOISES)))), (STARTS, 1))
        # first anywhere near each start, then the same problem for all
        near, _ = fits(self._fitted, starts, np.zeros_like(noise), noise)
        found, cost = fits(self._fitted, np.zeros_like(starts), np.zeros_like(noise), noise, start=near)
        return np.append(found[cost.argmin()], np.zeros(len(NOISES)))

    def draw(self, best: FloatArray, rng: np.random.Generator, draws: int) -> FloatArray:
        """Deviations of worlds in proportion to their probability, [draws, terms]."""
        noises = self._draw_noises(best, rng, draws)
        noise = self._noise(noises)
        goal = noise * rng.standard_normal(noise.shape)
        found, _ = fits(self._fitted, rng.standard_normal((draws, TERMS)), goal, noise)
        return np.hstack([found, noises])

    def _draw_noises(self, best: FloatArray, rng: np.random.Generator, draws: int) -> FloatArray:
        """Deviations of the noises, [draws, noises], given what the most probable world leaves unexplained."""
        noise = self._noise(best[None, TERMS:])[0]
        free = freedom(self._fitted, best[:TERMS], noise) / len(noise)
        miss = np.split(self._fitted(best[None, :TERMS])[0], [len(self._log_tok_s)])
        grid = np.linspace(-3, 3, 121)
        columns = []
        for name, part in zip(NOISES, miss, strict=True):
            size = BELIEFS[name].centre * np.exp(BELIEFS[name].spread * grid)
            log = -0.5 * grid**2 - free * len(part) * np.log(size) - 0.5 * (part**2).sum() / size**2
            chance = np.exp(log - log.max())
            columns.append(rng.choice(grid, size=draws, p=chance / chance.sum()))
        return np.column_stack(columns)

    def _fitted(self, z: FloatArray) -> FloatArray:
        """:meth:`miss` without the noises among the terms."""
        return self.miss(np.hstack([z, np.zeros((len(z), len(NOISES)))]))

    def _noise(self, deviations: FloatArray) -> FloatArray:
        """Noise of every row's tok_s, then of every tau, [n, tok_s and tau]."""
        counts = len(self._log_tok_s), len(self._log_tau)
        sizes = [BELIEFS[n].centre * np.exp(BELIEFS[n].spread * d) for n, d in zip(NOISES, deviations.T, strict=True)]
        return np.hstack([np.tile(s[:, None], (1, c)) for s, c in zip(sizes, counts, strict=True)])


def _usual_tau(k: int) -> float:
    """tau where each draft is accepted with chance 0.7; only sets a unit."""
    return (1 - 0.7 ** (k + 1)) / 0.3


def _without_context(rows: Sequence[Row]) -> list[Row]:
    return [r._replace(context=None) for r in rows]


def _limits(values: FloatArray) -> Interval:
    """The first value, and the limits of the others, [n]."""
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(values[1:], [tail, 1 - tail]).tolist()
    return Interval(float(values[0]), low, high)
