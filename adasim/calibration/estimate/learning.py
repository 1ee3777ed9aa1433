"""How fast drafters learned and forgot, from runs that trained them while serving."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from adasim.calibration.estimate.part import FittedPart, interval, weights
from adasim.calibration.estimate.recording import RecordedTrial, rounds_of
from adasim.calibration.learning import LearningCurve
from adasim.records import Records
from adasim.types import FloatArray, IntArray

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


@dataclass(frozen=True, slots=True)
class _Run:
    """What one run tells about one domain.

    Attributes:
        trained: rounds, share and parent of each version; see :func:`training`.
        versions: with enough rounds, ascending from 0.
        tokens, counts: given and rounds, by text and version, [texts, versions].
    """

    trained: list[tuple[float, float, int]]
    versions: list[int]
    tokens: FloatArray
    counts: FloatArray

    def factors(self, w: FloatArray) -> FloatArray:
        """tau over that as loaded where texts count so often, [versions]; NaN: a sample without rounds of a version."""
        count = w @ self.counts
        tau = np.divide(w @ self.tokens, count, out=np.full(len(count), np.nan), where=count > 0)
        return np.asarray(tau / tau[0], dtype=np.float64)

    @property
    def weight(self) -> FloatArray:
        """Of each factor in a fit, [versions]."""
        return np.sqrt(self.counts.sum(axis=0))


def _fit_domain(
    part: FittedPart[dict[str, LearningCurve]],
    domain: str,
    rounds: pd.DataFrame,
    trials: Sequence[RecordedTrial],
    seed: int,
) -> None:
    per = rounds.groupby(["trial", "draft_version"]).size()
    enough = per[per >= LEAST_ROUNDS].index
    pairs = [(int(t), int(v)) for t, v in enough.to_list()]
    known = {trial: [v for t, v in pairs if t == trial] for trial, _ in pairs}
    known = {t: versions for t, versions in known.items() if len(versions) >= LEAST_VERSIONS and versions[0] == 0}
    if not known:
        part.notes.append(
            f"learning of {domain}: fewer than {LEAST_VERSIONS} versions with {LEAST_ROUNDS} rounds; not fitted"
        )
        return
    mine = rounds[rounds["trial"].isin(list(known))]
    life, names = pd.factorize(mine["text"])
    runs = [_run(mine, life, len(names), t, trials[t], domain, versions) for t, versions in known.items()]
    forgets = any(share < FEW for r in runs for _, share, _ in r.trained[1:])
    whole = np.ones(len(names))
    fitted = _solve(runs, whole, forgets=forgets)
    drawn = weights(len(names), seed, DRAWS)
    draws = np.array([_solve(runs, w, forgets=forgets) for w in drawn])
    seen = sum(len(r.versions) for r in runs)
    how = f"tau of {seen} versions over {len(names)} requests, bootstrap over them"
    for i, name in enumerate(list(LIMITS)[: 3 if forgets else 2]):
        part.intervals[f"learning.{domain}.{name}"] = interval(fitted[i], draws[:, i], len(names), how, LIMITS[name])
    curve = _curve(fitted, forgets=forgets)
    part.model[domain] = curve
    if not forgets:
        part.notes.append(f"learning of {domain}: it was never a small part of the training, so forgetting is not known")
    tables = [_points(r, curve, whole, drawn, how) for r in runs]
    part.points[f"learning of {domain}"] = pd.concat(tables, ignore_index=True).sort_values("rounds", kind="stable")
    part.counts[f"versions in {domain}"] = seen


def _run(
    rounds: pd.DataFrame, life: IntArray, texts: int, index: int, trial: RecordedTrial, domain: str, versions: list[int]
) -> _Run:
    kept = ((rounds["trial"] == index) & rounds["draft_version"].isin(versions)).to_numpy()
    at = np.searchsorted(versions, rounds["draft_version"].to_numpy()[kept])
    tokens, counts = np.zeros((2, texts, len(versions)))
    np.add.at(tokens, (life[kept], at), 1 + rounds["accepted"].to_numpy()[kept])
    np.add.at(counts, (life[kept], at), 1)
    made = training(trial, domain, versions[-1])
    trained = [(float(r), float(s), int(p)) for r, s, p in made[["rounds", "share", "parent"]].itertuples(index=False)]
    return _Run(trained, versions, tokens, counts)


def _points(run: _Run, curve: LearningCurve, whole: FloatArray, drawn: FloatArray, how: str) -> pd.DataFrame:
    """Measured and fitted factors of one run, for pictures."""
    values = np.array([run.factors(w) for w in drawn])
    limits = [interval(v, values[:, i], len(whole), how) for i, v in enumerate(run.factors(whole).tolist())]
    return pd.DataFrame(
        {
            "rounds": _spent(run.trained)[run.versions],
            "factor": [x.value for x in limits],
            "low": [x.low for x in limits],
            "high": [x.high for x in limits],
            "fitted": _follow(curve, run.trained)[run.versions],
        }
    )


def training(trial: RecordedTrial, domain: str, last: int) -> pd.DataFrame:
    """What made each version, by version 0..last: rounds (of 128 requests), share (of the domain), parent (version).

    Training goes on from the version before, after a rollback from the one that serving went back to.
    """
    records = trial.records
    loads = records.events[records.events["kind"] == "reload"].groupby("draft_version")["time_s"].min()
    done = records.requests[records.requests["finish_s"].notna()]
    known, backs = records.versions, _went_back(records)
    rows, since = [(0.0, 1.0, 0)], -np.inf
    for version in range(1, last + 1):
        until = float(loads.get(version, np.inf))
        mine = done[(done["finish_s"] > since) & (done["finish_s"] <= until)]
        share = float((mine["domain"] == domain).mean()) if len(mine) else 1.0
        samples, parent = float(len(mine)), version - 1
        for time_s, bad, good in backs:
            parent = good if time_s < until and good < parent <= bad else parent
        if known is not None:
            told = known[(known["version"] == version) & (known["domain"] == domain)]
            if len(told):
                share, samples = float(told["share"].iloc[0]), float(told["samples"].iloc[0])
                parent = int(told["parent"].iloc[0])
        elif (opd := trial.backend.get("opd")) is not None:
            samples = float(opd.get("buffer", PUBLISHED_SAMPLES))
        rows.append((samples / PUBLISHED_SAMPLES, share, parent))
        since = until if np.isfinite(until) else since
    return pd.DataFrame(rows, columns=["rounds", "share", "parent"])


def _went_back(records: Records) -> list[tuple[float, int, int]]:
    """Rollbacks: when, from which version, to which. An engine's events name the latter, and serving used the former."""
    events, steps, out = records.events, records.steps, list[tuple[float, int, int]]()
    for time_s in events[events["kind"] == "rollback"]["time_s"].astype(float):
        bad = steps[steps["start_s"] < time_s]["draft_version"]
        good = steps[(steps["start_s"] >= time_s) & (steps["draft_version"] != (bad.iloc[-1] if len(bad) else 0))]
        if len(bad) and len(good) and int(good["draft_version"].iloc[0]) < int(bad.iloc[-1]):
            out.append((time_s, int(bad.iloc[-1]), int(good["draft_version"].iloc[0])))
    return out


