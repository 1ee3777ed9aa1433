"""Pictures of a calibration: fit against points."""

from collections.abc import Callable
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from adasim.calibration.estimate.part import FittedPart
from adasim.calibration.interval import Estimate, Residual
from adasim.figures import png

MOST_BATCHES, MOST_DOMAINS, MOST_CONTEXTS = 8, 9, 3
CAPTIONS = {
    "verify": "Verification: medians of equal passes (points, the machine's drift taken out) and the fit at the same "
    "batch, tokens and context (lines). Grey band: the knee with its interval.",
    "residuals": "Verification: how far the fit lies from what was measured, by batch and tokens a request (median; "
    "cells).",
    "draft_prefill": "Drafting against positions filled (anchors counted), and prefills against prompt tokens.",
    "overhead": "What rounds take outside draft and verification, pauses before them included, by what they did; crosses "
    "are the fit (outliers beyond the axis are not shown).",
    "speed": "How much slower than usual the machine was in each run or stretch of time; 1 where nothing was repeated.",
    "survival": "P(first k drafts accepted) of full blocks with 95 % intervals; points are counted among blocks that "
    "verified so far, in the runs as they were. Shaded: too few drafts were verified there, extrapolated.",
    "tau": "tau of runs of one verify length with 95 % intervals, and what the fitted text says (lines).",
    "head": "Rounds by what the length head reported: tokens emitted (points; size: rounds) and what the fitted head "
    "expects of the same rounds, cut as they were (line).",
    "confidence": "Left: rounds by the sum of their confidence curve: drafts accepted (points; size: rounds), and what "
    "the fit expects of the same rounds, cut as they were (line). Right: quantiles of the sums, recorded (points) and "
    "fitted (line).",
    "context": "tau by context, relative to the same domains and verify lengths at all contexts.",
    "learning": "tau of drafter versions over that as loaded, against training rounds of 128 requests, and the fit.",
}


def draw(parts: dict[str, FittedPart[Any]], mark: str) -> dict[str, bytes]:
    """All figures that the parts support, by name; ``mark`` (simulated, measured) is printed on each."""
    points = {name: table for part in parts.values() for name, table in part.points.items()}
    knee = parts["verify"].intervals["verify.knee_tokens"]
    pictures: dict[str, Callable[[], Figure]] = {
        "verify": lambda: _verify(points["verify"], knee),
        "residuals": lambda: _residuals([r for r in parts["verify"].residuals if r.part == "verify"]),
    }
    if "draft" in points or "prefill" in points:
        pictures["draft_prefill"] = lambda: _lines({n: points[n] for n in ("draft", "prefill") if n in points})
    if "overhead" in points:
        pictures["overhead"] = lambda: _overhead(points["overhead"])
    if len(points["speed"]) > 1:
        pictures["speed"] = lambda: _speed(points["speed"])
    domains = [n.removeprefix("survival of ") for n in points if n.startswith("survival of ")][:MOST_DOMAINS]
    pictures["survival"] = lambda: _by_domain(domains, lambda ax, d: _survival(ax, points[f"survival of {d}"]))
    if any(len(points[f"tau of {d}"]) for d in domains):
        pictures["tau"] = lambda: _by_domain(domains, lambda ax, d: _tau(ax, points[f"tau of {d}"]))
    if "head" in points:
        pictures["head"] = lambda: _head(points["head"])
    if "confidence" in points:
        pictures["confidence"] = lambda: _confidence(points["confidence"], points["confidence sums"])
    if "context" in points:
        pictures["context"] = lambda: _context(points["context"])
    learned = {n.removeprefix("learning of "): t for n, t in points.items() if n.startswith("learning of ")}
    if learned:
        pictures["learning"] = lambda: _by_domain(list(learned), lambda ax, d: _learning(ax, learned[d]))
    with mpl.rc_context({"backend": "Agg"}), sns.axes_style("whitegrid"), sns.plotting_context("notebook", 0.9):
        return {name: png(make(), mark) for name, make in pictures.items()}


