"""How well a drafter's confidences know L, and how far they are off, from their sums and what was then accepted."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import minimize

from adasim.calibration.estimate.head import LEAST_ROUNDS, MOST_ROUNDS
from adasim.calibration.estimate.head_likelihood import BIAS, NOISE, ODD, HeadLikelihood
from adasim.calibration.estimate.head_reports import Seen, quantiles_of, seen_in
from adasim.calibration.estimate.part import FittedPart, interval, residual, weights
from adasim.calibration.estimate.recording import RecordedTrial, at_most, max_draft_len, rounds_with
from adasim.calibration.head_quality import SIGNAL_MARGIN, Confidence, HeadQuality
from adasim.types import FloatArray

LEAST_TEXTS = 5  # of a domain
LOOKS = 300  # that the distribution of sums is computed for
CLOSE = 0.01  # of bias and of the logarithm of noise: far less than their intervals
LEAST_GAP = 1e-9  # between sums of neighbouring looks
LEVELS = np.linspace(0.025, 0.975, 20)  # quantiles of sums that the report shows
BINS = 8  # of sums, equally many rounds each, that the report shows
DRAWS = 50


def fit_confidence(
    trials: Sequence[RecordedTrial], seed: int = 0, survival: Mapping[str, FloatArray] | None = None
) -> FittedPart[dict[str, Confidence]]:
    """What confidences know and claim by domain; domains with too few rounds are left out, with a note.

    Records hold the sum of a round's confidence curve. What it knows is told by its rank and by what was accepted behind
    it, which the verified length censors, as for a head whose reports are taken as seen. What it claims is the noise and
    bias under which the sums are likeliest. Lengths that follow the confidences censor no differently given them, so
    rounds of policies that read them count. Those that drafted less than a full block do not, nor those of a drafter that
    has learned since. A curve may know more than its sum does, so that its noise is rather less than found.

    Args:
        trials: recorded.
        seed: of the bootstrap.
        survival: of full blocks by domain, [K] each, that the simulator will use; where there is none, the distribution
            of L is estimated with the rest.
    """
    rounds = rounds_with(trials, "confidence")
    if rounds.empty:
        return FittedPart({}, notes=["confidence: no round asked for it; it is taken to know what the length head knows"])
    depth = max_draft_len(trials)
    rounds, notes = _enough(rounds[_comparable(rounds, depth)])
    part: FittedPart[dict[str, Confidence]] = FittedPart({}, notes=notes)
    if rounds.empty:
        return part
    rounds = at_most(rounds, MOST_ROUNDS, seed)
    likelihood = _likelihood(rounds, depth, survival)
    seen = seen_in(_as_reports(rounds), likelihood)
    share, sums = rounds["share"].to_numpy(), rounds["confidence"].to_numpy()
    part.model = _found(seen, likelihood, sums, share)
    text, names = pd.factorize(rounds["text"])
    drawn = weights(len(names), seed, DRAWS)[:, text]
    again = [_found(seen, likelihood, sums, w * share, part.model) for w in drawn]
    for d, (name, at) in enumerate(part.model.items()):
        texts = len(np.unique(text[seen.domain == d]))
        how = f"sums of {int((seen.domain == d).sum())} rounds, bootstrap over {texts} requests"
        for field, limits in (("noise", NOISE), ("claims", NOISE), ("bias", BIAS)):
            draws = np.array([getattr(one[name], field) for one in again])
            part.intervals[f"confidence.{field}.{name}"] = interval(getattr(at, field), draws, texts, how, limits)
    part.counts["confidence rounds"] = len(rounds)
    part.ranges["confidence"] = float(sums.min()), float(sums.max())
    part.points["confidence"] = _accepted(rounds, seen, likelihood)
    part.points["confidence sums"] = _quantiles(part.model, likelihood, rounds)
    off = (1 + part.points["confidence"]["expected"]) / (1 + part.points["confidence"]["accepted"]) - 1
    part.residuals.append(residual("confidence", "emitted tokens by sum", off.to_numpy()))
    return part


def confidence_of(rounds: pd.DataFrame, depth: int, survival: Mapping[str, FloatArray]) -> dict[str, Confidence]:
    """The confidences of a few recorded rounds, as :func:`fit_confidence` finds them, in domains that have enough.

    Args:
        rounds: ``RoundRecord`` columns, whatever chose their lengths.
        depth: K.
        survival: of full blocks by domain, [K] each.
    """
    known = rounds[rounds["confidence"].notna() & _comparable(rounds, depth)]
    known, _ = _enough(known.assign(share=1.0, text=known["request"]))
    if known.empty:
        return {}
    likelihood = _likelihood(known, depth, survival)
    seen = seen_in(_as_reports(known), likelihood)
    return _found(seen, likelihood, known["confidence"].to_numpy(), known["share"].to_numpy())


def _comparable(rounds: pd.DataFrame, depth: int) -> "pd.Series[bool]":
    """Sums of full blocks, of the drafter as loaded."""
    return (rounds["draft_len"] == depth) & (rounds["draft_version"] == 0)


def _enough(rounds: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Rounds of domains with enough of them, and a note on every other."""
    by_domain = rounds.groupby("domain")
    count, texts = by_domain.size(), by_domain["text"].nunique()
    good = (count >= LEAST_ROUNDS) & (texts >= LEAST_TEXTS)
    notes = [
        f"confidence: {count[d]} rounds of {texts[d]} requests of {d} are too few; there it is taken to know what the "
        "length head knows"
        for d in good.index[~good]
    ]
    return rounds[rounds["domain"].isin(good.index[good])], notes


