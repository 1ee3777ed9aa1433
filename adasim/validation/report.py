"""Predicted beside measured: how far off, which limits are met, and what is to blame."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isnan, nan
from pathlib import Path
from typing import Any

import pandas as pd

from adasim.page import Page, Story, Table, number, short, write_page
from adasim.statistics import CONFIDENCE
from adasim.tolerances import Validation
from adasim.turns import TURN_S
from adasim.validation.accuracy import MAIN, Bar, Noise, held_out
from adasim.validation.attribution import ALL
from adasim.validation.figures import MARK, captions, draw
from adasim.validation.measured import METRICS

WORDS = {
    "throughput_ratio": "throughput / plain", "tpot_p50_ratio": "TPOT p50 / plain", "tpot_p95_ratio": "TPOT p95 / plain",
    "tau": "tau", "verify_tokens_per_round": "tokens / verify", "output_tok_s": "tok/s", "tpot_p50_ms": "TPOT p50 ms",
    "tpot_p95_ms": "TPOT p95 ms", "ttft_p50_ms": "TTFT p50 ms", "ttft_p95_ms": "TTFT p95 ms", "itl_p50_ms": "ITL p50 ms",
    "itl_p95_ms": "ITL p95 ms", "itl_p99_ms": "ITL p99 ms",
}  # fmt: skip

VERDICT = {True: "met", False: "MISSED", None: "cannot tell"}
WORTH = 0.1  # of the error; a part that removes less is not named


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
    notes: list[str] = field(default_factory=list)

    @property
    def judged(self) -> bool:
        """Whether the limits of throughput could be judged: without them nothing is known."""
        limits = [bar for bar in self.bars if bar.what.startswith("throughput")]
        return bool(limits) and all(bar.met is not None for bar in limits)

    @property
    def passed(self) -> bool:
        """Everything was measured, throughput was judged, and no limit is missed."""
        return not self.missing and self.judged and all(bar.met is not False for bar in self.bars)


def answer(found: Findings) -> list[str]:
    """Whether the simulator may be trusted here, in sentences."""
    held = held_out(found.cells)
    missed = [bar for bar in found.bars if bar.met is False]
    unknown = [bar for bar in found.bars if bar.met is None]
    says = []
    if found.missing:
        says.append(f"Not finished: {found.missing} runs are missing, so nothing is decided; what follows is so far.")
    ratios = found.errors[found.errors["metric"] == "throughput_ratio"] if len(found.errors) else found.errors
    if len(ratios):
        ratio = ratios.iloc[0]
        says.append(
            f"Over {len(held)} held-out cells, throughput over plain decoding is off by {ratio['mean_abs']:.1%} on "
            f"average (bias {ratio['bias']:+.1%}, worst {ratio['worst']:+.1%}: {ratio['worst_cell']})"
            + ("." if isnan(found.noise.cell) else f"; the scatter of repeats alone by {found.noise.cell:.1%}.")
        )
    if missed:
        says.append(f"{len(missed)} of {len(found.bars)} limits are missed: {'; '.join(_told(b) for b in missed)}.")
    elif not found.judged:
        says.append("Throughput over plain decoding cannot be judged, so nothing is: no pass.")
    elif not found.missing:
        says.append(f"All {len(found.bars) - len(unknown)} limits that can be judged are met.")
    if unknown:
        says.append(f"Cannot be judged: {'; '.join(b.what for b in unknown)}.")
    parts = found.attribution[found.attribution["part"] != ALL] if len(found.attribution) else found.attribution
    if len(parts) and parts.iloc[0]["removed"] > WORTH * parts.iloc[0]["before"]:
        top = parts.iloc[0]
        says.append(
            f"What matters most is {top['part']}: measured in its place, it leaves {top['swapped']:.1%} of "
            f"{top['before']:.1%}."
        )
    elif len(parts):
        says.append("No part of the model, measured in its place, removes a tenth of the error: noise, or its form.")
    return says


def _order(found: Findings, settings: Validation) -> str:
    """How runs and their references lie in time."""
    ages = found.measured.loc[~found.measured["reference"], "reference_age_s"]
    if ages.notna().all() and (ages == 0).all():
        return (
            f"Up to {settings.pair} policies and plain decoding take turns of {TURN_S:g} s on the engine, on clocks of "
            "their own; the one least far goes next, so that all begin and end together. Every point comes once before "
            "any twice. A run is divided by the plain decoding beside it."
        )
    age = f"{ages.max():.0f} s at most" if ages.notna().any() else "in no known order"
    return (
        f"Measured runs alternate with plain decoding (a reference, {settings.pair} policies, a reference, ...), every "
        "point once before any twice. A run is divided by the reference interpolated between the ones before and after; "
        f"they lie {age} apart; a run further than {settings.reference_age_s:g} s is not judged."
    )


def _told(bar: Bar) -> str:
    return f"{bar.what} {_value(bar, bar.value)}, allowed {_value(bar, bar.limit)}"


def _value(bar: Bar, value: float) -> str:
    whole = "pairs" in bar.what or "steps" in bar.what
    return "–" if isnan(value) else f"{value:.0f}" if whole else f"{value:.1%}"


def method(found: Findings, settings: Validation) -> list[str]:
    """How it was measured and simulated."""
    return [
        f"{_order(found, settings)} What both share, like a slower machine, cancels.",
        f"Simulated: the twin of every measured run, with the requests as served and the engine's own limits, "
        f"{settings.replications} times with luck of its own; divided by the twin of the plain decoding beside it. "
        "Policies believe of time what they believe on the real engine. A request's output length is an input where the "
        "model may end it early.",
        f"Intervals: measured, a {CONFIDENCE:.0%} t-interval over repeats, relative; simulated, the luck of as many "
        "runs, and each uncertainty of the profile moved alone, in squares. Errors are of means over repeats.",
        "Repeat error: how far measured over simulated throughput (over plain decoding) of a run lies from its cell's "
        f"mean, {_percent(found.noise.run)}, and of a mean over the cell's repeats, {_percent(found.noise.cell)}: what a "
        "right model would be off by. The simulation knows which requests a repeat serves; the luck of the text, of the "
        f"machine and of the simulation are in it. Tokens/s move by {_percent(found.noise.absolute)}"
        + ("." if isnan(found.noise.reference) else f"; two references of a block by {_percent(found.noise.reference)}."),
        "Limits hold over held-out cells: cells that the profile was fitted on, and plain decoding itself, do not count. "
        "tau and TPOT have limits on the mean error; how many cells exceed a limit is said beside.",
        "Ranking: a gap between two policies exceeds noise when it exceeds 1 % and its interval, all gaps of a point "
        "together (Bonferroni), variance pooled over pairs. Without repeats no gap does.",
        "Crossover: the load after the last one at which a policy beats plain decoding.",
        "Attribution: times keep the profile's form and take the run's own level, part by part, relative to that "
        "of plain decoding beside it; the pause before a step is part of its overhead or prefill, as calibration has it. "
        "Acceptance is the run's own survival (product-limit; where a policy cut by "
        "what it saw, that of fixed lengths beside it); the head's bias and noise are its own. What a part removes alone "
        "may be hidden by another's error of the opposite sign.",
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
        pictures=draw(found.cells, found.attribution, story.design, settings.tolerances),
        captions=captions(settings.tolerances),
        method=method(found, settings),
        about_error=f"Held-out cells alone count. {fitted}",
        failures=[_told(b) for b in found.bars if b.met is False],
    )  # fmt: skip
    story.kind = MARK
    write_page(page, story, out)


def bars_table(bars: Sequence[Bar]) -> pd.DataFrame:
    """Limits as a table."""
    rows = [
        {"limit": b.what, "found": b.value, "allowed": b.limit, "verdict": VERDICT[b.met], "why": b.why} for b in bars
    ]
    return pd.DataFrame(rows)


def _tables(found: Findings, point: list[str]) -> list[Table]:
    names = short(point)
    bars = [[b.what, _value(b, b.value), _value(b, b.limit), VERDICT[b.met], b.why] for b in found.bars]
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
        ["measured over simulated throughput / plain, a run from its cell's mean", _percent(found.noise.run)],
        ["the same, the mean over a cell's repeats", _percent(found.noise.cell)],
        ["tokens/s, a run from its cell's mean", _percent(found.noise.absolute)],
        ["plain decoding, one run from the next within a block", _percent(found.noise.reference)],
    ]
    unlimited = (
        "Simulated / measured - 1. What is not divided by plain decoding follows the machine's speed: reported only."
    )
    where = ["measured", "simulated", "grid steps off", "counts"]
    swapped = ["part measured instead", "cells", "error", "error left", "removed"]
    ranked = ["policies", "Kendall tau", "pairs clear of noise", "wrong", "which"]
    spread = ["metric", "cells", "mean |error|", "bias", "worst", "where", "has a limit"]
    return [
        Table("Limits", ["limit", "found", "allowed", "verdict", ""], bars),
        Table("Errors over held-out cells", spread, errors, unlimited),
        Table("How much the measured numbers themselves move", ["measured", "moves by"], noise),
        Table("Ranking of policies", [*names, *ranked], ranking),
        Table("Where speculation stops paying", ["policy", *short(facets), *where], crossing),
        Table("Which part is to blame", swapped, parts, "Held-out cells, throughput over plain decoding."),
        _cells_table("Cells: measured, simulated, error", found.cells, point, MAIN),
        _cells_table("Cells: everything else", found.cells, point, [m for m in METRICS if m not in MAIN], folded=True),
        Table("To blame, cell by cell", ["policy", *names, "error", "part", "points removed"], blame, folded=True),
    ]


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
