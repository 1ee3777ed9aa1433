"""How fast drafters learned and forgot, from runs that trained them while serving."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from adasim.calibration.estimate.part import FittedPart, interval, weights
from adasim.calibration.estimate.recording import RecordedTrial, rounds_of
from adasim.calibration.learning import LearningCurve
from adasim.types import FloatArray

PUBLISHED_SAMPLES = 128  # finished requests of a training round, the unit of a curve's ``rounds``
LEAST_VERSIONS, LEAST_ROUNDS = 3, 60  # of a domain, rounds under each version
LIMITS = {"gain": (0.0, 2.0), "rounds": (0.5, 500.0), "forgetting_rounds": (1.0, 5000.0)}
FEW = 0.25  # share of the training below which a domain may be forgotten
DRAWS = 60


def fit_learning(trials: Sequence[RecordedTrial], seed: int = 0) -> FittedPart[dict[str, LearningCurve]]:
    """The learning curve of each domain that was served under enough versions; empty without.

    tau of a version over that as loaded, of rounds whose length is not chosen by a look at their drafts. Training rounds
    count in units of 128 finished requests; a domain's share is that among the requests that finished since the version
    before. Gains are of the loss that was trained with. The floor of forgetting is assumed.
    """
    part: FittedPart[dict[str, LearningCurve]] = FittedPart({})
    rounds = rounds_of(trials)
    if rounds.empty or rounds["draft_version"].nunique() < LEAST_VERSIONS:
        if any((t.records.steps["draft_version"] > 0).any() for t in trials):
            part.notes.append("learning: too few rounds of fixed or full length under different versions; not fitted")
        return part
    for domain, mine in rounds.groupby("domain"):
        _fit_domain(part, str(domain), mine, trials, seed)
    if part.model:
        part.notes.append("learning: gains are those of the loss and the trainer that were recorded")
    return part


def _fit_domain(
    part: FittedPart[dict[str, LearningCurve]],
    domain: str,
    rounds: pd.DataFrame,
    trials: Sequence[RecordedTrial],
    seed: int,
) -> None:
    per = rounds.groupby(["trial", "draft_version"]).size()
    enough = per[per >= LEAST_ROUNDS].index
    seen = enough.to_frame(index=False).groupby("trial")["draft_version"].agg(["size", "min"])
    runs = [int(t) for t in seen.index[(seen["size"] >= LEAST_VERSIONS) & (seen["min"] == 0)].to_list()]
    if not runs:
        part.notes.append(
            f"learning of {domain}: fewer than {LEAST_VERSIONS} versions with {LEAST_ROUNDS} rounds; not fitted"
        )
        return
    trial = trials[runs[0]]
    mine = rounds[rounds["trial"].isin(runs)]
    versions = sorted(v for t, v in enough if t == runs[0])
    trained = training(trial, domain, versions[-1])
    life, names = pd.factorize(mine["text"])
    at = mine["draft_version"].to_numpy()
    tokens, counts = np.zeros((2, len(names), versions[-1] + 1))
    np.add.at(tokens, (life, at), 1 + mine["accepted"].to_numpy())
    np.add.at(counts, (life, at), 1)

    def factors(w: FloatArray) -> FloatArray:
        tau = (w @ tokens)[versions] / np.maximum((w @ counts)[versions], 1e-9)
        return tau / max(tau[0], 1e-9)

    forgets = bool((trained["share"].to_numpy()[1:] < FEW).any())
    weight = np.sqrt(counts.sum(axis=0)[versions])
    whole = np.ones(len(names))
    fitted = _solve(factors(whole), weight, trained, versions, forgets=forgets)
    drawn = weights(len(names), seed, DRAWS)
    draws = np.array([_solve(factors(w), weight, trained, versions, forgets=forgets) for w in drawn])
    how = f"tau of {len(versions)} versions over {len(names)} requests, bootstrap over them"
    for i, name in enumerate(list(LIMITS)[: 3 if forgets else 2]):
        part.intervals[f"learning.{domain}.{name}"] = interval(fitted[i], draws[:, i], len(names), how, LIMITS[name])
    curve = _curve(fitted, forgets=forgets)
    part.model[domain] = curve
    if not forgets:
        part.notes.append(f"learning of {domain}: it was never a small part of the training, so forgetting is not known")
    values = np.array([factors(w) for w in drawn])
    limits = [interval(v, values[:, i], len(names), how) for i, v in enumerate(factors(whole).tolist())]
    part.points[f"learning of {domain}"] = pd.DataFrame(
        {
            "rounds": trained["rounds"].cumsum().to_numpy()[versions],
            "factor": [x.value for x in limits],
            "low": [x.low for x in limits],
            "high": [x.high for x in limits],
            "fitted": _follow(curve, trained)[versions],
        }
    )
    part.counts[f"versions in {domain}"] = len(versions)


def training(trial: RecordedTrial, domain: str, last: int) -> pd.DataFrame:
    """What made each version, by version 0..last: rounds (of 128 requests), share (of the domain)."""
    records = trial.records
    loads = records.events[records.events["kind"] == "reload"].groupby("draft_version")["time_s"].min()
    done = records.requests[records.requests["finish_s"].notna()]
    known = records.versions
    rows, since = [(0.0, 1.0)], -np.inf
    for version in range(1, last + 1):
        until = float(loads.get(version, np.inf))
        mine = done[(done["finish_s"] > since) & (done["finish_s"] <= until)]
        share = float((mine["domain"] == domain).mean()) if len(mine) else 1.0
        samples = float(len(mine))
        if known is not None:
            told = known[(known["version"] == version) & (known["domain"] == domain)]
            if len(told):
                share, samples = float(told["share"].iloc[0]), float(told["samples"].iloc[0])
        elif (opd := trial.backend.get("opd")) is not None:
            samples = float(opd.get("buffer", PUBLISHED_SAMPLES))
        rows.append((samples / PUBLISHED_SAMPLES, share))
        since = until if np.isfinite(until) else since
    return pd.DataFrame(rows, columns=["rounds", "share"])


def _curve(found: FloatArray, *, forgets: bool) -> LearningCurve:
    gain, rounds, forgetting = (float(np.clip(x, *LIMITS[n])) for x, n in zip(found, LIMITS, strict=True))
    return LearningCurve(gain=gain, rounds=rounds, forgetting_rounds=forgetting if forgets else None)


def _follow(curve: LearningCurve, trained: pd.DataFrame) -> FloatArray:
    """Factor of tau of every version."""
    factor, out = 1.0, [1.0]
    for rounds, share in trained.to_numpy()[1:].tolist():
        factor = curve.after(factor, rounds, share, 1.0)
        out.append(factor)
    return np.array(out)


def _solve(
    measured: FloatArray, weight: FloatArray, trained: pd.DataFrame, versions: list[int], *, forgets: bool
) -> FloatArray:
    """Gain, rounds, forgetting rounds by least squares."""
    low, high = np.array([LIMITS[n] for n in LIMITS]).T

    def miss(x: FloatArray) -> FloatArray:
        found = np.array([x[0], np.exp(x[1]), np.exp(x[2])])
        fitted = _follow(_curve(found, forgets=forgets), trained)[versions]
        return np.asarray((fitted - measured) * weight, dtype=np.float64)

    start = np.array([max(float(measured.max()) - 1, 0.02), np.log(10.0), np.log(100.0)])
    bounds = np.array([low[0], np.log(low[1]), np.log(low[2])]), np.array([high[0], np.log(high[1]), np.log(high[2])])
    best = least_squares(miss, np.clip(start, *bounds), bounds=bounds).x
    return np.array([best[0], np.exp(best[1]), np.exp(best[2])])