def _as_reports(rounds: pd.DataFrame) -> pd.DataFrame:
    """Sums in the place of reports of a length head, the anchor counted."""
    return rounds.assign(accept_len=1 + rounds["confidence"])


def _likelihood(rounds: pd.DataFrame, depth: int, survival: Mapping[str, FloatArray] | None) -> HeadLikelihood:
    likelihood = HeadLikelihood(_as_reports(rounds), depth, survival)
    if set(likelihood.names) - set(survival or {}):
        likelihood.fit("mean")  # learns the distribution of L with the rest
    return likelihood


def _found(
    seen: Seen,
    likelihood: HeadLikelihood,
    sums: FloatArray,
    weight: FloatArray,
    start: Mapping[str, Confidence] | None = None,
) -> dict[str, Confidence]:
    """By domain, where rounds count so often, [rounds]; a domain of which none counts is as at the ``start``."""
    found = {}
    for d, (name, noise) in enumerate(zip(seen.domains, seen.noises(weight).tolist(), strict=True)):
        mine, begin = seen.domain == d, Confidence(noise=round(noise, 4)) if start is None else start[name]
        if weight[mine].any():
            claims, bias = _claims(sums[mine], weight[mine], likelihood.masses[d], begin)
            begin = Confidence(noise=round(noise, 4), claims=round(claims, 4), bias=round(bias, 4))
        found[name] = begin
    return found


def _claims(sums: FloatArray, weight: FloatArray, mass: FloatArray, start: Confidence) -> tuple[float, float]:
    """Noise and bias under which curves are likeliest to have these sums; one in a hundred may be anything.

    Args:
        sums: of curves, [rounds].
        weight: how often each counts, [rounds].
        mass: P(L = l), [K + 1].
        start: where to begin.
    """

    def at(x: FloatArray) -> tuple[float, float]:
        return float(np.clip(np.exp(x[0]), *NOISE)), float(np.clip(x[1], *BIAS))

    def unlikely(x: FloatArray) -> float:
        noise, bias = at(x)
        looks, rank = _looks(noise, mass)
        edges = _sums(looks + bias, noise, mass)
        place = np.searchsorted(edges, sums, side="right") - 1
        inside = (place >= 0) & (place < LOOKS)
        density = np.diff(rank) / np.maximum(np.diff(edges), LEAST_GAP)
        like = (1 - ODD) * np.where(inside, density[place.clip(0, LOOKS - 1)], 0.0) + ODD / len(mass)
        return -float(weight @ np.log(like))

    first = np.array([np.log(start.claims or start.noise), start.bias])
    simplex = first + np.array([[0.0, 0.0], [0.2, 0.0], [0.0, 0.2]])
    options: Any = {"xatol": CLOSE, "fatol": 0.1, "initial_simplex": simplex}
    return at(minimize(unlikely, first, method="Nelder-Mead", options=options).x)


def _looks(noise: float, mass: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Looks, and the share of all looks below each, [LOOKS + 1] each."""
    head, survival = HeadQuality(noise=noise, reports="mean"), 1 - np.cumsum(mass)[:-1]
    reach = SIGNAL_MARGIN * head.sigma(survival)
    looks = np.linspace(-reach, len(survival) + reach, LOOKS + 1)
    return looks, head.rank(survival, looks)


def _sums(looks: FloatArray, noise: float, mass: FloatArray) -> FloatArray:
    head = HeadQuality(noise=noise, reports="mean")
    return np.asarray(head.posterior(1 - np.cumsum(mass)[:-1], looks).sum(axis=1), dtype=np.float64)


def _accepted(rounds: pd.DataFrame, seen: Seen, likelihood: HeadLikelihood) -> pd.DataFrame:
    """By domain and sum: what was accepted, and what the fit expects of rounds cut as these were."""
    cut = np.minimum(likelihood.run, rounds["verify_len"].to_numpy()[:, None] - 1)
    table = pd.DataFrame(
        {
            "domain": rounds["domain"].to_numpy(),
            "sum": rounds["confidence"].to_numpy(),
            "accepted": rounds["accepted"].to_numpy(),
            "expected": (seen.believed * cut).sum(axis=1),
            "censored": (rounds["accepted"] == rounds["verify_len"] - 1).to_numpy(),
        }
    )
    place = table.groupby("domain")["sum"].transform(lambda s: pd.qcut(s, BINS, labels=False, duplicates="drop"))
    means = table.groupby(["domain", place.rename("place")]).agg(
        sum=("sum", "mean"), accepted=("accepted", "mean"), expected=("expected", "mean"),
        censored=("censored", "mean"), count=("sum", "size"),
    )  # fmt: skip
    return means.reset_index().drop(columns="place")


def _quantiles(model: Mapping[str, Confidence], likelihood: HeadLikelihood, rounds: pd.DataFrame) -> pd.DataFrame:
    """Quantiles of sums by domain, recorded and as the simulator reports them."""
    parts = []
    for (name, at), mass in zip(model.items(), likelihood.masses, strict=True):
        claims = at.claims or at.noise
        looks, rank = _looks(claims, mass)
        fitted = np.interp(LEVELS, rank, _sums(looks + at.bias, claims, mass))
        mine = rounds[rounds["domain"] == name]
        seen = quantiles_of(mine["confidence"].to_numpy(), mine["share"].to_numpy(), LEVELS)
        parts.append(pd.DataFrame({"domain": name, "share": LEVELS, "recorded": seen, "fitted": fitted}))
    return pd.concat(parts, ignore_index=True)
