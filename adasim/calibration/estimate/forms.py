"""Formulas of the target's pass, and their constants from measured cells."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.optimize import minimize_scalar

from adasim.calibration.estimate.regression import fit, independent
from adasim.types import FloatArray

TERMS = ("base_ms", "per_token_ms", "per_request_ms", "per_attended_ms", "per_context_ms")
BESIDE = ("drafter_ms", "drafter_per_request_ms")  # longer while a drafter is loaded, whose context has to follow
KNEES = 16  # tried, evenly in logarithms
CAPPED = 0.3  # relative error from which on a cell counts no more when knees are compared


@dataclass(frozen=True, slots=True)
class Form:
    """A formula with its constants in milliseconds; ``sharpness`` 0: no knee."""

    sharpness: float
    knee: float
    used: tuple[int, ...]  # indices of TERMS + BESIDE
    found: FloatArray  # [used]

    def predict(self, table: pd.DataFrame) -> FloatArray:
        """Milliseconds of each row."""
        return terms_of(table, self.sharpness, self.knee)[:, list(self.used)] @ self.found

    def constants(self) -> dict[str, float]:
        """By name, those not used 0."""
        names = TERMS + BESIDE
        return dict.fromkeys(names, 0.0) | {names[i]: float(v) for i, v in zip(self.used, self.found, strict=True)}

    def beside(self, table: pd.DataFrame) -> FloatArray:
        """Milliseconds of each row that are the loaded drafter's."""
        mine = [i for i in self.used if i >= len(TERMS)]
        found = np.array([v for i, v in zip(self.used, self.found, strict=True) if i >= len(TERMS)])
        return terms_of(table, self.sharpness, self.knee)[:, mine] @ found if mine else np.zeros(len(table))


def fit_form(
    table: pd.DataFrame,
    sharpness: float,
    weight: FloatArray | None = None,
    near: float | None = None,
    used: Sequence[int] | None = None,
) -> Form:
    """Constants of one form; a knee is searched, near a known one where that is given."""
    ms = table["ms"].to_numpy()
    weight = np.sqrt(table["count"].to_numpy()) * (1.0 if weight is None else weight)
    kept = weight > 0
    part, ms, weight = table[kept], ms[kept], weight[kept]

    def at(knee: float) -> tuple[float, Form]:
        terms = terms_of(part, sharpness, knee)
        mine = tuple(independent(terms, TERMS + BESIDE, ms)) if used is None else tuple(used)
        found = fit(terms[:, list(mine)], ms, weight)
        off = np.abs(terms[:, list(mine)] @ found / ms - 1)
        return float(np.sum(weight * np.minimum(off, CAPPED))), Form(sharpness, knee, mine, found)

    if not sharpness:
        return at(0.0)[1]
    if near:
        low, high = near / 3, near * 3
    else:
        knees = np.geomspace(1.5, max(part["tokens"].max(), 3.0), KNEES)
        i = int(np.argmin([at(k)[0] for k in knees.tolist()]))
        low, high = knees[max(i - 1, 0)], knees[min(i + 1, KNEES - 1)]
    best = minimize_scalar(
        lambda x: at(float(np.exp(x)))[0], bounds=(np.log(low), np.log(high)), method="bounded", options={"xatol": 0.02}
    )
    return at(float(np.exp(best.x)))[1]


def terms_of(table: pd.DataFrame, sharpness: float, knee: float) -> FloatArray:
    """[rows, TERMS + BESIDE]."""
    loaded = table["drafter_loaded"].to_numpy(dtype=float)
    batch, tokens, context = (table[c].to_numpy(dtype=float) for c in ("batch", "tokens", "context"))
    if sharpness:
        high, low = np.maximum(tokens, knee), np.minimum(tokens, knee)
        rise = high * (1 + (low / high) ** sharpness) ** (1 / sharpness)
    else:
        rise = tokens
    return np.stack([np.ones(len(table)), rise, batch, tokens * context, batch * context, loaded, loaded * batch], axis=1)
