"""Pictures of a validation, as PNG bytes."""

from collections.abc import Sequence
from math import isnan

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from adasim.figures import png
from adasim.page import short
from adasim.tables import Design
from adasim.tolerances import Tolerances

MARK = "measured and simulated, as marked"


def captions(limits: Tolerances) -> dict[str, str]:
    """What is under each picture, by name."""
    mean, worst = 100 * limits.throughput_mae, 100 * limits.throughput_worst
    return {
        "scatter": "Throughput over plain decoding, simulated against measured, one point a cell; hollow: used for "
        "fitting. Bars: 95 % intervals (measured: over repeats; simulated: luck and the profile's uncertainty; none: "
        f"unknown). Bands: {mean:g} and {worst:g} %.",
        "errors": "Error of the simulated throughput over plain decoding, by cell, in %: blue is too slow, red too fast; "
        "cells in brackets were used for fitting and do not count.",
        "crossover": "Throughput over plain decoding against the load: measured solid, simulated dashed.",
        "attribution": "Mean absolute error that is left when a part of the model is replaced by what each run showed.",
    }


def draw(cells: pd.DataFrame, attribution: pd.DataFrame, design: Design, limits: Tolerances) -> dict[str, bytes]:
    """All pictures, by name.

    Args:
        cells: see ``accuracy.cells_of``.
        attribution: see ``attribution.summary_of``.
        design: what was swept.
        limits: shown as bands.
    """
    shown = cells[~cells["reference"]]
    with mpl.rc_context({"backend": "Agg"}), sns.axes_style("whitegrid"), sns.plotting_context("notebook", 0.9):
        made: dict[str, Figure] = {}
        if len(shown):
            made |= {"scatter": _scatter(shown, limits), "errors": _heat(shown, design.point)}
            if design.x is not None and shown[design.x].nunique() > 1:
                made["crossover"] = _curves(shown, design.x, design.facets)
        if len(attribution):
            made["attribution"] = _bars(attribution)
        return {name: png(figure, MARK) for name, figure in made.items()}


