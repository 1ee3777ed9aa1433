"""Acceptance of recorded runs: survival by domain, how requests differ, how rounds hang together."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from adasim.calibration.acceptance import CurveAcceptance
from adasim.calibration.estimate.effects import by_context, by_temperature
from adasim.calibration.estimate.part import FittedPart, interval, residual, weights
from adasim.calibration.estimate.recording import RecordedTrial, max_draft_len, natural, rounds_of
from adasim.calibration.estimate.text_model import Shape, TextModel, sequences, settled
from adasim.calibration.estimate.text_shape import Posterior, Told, low_limit, posterior
from adasim.calibration.interval import Estimate
from adasim.calibration.survival import AnyCurve, Measured
from adasim.errors import InputError
from adasim.types import FloatArray

LEAST_AT_RISK = 10  # drafts that could have been accepted; with fewer a position counts as unknown
LEAST_WHOLE = 300  # full-block rounds with which their own survival needs no model
MOST_REQUESTS = 160  # of a domain, whose sequences are looked at
LEAST_REQUESTS = 8  # in all, to tell how requests differ
MODEL_DRAWS = 100


@dataclass(frozen=True, slots=True)
class _Counts:
    """Of one domain: how often a draft was verified behind accepted ones, and accepted, of each text.

    Runs of one length that answer the same text count once together: which prompts were repeated is the design's doing.
    """

    at_risk: FloatArray  # [texts, K]
    survived: FloatArray  # [texts, K]
    whole_at_risk: FloatArray  # [texts, K] of full blocks only
    whole_survived: FloatArray  # [texts, K]
    rounds: dict[int, float]  # verify_len -> rounds
    known: int  # positions that are identified
    tokens: float  # mean answer behind the prefill's token

    @property
    def direct(self) -> bool:
        """Enough full blocks to read survival off them, also where it is next to nothing."""
        return bool(self.whole_at_risk[:, 0].sum() >= LEAST_WHOLE)

    @property
    def cut(self) -> bool:
        """Most rounds did not verify what follows the last known position; else drafts rarely get there."""
        reach = sum(n for v, n in self.rounds.items() if v > self.known + 1)
        return reach < sum(self.rounds.values()) / 2

    def hazards(self, w: FloatArray | None = None) -> FloatArray:
        """P(draft d accepted | those before were, and it was verified) where texts count so often, [known]."""
        return _rates(self.at_risk, self.survived, w)[: self.known]

    def whole_curve(self, w: FloatArray | None = None) -> FloatArray:
        """Survival of full blocks where texts count so often, [K]."""
        return np.cumprod(_rates(self.whole_at_risk, self.whole_survived, w), dtype=np.float64)


def _rates(at_risk: FloatArray, survived: FloatArray, w: FloatArray | None) -> FloatArray:
    n, s = (a.sum(axis=0) if w is None else w @ a for a in (at_risk, survived))
    return np.asarray((s + 0.5) / (n + 1), dtype=np.float64)


def fit_acceptance(trials: Sequence[RecordedTrial], seed: int = 0) -> FittedPart[CurveAcceptance]:
    """Survival curves, spread, correlation, range, and the effect of context and temperature.

    Only rounds whose verify length was not chosen by a look at their drafts count: those of fixed lengths, and those
    drawn by chance to be verified in full. A round whose drafts were all accepted is censored: what was cut off may have
    been good. Positions are counted among those that reach them (Kaplan-Meier).

    Raises:
        InputError: no such rounds.
    """
    rounds, notes = _unbiased(trials)
    as_loaded = rounds["draft_version"] == 0
    if not as_loaded.all() and as_loaded.sum() >= LEAST_WHOLE:
        rounds = rounds[as_loaded]
        notes.append("acceptance: of the drafter as loaded; later versions are in the learning curves")
    elif not as_loaded.all():
        notes.append("acceptance: pooled over drafter versions, too few rounds are of the drafter as loaded")
    rounds = rounds.assign(share=1 / rounds.groupby(["text", "fixed_len"])["trial"].transform("nunique"))
    depth = max_draft_len(trials)
    domains = list(dict.fromkeys(sorted(rounds["domain"])))
    counts = {d: _count(rounds[rounds["domain"] == d], depth) for d in domains}
    told = {d: _told(rounds[rounds["domain"] == d], counts[d], seed) for d in domains}
    with_order = [t for t in told.values() if t is not None]
    requests = sum(len(np.unique(t.texts)) for t in with_order)
    found = posterior(with_order, seed) if requests >= LEAST_REQUESTS else None
    shape = found.mean() if found else Shape(0.0, 0.0, 3.0)
    if found is None:
        notes.append(f"acceptance: {requests} requests are too few to tell how requests differ and rounds hang together")
    part: FittedPart[CurveAcceptance] = FittedPart(CurveAcceptance(curves={"-": Measured(values=[0.5])}), notes=notes)
    curves: dict[str, AnyCurve] = {}
    widths = []
    for d in domains:
        curve, width, at_lengths = _domain(part, d, counts[d], depth, shape, found, seed)
        curves[d] = Measured(values=curve.tolist())
        widths.append(width)
        _compare(part, d, rounds[rounds["domain"] == d], at_lengths)
    part.intervals |= _shape_intervals(found, shape, requests, seed)
    context = by_context(rounds, seed)
    temperature = by_temperature([trials[i] for i in sorted(rounds["trial"].unique())], rounds, seed)
    for effect in (context, temperature):
        part.notes += effect.notes
        part.intervals |= effect.intervals
        part.points |= effect.points
    part.model = CurveAcceptance(
        curves=curves,
        spread=round(shape.spread, 6),
        correlation=round(shape.correlation, 6),
        range_tokens=shape.range_tokens,
        tau_by_context=context.factors or None,
        temperature=temperature.base,
        tau_by_temperature=temperature.factors or None,
    )
    misfit = [r.error for r in part.residuals if r.part == "acceptance"]
    part.error = float(np.hypot(max(widths), np.mean(misfit) if misfit else 0.0))
    part.ranges = {
        "verify_len": (float(rounds["verify_len"].min()), float(rounds["verify_len"].max())),
        "acceptance context": (float(rounds["context"].min()), float(rounds["context"].max())),
        "temperature": temperature.seen,
    }
    part.counts = {"acceptance rounds": len(rounds), "acceptance requests": int(rounds["text"].nunique())}
    return part


def _unbiased(trials: Sequence[RecordedTrial]) -> tuple[pd.DataFrame, list[str]]:
    """Rounds whose lengths say nothing about their drafts, and what was left out."""
    rounds, notes = rounds_of(trials), list[str]()
    kinds = natural(trials)
    lost = sorted({t.label for t in kinds if t.choice != "fixed"})
    if not rounds.empty:
        rounds = rounds[rounds["verify_len"] > 1]
    if rounds.empty:
        rounds = rounds_of(trials, ("fixed", "adaptive"))
        rounds = rounds[rounds["verify_len"] > 1] if not rounds.empty else rounds
        if rounds.empty:
            why = "all acceptance was by decree" if not kinds else "no rounds of fixed length or drawn in full"
            if kinds and all(t.records.rounds is None for t in kinds):
                why = "rounds.parquet is missing"
            raise InputError(
                f"acceptance: {why}; record natural runs of a fixed length, the full block best, or with "
                "backend.opd.full_verify_share"
            )
        notes.append(
            "acceptance: only rounds of policies that follow earlier rounds were there; survival may be biased by what "
            "they chose"
        )
        lost = sorted({t.label for t in kinds if t.choice == "informed"})
    if lost:
        notes.append(
            f"acceptance: rounds of {', '.join(lost)} are left out of survival: where lengths follow what is seen of the "
            "drafts, what is cut off differs from what is verified"
        )
    return rounds, notes


def _count(rounds: pd.DataFrame, depth: int) -> _Counts:
    text, names = pd.factorize(rounds["text"])
    accepted, verified = rounds["accepted"].to_numpy(), rounds["verify_len"].to_numpy()
    share = rounds["share"].to_numpy()[:, None]
    d = np.arange(1, depth + 1)
    at_risk = (accepted[:, None] >= d - 1) & (verified[:, None] > d)
    survived = at_risk & (accepted[:, None] >= d)
    whole = (verified == depth + 1)[:, None]

    def by_text(flags: "np.ndarray[tuple[int, int], np.dtype[np.bool_]]") -> FloatArray:
        out = np.zeros((len(names), depth))
        np.add.at(out, text, share * flags)
        return out

    by_len = {int(str(v)): float(n) for v, n in pd.Series(share[:, 0]).groupby(verified).sum().items()}
    enough = at_risk.sum(axis=0) >= LEAST_AT_RISK
    known = int(depth if enough.all() else np.argmin(enough))
    return _Counts(
        by_text(at_risk), by_text(survived), by_text(at_risk & whole), by_text(survived & whole), by_len, max(known, 1),
        float(rounds.groupby("life")["answer"].first().mean()) - 1,
    )  # fmt: skip


def _told(rounds: pd.DataFrame, counts: _Counts, seed: int) -> Told | None:
    """Sequences of runs of fixed lengths, in order; None = there are none.

    What lies beyond the known positions is taken for not verified: the few blocks that get there are censored.
    """
    rounds = rounds[rounds["fixed_len"] > 1]
    first = rounds.groupby(["text", "fixed_len"])["life"].transform("first")
    rounds = rounds[rounds["life"] == first]  # the same text cut alike tells the same again
    lives = rounds["life"].unique()
    if not len(lives):
        return None
    if len(lives) > MOST_REQUESTS:
        lives = np.random.default_rng(seed).choice(lives, MOST_REQUESTS, replace=False)
        rounds = rounds[rounds["life"].isin(lives)]
    groups = [g for _, g in rounds.groupby("life", sort=False)]
    accepted = [g["accepted"].to_numpy().clip(max=counts.known) for g in groups]
    order = sequences(accepted, [g["verify_len"].to_numpy().clip(max=counts.known + 1) for g in groups])
    lengths = {v: n for v, n in counts.rounds.items() if v > 1}
    texts = np.array([g["text"].iloc[0] for g in groups])
    return Told(order, counts.hazards(), lengths, texts, counts.tokens)


def _domain(
    part: FittedPart[CurveAcceptance],
    domain: str,
    counts: _Counts,
    depth: int,
    shape: Shape,
    found: Posterior | None,
    seed: int,
) -> tuple[FloatArray, float, "_AtLengths"]:
    """Full-block survival of a domain, [K], the relative half-width of its tau, and its thresholds."""
    lives = len(counts.at_risk)
    model = TextModel(shape)
    thresholds = _beyond(model.solve(counts.hazards(), counts.rounds, counts.tokens), depth)
    if counts.direct:
        pooled = counts.whole_curve()
        curve = settled(pooled, shape, counts.tokens)
        draws = np.stack([counts.whole_curve(w) for w in weights(lives, seed)]) * (curve / pooled)
        part.notes.append(
            f"acceptance of {domain}: tau {1 + pooled.sum():.3f} over answers of {counts.tokens + 1:.0f} tokens, whose "
            f"first rounds start anywhere, is {1 + curve.sum():.3f} of settled rounds, which the curve is of"
        )
        how = f"full blocks of {lives} requests, bootstrap over them"
    else:
        curve = np.minimum.accumulate(model.survival(thresholds, depth + 1))
        shapes = found.draws(seed, MODEL_DRAWS) if found else [shape] * MODEL_DRAWS
        draws = _model_draws(counts, shapes, depth, seed)
        how = f"blocks cut short of {lives} requests, carried to full blocks by the text's correlation; bootstrap"
    if counts.known < depth and not counts.direct:
        why, unsure = "drafts rarely get there", "from never accepted to always once they do"
        if counts.cut:
            why, unsure = f"fewer than {LEAST_AT_RISK} drafts were verified there", "everything from never to always"
        part.notes.append(
            f"acceptance of {domain}: positions {counts.known + 1} to {depth} are not identified ({why}); they go on "
            f"with the last threshold, and their intervals hold {unsure}"
        )
    elif not counts.direct:
        part.notes.append(
            f"acceptance of {domain}: fewer than {LEAST_WHOLE} full blocks; shorter ones and the text's correlation "
            "carry the curve"
        )
    for k in range(depth):
        name = f"acceptance.{domain}.survival.{k + 1}"
        if k < counts.known or not counts.direct:
            told = how if k < counts.known else "extrapolated"
            part.intervals[name] = interval(float(curve[k]), draws[:, k], lives, told, (0.0, 1.0))
        else:  # hardly a draft got here: at most all that were left
            most = part.intervals[f"acceptance.{domain}.survival.{counts.known}"].high
            rare = f"{how}; fewer than {LEAST_AT_RISK} drafts got here"
            part.intervals[name] = Estimate(value=float(curve[k]), low=0.0, high=most, how=rare)
    tau = interval(1 + float(curve.sum()), 1 + draws.sum(axis=1), lives, how, (1.0, depth + 1.0))
    part.intervals[f"acceptance.{domain}.tau"] = tau
    part.points[f"survival of {domain}"] = pd.DataFrame(
        {
            "position": np.arange(1, depth + 1),
            "survival": curve,
            "low": [part.intervals[f"acceptance.{domain}.survival.{k + 1}"].low for k in range(depth)],
            "high": [part.intervals[f"acceptance.{domain}.survival.{k + 1}"].high for k in range(depth)],
            "at_risk": counts.at_risk.sum(axis=0),
            "observed": np.concatenate([np.cumprod(counts.hazards()), np.full(depth - counts.known, np.nan)]),
        }
    )
    at_lengths = _AtLengths(model, thresholds, counts.tokens)
    return np.clip(curve, 1e-6, 1.0), (tau.high - tau.low) / 2 / tau.value, at_lengths


def _model_draws(counts: _Counts, shapes: Sequence[Shape], depth: int, seed: int) -> FloatArray:
    """Full-block survival of bootstrap samples, each with a shape that may be, [draws, K]."""
    rng = np.random.default_rng([seed, 3])
    out = []
    for w, shape in zip(weights(len(counts.at_risk), seed, len(shapes)), shapes, strict=True):
        model = TextModel(shape)
        thresholds = model.solve(counts.hazards(w), counts.rounds, counts.tokens)
        tail = float(np.log(rng.uniform()) - np.log(rng.uniform()))  # logistic: a rate anywhere between never and always
        out.append(model.survival(_beyond(thresholds, depth, tail), depth + 1))
    return np.array(out)


def _beyond(thresholds: FloatArray, depth: int, tail: float | None = None) -> FloatArray:
    """Thresholds of all positions: those unknown like the last known, or ``tail``."""
    rest = depth - len(thresholds)
    return np.concatenate([thresholds, np.full(rest, thresholds[-1] if tail is None else tail)])


@dataclass(frozen=True, slots=True)
class _AtLengths:
    """tau at every verify length under the model, in answers like those recorded."""

    model: TextModel
    thresholds: FloatArray
    tokens: float

    def tau(self, verify_len: int) -> float:
        return 1 + float(self.model.survival(self.thresholds, verify_len, self.tokens).sum())


def _compare(part: FittedPart[CurveAcceptance], domain: str, rounds: pd.DataFrame, model: _AtLengths) -> None:
    """tau of every fixed length, measured and by the model."""
    rows = []
    for v, mine in rounds[rounds["fixed_len"] > 1].groupby("fixed_len"):
        given = mine.assign(given=mine["share"] * (1 + mine["accepted"])).groupby("text")[["given", "share"]].sum()
        measured, expected = float(given["given"].sum() / given["share"].sum()), model.tau(int(str(v)))
        lives, drawn = given["share"], weights(len(given))
        means = (drawn @ given["given"]) / (drawn @ lives)
        limits = interval(measured, means, len(lives), "")
        rows.append((int(str(v)), measured, limits.low, limits.high, expected))
        off = np.array([expected / measured - 1])
        part.residuals.append(
            residual("acceptance", f"tau of {domain} at verify_len {v}", off).model_copy(update={"count": len(mine)})
        )
    part.points[f"tau of {domain}"] = pd.DataFrame(rows, columns=["verify_len", "tau", "low", "high", "model"])


def _shape_intervals(found: Posterior | None, shape: Shape, requests: int, seed: int) -> dict[str, Estimate]:
    limits = {"spread": (0.0, 0.95), "correlation": (0.0, 0.95), "range_tokens": (1.0, 20.0)}
    if found is None:
        return {
            f"acceptance.{n}": Estimate(
                value=getattr(shape, n), low=a, high=b, how=f"not identified: {requests} requests"
            )
            for n, (a, b) in limits.items()
        }
    draws = found.draws(seed)
    how = f"likelihood of the rounds of {requests} requests in their order, bagged over requests"
    out = {}
    for name, limit in limits.items():
        value = float(getattr(shape, name))
        at = interval(value, np.array([getattr(s, name) for s in draws]), requests, how, limit)
        low = low_limit(at.low, at.high) if name != "range_tokens" else at.low
        out[f"acceptance.{name}"] = at.model_copy(update={"low": low})
    return out
