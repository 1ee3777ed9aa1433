"""Pictures of advice, as PNG bytes. The same findings give the same bytes."""

from collections.abc import Callable
from functools import partial
from math import inf

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from adasim.advice.choice import Crossover, Loop
from adasim.advice.study import Findings
from adasim.figures import png
from adasim.tables import RATIO

CAPTIONS = {
    "speedup_closed": "Speed-up over plain decoding by concurrency. Band: the best fixed length with everything "
    "that may be off, 95 %; shaded columns: where it may stop paying.",
    "speedup_open": "Speed-up in median TPOT over plain decoding by arrival rate; band and columns as above.",
    "best_k": "Draft length with the most tokens per second for a batch that decodes steadily, by formula; 0 = plain "
    "decoding. In brackets: the lengths that are best in 95 % of the worlds that the data allow.",
    "bursts_closed": "Tokens per second against ITL p99, a line a policy, its points the loads: up and left is better.",
    "bursts_open": "Median TPOT against ITL p99, a line a policy, its points the rates: down and to the left is better.",
    "error": "What the error of the speed-up is made of, where speculation is nearest to not being told from "
    "plain decoding.",
}
MAX_TICKS = 12


def draw(found: Findings, parts: pd.DataFrame | None, mark: str) -> dict[str, bytes]:
    """All pictures that the findings support, by name; ``mark`` is printed on each."""
    pictures: dict[str, Callable[[], Figure]] = {}
    for kind, loop in found.loops.items():
        if loop.summary[RATIO].notna().any() and len(loop.kinds()) > 1:
            pictures[f"speedup_{kind}"] = partial(speedups, loop, found.curves[kind], found.crossovers[kind])
            pictures[f"bursts_{kind}"] = partial(bursts, loop)
    if len(found.lengths):
        pictures["best_k"] = lambda: best_lengths(found.lengths)
    if parts is not None and len(parts):
        pictures["error"] = lambda: error_parts(parts)
    with (
        mpl.rc_context({"backend": "Agg"}),
        sns.axes_style("whitegrid"),
        sns.plotting_context("notebook", 0.9),
    ):
        return {name: png(make(), mark) for name, make in pictures.items()}


def _colours(loop: Loop) -> dict[str, tuple[float, float, float]]:
    names = [p.label for p in loop.plan.scenario.policies]
    return dict(zip(names, sns.color_palette("colorblind", len(names)), strict=True))


def speedups(loop: Loop, curve: pd.DataFrame, crossing: Crossover | None) -> Figure:
    """Every policy's speed-up by load, the best fixed length's band, and where it stops paying."""
    figure, ax = plt.subplots(figsize=(8.6, 4.4), layout="constrained")
    for policy, colour in _colours(loop).items():
        rows = loop.summary[loop.summary["policy"] == policy].sort_values(loop.x)
        if policy != "off" and len(rows):
            ax.plot(rows[loop.x], rows[RATIO], marker="o", markersize=4, color=colour, label=policy)
    if len(curve):
        ax.fill_between(
            curve["load"], curve["low"], curve["high"], color="0.5", alpha=0.2, linewidth=0, label="best k, all errors"
        )
    if crossing is not None and (crossing.low, crossing.high) not in {(inf, inf), (0.0, 0.0)}:
        low, high = max(crossing.low, crossing.first), min(crossing.high, crossing.last)
        ax.axvspan(low, high, color="tab:red", alpha=0.08, linewidth=0, label="may stop paying")
        if 0 < crossing.at < inf:
            ax.axvline(crossing.at, color="tab:red", linewidth=1.2)
    ax.axhline(1, color="0.3", linestyle="--", linewidth=1)
    top = max([float(loop.summary[RATIO].max()), float(curve["speedup"].max()) if len(curve) else 1.0])
    ax.set_ylim(0, min(1.25 * top, max(1.1 * top, float(curve["high"].max()) * 1.05 if len(curve) else top)))
    _axis(ax, loop)
    ax.set_ylabel("speed-up over plain decoding")
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def _axis(ax: Axes, loop: Loop) -> None:
    loads = np.array(loop.loads, dtype=float)
    if len(loads) > 1 and loads[-1] / loads[0] >= 8:
        ax.set_xscale("log", base=2)
    ax.set_xticks(loads[:MAX_TICKS], [f"{v:g}" for v in loads[:MAX_TICKS]])
    ax.minorticks_off()
    ax.set_xlabel("requests at a time" if loop.kind == "closed" else "requests per second")


def bursts(loop: Loop) -> Figure:
    """Speed against ITL p99."""
    speed, words = ("output_tok_s", "output tokens/s") if loop.kind == "closed" else ("tpot_p50_ms", "median TPOT, ms")
    figure, ax = plt.subplots(figsize=(8.6, 4.4), layout="constrained")
    for policy, colour in _colours(loop).items():
        rows = loop.summary[loop.summary["policy"] == policy].sort_values(loop.x)
        style = {"linestyle": "--", "color": "0.25"} if policy == "off" else {"color": colour}
        ax.plot(rows["itl_p99_ms"], rows[speed], marker="o", markersize=4, label=policy, **style)
        if len(rows):
            last = rows.iloc[-1]
            ax.annotate(f"{last[loop.x]:g}", (last["itl_p99_ms"], last[speed]), fontsize=7, color="0.4",
                        xytext=(4, 2), textcoords="offset points")  # fmt: skip
    ax.set(xlabel="ITL p99, ms", ylabel=words)
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def best_lengths(table: pd.DataFrame) -> Figure:
    """A map of the best length over batch and context."""
    grid = table.pivot(index="context", columns="batch", values="k").sort_index(ascending=False)
    words = (
        table.assign(
            text=[
                f"{k}" if low == high == k else f"{k}\n({low}–{high})"
                for k, low, high in zip(table["k"], table["k_low"], table["k_high"], strict=True)
            ]
        )
        .pivot(index="context", columns="batch", values="text")
        .reindex_like(grid)
    )
    height = 1.6 + 0.62 * len(grid)
    figure, ax = plt.subplots(figsize=(1.8 + 0.85 * len(grid.columns), height), layout="constrained")
    sns.heatmap(
        grid.astype(float), annot=words, fmt="", cmap="crest", vmin=0, cbar=False, linewidths=0.6, ax=ax,
        annot_kws={"fontsize": 9},
    )  # fmt: skip
    ax.set(xlabel="batch", ylabel="context, tokens", title="best k")
    ax.tick_params(axis="y", rotation=0)
    return figure


def error_parts(parts: pd.DataFrame) -> Figure:
    """Bars of the parts of the error, the largest on top."""
    shown = parts.iloc[::-1]
    figure, ax = plt.subplots(figsize=(6.4, 1.2 + 0.34 * len(shown)), layout="constrained")
    ax.barh(shown["part"], 100 * shown["half_width"], color=sns.color_palette("colorblind")[0], height=0.7)
    ax.set(xlabel="± % of the speed-up")
    ax.grid(visible=False, axis="y")
    return figure
