"""Figures of a report, as PNG bytes. The same tables give the same bytes."""

import io
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from adasim.adaptation import Timeline
from adasim.tables import RATIO, Design, Tables
from adasim.types import FloatArray

PARTS = ("draft", "verify", "overhead", "prefill", "idle")
MAX_TIME_PANELS = 5
MAX_TIMELINES = 6
MAX_LINES = 8  # more cannot be told apart by colour


def draw(
    tables: Tables, design: Design, *, goodput: bool, metric: str, mark: str, timelines: Sequence[Timeline] = ()
) -> dict[str, bytes]:
    """All figures that the tables support, by name; ``mark`` (simulated, measured) is printed on each."""
    shown = tables.summary[~tables.summary["policy"].isin([a.label for a in design.arms if a.group])]
    pictures: dict[str, Callable[[], Figure]] = {}
    if shown[RATIO].notna().any():
        pictures["speedup"] = lambda: curves(shown, design, {RATIO: "speed-up over off"}, line=1.0)
    pictures["throughput"] = lambda: curves(shown, design, {"output_tok_s": "output tokens/s"}, zero=True)
    pictures["acceptance"] = lambda: curves(
        shown,
        design,
        {"tau": "tau (tokens per request and round)", "verify_len": "verified per request and round"},
    )
    pictures["latency"] = lambda: curves(
        shown,
        design,
        {f"{m}_p{q}_ms": f"{m.upper()} p{q}, ms" for q in (50, 99) for m in ("ttft", "tpot", "itl")},
        rows=2,
    )
    if goodput:
        pictures["goodput"] = lambda: curves(shown, design, {"goodput_rps": "goodput, requests/s"}, zero=True)
    pictures["time"] = lambda: time_bars(shown, design)
    if timelines:
        pictures["adaptation"] = lambda: adaptation(timelines)
    if tables.reference is not None:
        reference = tables.reference
        pictures["reference"] = lambda: against(reference, metric)
    with (
        mpl.rc_context({"backend": "Agg"}),
        sns.axes_style("whitegrid"),
        sns.plotting_context("notebook", 0.9),
    ):
        drawn = ((name, make()) for name, make in pictures.items())
        return {name: png(figure, mark) for name, figure in drawn if figure.axes}


