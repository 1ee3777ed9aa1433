"""The report over all public cases, and its pictures."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from adasim.figures import png
from adasim.page import Page, Story, Table, write_page
from adasim.tables import Design
from tests.public_cases.held_out import NEAR, PLAIN, Case, Judged, judge, load, not_fitted

BAR = 0.8  # share of the columns in which advice is to be near the best
METHOD = [
    "Rows marked «input» were fitted, at most a third of a table and never all rows of a batch; which ones was settled "
    "by their places - plain decoding and one or two lengths at spread batches; where there is one batch, plain decoding "
    "and the middle length; of accept lengths those in the middle of equal parts. Where the outcome depends on the "
    "choice among such rows (angelslim_qwen3_30b, specforge_qwen3_30b), all choices were tried, and that of the median "
    "error counts. Everything else was predicted.",
    "Accept lengths that were measured in fitted rows are used; those of predicted chains are predicted too. Of "
    "trees the accept length is told, because no chain gives it, and only what a round of theirs costs is predicted.",
    "Limits are for 95 % of what would be measured. They come from worlds drawn in proportion to their probability.",
    "Null model: the logarithm as a quadratic in k and log2 batch on the same fitted rows, with as many of the terms 1, "
    "log2 batch, k, k^2, log2 batch^2, k log2 batch as these fix. «nearest»: the fitted row nearest in k at the same "
    "batch, where there is one.",
    f"Advice: per column (a batch, or a benchmark) the length with the best prediction; regret is the measured "
    f"throughput given away; near means within {NEAR:.0%}. Trees compete only where a tree was fitted. The best constant "
    "length is known only afterwards.",
    "What is believed beforehand (calibration/world.py) is the same for all cases. Its form (draft time per request in "
    "proportion to the target's, a knee that may be sharp) and its widths were settled with these tables at hand.",
]


def write(out: Path) -> list[Judged]:
    """Fit and judge every case, and write the report."""
    judged = [judge(case) for case in load()]
    out.mkdir(parents=True, exist_ok=True)
    pictures = {j.case.name: draw(j) for j in judged}
    captions = {j.case.name: _caption(j) for j in judged}
    page = Page(
        answer=answer(judged),
        shown=_shown(judged),
        tables={"cells": pd.concat([j.cells.assign(case=j.case.name) for j in judged]), "summary": summary(judged)},
        pictures=pictures,
        captions=captions,
        method=METHOD,
        failures=failures(judged),
        about_error="The error of every table is that of the rows that were not fitted.",
    )
    story = Story(
        name="public_cases",
        title="Public tables, a third of each fitted",
        description="Cost and acceptance are fitted to at most a third of the rows of tables that others published, "
        "and the other rows are predicted; so is which draft length to use.",
        design=Design([], None),
        calibration=[(j.case.name, j.case.source) for j in judged],
        inputs=["the rows marked as input in tables/cells.csv"],
        assumptions=[],
        notes=[],
        seeds=1,
        trials=(len(judged), len(judged)),
        kind="predicted",
    )
    write_page(page, story, out)
    return judged


def counted(judged: list[Judged], *, accepts: bool = False) -> list[Judged]:
    """The cases of which at most a third was fitted."""
    return [j for j in judged if not j.case.few and j.case.accepts == accepts]


def totals(judged: list[Judged]) -> dict[str, float]:
    """Over all rows and columns of the counted throughput tables, and the rows of the accept lengths."""
    rate, tau = counted(judged), counted(judged, accepts=True)
    cells, lengths = (pd.concat([j.predicted for j in part]) for part in (rate, tau))
    regret, with_trees = (pd.concat([j.advice(trees=t) for j in rate])["regret"] for t in (False, True))
    columns = [len(j.columns()) for j in rate]
    near = cells[cells["nearest"].notna()]
    return {
        "cells": len(cells),
        "error": cells["error"].abs().mean(),
        "error_of_cases": float(np.mean([j.error for j in rate])),
        "chains": cells.loc[~cells["tree"], "error"].abs().mean(),
        "trees": cells.loc[cells["tree"], "error"].abs().mean(),
        "null": (cells["null"] / cells["measured"] - 1).abs().mean(),
        "determined": float(np.mean([j.error for j in rate if j.determined])),
        "determined_null": float(np.mean([j.null_error() for j in rate if j.determined])),
        "beside_nearest": near["error"].abs().mean(),
        "nearest": (near["nearest"] / near["measured"] - 1).abs().mean(),
        "inside": float(((cells["low"] <= cells["measured"]) & (cells["measured"] <= cells["high"])).mean()),
        "columns": len(regret),
        "near": float((regret <= NEAR).mean()),
        "regret": float(regret.mean()),
        "constant": float(np.average([j.constant[1] for j in rate], weights=columns)),
        "near_with_trees": float((with_trees <= NEAR).mean()),
        "tau_cells": len(lengths),
        "tau_error": lengths["error"].abs().mean(),
        "tau_null": (lengths["null"] / lengths["measured"] - 1).abs().mean(),
    }


def answer(judged: list[Judged]) -> list[str]:
    """The outcome in sentences."""
    t = totals(judged)
    rate = counted(judged)
    worse = [j.case.name for j in rate if j.error > j.null_error()]
    simpler = [j.case.name for j in rate if j.error_beside_nearest > j.null_error("nearest")]
    determined = sum(j.determined for j in rate)
    return [
        f"Throughput of {t['cells']:.0f} rows that were not fitted is predicted with a mean absolute error of "
        f"{t['error']:.1%} ({t['error_of_cases']:.1%} if every table counts alike; chains {t['chains']:.1%}, trees "
        f"{t['trees']:.1%}, which were told their accept length); the null model's is {t['null']:.1%}. It is worse than "
        f"that in {', '.join(worse) or 'no table'}. {t['inside']:.0%} of the rows lie within their 95 % limits.",
        f"That null model is weak where few rows were fitted. In the {determined} tables that determine all of its terms "
        f"the mean error is {t['determined']:.1%} against its {t['determined_null']:.1%}. The fitted row nearest in k at "
        f"the same batch, where there is one, is off by {t['nearest']:.1%} (this model, on the same rows, "
        f"{t['beside_nearest']:.1%}), and better than this model in {', '.join(simpler) or 'no table'}.",
        f"The advised length is within {NEAR:.0%} of the best measured one in {t['near']:.0%} of {t['columns']:.0f} "
        f"columns (bar {BAR:.0%}), with a mean regret of {t['regret']:.1%}; the best constant length of each table, "
        f"known only afterwards, {t['constant']:.1%}. With trees among the choices: {t['near_with_trees']:.0%}.",
        f"Accept lengths of {t['tau_cells']:.0f} lengths that were not fitted: mean absolute error {t['tau_error']:.1%}, "
        f"null model {t['tau_null']:.1%}.",
    ]


def failures(judged: list[Judged]) -> list[str]:
    """Targets that were missed."""
    t = totals(judged)
    says = [f"mean error {t['error']:.1%} exceeds 10 %"] if t["error"] > 0.1 else []
    if t["near"] < BAR:
        says.append(f"advice is near the best in {t['near']:.0%} of the columns")
    if t["regret"] > t["constant"]:
        says.append("the best constant length, known only afterwards, gives less away")
    return says


def summary(judged: list[Judged]) -> pd.DataFrame:
    """One row a case."""
    rows = []
    for j in judged:
        advice = j.advice()
        right, sides = j.sides
        rows.append(
            {
                "case": j.case.name,
                "rows": len(j.cells),
                "fitted": int((j.cells["role"] == "input").sum()),
                "error": j.error,
                "worst": j.worst,
                "null": j.null_error(),
                "nearest": j.null_error("nearest"),
                "inside": j.inside,
                "columns": len(advice),
                "near": int((advice["regret"] <= NEAR).sum()),
                "regret": advice["regret"].mean(),
                "constant": j.constant[0],
                "constant_regret": j.constant[1],
                "sides": sides,
                "sides_right": right,
                "counted": not j.case.few,
                "why": j.case.why,
            }
        )
    return pd.DataFrame(rows)


def _shown(judged: list[Judged]) -> list[Table]:
    head = ["case", "rows", "fitted", "mean error", "worst", "null model", "nearest", "within limits"]
    advice = ["near the best", "regret", "best constant", "right side of plain"]
    parts = [
        ("Throughput", counted(judged), head + advice),
        ("Accept lengths", counted(judged, accepts=True), head),
        ("Too few rows: more than a third was fitted; not counted", [j for j in judged if j.case.few], head + advice),
    ]
    shown = [Table(title, columns, [_cells(j)[: len(columns)] for j in part]) for title, part, columns in parts]
    says = [[j.case.name, line] for j in judged for line in j.crossovers]
    shown.append(Table("Where speculation first stops paying", ["case", "k: batch"], says))
    missed = [
        [j.case.name, f"{r['group']} {r['batch']}".strip(), str(r["advised"]), str(r["best"]), f"{r['regret']:.1%}"]
        for j in counted(judged)
        for _, r in j.advice().iterrows()
        if r["regret"] > NEAR
    ]
    shown.append(Table("Advice that is not near the best", ["case", "column", "advised", "best", "regret"], missed))
    shown.append(Table("Why it misses", ["case", "reason"], [[j.case.name, j.case.why] for j in judged if j.case.why]))
    odd = [[j.case.name, f"{len(j.doubts)} rows; the first: {j.doubts[0]}"] for j in judged if j.doubts]
    shown.append(Table("What looks as if rows came from different set-ups", ["case", "doubt"], odd))
    reasons = [[name, why] for name, why in not_fitted().items()]
    shown.append(Table("Tables that were not fitted", ["table", "why"], reasons))
    return shown


def _cells(j: Judged) -> list[str]:
    advice, (right, sides) = j.advice(), j.sides

    def share(value: float) -> str:
        return "–" if np.isnan(value) else f"{value:.1%}"

    return [
        j.case.name,
        f"{len(j.cells)}",
        f"{(j.cells['role'] == 'input').sum()}",
        share(j.error),
        share(j.worst),
        share(j.null_error()),
        share(j.null_error("nearest")),
        f"{j.inside:.0%}",
        f"{(advice['regret'] <= NEAR).sum()} of {len(advice)}",
        share(advice["regret"].mean()) if len(advice) else "–",
        f"{j.constant[0]}: {share(j.constant[1])}" if j.constant[0] else "–",
        f"{right} of {sides}" if sides else "–",
    ]


def _caption(j: Judged) -> str:
    what = "Tokens per round" if j.case.accepts else "Output tokens per second"
    return (
        f"{j.case.title}. {what}: lines and bands predicted, with 95 % limits; hollow points were fitted, full ones "
        f"were not; dashes: the null model. Mean error {j.error:.1%}, null model {j.null_error():.1%}. "
        f"Source: {j.case.source}."
    )


def draw(j: Judged) -> bytes:
    """A panel a column, over k; rows that are alone at their batch go into a panel of plain decoding over batches."""
    columns = [(_place(p), p) for _, p in j.cells.groupby(["group", "batch"], sort=False) if len(p) > 1]
    plain = j.cells[j.cells["k"] == 0]
    with mpl.rc_context({"backend": "Agg"}), sns.axes_style("whitegrid"), sns.plotting_context("notebook", 0.8):
        if j.case.accepts or plain["batch"].nunique() <= len(columns):
            figure = _panels(columns, j.case)
        else:
            figure = _panels([*columns, ("plain decoding over batches", plain)], j.case)
        return png(figure, "predicted")


def _panels(panels: list[tuple[str, pd.DataFrame]], case: Case) -> Figure:
    across = min(4, len(panels))
    down = -(-len(panels) // across)
    figure, axes = plt.subplots(
        down, across, figsize=(3.1 * across + 1.2, 2.7 * down + 0.4), squeeze=False, layout="constrained"
    )
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    for i, (ax, (title, part)) in enumerate(zip(axes.flat, panels, strict=False)):
        over_batches = title.startswith(PLAIN)
        _panel(ax, part.sort_values("batch" if over_batches else ["tree", "k"], kind="stable"), over_batches)
        ax.set_title(title, fontsize=9)
        if over_batches:
            ax.set_xlabel("batch")
        elif i + across >= len(panels):
            ax.set_xlabel("drafts k")
    for ax in axes[:, 0]:
        ax.set_ylabel("tokens per round" if case.accepts else "tok/s")
    named: dict[str, Any] = {}
    for ax in axes.flat:  # the first of each name: lines before marks
        for handle, name in zip(*ax.get_legend_handles_labels(), strict=True):
            named.setdefault(name, handle)
    columns = 5 if across > 1 else 3
    figure.legend(list(named.values()), list(named), loc="outside lower center", ncols=columns, frameon=False)
    return figure


def _panel(ax: Axes, part: pd.DataFrame, over_batches: bool) -> None:
    x = np.arange(len(part))
    tree, fitted = part["tree"].to_numpy(), (part["role"] == "input").to_numpy()
    measured = part["measured"].to_numpy()
    colour = sns.color_palette("colorblind")[0]
    for kind in (~tree, tree):
        if not kind.any():
            continue
        at, rows = x[kind], part[kind]
        joined = kind is not tree and len(at) > 1  # each tree is a drafter of its own: no line from one to the next
        line, dash = ("-", "--") if joined else ("", "")
        marks: dict[str, Any] = {"marker": "" if joined else "_", "markersize": 11}
        low, high = rows["low"].to_numpy(), rows["high"].to_numpy()
        if joined:
            ax.fill_between(at, low, high, color=colour, alpha=0.18, linewidth=0, label="95 % limits")
        else:
            ax.vlines(at, low, high, color=colour, alpha=0.25, linewidth=7, label="95 % limits")
        style: dict[str, Any] = {"color": colour, "linestyle": line, "label": "predicted", **marks}
        ax.plot(at, rows["predicted"], **style)
        null: dict[str, Any] = {"color": "0.55", "linestyle": dash, "linewidth": 1, "label": "null model", **marks}
        ax.plot(at, rows["null"], **null)
    ax.plot(x[~fitted], measured[~fitted], "o", color="0.15", markersize=5, label="measured")
    ax.plot(x[fitted], measured[fitted], "o", color="0.15", markerfacecolor="white", markersize=5, label="fitted")
    labels = list(part["batch"].astype(str) if over_batches else part["label"])
    ax.set_xticks(x, labels, rotation=30 if sum(map(len, labels)) > 20 else 0)
    top = max(float(part[["measured", "high"]].max().max()), 0.0)
    ax.set_ylim(0, 1.08 * min(top, 2.2 * float(measured.max())))


def _place(part: pd.DataFrame) -> str:
    first = part.iloc[0]
    return str(first["group"]) or f"batch {first['batch']}"
