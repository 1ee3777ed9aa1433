"""How well the length head knows L, from what it reported and what was then accepted."""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import pandas as pd

from adasim.calibration.estimate.head_likelihood import BIAS, NOISE, Form, HeadLikelihood, Told
from adasim.calibration.estimate.head_reports import Seen, seen_in
from adasim.calibration.estimate.part import FittedPart, interval, residual, weights
from adasim.calibration.estimate.recording import RecordedTrial, at_most, max_draft_len, rounds_of, rounds_with
from adasim.calibration.estimate.survival import survival_of
from adasim.calibration.head_quality import HeadQuality
from adasim.calibration.interval import Estimate
from adasim.types import FloatArray

MOST_ROUNDS = 10000
LEAST_ROUNDS = 50
DRAWS = 50
CLEARLY = 3.0  # log likelihood by which "mean" must be better than the simpler "truth"
FORMS: dict[Form, str] = {"truth": "1 + L, bias and noise", "mean": "1 + the mean of L given a noisy look at it"}


def fit_head(
    trials: Sequence[RecordedTrial], seed: int = 0, survival: Mapping[str, FloatArray] | None = None
) -> FittedPart[HeadQuality]:
    """Form, noise and bias of the length head, or its reports as they were seen; margins keep their defaults.

    Maximum likelihood of reports and accepted drafts together: a round whose drafts were all accepted says
    L >= verify_len - 1. Lengths that follow the report itself censor no differently for it, so rounds of head policies
    count too. Assumes normal noise of one size. The form is the likelier one, unless reports as they were seen, with a
    noise of each domain's own, are likelier by more than their parameters (Akaike).

    Intervals are given the survival: where that is off, the bias makes up for it. Too few reports: the default, with
    intervals of everything, and a note.

    Args:
        trials: recorded.
        seed: of the bootstrap.
        survival: of full blocks by domain, [K] each, that the simulator will use; None = as full blocks among the trials
            show it. Where they show none, the distribution of L is estimated with the rest.
    """
    rounds = rounds_with(trials, "accept_len")
    if len(rounds) < LEAST_ROUNDS:
        note = f"head: {len(rounds)} rounds with a report of the length head are too few; its quality is assumed"
        return FittedPart(HeadQuality(), _unknown(), notes=[note])
    depth = max_draft_len(trials)
    rounds = at_most(rounds, MOST_ROUNDS, seed)
    likelihood = HeadLikelihood(rounds, depth, _whole_blocks(trials, depth) if survival is None else survival)
    told, note = _likelier(likelihood)
    seen = seen_in(rounds, likelihood)
    measured, more = _measured(seen, told)
    points = _predicted(likelihood, seen.believed if measured else likelihood.believed(told), rounds)
    life, names = pd.factorize(rounds["text"])
    how = f"likelihood of {len(rounds)} rounds, bootstrap over {len(names)} requests"
    drawn = weights(len(names), seed, DRAWS)
    if measured:
        intervals = _as_seen(seen, rounds, drawn[:, life], len(names), how)
    else:
        again = [likelihood.fit(told.reports, w[life], told) for w in drawn]
        intervals = {
            "head.noise": interval(told.noise, np.array([t.noise for t in again]), len(names), how, NOISE),
            "head.bias": interval(told.bias, np.array([t.bias for t in again]), len(names), how, BIAS),
        }
    part = FittedPart(
        seen.quality if measured else told.quality,
        intervals,
        counts={"head rounds": len(rounds)},
        ranges={"accept_len": (float(rounds["accept_len"].min()), float(rounds["accept_len"].max()))},
        notes=[note + more],
        points={"head": points},
    )
    censored = float((rounds["accepted"] == rounds["verify_len"] - 1).mean())
    if censored > 0.5:
        part.notes.append(f"head: {censored:.0%} of its rounds are censored; runs that verify in full would tell more")
    off = points["expected"] / (1 + points["accepted"]) - 1
    part.residuals.append(residual("head", "emitted tokens by report", off.to_numpy()))
    _staleness(part, rounds, depth, told.reports, how)
    return part


def head_of(
    rounds: pd.DataFrame,
    depth: int,
    survival: Mapping[str, FloatArray] | None = None,
    reports: Form | Literal["measured"] | None = None,
) -> HeadQuality | None:
    """The length head of a few recorded rounds, as :func:`fit_head` finds it; None: too few reports.

    Args:
        rounds: ``RoundRecord`` columns, whatever chose their lengths.
        depth: K.
        survival: of full blocks by domain; see :func:`fit_head`.
        reports: the form; None = the likelier one of two that are formulas.
    """
    known = rounds[rounds["accept_len"].notna() & (rounds["draft_len"] > 0)]
    if len(known) < LEAST_ROUNDS:
        return None
    likelihood = HeadLikelihood(known, depth, survival)
    if reports == "measured":
        return seen_in(known.assign(share=1.0), likelihood).quality
    return (_likelier(likelihood)[0] if reports is None else likelihood.fit(reports)).quality


