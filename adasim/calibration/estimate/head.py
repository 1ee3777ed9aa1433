"""How well the length head knows L, from what it reported and what was then accepted."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from adasim.calibration.estimate.part import FittedPart, interval, residual, weights
from adasim.calibration.estimate.recording import RecordedTrial, max_draft_len, natural, numbered
from adasim.calibration.interval import Estimate
from adasim.calibration.luck import HeadQuality
from adasim.types import FloatArray, IntArray

MOST_ROUNDS = 6000
LEAST_ROUNDS = 50
DRAWS = 60
NOISE, BIAS = (0.05, 30.0), (-30.0, 30.0)  # of HeadQuality


def fit_head(trials: Sequence[RecordedTrial], seed: int = 0) -> FittedPart[HeadQuality]:
    """Noise and bias of the length head; margins keep their defaults.

    Maximum likelihood of reports and accepted drafts together, L being free by domain: a round whose drafts were all
    accepted says L >= verify_len - 1. Lengths that follow the report itself censor no differently for it, so rounds of
    head policies count too. Assumes normal noise of one size.

    Too few reports: the default, with intervals of everything, and a note.
    """
    rounds = _reports(trials)
    if len(rounds) < LEAST_ROUNDS:
        note = f"head: {len(rounds)} rounds with a report of the length head are too few; its quality is assumed"
        return FittedPart(HeadQuality(), _unknown(), notes=[note])
    depth = max_draft_len(trials)
    if len(rounds) > MOST_ROUNDS:
        lives = np.random.default_rng(seed).permutation(rounds["text"].unique())
        total = rounds.groupby("text").size().reindex(lives).cumsum()
        rounds = rounds[rounds["text"].isin(total.index[total <= MOST_ROUNDS])]
    fitter = _Fitter(rounds, depth)
    noise, bias = fitter.fit(np.ones(len(rounds)))
    life, names = pd.factorize(rounds["text"])
    draws = np.array([fitter.fit(w[life], (noise, bias)) for w in weights(len(names), seed, DRAWS)])
    how = f"likelihood of {len(rounds)} rounds, bootstrap over {len(names)} requests"
    part = FittedPart(
        HeadQuality(noise=float(np.clip(noise, *NOISE)), bias=float(np.clip(bias, *BIAS))),
        {
            "head.noise": interval(noise, draws[:, 0], len(names), how, NOISE),
            "head.bias": interval(bias, draws[:, 1], len(names), how, BIAS),
        },
        counts={"head rounds": len(rounds)},
        ranges={"accept_len": (float(rounds["accept_len"].min()), float(rounds["accept_len"].max()))},
    )
    censored = float((rounds["accepted"] == rounds["verify_len"] - 1).mean())
    if censored > 0.5:
        part.notes.append(f"head: {censored:.0%} of its rounds are censored; runs that verify in full would tell more")
    part.points["head"] = _predicted(fitter, rounds, noise, bias)
    off = part.points["head"]["expected"] / (1 + part.points["head"]["accepted"]) - 1
    part.residuals.append(residual("head", "emitted tokens by report", off.to_numpy()))
    _staleness(part, rounds, depth, how)
    return part


def _reports(trials: Sequence[RecordedTrial]) -> pd.DataFrame:
    """Rounds with a report of the head, ``text`` numbering requests as in :func:`rounds_of`."""
    parts = []
    for i, trial in enumerate(natural(trials)):
        rounds = trial.records.rounds
        if rounds is not None and len(rounds):
            # those that verified nothing count too: leaving them out would choose by the report
            parts.append(rounds[rounds["accept_len"].notna()].assign(trial=i, seed=trial.seed))
    return numbered(pd.concat(parts, ignore_index=True)) if parts else pd.DataFrame(columns=["text"])


def _unknown() -> dict[str, Estimate]:
    limits = {"head.noise": (HeadQuality().noise, NOISE), "head.bias": (0.0, BIAS)}
    return {n: Estimate(value=v, low=low, high=high, how="not identified") for n, (v, (low, high)) in limits.items()}


class _Fitter:
    """Expectation-maximisation over L: its distribution by domain, noise and bias.

    Args:
        rounds: with accept_len, accepted, verify_len, domain.
        depth: K.
    """

    def __init__(self, rounds: pd.DataFrame, depth: int) -> None:
        self.run = np.arange(depth + 1)
        self.report = rounds["accept_len"].to_numpy() - 1
        self.domain, self.names = pd.factorize(rounds["domain"])
        accepted, verified = rounds["accepted"].to_numpy()[:, None], rounds["verify_len"].to_numpy()[:, None]
        open_end = accepted == verified - 1
        self.possible = np.where(open_end, self.run >= accepted, self.run == accepted)  # [rounds, K + 1]

    def fit(self, weight: FloatArray, start: tuple[float, float] | None = None) -> tuple[float, float]:
        """Noise and bias where rounds count so much."""
        shape = len(self.names), len(self.run)
        mass = np.full(shape, 1 / shape[1])
        noise, bias = start or (2.0, 0.0)
        kept = weight > 0
        w, report, domain, possible = weight[kept], self.report[kept], self.domain[kept], self.possible[kept]
        for _ in range(400):
            likely = self.posterior(report, domain, possible, mass, noise, bias)
            mass = np.stack([(likely[domain == d] * w[domain == d, None]).sum(axis=0) for d in range(shape[0])]) + 1e-9
            mass /= mass.sum(axis=1, keepdims=True)
            off = report[:, None] - self.run
            before = noise, bias
            bias = float((w[:, None] * likely * off).sum() / w.sum())
            noise = float(np.sqrt((w[:, None] * likely * (off - bias) ** 2).sum() / w.sum()))
            noise = max(noise, NOISE[0])
            if abs(noise - before[0]) + abs(bias - before[1]) < 1e-4:
                break
        self.mass = mass
        return noise, bias

    def posterior(
        self, report: FloatArray, domain: IntArray, possible: FloatArray, mass: FloatArray, noise: float, bias: float
    ) -> FloatArray:
        """P(L = l | report, what was accepted), [rounds, K + 1]."""
        logs = -(((report[:, None] - self.run - bias) / noise) ** 2) / 2
        like = np.exp(logs - logs.max(axis=1, keepdims=True)) * mass[domain] * possible + 1e-300 * possible
        return like / like.sum(axis=1, keepdims=True)


def _predicted(fitter: _Fitter, rounds: pd.DataFrame, noise: float, bias: float) -> pd.DataFrame:
    """By report: what was accepted, and what the fitted head expects of rounds cut as these were."""
    fitter.fit(np.ones(len(rounds)), (noise, bias))
    everything = np.ones_like(fitter.possible, dtype=bool)
    likely = fitter.posterior(fitter.report, fitter.domain, everything, fitter.mass, noise, bias)
    cut = np.minimum(fitter.run, rounds["verify_len"].to_numpy()[:, None] - 1)
    table = pd.DataFrame(
        {
            "report": rounds["accept_len"].to_numpy(),
            "accepted": rounds["accepted"].to_numpy(),
            "expected": 1 + (likely * cut).sum(axis=1),
            "censored": (rounds["accepted"] == rounds["verify_len"] - 1).to_numpy(),
        }
    )
    place = np.floor(table["report"].clip(-2, len(fitter.run) + 3))
    means = table.groupby(place).agg(
        report=("report", "mean"), accepted=("accepted", "mean"), expected=("expected", "mean"),
        censored=("censored", "mean"), count=("report", "size"),
    )  # fmt: skip
    return means[means["count"] >= 5].reset_index(drop=True)


def _staleness(part: FittedPart[HeadQuality], rounds: pd.DataFrame, depth: int, how: str) -> None:
    """Bias by drafter version: a head that keeps its level while the drafter learns reports too little."""
    sizes = rounds.groupby("draft_version").size()
    enough = sizes[sizes >= LEAST_ROUNDS].index
    if len(enough) < 2:
        return
    rows = []
    for version in enough:
        mine = rounds[rounds["draft_version"] == version]
        fitter = _Fitter(mine, depth)
        noise, bias = fitter.fit(np.ones(len(mine)))
        life, names = pd.factorize(mine["text"])
        draws = np.array([fitter.fit(w[life], (noise, bias))[1] for w in weights(len(names), 0, 30)])
        at = interval(bias, draws, len(names), how, BIAS)
        part.intervals[f"head.bias.version {version}"] = at
        rows.append((int(version), noise, at.value, at.low, at.high, len(mine)))
    columns = ["version", "noise", "bias", "low", "high", "rounds"]
    part.points["head by version"] = pd.DataFrame(rows, columns=columns)
    part.notes.append("head: noise and bias are those of all drafter versions together; by version, see the intervals")