def _scatter(cells: pd.DataFrame, limits: Tolerances) -> Figure:
    figure, ax = plt.subplots(figsize=(8.4, 5.6), layout="constrained")
    policies = list(dict.fromkeys(cells["policy"]))
    for policy, colour in zip(policies, sns.color_palette("colorblind", len(policies)), strict=True):
        for fitted in (False, True):
            part = cells[(cells["policy"] == policy) & (cells["fitted"] == fitted)]
            if part.empty:
                continue
            x, y = part["measured_throughput_ratio"], part["predicted_throughput_ratio"]
            xerr = x * part["measured_throughput_ratio_hw"].fillna(0)
            yerr = y * part["predicted_throughput_ratio_hw"].fillna(0)
            ax.errorbar(x, y, xerr=xerr, yerr=yerr, fmt="none", ecolor=colour, elinewidth=0.7, alpha=0.5)
            label = f"{policy} (fitted)" if fitted else policy
            ax.scatter(x, y, s=40, edgecolors=[colour], facecolors=["none" if fitted else colour], label=label)
    values = cells[["measured_throughput_ratio", "predicted_throughput_ratio"]].to_numpy()
    line = np.array([np.nanmin(values) * 0.93, np.nanmax(values) * 1.07])
    ax.plot(line, line, color="0.3", linewidth=1)
    for band in (limits.throughput_mae, limits.throughput_worst):
        ax.fill_between(line, (1 - band) * line, (1 + band) * line, color="0.5", alpha=0.12, linewidth=0)
    ax.axhline(1, color="0.4", linestyle=":", linewidth=1)
    ax.axvline(1, color="0.4", linestyle=":", linewidth=1)
    ax.set(xscale="log", yscale="log", xlim=line, ylim=line)
    ax.set(xlabel="measured throughput over plain decoding", ylabel="simulated throughput over plain decoding")
    ticks = [t for t in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1, 1.2, 1.5, 2, 2.5, 3, 4, 6) if line[0] <= t <= line[1]]
    ax.set_xticks(ticks, [f"{t:g}" for t in ticks])
    ax.set_yticks(ticks, [f"{t:g}" for t in ticks])
    ax.minorticks_off()
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def _heat(cells: pd.DataFrame, point: list[str]) -> Figure:
    place = [", ".join(f"{v}" for v in row) for row in cells[point].astype(str).to_numpy().tolist()] if point else "all"
    table = cells.assign(place=place)
    order = list(dict.fromkeys(table["place"])), list(dict.fromkeys(table["policy"]))
    values = 100 * table.pivot_table(index="policy", columns="place", values="error_throughput_ratio", observed=True)
    fitted = table.pivot_table(index="policy", columns="place", values="fitted", aggfunc="max")
    values, fitted = (t.reindex(index=order[1], columns=order[0]) for t in (values, fitted))
    text = [
        ["" if isnan(v) else f"({v:+.0f})" if f is True or f == 1 else f"{v:+.0f}" for v, f in zip(a, b, strict=True)]
        for a, b in zip(values.to_numpy(), fitted.to_numpy(), strict=True)
    ]
    size = (0.62 * len(order[0]) + 4, 0.42 * len(order[1]) + 1.8)
    figure, ax = plt.subplots(figsize=size, layout="constrained")
    shades = sns.color_palette("vlag", as_cmap=True)
    colours = ax.pcolormesh(values.to_numpy(), cmap=shades, vmin=-30, vmax=30, edgecolors="w", linewidth=0.5)
    figure.colorbar(colours, ax=ax, label="error, %")
    for y, line in enumerate(text):
        for x, words in enumerate(line):
            colour = "w" if abs(values.to_numpy()[y, x]) > 18 else "0.15"
            ax.text(x + 0.5, y + 0.5, words, ha="center", va="center", fontsize=9, color=colour)
    ax.set_xticks(np.arange(len(order[0])) + 0.5, order[0])
    ax.set_yticks(np.arange(len(order[1])) + 0.5, order[1])
    ax.invert_yaxis()
    ax.grid(visible=False)
    ax.set(xlabel=", ".join(short(point)), ylabel="")
    ax.tick_params(axis="x", rotation=60)
    return figure


def _curves(cells: pd.DataFrame, x: str, facets: Sequence[str]) -> Figure:
    groups = list(cells.groupby(list(facets), sort=False)) if facets else [((), cells)]
    figure, axes = plt.subplots(
        1, len(groups), figsize=(5.4 * len(groups) + 2.4, 4.4), squeeze=False, sharey=True, layout="constrained"
    )
    policies = list(dict.fromkeys(cells["policy"]))
    colours = dict(zip(policies, sns.color_palette("colorblind", len(policies)), strict=True))
    for ax, (key, part) in zip(axes.flat, groups, strict=True):
        for policy, found in part.groupby("policy", sort=False):
            rows = found.sort_values(x)
            for arm, style in (("measured", "-o"), ("predicted", "--")):
                label = str(policy) if arm == "measured" else None
                ax.plot(rows[x], rows[f"{arm}_throughput_ratio"], style, color=colours[str(policy)], ms=4, label=label)
        ax.axhline(1, color="0.4", linewidth=1)
        ax.set(xlabel=short([x])[0], ylabel="throughput over plain decoding", title=", ".join(str(k) for k in key))
        values = np.sort(part[x].unique())
        if values[0] > 0 and values[-1] / values[0] >= 8:
            ax.set_xscale("log", base=2)
        ax.set_xticks(values, [f"{v:g}" for v in values])
        ax.minorticks_off()
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False)
    return figure


def _bars(attribution: pd.DataFrame) -> Figure:
    figure, ax = plt.subplots(figsize=(8.4, 0.45 * len(attribution) + 1.5), layout="constrained")
    names = ["as simulated", *attribution["part"]]
    left = 100 * np.array([attribution["before"].iloc[0], *attribution["swapped"]])
    ax.barh(names, left, color=["0.5", *sns.color_palette("colorblind", len(attribution))], height=0.7)
    ax.invert_yaxis()
    ax.set(xlabel="mean |error| that is left, %")
    ax.grid(visible=False, axis="y")
    return figure