def _spent(trained: Sequence[tuple[float, float, int]]) -> FloatArray:
    """Training rounds behind every version, those of its forebears counted."""
    spent = [0.0]
    for rounds, _, parent in trained[1:]:
        spent.append(spent[parent] + rounds)
    return np.array(spent)


def _curve(found: FloatArray, *, forgets: bool) -> LearningCurve:
    gain, rounds, forgetting = (float(np.clip(x, *LIMITS[n])) for x, n in zip(found, LIMITS, strict=True))
    return LearningCurve(gain=gain, rounds=rounds, forgetting_rounds=forgetting if forgets else None)


def _follow(curve: LearningCurve, trained: Sequence[tuple[float, float, int]]) -> FloatArray:
    """Factor of tau of every version."""
    out = [1.0]
    for rounds, share, parent in trained[1:]:
        out.append(curve.after(out[parent], rounds, share, 1.0))
    return np.array(out)


def _solve(runs: Sequence[_Run], w: FloatArray, *, forgets: bool) -> FloatArray:
    """Gain, rounds, forgetting rounds by least squares over all runs; NaN: the sample lacks a version."""
    low, high = np.array([LIMITS[n] for n in LIMITS]).T
    measured = [r.factors(w) for r in runs]
    if not all(np.isfinite(m).all() for m in measured):
        return np.full(3, np.nan)

    def miss(x: FloatArray) -> FloatArray:
        curve = _curve(np.array([x[0], np.exp(x[1]), np.exp(x[2])]), forgets=forgets)
        off = [(_follow(curve, r.trained)[r.versions] - m) * r.weight for r, m in zip(runs, measured, strict=True)]
        return np.concatenate(off)

    highest = max(float(m.max()) for m in measured)
    start = np.array([max(highest - 1, 0.02), np.log(10.0), np.log(100.0)])
    bounds = np.array([low[0], np.log(low[1]), np.log(low[2])]), np.array([high[0], np.log(high[1]), np.log(high[2])])
    best = least_squares(miss, np.clip(start, *bounds), bounds=bounds).x
    return np.array([best[0], np.exp(best[1]), np.exp(best[2])])
