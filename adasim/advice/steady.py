"""Draft lengths by formula: a batch that decodes steadily, in the most probable world and in others."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan

import numpy as np
import pandas as pd

from adasim.advice.known import Known
from adasim.calibration.acceptance import AcceptanceModel, CurveAcceptance
from adasim.calibration.adjust import DEFAULTS, Adjust
from adasim.calibration.cost import CostModel
from adasim.calibration.survival import harden
from adasim.errors import InputError
from adasim.exports.best_k import rates, tokens_per_round
from adasim.statistics import CONFIDENCE
from adasim.types import FloatArray

NORMAL = 1.96
MOVED = ("verify", "draft", "overhead", "acceptance")  # inputs that a steady batch depends on
WORLDS = 60
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (512, 2048, 8192, 32768)


@dataclass(frozen=True, slots=True)
class World:
    """One possible truth."""

    cost: CostModel
    acceptance: AcceptanceModel
    mix: dict[str, float]  # of requests by domain
    max_draft_len: int
    one_pass: bool

    def tau(self, context: float) -> FloatArray:
        """Tokens per request and round of 0, 1, ... drafts, [max_draft_len + 1]; of all domains together."""
        model = self.acceptance
        if not isinstance(model, CurveAcceptance):
            raise InputError("acceptance is a recording: no formula tells the best length")
        curves = [model.survival(domain, self.max_draft_len) for domain in self.mix]
        if model.tau_by_context:
            at = sorted(model.tau_by_context)
            factor = float(np.interp(context, at, [model.tau_by_context[c] for c in at]))
            curves = [harden(curve, factor) for curve in curves]
        weights = np.array(list(self.mix.values()))
        return tokens_per_round(np.array(curves), weights / weights.sum())

    def tok_s(self, batch: int, context: float) -> FloatArray:
        """Output tokens per second of 0 (no drafter loaded), 1, ... drafts, [max_draft_len + 1]; NaN beyond what was
        measured.
        """
        found = rates(self.cost, self.tau(context), [batch], context, draft_block=self.one_pass)
        if not found:
            return np.full(self.max_draft_len + 1, nan)
        tok_s = found[0].tok_s.copy()
        if not np.isnan(tok_s[0]):
            tok_s[0] = batch / self.cost.step(batch, 0, batch, context, drafter_loaded=False).total
        return tok_s


def worlds_of(known: Known, mix: dict[str, float], count: int = WORLDS, seed: int = 0) -> list[World]:
    """The most probable world first, then ``count`` others in proportion to their probability.

    Of a fit to throughput: its own draws. Of a profile: times and tau moved by its stated uncertainties (defaults where
    it states none), normal and independent; values that cannot be are left out.
    """
    profile, posterior = known.profile, known.posterior
    rest = mix, known.max_draft_len, known.one_pass
    first = World(profile.cost, profile.acceptance, *rest)
    if posterior is not None:
        tokens = [r.tokens for r in posterior.rows if r.tok_s is not None]
        return [first] + [
            World(
                posterior.worlds.cost(
                    i,
                    fitted_tokens=[min(tokens), max(tokens)],
                    one_pass=posterior.one_pass,
                    with_context=posterior.with_context,
                ),
                CurveAcceptance(curves={"default": posterior.worlds.curve(i)}),
                *rest,
            )
            for i in range(1, min(count, len(posterior.deviations) - 1) + 1)
        ]
    rng = np.random.default_rng(seed)
    found = [first]
    for _ in range(count):
        factors = {}
        for name in MOVED:
            stated = getattr(profile.uncertainty, name)
            size = getattr(DEFAULTS, name) if stated is None else stated
            factors[name] = float(np.clip(1 + size * rng.standard_normal() / NORMAL, 0.05, 3.0))
        moved = Adjust(**factors)
        try:
            world = World(moved.cost(profile.cost), moved.luck(profile.acceptance), *rest)
            world.tau(1.0)
        except InputError:
            continue
        found.append(world)
    return found


def best_lengths(worlds: Sequence[World], batches: Sequence[int], contexts: Sequence[float]) -> pd.DataFrame:
    """A row a batch and context: the length with the most tokens per second, and in what limits it lies.

    Columns: batch, context, k (0 = plain decoding, no drafter loaded), k_low and k_high (95 % of the worlds), sure
    (share of the worlds with that very k), gain over plain decoding and its limits, best_drafts (the best length of at
    least 1). Empty where acceptance is a recording.
    """
    tail = 50 * (1 - CONFIDENCE)
    rows: list[dict[str, float]] = []
    if not isinstance(worlds[0].acceptance, CurveAcceptance):
        return pd.DataFrame()  # a recording: no formula
    for context in contexts:
        for batch in batches:
            rates = [w.tok_s(batch, context) for w in worlds]
            if np.isnan(rates[0]).all():
                continue
            best = [int(np.nanargmax(r)) for r in rates if not np.isnan(r).all()]
            gains = [float(np.nanmax(r) / r[0] - 1) for r in rates if not np.isnan(r).all()]
            others = best[1:] or best
            low, high = np.percentile(others, [tail, 100 - tail], method="nearest")
            least, most = np.percentile(gains[1:] or gains, [tail, 100 - tail])
            drafts = rates[0][1:]
            rows.append(
                {"batch": batch, "context": context, "k": best[0], "k_low": int(low), "k_high": int(high)}
                | {"sure": float(np.mean([k == best[0] for k in others])), "gain": gains[0]}
                | {"gain_low": float(least), "gain_high": float(most)}
                | {"best_drafts": 0 if np.isnan(drafts).all() else 1 + int(np.nanargmax(drafts))}
            )
    return pd.DataFrame(rows)


def context_matters(worlds: Sequence[World], batch: int) -> bool:
    """Whether the data say that context changes what a round costs or accepts."""
    short, long = (worlds[0].tok_s(batch, c)[0] for c in (CONTEXTS[0], CONTEXTS[-1]))
    return bool(np.isnan(long) or abs(long / short - 1) > 1e-6)
