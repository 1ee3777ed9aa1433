"""How likely recorded rounds are under a text: what spread, correlation and range are told by.

Every token is tested at most once (a round ends at the first draft that is wrong, the next one starts there), so the own
luck of tokens integrates out and what rounds see is a hidden Markov chain: the request's level and the shared hardness,
both on a grid. Its likelihood of whole sequences of rounds needs no approximation beyond the grid; censored rounds
(everything verified was accepted) are counted as what they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from scipy.special import ndtr, ndtri

from adasim.types import FloatArray, IntArray

HARDNESS = np.linspace(-4.0, 4.0, 21)
LEVELS = np.linspace(-3.0, 3.0, 13)
LIMIT = 8.0  # thresholds lie within +- this
MOST_ROUNDS, SETTLED = 200, 1e-8  # until starts of rounds no longer change, in probability
MOST_TOKENS = 64  # of an answer, whose positions are looked at one by one


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a text: shares of the hardness variance, and the range in tokens. See ``calibration.text``."""

    spread: float
    correlation: float
    range_tokens: float


@dataclass(frozen=True, slots=True)
class Sequences:
    """Rounds of one domain in order of requests.

    Attributes:
        accepted: drafts accepted, [requests, rounds]; -1 = no such round.
        verify_len: tokens verified, the anchor counted, [requests, rounds].
    """

    accepted: IntArray
    verify_len: IntArray


