"""Formulas of the target's pass, and their constants from measured cells."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import minimize_scalar

from adasim.calibration.estimate.regression import fit, independent
from adasim.types import FloatArray

RISE = ("base_ms", "per_token_ms")
ASIDE = ("per_request_ms", "per_attended_ms", "per_context_ms")
BESIDE = ("drafter_ms", "drafter_per_request_ms")  # longer while a drafter is loaded, whose context has to follow
KNEES = 16  # tried, evenly in logarithms
CAPPED = 0.3  # relative error from which on a cell counts no more when knees are compared
APART = 1.8  # times as many tokens as at the node before
LEAST_A_NODE = 3  # rows


@dataclass(frozen=True, slots=True)
class Rise:
    """How a pass takes longer with its tokens: in a straight line, behind a knee, or from node to node.

    Attributes:
        sharpness: of the knee; 0 = there is none.
        knee: tokens.
        nodes: tokens between which times are linear; none = a formula.
    """

    sharpness: float = 0.0
    knee: float = 0.0
    nodes: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        """For people."""
        if self.nodes:
            return f"lines between {len(self.nodes)} token counts"
        return f"knee of sharpness {self.sharpness:g}" if self.sharpness else "straight lines"

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of its constants."""
        return tuple(f"at_{n:g}_tokens_ms" for n in self.nodes) or RISE

    def of(self, tokens: FloatArray) -> list[FloatArray]:
        """What its constants multiply, [rows] each."""
        if self.nodes:
            return [_linear(tokens, np.array(self.nodes), hat) for hat in np.eye(len(self.nodes))]
        rise = tokens
        if self.sharpness:
            high, low = np.maximum(tokens, self.knee), np.minimum(tokens, self.knee)
            rise = high * (1 + (low / high) ** self.sharpness) ** (1 / self.sharpness)
        return [np.ones(len(tokens)), rise]


@dataclass(frozen=True, slots=True)
class Form:
    """A formula with its constants in milliseconds."""

    rise: Rise
    used: tuple[int, ...]  # indices of names
    found: FloatArray  # [used]

    @property
    def names(self) -> tuple[str, ...]:
        """Of all constants it may have."""
        return self.rise.terms + ASIDE + BESIDE

    def predict(self, table: pd.DataFrame) -> FloatArray:
        """Milliseconds of each row."""
        return terms_of(table, self.rise)[:, list(self.used)] @ self.found

    def constants(self) -> dict[str, float]:
        """By name, those not used 0."""
        return dict.fromkeys(self.names, 0.0) | {
            self.names[i]: float(v) for i, v in zip(self.used, self.found, strict=True)
        }

    def cost(self) -> dict[str, Any]:
        """The fields of a ``PassCost``; what is beside a drafter is left out."""
        known = self.constants()
        fields: dict[str, Any] = {name: known[name] for name in ASIDE}
        if self.rise.nodes:
            return fields | {
                "nodes": [
                    {"tokens": int(n), "ms": known[t]} for n, t in zip(self.rise.nodes, self.rise.terms, strict=True)
                ]
            }
        fields |= {name: known[name] for name in RISE}
        return fields | {"knee_tokens": self.rise.knee, "sharpness": self.rise.sharpness or 1.0}

    def beside(self, table: pd.DataFrame) -> FloatArray:
        """Milliseconds of each row that are the loaded drafter's."""
        mine = [name in BESIDE for name in np.array(self.names)[list(self.used)]]
        return terms_of(table, self.rise)[:, np.array(self.used)[mine]] @ self.found[mine]


def rises_of(table: pd.DataFrame, sharpness: Sequence[float]) -> list[Rise]:
    """What may be tried on measured cells, the simplest first."""
    found = [Rise(), *(Rise(s) for s in sharpness)]
    nodes = nodes_of(table["tokens"].to_numpy(dtype=float))
    return found + [Rise(nodes=nodes)] * (len(nodes) > 2 and len(table) >= LEAST_A_NODE * len(nodes))


def nodes_of(tokens: FloatArray) -> tuple[float, ...]:
    """Measured token counts, each some times the one before; the lowest and the highest among them."""
    counts, nodes = np.unique(np.rint(tokens)), list[float]()
    for count in counts.tolist():
        if not nodes or count >= APART * nodes[-1]:
            nodes.append(count)
    if nodes and nodes[-1] < counts[-1]:
        nodes[-1:] = [counts[-1]] if len(nodes) > 1 and counts[-1] < APART**0.5 * nodes[-1] else [nodes[-1], counts[-1]]
    return tuple(nodes)


def fit_form(
    table: pd.DataFrame,
    rise: Rise,
    weight: FloatArray | None = None,
    used: Sequence[int] | None = None,
) -> Form:
    """Constants of one form; a knee is searched, near a known one where ``rise`` has it."""
    ms = table["ms"].to_numpy()
    weight = np.sqrt(table["count"].to_numpy()) * (1.0 if weight is None else weight)
    kept = weight > 0
    part, ms, weight = table[kept], ms[kept], weight[kept]

    def at(rise: Rise) -> tuple[float, Form]:
        terms = terms_of(part, rise)
        mine = tuple(independent(terms, rise.terms + ASIDE + BESIDE, ms)) if used is None else tuple(used)
        found = fit(terms[:, list(mine)], ms, weight)
        off = np.abs(terms[:, list(mine)] @ found / ms - 1)
        return float(np.sum(weight * np.minimum(off, CAPPED))), Form(rise, mine, found)

    def knee(log_tokens: float) -> Rise:
        return replace(rise, knee=float(np.exp(log_tokens)))

    if not rise.sharpness:
        return at(rise)[1]
    if rise.knee:
        low, high = np.log(rise.knee / 3), np.log(rise.knee * 3)
    else:
        knees = np.linspace(np.log(1.5), np.log(max(part["tokens"].max(), 3.0)), KNEES)
        i = int(np.argmin([at(knee(k))[0] for k in knees.tolist()]))
        low, high = knees[max(i - 1, 0)], knees[min(i + 1, KNEES - 1)]
    best = minimize_scalar(lambda x: at(knee(x))[0], bounds=(low, high), method="bounded", options={"xatol": 0.02})
    return at(knee(best.x))[1]


def terms_of(table: pd.DataFrame, rise: Rise) -> FloatArray:
    """What the constants multiply, [rows, those of the rise + ASIDE + BESIDE]."""
    loaded = table["drafter_loaded"].to_numpy(dtype=float)
    batch, tokens, context = (table[c].to_numpy(dtype=float) for c in ("batch", "tokens", "context"))
    return np.stack([*rise.of(tokens), batch, tokens * context, batch * context, loaded, loaded * batch], axis=1)


def _linear(x: FloatArray, nodes: FloatArray, values: FloatArray) -> FloatArray:
    """Linear between nodes and beyond the outermost, [rows]."""
    i = np.searchsorted(nodes, x).clip(1, len(nodes) - 1)
    share = (x - nodes[i - 1]) / (nodes[i] - nodes[i - 1])
    return np.asarray((1 - share) * values[i - 1] + share * values[i], dtype=np.float64)