def _verify(points: pd.DataFrame, knee: Estimate) -> Figure:
    logs = np.log(points["context"].to_numpy())
    edges = np.quantile(logs, [1 / 3, 2 / 3]) if np.ptp(logs) > 1 else np.empty(0)
    level = np.searchsorted(edges, logs)
    levels = np.unique(level)
    figure, axes = plt.subplots(
        1, len(levels), figsize=(4.6 * len(levels) + 1.8, 4.4), squeeze=False, sharey=True, layout="constrained"
    )
    batches = sorted(points["batch"].round().unique())
    if len(batches) > MOST_BATCHES:
        batches = [batches[round(i)] for i in np.linspace(0, len(batches) - 1, MOST_BATCHES)]
    colours = dict(zip(batches, sns.color_palette("viridis", len(batches)), strict=True))
    for ax, which in zip(axes.flat, levels, strict=True):
        part = points[level == which]
        for batch, colour in colours.items():
            mine = part[part["batch"].round() == batch].sort_values("tokens")
            if mine.empty:
                continue
            ax.scatter(mine["tokens"], mine["ms"], s=16, color=colour, alpha=0.6, label=f"batch {batch:.0f}")
            line = mine.groupby(mine["tokens"].round())[["tokens", "fitted_ms"]].mean()
            ax.plot(line["tokens"], line["fitted_ms"], color=colour, linewidth=1.5)
        if knee.value:
            ax.axvspan(max(knee.low, 0.5), max(knee.high, 0.5), color="0.5", alpha=0.18, linewidth=0)
            ax.axvline(knee.value, color="0.4", linewidth=1, linestyle="--")
        span = f"context {part['context'].min():.0f}-{part['context'].max():.0f}"
        ax.set(xscale="log", yscale="log", xlabel="tokens of the pass", title=span)
    axes.flat[0].set_ylabel("ms")
    named = dict(pair for ax in axes.flat for pair in zip(*ax.get_legend_handles_labels()[::-1], strict=True))
    ordered = [f"batch {b:.0f}" for b in batches if f"batch {b:.0f}" in named]
    figure.legend([named[n] for n in ordered], ordered, loc="outside right upper", frameon=False)
    return figure


def _residuals(residuals: list[Residual]) -> Figure:
    rows = [r.region.split(", ") for r in residuals]
    table = pd.DataFrame(
        {
            "batch": [a.removeprefix("batch ") for a, _ in rows],
            "tokens": [b.removesuffix(" tokens a request") for _, b in rows],
            "bias": [100 * r.bias for r in residuals],
            "text": [f"{100 * r.bias:+.1f} %\n± {100 * r.error:.1f} ({r.count})" for r in residuals],
        }
    )
    order = {name: list(dict.fromkeys(table[name])) for name in ("batch", "tokens")}
    order["tokens"].sort(key=lambda t: float(t.split("-")[0].removeprefix("over ")))
    values = table.pivot(index="batch", columns="tokens", values="bias").loc[order["batch"], order["tokens"]]
    texts = table.pivot(index="batch", columns="tokens", values="text").loc[order["batch"], order["tokens"]].fillna("")
    figure, ax = plt.subplots(figsize=(2.0 * values.shape[1] + 2.5, 0.85 * values.shape[0] + 1.6), layout="constrained")
    reach = max(5.0, float(np.nanmax(np.abs(values.to_numpy()))))
    image = ax.imshow(values, cmap="RdBu_r", vmin=-reach, vmax=reach, aspect="auto")
    for (row, column), text in np.ndenumerate(texts.to_numpy()):
        dark = abs(np.nan_to_num(values.to_numpy()[row, column])) > 0.6 * reach
        ax.text(column, row, text, ha="center", va="center", fontsize=9, color="white" if dark else "0.1")
    figure.colorbar(image, ax=ax, label="fit over measured, %")
    ax.set_xticks(range(values.shape[1]), list(values.columns))
    ax.set_yticks(range(values.shape[0]), list(values.index))
    ax.grid(visible=False)
    ax.set(xlabel="tokens a request", ylabel="batch")
    return figure


def _lines(tables: dict[str, pd.DataFrame]) -> Figure:
    figure, axes = plt.subplots(1, len(tables), figsize=(5.2 * len(tables), 3.8), squeeze=False, layout="constrained")
    axis = {"draft": ("positions", "draft positions of the round"), "prefill": ("tokens", "prompt tokens of the step")}
    for ax, (name, table) in zip(axes.flat, tables.items(), strict=True):
        x, words = axis[name]
        part = table.sort_values(x)
        ax.scatter(part[x], part["ms"], s=16, alpha=0.6, label="measured")
        ax.plot(part[x], part["fitted_ms"], "x", color="firebrick", markersize=5, label="fit")
        ax.set(xlabel=words, ylabel=f"{name}, ms", ylim=(0, _top(part)))
        ax.legend(frameon=False)
    return figure


def _overhead(points: pd.DataFrame) -> Figure:
    kinds = {
        "plain": points["positions"] == 0,
        "drafting": (points["positions"] > 0) & ~points["reads_head"],
        "drafting, head read": (points["positions"] > 0) & points["reads_head"],
    }
    figure, ax = plt.subplots(figsize=(7.6, 4.0), layout="constrained")
    for (name, which), colour in zip(kinds.items(), sns.color_palette("colorblind", 3), strict=True):
        part = points[which]
        if len(part):
            ax.scatter(part["batch"], part["ms"], s=18, alpha=0.55, color=colour, label=name)
            ax.plot(part["batch"], part["fitted_ms"], "x", color=colour, markersize=6)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set(xlabel="batch", ylabel="ms a round", ylim=(0, _top(points)))
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def _top(points: pd.DataFrame) -> float:
    """Where an axis ends that leaves the worst outliers out, but no fit."""
    return 1.3 * float(max(points["ms"].quantile(0.75), points["fitted_ms"].max()))


