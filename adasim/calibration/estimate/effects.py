"""What context and temperature do to tau."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from adasim.calibration.estimate.part import interval, weights
from adasim.calibration.estimate.recording import RecordedTrial
from adasim.calibration.interval import Estimate
from adasim.types import FloatArray

BINS = 3  # of context, with equally many rounds
LEAST_REQUESTS = 20  # that reach a bin
LEAST_SPAN = 1.5  # ratio of the outer bins' contexts
MATERIAL = 0.02  # of tau: smaller effects are not modelled
FAR = 1_000_000  # tokens: an effect is flat beyond what was seen


@dataclass(slots=True)
class Effect:
    """Factors of tau by value, relative to all rounds together; empty = none that can be told from 1.

    ``base``: the value of most rounds, ``seen``: lowest and highest.
    """

    base: float = 0.0
    seen: tuple[float, float] = (0.0, 0.0)
    factors: dict[float, float] = field(default_factory=dict)
    intervals: dict[str, Estimate] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    points: dict[str, pd.DataFrame] = field(default_factory=dict)


@dataclass(slots=True)
class ContextEffect(Effect):
    """By tokens of context."""

    factors: dict[int, float] = field(default_factory=dict)  # type: ignore[assignment]


def by_context(rounds: pd.DataFrame, seed: int) -> ContextEffect:
    """tau in thirds of the contexts seen, relative to all, domains and verify lengths held equal."""
    effect = ContextEffect()
    place = pd.qcut(rounds["context"], BINS, labels=False, duplicates="drop")
    middles = rounds["context"].groupby(place).median()
    lives = rounds["text"].groupby(place).nunique()
    if len(middles) < 2 or lives.min() < LEAST_REQUESTS or middles.iloc[-1] / middles.iloc[0] < LEAST_SPAN:
        effect.notes.append(
            "acceptance: contexts differ too little, or too few requests reach them, to tell their effect"
        )
        return effect
    draws, value = _relative(rounds, place.to_numpy(), len(middles), seed)
    how = f"bootstrap over {rounds['text'].nunique()} requests"
    rows = []
    for i, context in enumerate(middles):
        at = interval(float(value[i]), draws[:, i], int(lives.iloc[i]), how, (0.0, np.inf))
        effect.intervals[f"acceptance.tau_by_context.{context:.0f}"] = at
        rows.append((context, at.value, at.low, at.high))
    effect.points["context"] = pd.DataFrame(rows, columns=["context", "factor", "low", "high"])
    ends = draws[:, -1] / draws[:, 0]
    ratio = interval(float(value[-1] / value[0]), ends, int(lives.min()), how)
    if ratio.low <= 1 <= ratio.high or abs(ratio.value - 1) < MATERIAL:
        effect.notes.append(
            f"acceptance: context has no effect on tau that can be told ({middles.iloc[-1]:.0f} against "
            f"{middles.iloc[0]:.0f} tokens: {ratio.low - 1:+.1%} to {ratio.high - 1:+.1%}); not modelled"
        )
        return effect
    points = {round(c): float(v) for c, v in zip(middles, value, strict=True)}
    effect.factors = {1: float(value[0]), **points, FAR: float(value[-1])}
    effect.notes.append("acceptance: the effect of context is flat outside the contexts measured, which is assumed")
    return effect


def by_temperature(trials: Sequence[RecordedTrial], rounds: pd.DataFrame, seed: int) -> Effect:
    """tau at each sampling temperature, relative to all of them, as curves are; at only one it is that by definition."""
    effect = Effect()
    index = {t: i for i, t in enumerate(sorted(rounds["trial"].unique()))}
    heats = [float((t.backend.get("sampling") or {}).get("temperature", 0.0)) for t in trials]
    of_round = rounds["trial"].map(index).map(dict(enumerate(heats))).to_numpy()
    known, place, counts = np.unique(of_round, return_inverse=True, return_counts=True)
    effect.base, effect.seen = float(known[np.argmax(counts)]), (float(known[0]), float(known[-1]))
    if len(known) < 2:
        effect.factors = {effect.base: 1.0} if effect.base else {}
        return effect
    draws, value = _relative(rounds, place, len(known), seed)
    for i, heat in enumerate(known.tolist()):
        lives = rounds["text"][place == i].nunique()
        how = f"bootstrap over {lives} requests"
        at = interval(float(value[i]), draws[:, i], lives, how, (0.0, 9.0))
        effect.intervals[f"acceptance.tau_by_temperature.{heat:g}"] = at
        effect.factors[heat] = at.value
    effect.notes.append(
        "acceptance: curves pool all temperatures that were recorded, to which tau_by_temperature is relative; "
        f"predictions are for {effect.base:g}, where most rounds are, unless acceptance.temperature says otherwise"
    )
    return effect


def _relative(rounds: pd.DataFrame, place: "NDArray[Any]", places: int, seed: int) -> tuple[FloatArray, FloatArray]:
    """tau by place over what its domains and lengths have on average: bootstrap draws [b, places], value [places]."""
    kind = rounds.groupby(["domain", "verify_len"]).ngroup()
    expected = (1 + rounds["accepted"]).groupby(kind).transform("mean").to_numpy()
    life, names = pd.factorize(rounds["text"])
    got, wanted = np.zeros((len(names), places)), np.zeros((len(names), places))
    np.add.at(got, (life, place.astype(int)), (1 + rounds["accepted"]).to_numpy())
    np.add.at(wanted, (life, place.astype(int)), expected)
    w = weights(len(names), seed)
    return (w @ got) / np.maximum(w @ wanted, 1e-9), got.sum(axis=0) / np.maximum(wanted.sum(axis=0), 1e-9)