class TextModel:
    """The chain of one shape of text.

    Args:
        shape: spread, correlation and range.
    """

    def __init__(self, shape: Shape) -> None:
        levels = LEVELS if shape.spread > 1e-9 else np.zeros(1)
        share = np.exp(-(levels**2) / 2)
        self.share = share / share.sum()  # [r]
        phi = float(np.exp(-1 / shape.range_tokens))
        move = np.exp(-(((HARDNESS[None, :] - phi * HARDNESS[:, None]) ** 2) / (1 - phi**2)) / 2)
        self.move = move / move.sum(axis=1, keepdims=True)  # [x, x]
        self.shift = np.sqrt(shape.spread) * levels[:, None] + np.sqrt(shape.correlation) * HARDNESS[None, :]
        self.scale = float(np.sqrt(1 - shape.spread - shape.correlation))
        start = np.exp(-(HARDNESS**2) / 2)
        self.start = np.tile(start / start.sum(), (len(levels), 1))  # [r, x]

    def accept(self, threshold: float) -> FloatArray:
        """P(draft accepted | state of its token), [r, x]."""
        accepted: FloatArray = ndtr((threshold - self.shift) / self.scale)
        return accepted

    def solve(self, hazards: FloatArray, rounds: Mapping[int, float], tokens: float = inf) -> FloatArray:
        """Thresholds by distance, [K], under which rounds have these rates of acceptance.

        Args:
            hazards: P(draft d accepted | those before it were, and it was verified), pooled over the rounds, [K].
            rounds: verify_len -> how many rounds of runs that always verify so much.
            tokens: mean answer behind the prefill's token, in which the rounds were; infinite: they are settled.
        """
        thresholds = np.clip(ndtri(np.clip(hazards, 1e-6, 1 - 1e-6)), -LIMIT, LIMIT)
        for _ in range(40):
            before = thresholds.copy()
            alive = {v: n * self.starts(thresholds[: v - 1], tokens) for v, n in rounds.items()}
            for d in range(len(hazards)):
                here = {v: alive[v] @ self.move for v in rounds if v > d + 1}
                if not here:
                    break
                thresholds[d] = self._threshold(sum(here.values()), float(hazards[d]), float(thresholds[d]))
                ok = self.accept(float(thresholds[d]))
                alive |= {v: mass * ok for v, mass in here.items()}
            if np.abs(thresholds - before).max() < 1e-4:
                break
        return thresholds

    def starts(self, thresholds: FloatArray, tokens: float = inf) -> FloatArray:
        """Where rounds with these thresholds start, pooled over answers of ``tokens``, [r, x], 1 in all.

        The first round of an answer starts anywhere; later ones behind a token that was wrong, where text is harder than
        usual. Who accepts less needs more rounds. Positions that a long answer has beyond some are like the ones before.
        """
        ended, complete = self._operators(thresholds)
        moves = np.stack([*ended, complete[-1]])  # [a, r, x, x]: from the start of a round that accepts a to the next
        if tokens == inf:
            return self._settled(moves)
        reach, width = len(moves), len(HARDNESS)
        out = moves.transpose(1, 2, 0, 3).reshape(len(self.share), width, reach * width)
        first = min(max(round(tokens), 1), MOST_TOKENS)
        mass = np.zeros((first + reach, *self.start.shape))
        mass[0] = self.share[:, None] * self.start
        for t in range(first):
            later = (mass[t][:, None, :] @ out).reshape(len(self.share), reach, width)
            mass[t + 1 : t + 1 + reach] += later.transpose(1, 0, 2)
        pooled = mass[:first].sum(axis=0) + max(tokens - first, 0.0) * mass[first - first // 4 - 1 : first].mean(axis=0)
        return np.asarray(pooled / pooled.sum(), dtype=np.float64)

    def _settled(self, moves: FloatArray) -> FloatArray:
        """The same where answers have no end, from what each number accepted does to the state, [a, r, x, x]."""
        step, state = moves.sum(axis=0), self.start
        for _ in range(MOST_ROUNDS):
            before, state = state, (state[:, None, :] @ step)[:, 0]
            state = state / np.maximum(state.sum(axis=1, keepdims=True), 1e-300)
            if np.abs(state - before).max() < SETTLED:
                break
        given = (state[None, :, None, :] @ moves)[:, :, 0].sum(axis=2)  # [a, r]
        share = self.share / (np.arange(1, len(moves) + 1) @ given)  # rounds of each level
        return np.asarray(state * (share / share.sum())[:, None], dtype=np.float64)

    def _threshold(self, here: FloatArray, hazard: float, guess: float) -> float:
        """Where the share ``hazard`` of the mass is accepted: Newton, kept within limits."""
        total, threshold = float(here.sum()), guess
        for _ in range(30):
            z = (threshold - self.shift) / self.scale
            miss = float((here * ndtr(z)).sum()) / total - hazard
            slope = float((here * np.exp(-(z**2) / 2)).sum()) / (total * self.scale * np.sqrt(2 * np.pi))
            step = np.clip(miss / max(slope, 1e-12), -1.0, 1.0)
            threshold = float(np.clip(threshold - step, -LIMIT, LIMIT))
            if abs(step) < 1e-7 or abs(threshold) == LIMIT:
                break
        return threshold

    def survival(self, thresholds: FloatArray, verify_len: int, tokens: float = inf) -> FloatArray:
        """Survival curve of runs that always verify ``verify_len`` tokens, [verify_len - 1].

        Args:
            thresholds: by distance, [K].
            verify_len: of every round.
            tokens: see :meth:`solve`.
        """
        cut = thresholds[: verify_len - 1]
        alive, curve = self.starts(cut, tokens), []
        for threshold in cut.tolist():
            alive = (alive @ self.move) * self.accept(threshold)
            curve.append(alive.sum())
        return np.array(curve)

    def log_likelihood(self, sequences: Sequences, thresholds: FloatArray) -> FloatArray:
        """Of each request's rounds, [requests]."""
        ended, complete = self._operators(thresholds)
        requests, longest = sequences.accepted.shape
        state = np.repeat((self.share[:, None] * self.start)[:, None, :], requests, axis=1)  # [r, requests, x]
        total = np.zeros(requests)
        for j in range(longest):
            accepted, verified = sequences.accepted[:, j], sequences.verify_len[:, j]
            for censored in (False, True):
                operators = complete if censored else ended
                here = (accepted >= 0) & ((accepted == verified - 1) == censored)
                for a in np.unique(accepted[here]):
                    rows = np.flatnonzero(here & (accepted == a))
                    state[:, rows] = state[:, rows] @ operators[a]
            mass = state.sum(axis=(0, 2))
            total += np.log(np.maximum(mass, 1e-300))
            state /= np.maximum(mass, 1e-300)[None, :, None]
        return total

    def _operators(self, thresholds: FloatArray) -> tuple[list[FloatArray], list[FloatArray]]:
        """What a round with ``a`` drafts accepted does to the state, [a] of [r, x, x]: ended by a wrong one; complete."""
        whole = np.repeat(np.eye(len(HARDNESS))[None], len(self.share), axis=0)
        ended, complete = [], []
        for d in range(len(thresholds) + 1):
            moved = whole @ self.move
            complete.append(moved)
            if d < len(thresholds):
                ok = self.accept(float(thresholds[d]))[:, None, :]
                ended.append(moved * (1 - ok))
                whole = moved * ok
        return ended, complete


def settled(curve: FloatArray, shape: Shape, tokens: float) -> FloatArray:
    """The survival of settled full-block rounds, [K], where ``curve`` is that of all rounds of answers of ``tokens``.

    Acceptance models are of settled rounds. Short answers are better: their first round may start anywhere, later ones
    only where a draft was wrong.
    """
    whole, before = {len(curve) + 1: 1.0}, np.concatenate([[1.0], curve[:-1]])
    model = TextModel(shape)
    thresholds = model.solve(np.divide(curve, before, out=np.zeros_like(curve), where=before > 0), whole, tokens)
    later, all_of_them = (model.survival(thresholds, len(curve) + 1, n) for n in (inf, tokens))
    return np.minimum.accumulate(np.clip(curve * later / np.maximum(all_of_them, 1e-300), 0.0, 1.0))


def sequences(accepted: Sequence[IntArray], verify_len: Sequence[IntArray]) -> Sequences:
    """Requests of different numbers of rounds as one array."""
    longest = max(len(a) for a in accepted)
    shape = len(accepted), longest
    a, v = np.full(shape, -1, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    for i, (mine, lengths) in enumerate(zip(accepted, verify_len, strict=True)):
        a[i, : len(mine)], v[i, : len(mine)] = mine, lengths
    return Sequences(a, v)