def _speed(points: pd.DataFrame) -> Figure:
    figure, ax = plt.subplots(figsize=(7.6, 3.2), layout="constrained")
    ax.plot(np.arange(1, len(points) + 1), points["factor"], "o-", markersize=4, linewidth=1)
    ax.axhline(1, color="0.4", linewidth=1)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set(xlabel="run or stretch of time, in order", ylabel="times slower than usual")
    return figure


def _by_domain(domains: list[str], paint: Callable[[Axes, str], None]) -> Figure:
    columns = min(3, len(domains))
    rows = -(-len(domains) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(4.3 * columns + 0.6, 3.3 * rows + 0.4), squeeze=False, sharey=True, layout="constrained"
    )
    for ax in axes.flat[len(domains) :]:
        ax.set_visible(False)
    for ax, domain in zip(axes.flat, domains, strict=False):
        paint(ax, domain)
        ax.set_title(domain)
    return figure


def _survival(ax: Axes, table: pd.DataFrame) -> None:
    ax.fill_between(table["position"], table["low"], table["high"], alpha=0.25, linewidth=0)
    ax.plot(table["position"], table["survival"], linewidth=1.8, label="full block")
    ax.plot(table["position"], table["observed"], "o", color="0.2", markersize=4, label="counted")
    unknown = table["observed"].isna()
    if unknown.any():
        ax.axvspan(table.loc[unknown, "position"].min() - 0.5, table["position"].max() + 0.5, color="0.5", alpha=0.12)
    ax.set(xlabel="position k", ylabel="P(first k accepted)", ylim=(0, 1))
    ax.legend(frameon=False)


def _tau(ax: Axes, table: pd.DataFrame) -> None:
    spread = np.abs(table[["low", "high"]].to_numpy().T - table["tau"].to_numpy())
    ax.errorbar(table["verify_len"], table["tau"], yerr=spread, fmt="o", color="0.2", capsize=3, label="measured")
    ax.plot(table["verify_len"], table["model"], "x-", color="firebrick", linewidth=1.2, label="fit")
    ax.set(xlabel="verify_len", ylabel="tau")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend(frameon=False)


def _head(table: pd.DataFrame) -> Figure:
    figure, ax = plt.subplots(figsize=(6.6, 4.2), layout="constrained")
    size = 10 + 140 * table["count"] / table["count"].max()
    ax.scatter(table["report"], 1 + table["accepted"], s=size, alpha=0.6, label="measured")
    ax.plot(table["report"], table["expected"], color="firebrick", linewidth=1.6, label="fitted head")
    ends = np.array([table["report"].min(), table["report"].max()])
    ax.plot(ends, ends, color="0.5", linewidth=1, linestyle=":", label="report = emitted")
    ax.set(xlabel="length head's report, tokens", ylabel="tokens emitted (cut as verified)")
    ax.set_ylim(0, 1.15 * float(max(table["expected"].max(), 1 + table["accepted"].max())))
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def _confidence(accepted: pd.DataFrame, sums: pd.DataFrame) -> Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.6, 4.2), layout="constrained")
    domains = list(accepted["domain"].unique())[:MOST_DOMAINS]
    for domain, colour in zip(domains, sns.color_palette("colorblind", len(domains)), strict=True):
        mine, levels = accepted[accepted["domain"] == domain], sums[sums["domain"] == domain]
        size = 10 + 90 * mine["count"] / accepted["count"].max()
        left.scatter(mine["sum"], mine["accepted"], s=size, alpha=0.6, color=colour, label=domain)
        left.plot(mine["sum"], mine["expected"], color=colour, linewidth=1.6)
        right.plot(levels["recorded"], levels["share"], "o", color=colour, markersize=4, alpha=0.6)
        right.plot(levels["fitted"], levels["share"], color=colour, linewidth=1.6)
    ends = np.array([0.0, accepted["sum"].max()])
    left.plot(ends, ends, color="0.5", linewidth=1, linestyle=":", label="sum = accepted")
    left.set(xlabel="sum of the curve, drafts", ylabel="drafts accepted (cut as verified)")
    right.set(xlabel="sum of the curve, drafts", ylabel="share of rounds below")
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def _context(table: pd.DataFrame) -> Figure:
    figure, ax = plt.subplots(figsize=(6.0, 3.4), layout="constrained")
    spread = np.abs(table[["low", "high"]].to_numpy().T - table["factor"].to_numpy())
    ax.errorbar(table["context"], table["factor"], yerr=spread, fmt="o-", capsize=3)
    ax.axhline(1, color="0.4", linewidth=1)
    ax.set(xlabel="context, tokens", ylabel="tau, relative")
    return figure


def _learning(ax: Axes, table: pd.DataFrame) -> None:
    spread = np.abs(table[["low", "high"]].to_numpy().T - table["factor"].to_numpy())
    ax.errorbar(table["rounds"], table["factor"], yerr=spread, fmt="o", color="0.2", capsize=3, label="measured")
    ax.plot(table["rounds"], table["fitted"], color="firebrick", linewidth=1.6, label="fit")
    ax.set(xlabel="training rounds", ylabel="tau over that as loaded")
    ax.legend(frameon=False)
