"""Predicted beside measured: how far off, which limits are met, and what is to blame."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isnan, nan
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from adasim.accuracy import MAIN, Bar, Noise, held_out
from adasim.attribution import ALL
from adasim.figures import png
from adasim.prediction import METRICS
from adasim.report import Page, Story, Table, number, short, write_page
from adasim.statistics import CONFIDENCE
from adasim.tolerances import Validation

WORDS = {
    "throughput_ratio": "throughput / plain", "tpot_p50_ratio": "TPOT p50 / plain", "tpot_p95_ratio": "TPOT p95 / plain",
    "tau": "tau", "verify_tokens_per_round": "tokens / verify", "output_tok_s": "tok/s", "tpot_p50_ms": "TPOT p50 ms",
    "tpot_p95_ms": "TPOT p95 ms", "ttft_p50_ms": "TTFT p50 ms", "ttft_p95_ms": "TTFT p95 ms", "itl_p50_ms": "ITL p50 ms",
    "itl_p95_ms": "ITL p95 ms", "itl_p99_ms": "ITL p99 ms",
}  # fmt: skip
CAPTIONS = {
    "scatter": "Throughput over plain decoding, simulated against measured, one point a cell; hollow: used for fitting. Bars: "
    "95 % intervals (measured: over repeats; simulated: luck and the profile's uncertainty). Bands: 6 and 15 %.",
    "errors": "Error of the simulated throughput over plain decoding, by cell: blue is too slow, red too fast; cells in "
    "brackets were used for fitting and do not count.",
    "crossover": "Throughput over plain decoding against the load: measured solid, simulated dashed.",
    "attribution": "Mean absolute error that is left when a part of the model is replaced by what each run itself showed.",
}
MARK = "measured and simulated, as marked"


@dataclass(slots=True)
class Findings:
    """All that a validation found."""

    cells: pd.DataFrame
    errors: pd.DataFrame
    noise: Noise
    ranking: pd.DataFrame
    crossover: pd.DataFrame
    bars: list[Bar]
    measured: pd.DataFrame
    predicted: pd.DataFrame
    attribution: pd.DataFrame = field(default_factory=pd.DataFrame)
    blame: pd.DataFrame = field(default_factory=pd.DataFrame)
    missing: int = 0  # runs of policies that were not measured yet

    @property
    def passed(self) -> bool:
        """Everything was measured, and no limit is missed."""
        return not self.missing and all(bar.met is not False for bar in self.bars)


def answer(found: Findings) -> list[str]:
    """Whether the simulator may be trusted here, in sentences."""
    held = held_out(found.cells)
    missed = [bar for bar in found.bars if bar.met is False]
    unknown = [bar for bar in found.bars if bar.met is None]
    says = []
    if found.missing:
        says.append(f"Not finished: {found.missing} runs are missing, so nothing is decided; what follows is so far.")
    ratio = found.errors.set_index("metric").loc["throughput_ratio"] if len(found.errors) else None
    if ratio is not None:
        says.append(
            f"Over {len(held)} held-out cells, throughput over plain decoding is off by {ratio['mean_abs']:.1%} on average "
            f"(bias {ratio['bias']:+.1%}, worst {ratio['worst']:+.1%}: {ratio['worst_cell']})"
            + ("." if isnan(found.noise.repeat) else f"; a repeat of the same cell by {found.noise.repeat:.1%}.")
        )
    if missed:
        says.append(f"{len(missed)} of {len(found.bars)} limits are missed: {'; '.join(_told(b) for b in missed)}.")
    elif not found.missing:
        says.append(f"All {len(found.bars) - len(unknown)} limits that can be judged are met.")
    if unknown:
        says.append(f"Cannot be judged: {'; '.join(b.what for b in unknown)}.")
    parts = found.attribution[found.attribution["part"] != ALL] if len(found.attribution) else found.attribution
    if len(parts) and parts.iloc[0]["removed"] > 0:
        top = parts.iloc[0]
        says.append(
            f"Most of the error is in {top['part']}: measured in its place, it leaves {top['swapped']:.1%} of "
            f"{top['before']:.1%}."
        )
    return says


def _told(bar: Bar) -> str:
    return f"{bar.what} {_value(bar, bar.value)}, allowed {_value(bar, bar.limit)}"


def _value(bar: Bar, value: float) -> str:
    whole = "pairs" in bar.what or "steps" in bar.what
    return "–" if isnan(value) else f"{value:.0f}" if whole else f"{value:.1%}"


def method(found: Findings, settings: Validation) -> list[str]:
    """How it was measured and simulated."""
    ages = found.measured.loc[~found.measured["reference"], "reference_age_s"]
    age = f"{ages.max():.0f} s at most" if ages.notna().any() else "in no known order"
    return [
        f"Measured runs alternate with plain decoding (a reference, {settings.pair} policies, a reference, ...), every point "
        "once before any twice. A run is divided by the reference interpolated between the ones before and after; they lie "
        f"{age} apart. What both share, like a slower machine, cancels.",
        f"Simulated: the twin of every measured run, with the requests as served and the engine's own limits, "
        f"{settings.luck} times with luck of its own; divided by the twin of the plain decoding beside it. Policies believe "
        "of time what they believe on the real engine.",
        f"Intervals: measured, a {CONFIDENCE:.0%} t-interval over repeats, relative; simulated, the luck of as many runs, and "
        "each uncertainty of the profile moved alone, in squares. Errors are of means over repeats.",
        f"Repeat error: a run's distance from its cell's mean, {_percent(found.noise.repeat)} of throughput over plain "
        f"decoding ({_percent(found.noise.absolute)} of tokens/s); two references that follow each other differ by "
        f"{_percent(found.noise.reference)}.",
        "Limits hold over held-out cells: cells that the profile was fitted on, and plain decoding itself, do not count. tau "
        "and TPOT have limits on the mean error; the worst cells are listed beside.",
        "Ranking: a gap between two policies exceeds noise when it exceeds 1 % and its interval, all gaps of a point "
        "together (Bonferroni), variance pooled over pairs. Without repeats no gap does.",
        "Crossover: the load after the last one at which a policy beats plain decoding.",
        "Attribution: times keep the profile's form and take the run's own level, part by part; acceptance is the run's own "
        "survival (product-limit; of the fixed lengths beside it where a policy cut by what it saw); the head's bias and "
        "noise are its own. What a part removes alone may be hidden by another's error of the opposite sign.",
    ]


def _percent(value: float) -> str:
    return "unknown" if isnan(value) else f"{value:.1%}"


def write(found: Findings, story: Story, settings: Validation, out: Path, *, fitted: str) -> None:
    """Write the report of a validation.

    Args:
        found: everything.
        story: of the scenario.
        settings: of the validation.
        out: existing folder.
        fitted: what the profile was fitted on, in words.
    """
    point = story.design.point
    page = Page(
        answer=answer(found),
        shown=[t for t in _tables(found, point) if t.rows],
        tables={
            "cells": found.cells, "errors": found.errors, "ranking": found.ranking, "crossover": found.crossover,
            "bars": bars_table(found.bars), "attribution": found.attribution, "blame": found.blame,
            "measured": found.measured, "simulated": found.predicted,
        },
        pictures=draw(found, story),
        captions=CAPTIONS,
        method=method(found, settings),
        about_error=f"Held-out cells alone count. {fitted}",
        failures=[_told(b) for b in found.bars if b.met is False],
    )  # fmt: skip
    story.kind = MARK
    write_page(page, story, out)


def bars_table(bars: Sequence[Bar]) -> pd.DataFrame:
    """Limits as a table."""
    told = {True: "met", False: "MISSED", None: "cannot tell"}
    return pd.DataFrame(
        [{"limit": b.what, "found": b.value, "allowed": b.limit, "verdict": told[b.met], "why": b.why} for b in bars]
    )


def _tables(found: Findings, point: list[str]) -> list[Table]:
    names = short(point)
    bars = [
        [
            b.what,
            _value(b, b.value),
            _value(b, b.limit),
            {True: "met", False: "MISSED", None: "cannot tell"}[b.met],
            b.why,
        ]
        for b in found.bars
    ]
    errors = [
        [
            WORDS[r["metric"]], f"{r['cells']}", f"{r['mean_abs']:.1%}", f"{r['bias']:+.1%}", f"{r['worst']:+.1%}",
            str(r["worst_cell"]), "yes" if r["metric"] in MAIN else "no: reported only",
        ]
        for _, r in found.errors.iterrows()
    ]  # fmt: skip
    ranking = [
        [*(str(r[p]) for p in point), f"{r['policies']}", f"{r['kendall_tau']:.2f}", f"{r['clear']} of {r['pairs']}",
         f"{r['wrong']}", str(r["wrong_pairs"])]
        for _, r in found.ranking.iterrows()
    ]  # fmt: skip
    facets = [c for c in found.crossover.columns if c in point]
    crossing = [
        [str(r["policy"]), *(str(r[f]) for f in facets), _load(r["measured"]), _load(r["predicted"]), f"{r['steps']}",
         "yes" if r["counts"] else "no: fitted cells"]
        for _, r in found.crossover.iterrows()
    ]  # fmt: skip
    parts = [
        [
            str(r["part"]),
            f"{r['cells']}",
            f"{r['before']:.1%}",
            f"{r['swapped']:.1%}",
            f"{100 * r['removed']:+.1f} points",
        ]
        for _, r in found.attribution.iterrows()
    ]
    blame = [
        [str(r["policy"]), *(str(r[p]) for p in point), f"{r['error']:+.1%}", str(r["part"]), f"{100 * r['removed']:.1f}"]
        for _, r in found.blame.iterrows()
    ]
    noise = [
        ["throughput over plain decoding, a repeat from its cell's mean", _percent(found.noise.repeat)],
        ["tokens/s, the same", _percent(found.noise.absolute)],
        ["plain decoding, one run from the next within a block", _percent(found.noise.reference)],
    ]
    return [
        Table("Limits", ["limit", "found", "allowed", "verdict", ""], bars),
        Table("Errors over held-out cells", ["metric", "cells", "mean |error|", "bias", "worst", "where", "has a limit"], errors,
              "Simulated / measured - 1. What is not divided by plain decoding follows the machine's speed: reported only."),
        Table("How much the measured numbers themselves move", ["measured", "moves by"], noise),
        Table("Ranking of policies", [*names, "policies", "Kendall tau", "pairs clear of noise", "wrong", "which"], ranking),
        Table("Where speculation stops paying", ["policy", *short(facets), "measured", "simulated", "grid steps off", "counts"],
              crossing),
        Table("Which part of the model is to blame", ["part measured instead", "cells", "error", "error left", "removed"], parts,
              "Held-out cells, throughput over plain decoding."),
        _cells_table("Cells: measured, simulated, error", found.cells, point, MAIN),
        _cells_table("Cells: everything else", found.cells, point, [m for m in METRICS if m not in MAIN], folded=True),
        Table("To blame, cell by cell", ["policy", *names, "error", "part", "points removed"], blame, folded=True),
    ]  # fmt: skip


def _load(value: Any) -> str:
    return "pays throughout" if value is None or pd.isna(value) else f"{value:g}"


def _cells_table(
    title: str, cells: pd.DataFrame, point: list[str], metrics: Sequence[str], *, folded: bool = False
) -> Table:
    rows = []
    for _, r in cells.iterrows():
        role = "reference" if r["reference"] else "fitted" if r["fitted"] else "held out"
        row = [str(r["policy"]), *(str(r[p]) for p in point), role, f"{r['repeats']}"]
        for m in metrics:
            for arm in ("measured", "predicted"):
                value, width = r[f"{arm}_{m}"], r[f"{arm}_{m}_hw"]
                row.append(number(value, nan) + ("" if isnan(width) else f" ± {width:.1%}"))
            row.append("–" if isnan(r[f"error_{m}"]) else f"{r[f'error_{m}']:+.1%}")
        rows.append(row)
    head = [h for m in metrics for h in (f"{WORDS[m]}, measured", "simulated", "error")]
    return Table(title, ["policy", *short(point), "role", "repeats", *head], rows, folded=folded)


def draw(found: Findings, story: Story) -> dict[str, bytes]:
    """All pictures as PNG bytes."""
    design = story.design
    shown = found.cells[~found.cells["reference"]]
    with mpl.rc_context({"backend": "Agg"}), sns.axes_style("whitegrid"), sns.plotting_context("notebook", 0.9):
        made: dict[str, Figure] = {}
        if len(shown):
            made |= {"scatter": _scatter(shown), "errors": _heat(shown, design.point)}
            if design.x is not None and shown[design.x].nunique() > 1:
                made["crossover"] = _curves(shown, design.x, list(design.facets))
        if len(found.attribution):
            made["attribution"] = _bars(found.attribution)
        return {name: png(figure, MARK) for name, figure in made.items()}


def _scatter(cells: pd.DataFrame) -> Figure:
    figure, ax = plt.subplots(figsize=(8.4, 5.6), layout="constrained")
    policies = list(dict.fromkeys(cells["policy"]))
    for policy, colour in zip(policies, sns.color_palette("colorblind", len(policies)), strict=True):
        for fitted in (False, True):
            part = cells[(cells["policy"] == policy) & (cells["fitted"] == fitted)]
            if part.empty:
                continue
            x, y = part["measured_throughput_ratio"], part["predicted_throughput_ratio"]
            ax.errorbar(
                x, y, xerr=x * part["measured_throughput_ratio_hw"].fillna(0), yerr=y * part["predicted_throughput_ratio_hw"],
                fmt="none", ecolor=colour, elinewidth=0.7, alpha=0.5,
            )  # fmt: skip
            label = f"{policy} (fitted)" if fitted else policy
            ax.scatter(x, y, s=40, edgecolors=[colour], facecolors=["none" if fitted else colour], label=label)
    values = cells[["measured_throughput_ratio", "predicted_throughput_ratio"]].to_numpy()
    line = np.array([np.nanmin(values) * 0.93, np.nanmax(values) * 1.07])
    ax.plot(line, line, color="0.3", linewidth=1)
    for band in (0.06, 0.15):
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
    figure, ax = plt.subplots(figsize=(0.62 * len(order[0]) + 4, 0.42 * len(order[1]) + 1.8), layout="constrained")
    sns.heatmap(
        values, annot=np.array(text), fmt="", cmap="vlag", center=0, vmin=-20, vmax=20, ax=ax, linewidths=0.5,
        cbar_kws={"label": "error, %"},
    )  # fmt: skip
    ax.set(xlabel=", ".join(short(point)), ylabel="")
    ax.tick_params(axis="x", rotation=60)
    return figure


def _curves(cells: pd.DataFrame, x: str, facets: list[str]) -> Figure:
    groups = list(cells.groupby(facets, sort=False)) if facets else [((), cells)]
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
    ax.set(xlabel="mean |error| of throughput over plain decoding that is left, %")
    ax.grid(visible=False, axis="y")
    return figure