def _likelier(likelihood: HeadLikelihood) -> tuple[Told, str]:
    """The form that explains the reports, and how clearly."""
    simple, mean = (likelihood.fit(form) for form in FORMS)
    better = mean.log_likelihood - simple.log_likelihood
    told, other = (mean, simple) if better > CLEARLY else (simple, mean)
    likelihood.masses = told.masses
    return told, (
        f"head: reports are taken as {told.reports} ({FORMS[told.reports]}), whose log likelihood is "
        f"{told.log_likelihood - other.log_likelihood:+.0f} against {other.reports}"
    )


def _whole_blocks(trials: Sequence[RecordedTrial], depth: int) -> dict[str, FloatArray]:
    """Survival by domain of the drafter as loaded, where enough full blocks were verified whatever was seen of them."""
    rounds = rounds_of(trials)
    if rounds.empty:
        return {}
    whole = rounds[(rounds["verify_len"] == depth + 1) & (rounds["draft_version"] == 0)]
    return survival_of(whole[whole.groupby("domain")["step"].transform("size") >= LEAST_ROUNDS], depth)


def _unknown() -> dict[str, Estimate]:
    limits = {"head.noise": (HeadQuality().noise, NOISE), "head.bias": (0.0, BIAS)}
    return {n: Estimate(value=v, low=low, high=high, how="not identified") for n, (v, (low, high)) in limits.items()}


def _measured(seen: Seen, told: Told) -> tuple[bool, str]:
    """Whether no formula of reports holds, and by how much."""
    better = seen.log_likelihood - told.log_likelihood
    needed = seen.parameters + CLEARLY
    return better > needed, (
        f"; reports as they were seen, with a noise of each domain's own, have {better:+.0f}, of which "
        f"{needed:.0f} are needed for their {seen.parameters} parameters"
    )


def _as_seen(seen: Seen, rounds: pd.DataFrame, drawn: FloatArray, requests: int, how: str) -> dict[str, Estimate]:
    """Intervals of a measured head: noise of each domain, what is common to them as factor and as tokens."""
    share, report = rounds["share"].to_numpy(dtype=float), rounds["accept_len"].to_numpy(dtype=float)
    again = np.stack([seen.noises(w * share) for w in drawn])
    found, low, high = {}, 1.0, 1.0
    for d, name in enumerate(seen.domains):
        at = interval(float(seen.noise[d]), again[:, d], requests, how, NOISE)
        found[f"head.noise.{name}"] = at
        low, high = min(low, at.low / at.value), max(high, at.high / at.value)
    mean = float(share @ report / share.sum())
    means = (drawn * share) @ report / (drawn @ share)
    widest = "times each domain's; the widest of their intervals"
    found["head.noise"] = Estimate(value=1.0, low=max(low, NOISE[0]), high=min(high, NOISE[1]), how=widest)
    found["head.bias"] = interval(0.0, means - mean, requests, how, BIAS)
    return found


def _predicted(likelihood: HeadLikelihood, believed: FloatArray, rounds: pd.DataFrame) -> pd.DataFrame:
    """By report: what was accepted, and what the fitted head expects of rounds cut as these were."""
    cut = np.minimum(likelihood.run, rounds["verify_len"].to_numpy()[:, None] - 1)
    table = pd.DataFrame(
        {
            "report": rounds["accept_len"].to_numpy(),
            "accepted": rounds["accepted"].to_numpy(),
            "expected": 1 + (believed * cut).sum(axis=1),
            "censored": (rounds["accepted"] == rounds["verify_len"] - 1).to_numpy(),
        }
    )
    place = np.floor(table["report"].clip(-2, len(likelihood.run) + 3))
    means = table.groupby(place).agg(
        report=("report", "mean"), accepted=("accepted", "mean"), expected=("expected", "mean"),
        censored=("censored", "mean"), count=("report", "size"),
    )  # fmt: skip
    return means[means["count"] >= 5].reset_index(drop=True)


def _staleness(part: FittedPart[HeadQuality], rounds: pd.DataFrame, depth: int, form: Form, how: str) -> None:
    """Bias by drafter version: a head that keeps its level while the drafter learns reports too little."""
    sizes = rounds.groupby("draft_version").size()
    enough = sizes[sizes >= LEAST_ROUNDS].index
    if len(enough) < 2:
        return
    rows = []
    for version in enough:
        mine = rounds[rounds["draft_version"] == version]
        likelihood = HeadLikelihood(mine, depth)  # survival is that of the version
        told = likelihood.fit(form)
        life, names = pd.factorize(mine["text"])
        draws = np.array([likelihood.fit(form, w[life], told).bias for w in weights(len(names), 0, 30)])
        at = interval(told.bias, draws, len(names), how, BIAS)
        part.intervals[f"head.bias.version {version}"] = at
        rows.append((int(version), told.noise, at.value, at.low, at.high, len(mine)))
    columns = ["version", "noise", "bias", "low", "high", "rounds"]
    part.points["head by version"] = pd.DataFrame(rows, columns=columns)
    part.notes.append("head: noise and bias are those of all drafter versions together; by version, see the intervals")
