"""Fit a third of a table's rows, predict the others, judge both the numbers and the advice."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from adasim.calibration.from_throughput import DRAWS, Posterior, fit_throughput_table
from adasim.calibration.throughput_profile import doubts
from adasim.calibration.throughput_table import Row
from adasim.files import load_yaml
from adasim.types import FloatArray

HERE = Path(__file__).parent
SCENARIOS = HERE.parents[1] / "scenarios"
NEAR = 0.02  # of the best: good advice
PLAIN = "plain"


@dataclass(frozen=True)
class Case:
    """A published table."""

    name: str
    title: str
    source: str
    limits: tuple[float, float]  # tolerated mean and worst error
    rows: pd.DataFrame  # group, batch, k, steps, top_k, tok_s, accept_length, role
    few: bool = False  # more than a third had to be fitted
    accepts: bool = False  # of accept lengths, not of throughput
    why: str = ""  # of misses


@dataclass(frozen=True)
class Judged:
    """A case with its predictions."""

    case: Case
    cells: pd.DataFrame  # group, batch, k, tree, label, role, measured, predicted, low, high, null, nearest, error
    posteriors: dict[str, Posterior]  # by group
    doubts: list[str]

    @property
    def predicted(self) -> pd.DataFrame:
        """The rows that were not fitted."""
        return self.cells[self.cells["role"] == "predicted"]

    @property
    def error(self) -> float:
        """Mean absolute error."""
        return float(self.predicted["error"].abs().mean())

    @property
    def worst(self) -> float:
        """Largest absolute error."""
        return float(self.predicted["error"].abs().max())

    @property
    def inside(self) -> float:
        """Share of the predicted rows within their limits."""
        c = self.predicted
        return float(((c["low"] <= c["measured"]) & (c["measured"] <= c["high"])).mean())

    @property
    def error_beside_nearest(self) -> float:
        """Mean absolute error over the rows that have a nearest fitted one."""
        return float(self.predicted.loc[self.predicted["nearest"].notna(), "error"].abs().mean())

    @property
    def determined(self) -> bool:
        """Whether the fitted rows determine the whole quadratic of the null model."""
        fitted = self.cells[self.cells["role"] == "input"]
        return len(self.posteriors) == 1 and len(_rising(_quadratic_terms(fitted["k"], fitted["batch"]))) == 6

    def null_error(self, null: str = "null") -> float:
        """Mean absolute error of a null model on the same rows."""
        return float((self.predicted[null] / self.predicted["measured"] - 1).abs().mean())

    def columns(self, *, trees: bool = False) -> list[pd.DataFrame]:
        """Rows of one group and batch among which there is a choice; trees, unless asked for, only if one was fitted."""
        if self.case.accepts:
            return []
        c = self.cells
        trees = trees or bool((c["tree"] & (c["role"] == "input")).any())
        return [p for _, p in c[trees | ~c["tree"]].groupby(["group", "batch"], sort=False) if len(p) > 1]

    def advice(self, *, trees: bool = False) -> pd.DataFrame:
        """Per column: the length with the best prediction, the best one measured, and the regret."""
        rows = []
        for part in self.columns(trees=trees):
            advised, best = (part.iloc[int(part[c].to_numpy().argmax())] for c in ("predicted", "measured"))
            regret = 1 - advised["measured"] / best["measured"]
            rows.append((advised["group"], advised["batch"], advised["label"], best["label"], regret))
        return pd.DataFrame(rows, columns=["group", "batch", "advised", "best", "regret"])

    @cached_property
    def constant(self) -> tuple[str, float]:
        """The length that does best when used in every column, among those measured in all, and its mean regret."""
        if not self.columns():
            return "", nan
        shares = [p.set_index("label")["measured"] / p["measured"].max() for p in self.columns()]
        table = pd.concat(shares, axis=1).dropna()
        means = 1 - table.mean(axis=1)
        return (str(means.idxmin()), float(means.min())) if len(means) else ("", nan)

    @property
    def sides(self) -> tuple[int, int]:
        """Speculative rows predicted on the right side of plain decoding, of those that were not fitted."""
        right = count = 0
        for _, part in self.cells.groupby(["group", "batch"], sort=False):
            plain = part[part["k"] == 0]
            others = part[(part["k"] > 0) & (part["role"] == "predicted")]
            if len(plain):
                right += int(
                    (
                        (others["measured"] > plain["measured"].iloc[0])
                        == (others["predicted"] > plain["predicted"].iloc[0])
                    ).sum()
                )
                count += len(others)
        return right, count

    @property
    def crossovers(self) -> list[str]:
        """Where speculation stops paying, measured and predicted at the measured batches, for lengths at 3 or more."""
        says = []
        plain = self.cells[self.cells["k"] == 0].set_index("batch")
        for label, part in self.cells[self.cells["k"] > 0].groupby("label", sort=False):
            both = part.set_index("batch").join(plain.add_suffix("_plain"), how="inner")
            if len(both) < 3 or part["group"].nunique() > 1:
                continue
            measured, predicted = (_first(both[c] <= both[f"{c}_plain"]) for c in ("measured", "predicted"))
            limits = ""
            k = int(part["k"].iloc[0])
            if label == f"{k}":
                c = self.posteriors[""].crossover(k, limit=4 * int(both.index.max()))
                limits = f" (limits {c.low:g} to {c.high:g})"
            says.append(f"{label}: measured {measured}, predicted {predicted}{limits}")
        return says


def _first(loses: "pd.Series[bool]") -> str:
    batches = loses.index[loses]
    return f"batch {batches.min()}" if len(batches) else f"beyond {loses.index.max()}"


def load() -> list[Case]:
    """All cases."""
    about = load_yaml(HERE / "cases.yaml")
    tables = {
        kind: pd.read_csv(HERE / f"{kind}.csv", comment="#", keep_default_na=True)
        for kind in ("throughput", "accept_lengths")
    }
    cases = []
    for kind, table in tables.items():
        for name, facts in about[kind].items():
            rows = _of_scenario(name) if facts.pop("scenario", False) else table[table["case"] == name]
            limits = tuple(facts.pop("limits"))
            cases.append(Case(name, rows=_complete(rows), limits=limits, accepts=kind == "accept_lengths", **facts))
    return cases


def not_fitted() -> dict[str, str]:
    """Tables that cannot be fitted, and why."""
    return dict(load_yaml(HERE / "cases.yaml")["not_fitted"])


def _of_scenario(name: str) -> pd.DataFrame:
    """The reference cells of a packaged scenario."""
    table = pd.read_csv(SCENARIOS / f"{name}.csv", comment="#")
    k = [0 if p == "off" else int(p.rsplit("=", 1)[1]) - 1 for p in table["policy"]]
    return pd.DataFrame({"batch": table["at"], "k": k, "tok_s": table["value"], "role": table["role"]})


def _complete(rows: pd.DataFrame) -> pd.DataFrame:
    columns: dict[str, Any] = {
        "group": "",
        "batch": 1,
        "steps": np.nan,
        "top_k": 1,
        "tok_s": np.nan,
        "accept_length": np.nan,
    }
    full = rows.assign(**{c: v for c, v in columns.items() if c not in rows})
    return full.fillna({"group": "", "top_k": 1}).reset_index(drop=True)


def judge(case: Case, draws: int = DRAWS) -> Judged:
    """Fit the rows marked as input, group by group, and predict all."""
    parts, posteriors, odd = [], {}, []
    for group, part in case.rows.groupby("group", sort=False):
        rows = [_row(r) for r in part.to_dict("records")]
        fitted = [r for r, role in zip(rows, part["role"], strict=True) if role == "input"]
        posterior = posteriors[str(group)] = fit_throughput_table(fitted, draws=draws)
        if case.accepts:
            found = posterior.tau([r.k for r in rows])
            measured = np.array([r.tau for r in rows], dtype=float)
        else:
            found = posterior.tok_s([r if r.tree else r._replace(tau=None) for r in rows])
            measured = np.array([r.tok_s for r in rows], dtype=float)
        known = (part["role"] == "input").to_numpy()
        odd += doubts(rows)
        parts.append(
            pd.DataFrame(
                {
                    "group": group,
                    "batch": [r.batch for r in rows],
                    "k": [r.k for r in rows],
                    "tree": [r.tree for r in rows],
                    "label": [_label(r) for r in rows],
                    "role": part["role"].to_numpy(),
                    "measured": measured,
                    "predicted": [i.estimate for i in found],
                    "low": [i.low for i in found],
                    "high": [i.high for i in found],
                    "null": quadratic(rows, known, measured),
                    "nearest": nearest(rows, known, measured),
                }
            )
        )
    cells = pd.concat(parts, ignore_index=True)
    cells["error"] = cells["predicted"] / cells["measured"] - 1
    return Judged(case, cells, posteriors, odd)


def quadratic(rows: list[Row], known: "np.ndarray[Any, Any]", measured: FloatArray) -> FloatArray:
    """The null model: log of the value as a quadratic in k and log2 batch, as far as the known rows fix it, [rows].

    Terms come in the order 1, log2 batch, k, k^2, log2 batch^2, k log2 batch; what does not raise the rank is left out.
    """
    terms = _quadratic_terms([r.k for r in rows], [r.batch for r in rows])
    chosen = _rising(terms[known])
    weights = np.linalg.lstsq(terms[known][:, chosen], np.log(measured[known]), rcond=None)[0]
    return np.exp(terms[:, chosen] @ weights)


def _quadratic_terms(lengths: Iterable[int], batches: Iterable[int]) -> FloatArray:
    k, b = np.array([*lengths], dtype=float), np.log2([*batches])
    return np.column_stack([np.ones(len(k)), b, k, k * k, b * b, k * b])


def _rising(terms: FloatArray) -> list[int]:
    """Columns each of which raises the rank of those before."""
    chosen: list[int] = []
    for i in range(terms.shape[1]):
        if np.linalg.matrix_rank(terms[:, [*chosen, i]]) > len(chosen):
            chosen.append(i)
    return chosen


def nearest(rows: list[Row], known: "np.ndarray[Any, Any]", measured: FloatArray) -> FloatArray:
    """The simplest null model: what the known row at the same batch with the nearest k measured, [rows]; NaN: none.

    Plain rows are compared with plain rows only.
    """
    found = []
    for row in rows:
        near = [
            (abs(r.k - row.k), m)
            for r, m, fitted in zip(rows, measured, known, strict=True)
            if fitted and r.batch == row.batch and (r.k > 0) == (row.k > 0)
        ]
        found.append(min(near)[1] if near else nan)
    return np.array(found, dtype=float)


def _row(r: dict[Any, Any]) -> Row:
    steps = None if pd.isna(r["steps"]) else int(r["steps"])
    tok_s, tau = (None if pd.isna(r[c]) else float(r[c]) for c in ("tok_s", "accept_length"))
    return Row(int(r["batch"]), int(r["k"]), tok_s, tau, steps=steps, top_k=int(r["top_k"]))


def _label(row: Row) -> str:
    if not row.k:
        return PLAIN
    return f"{row.steps}x{row.top_k} of {row.k + 1}" if row.tree else f"{row.k}"