def curves(
    summary: pd.DataFrame,
    design: Design,
    metrics: dict[str, str],
    *,
    rows: int = 1,
    line: float | None = None,
    zero: bool = False,
) -> Figure:
    """A panel per metric (and facet): mean over seeds with 95 % intervals.

    Lines over ``x``; bars without it; with more than eight policies a row for each, and a colour for each ``x``. Metrics
    that are 0 everywhere get no panel.
    """
    facets = _facets(summary, design)
    panels = [(m, f) for m in metrics for f in facets if summary[m].fillna(0).any()]  # 0 everywhere: not modelled
    if not panels:
        return plt.figure()
    columns = len(facets) if len(facets) > 1 else -(-len(panels) // rows) or 1
    rows = -(-len(panels) // columns)
    policies = list(dict.fromkeys(summary["policy"]))
    crowded = design.x is not None and len(policies) > MAX_LINES
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(5.6 * columns + 2.2, (0.24 * len(policies) + 1.2 if crowded else 3.8) * rows),
        squeeze=False,
        sharey=crowded,
        layout="constrained",
    )
    colours = dict(zip(policies, sns.color_palette("colorblind", len(policies)), strict=True))
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    for ax, (metric, facet) in zip(axes.flat, panels, strict=False):
        part = summary if facet is None else summary.loc[(_facet(summary, design) == facet).to_numpy()]
        if design.x is None:
            sns.barplot(part, x=metric, y="policy", hue="policy", palette=colours, legend=False, ax=ax)
            low, high = _limits(part, metric)
            mean = part[metric].to_numpy(dtype=float)
            ax.errorbar(mean, range(len(part)), xerr=(mean - low, high - mean), fmt="none", ecolor="0.2")
            ax.set(xlabel=metrics[metric], ylabel="", title=facet or "")
        elif crowded:
            _rows(ax, part, design.x, metric, policies, zero=zero)
            ax.set(xlabel=metrics[metric], title=facet or "")
        else:
            _lines(ax, part, design.x, metric, colours)
            ax.set(xlabel=design.x, ylabel=metrics[metric], title=facet or "")
            if zero:
                ax.set_ylim(bottom=0)
        if line is not None:
            (ax.axvline if design.x is None or crowded else ax.axhline)(line, color="0.3", linestyle="--", linewidth=1)
    if crowded:
        axes.flat[0].invert_yaxis()
    if design.x is not None:
        handles, labels = axes.flat[0].get_legend_handles_labels()
        title = design.x if crowded else None
        figure.legend(handles, labels, loc="outside right upper", frameon=False, title=title)
    return figure


def _limits(part: pd.DataFrame, metric: str) -> tuple[FloatArray, FloatArray]:
    """Ends of the intervals, [rows] each: a ratio's is symmetric in logarithms, no other metric falls below 0."""
    mean, width = part[metric].to_numpy(dtype=float), part[f"{metric}_hw"].to_numpy(dtype=float)
    if metric == RATIO:  # width = mean (f - 1 / f) / 2
        factor = width / mean + np.sqrt((width / mean) ** 2 + 1)
        return mean / factor, mean * factor
    return np.fmax(mean - width, 0 * width), mean + width


def _lines(ax: Any, part: pd.DataFrame, x: str, metric: str, colours: dict[str, Any]) -> None:
    for policy, found in part.groupby("policy", sort=False):
        rows = found.sort_values(x)
        style = {"color": colours[str(policy)], "label": policy}
        if str(policy).startswith("best "):
            style["linestyle"] = "--"
        ax.plot(rows[x].to_numpy(), rows[metric].to_numpy(), marker="o", markersize=4, **style)
        ax.fill_between(rows[x].to_numpy(), *_limits(rows, metric), color=style["color"], alpha=0.18, linewidth=0)
    values = np.sort(part[x].unique())
    if _wide(values):
        ax.set_xscale("log", base=2)
    ax.set_xticks(values, [f"{v:g}" for v in values])
    ax.minorticks_off()


def _rows(ax: Any, part: pd.DataFrame, x: str, metric: str, policies: list[str], *, zero: bool) -> None:
    place = {policy: i for i, policy in enumerate(policies)}
    values = np.sort(part[x].unique())
    for value, colour in zip(values, sns.color_palette("viridis", len(values)), strict=True):
        rows = part[part[x] == value]
        mean = rows[metric].to_numpy(dtype=float)
        low, high = _limits(rows, metric)
        at = rows["policy"].map(place).to_numpy(dtype=float)
        style = {"color": colour, "fmt": "o", "markersize": 4, "elinewidth": 1, "label": f"{value:g}"}
        ax.errorbar(mean, at, xerr=np.nan_to_num((mean - low, high - mean)), **style)
    known = part[metric].to_numpy(dtype=float)
    if zero and _wide(np.sort(known[known > 0])):
        ax.set_xscale("log")
    ax.set_yticks(range(len(policies)), policies)


def _wide(values: FloatArray) -> bool:
    """Whether sorted values ask for a logarithmic axis."""
    return len(values) > 1 and bool(values[0] > 0) and bool(values[-1] / values[0] >= 8)


def time_bars(summary: pd.DataFrame, design: Design) -> Figure:
    """Where time goes: shares of the window by policy, a panel for up to five points."""
    labels = _labels(summary, design)
    points = list(dict.fromkeys(labels))
    if len(points) > MAX_TIME_PANELS:
        points = [points[round(i)] for i in np.linspace(0, len(points) - 1, MAX_TIME_PANELS)]
    policies = list(dict.fromkeys(summary["policy"]))
    figure, axes = plt.subplots(
        1,
        len(points),
        figsize=(3.2 * len(points) + 3.5, 0.34 * len(policies) + 1.6),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    colours = sns.color_palette("colorblind", len(PARTS))
    for ax, point in zip(axes.flat, points, strict=True):
        part = summary[labels == point].set_index("policy").reindex(policies)
        left = np.zeros(len(policies))
        for name, colour in zip(PARTS, colours, strict=True):
            share = part[f"share_{name}"].fillna(0).to_numpy()
            ax.barh(policies, share, left=left, color=colour, label=name, height=0.75)
            left += share
        ax.set(title=point, xlim=(0, 1), xlabel="share of time")
        ax.grid(visible=False, axis="y")
    axes.flat[0].invert_yaxis()
    handles, names = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right upper", frameon=False)
    return figure


def adaptation(timelines: Sequence[Timeline]) -> Figure:
    """tau over time by domain, a panel a run, for up to six of the runs that decode speculatively."""
    shown = [t for t in timelines if (t.tau["tau"] > 1).any()] or list(timelines)
    if len(shown) > MAX_TIMELINES:
        shown = [shown[round(i)] for i in np.linspace(0, len(shown) - 1, MAX_TIMELINES)]
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(5.2 * columns + 1.6, 3.4 * rows), squeeze=False, sharey=True, layout="constrained"
    )
    domains = list(dict.fromkeys(d for t in shown for d in t.tau["domain"]))
    colours = dict(zip(domains, ["0.25", *sns.color_palette("colorblind", max(len(domains) - 1, 1))], strict=False))
    for ax in axes.flat[len(shown) :]:
        ax.set_visible(False)
    for ax, run in zip(axes.flat, shown, strict=False):
        events = run.events
        for at_s in events.loc[events["kind"] == "reload", "time_s"]:
            ax.axvline(at_s, color="0.85", linewidth=0.7, zorder=0)
        for at_s in events.loc[events["kind"] == "drift", "time_s"]:
            ax.axvline(at_s, color="0.3", linewidth=1.2, linestyle=":")
        for domain, part in run.tau.groupby("domain", sort=False):
            style = {"linewidth": 1.2, "linestyle": "--"} if domain == "" else {"linewidth": 1.8}
            ax.plot(part["time_s"], part["tau"], color=colours[str(domain)], label=domain or "all", **style)
        bottom = float(run.tau["tau"].min())
        for kind, marker in (("alarm", "^"), ("rollback", "x")):
            at = events.loc[events["kind"] == kind, "time_s"]
            ax.plot(at, np.full(len(at), bottom), marker, color="firebrick", label=kind if len(at) else None)
        ax.set(title=", ".join(x for x in (run.policy, run.place) if x), xlabel="seconds", ylabel="tau")
        ax.grid(visible=False, axis="x")
    named = dict(pair for ax in axes.flat for pair in zip(*ax.get_legend_handles_labels()[::-1], strict=True))
    figure.legend(list(named.values()), list(named), loc="outside right upper", frameon=False)
    return figure


def against(reference: pd.DataFrame, metric: str) -> Figure:
    """Predicted against reference, one point a cell; inputs hollow; the band is 10 %."""
    figure, ax = plt.subplots(figsize=(7.2, 4.8), layout="constrained")
    policies = list(dict.fromkeys(reference["policy"]))
    for policy, colour in zip(policies, sns.color_palette("colorblind", len(policies)), strict=True):
        for role, fill, marker in (("predicted", colour, "o"), ("extrapolated", colour, "^"), ("input", "none", "o")):
            part = reference[(reference["policy"] == policy) & (reference["role"] == role)]
            label = f"{policy} ({role})" if len(part) else None
            ax.scatter(
                part["reference"],
                part["predicted"],
                s=48,
                marker=marker,
                edgecolors=[colour],
                facecolors=[fill],
                label=label,
            )
    low, high = (
        reference[["reference", "predicted"]].min().min() * 0.9,
        reference[["reference", "predicted"]].max().max() * 1.1,
    )
    line = np.array([low, high])
    ax.plot(line, line, color="0.3", linewidth=1)
    ax.fill_between(line, 0.9 * line, 1.1 * line, color="0.5", alpha=0.15, linewidth=0)
    ax.set(
        xscale="log",
        yscale="log",
        xlabel=f"published {metric}",
        ylabel=f"simulated {metric}",
        xlim=line,
        ylim=line,
    )
    ticks = [t for t in (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8) if low <= t <= high]
    if ticks:
        ax.set_xticks(ticks, [f"{t:g}" for t in ticks])
        ax.set_yticks(ticks, [f"{t:g}" for t in ticks])
        ax.minorticks_off()
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def _facets(summary: pd.DataFrame, design: Design) -> list[str | None]:
    return list(dict.fromkeys(_facet(summary, design))) if design.facets else [None]


def _facet(summary: pd.DataFrame, design: Design) -> "pd.Series[str]":
    return _join(summary, list(design.facets))


def _labels(summary: pd.DataFrame, design: Design) -> "pd.Series[str]":
    return _join(summary, design.point)


def _join(summary: pd.DataFrame, fields: list[str]) -> "pd.Series[str]":
    text = [", ".join(f"{f.rsplit('.', 1)[-1]} {row[f]}" for f in fields) for _, row in summary.iterrows()]
    return pd.Series(text, index=summary.index)


def png(figure: Figure, mark: str) -> bytes:
    """A figure as bytes, marked simulated or measured; closes it."""
    out = io.BytesIO()
    figure.text(0.995, 0.005, mark, ha="right", va="bottom", fontsize=8, color="0.45")
    figure.savefig(out, format="png", dpi=110)
    plt.close(figure)
    return out.getvalue()
