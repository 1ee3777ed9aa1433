"""Tables, figures and pages of one experiment. Reads metrics only: it cannot tell which backend made them."""

from math import isnan, nan
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from adasim.figures import draw
from adasim.method import method
from adasim.page import Page, Story, number, short, write_page
from adasim.shown_tables import shown_tables
from adasim.tables import (
    RATIO,
    Goal,
    Tables,
    best_by_point,
    best_of_groups,
    compare,
    crossovers,
    gain_error,
    summarise,
    summarise_paybacks,
    with_speedup,
)

CAPTIONS = {
    "speedup": "Speed-up over plain decoding (open loops: in median TPOT), paired by seed, with 95 % intervals.",
    "throughput": "Output tokens per second, first tokens included.",
    "acceptance": "Tokens per request and round (bonus counted), and tokens verified for them (anchor counted).",
    "latency": "Time to first token (queueing included), time per output token, and time between two chunks.",
    "goodput": "Requests per second that finished within every limit of the SLO.",
    "time": "Where the engine's time goes.",
    "adaptation": "tau of finished requests over time by domain, one seed. Grey lines: a version was loaded; "
    "dotted: the mix drifted; triangles: an alarm; crosses: a version was rolled back.",
    "reference": "Simulated against published; hollow points fixed the model, full ones are predicted, triangles lie "
    "beyond what it was fitted on; band 10 %.",
}
UNITS = {"output_tok_s": "tok/s", "tpot_p50_ms": "ms per token", "goodput_rps": "good requests/s"}


def tabulate(trials: pd.DataFrame, story: Story, batches: pd.DataFrame | None = None) -> Tables:
    """All tables from the metrics of the finished trials, and of the batches of each."""
    design = story.design
    trials = with_speedup(trials, design)
    batches = None if batches is None or batches.empty else with_speedup(batches, design)
    summary = best_of_groups(summarise(trials, design, batches), design)
    tables = Tables(trials, summary, pd.DataFrame(), crossovers(trials, design))
    tables.payback = summarise_paybacks(trials, design)
    error = nan
    if story.reference is not None:
        r = story.reference
        ours = summary if r.x in summary else summary.assign(**{r.x: r.x_value})
        tables.reference, tables.errors = compare(ours, r.cells, r.x, r.metric)
        error = float(np.fmax(tables.errors["mean_abs"], gain_error(tables.reference)))
    members = summary[summary["picked"].isna()]
    tables.best = best_by_point(trials, members, design, error, batches)
    tables.method = method(
        trials,
        tables.best,
        design,
        error=error,
        one_seed_batches=batches is not None,
        simulated=story.kind == "simulated",
    )
    return tables


def failures(tables: Tables, story: Story) -> list[str]:
    """Where the predictions miss the reference by more than the scenario tolerates."""
    r, table = story.reference, tables.reference
    if r is None or table is None:
        return []
    says = []
    if tables.errors["missing"]:
        says.append(f"{tables.errors['missing']:.0f} reference cells have no prediction (policy or point not run)")
    if tables.errors["mean_abs"] > r.mean_abs_error:
        says.append(f"mean error {tables.errors['mean_abs']:.1%} exceeds {r.mean_abs_error:.1%}")
    held_out = table[table["role"] != "input"]
    for _, cell in held_out[held_out["error"].abs() > r.max_abs_error].iterrows():
        says.append(f"{cell['policy']} at {cell['at']:g}: off by {cell['error']:+.1%}, allowed {r.max_abs_error:.0%}")
    if r.side_margin is not None:
        clear = ((held_out["reference"] - 1).abs() > r.side_margin) & held_out["predicted"].notna()
        wrong = held_out[clear & ((held_out["reference"] > 1) != (held_out["predicted"] > 1))]
        says += [f"{c['policy']} at {c['at']:g}: on the wrong side of 1" for _, c in wrong.iterrows()]
    return says


def write(trials: pd.DataFrame, story: Story, out: Path, batches: pd.DataFrame | None = None) -> Tables:
    """Write report.html, report.md, CSV tables and PNG figures into ``out``; returns the tables.

    Args:
        trials: one row a finished trial: policy, seed, swept fields, metrics.
        story: everything else.
        out: existing folder.
        batches: parts of the runs, for intervals where there is one seed.
    """
    tables = tabulate(trials, story, batches)
    pictures = draw(
        tables,
        story.design,
        goodput=story.goodput,
        metric=story.reference.metric if story.reference else RATIO,
        mark=story.kind,
        timelines=story.timelines,
    )
    named = {
        "trials": tables.trials,
        "summary": tables.summary,
        "best": tables.best,
        "crossover": tables.crossover,
        "reference": tables.reference,
        "payback": tables.payback if len(tables.payback) else None,
    }
    page = Page(
        answer=answer(tables, story),
        shown=shown_tables(tables, story),
        tables={name: table for name, table in named.items() if table is not None},
        pictures=pictures,
        captions=CAPTIONS,
        method=tables.method,
        errors=tables.errors,
        failures=failures(tables, story),
    )
    write_page(page, story, out)
    return tables


def answer(tables: Tables, story: Story) -> list[str]:
    """What to do, a sentence a point."""
    says, goal = [], story.design.goal
    for _, row in tables.best.iterrows():
        point = story.design.point
        place = ", ".join(f"{name} {row[p]}" for name, p in zip(short(point), point, strict=True))
        start = f"At {place}: " if place else ""
        parts = []
        if "static" in row and not pd.isna(row.get("static")):
            parts.append(f"best static rule is {_choice(row, 'static', goal)}")
        if "adaptive" in row and not pd.isna(row.get("adaptive")):
            parts.append(f"best adaptive is {_choice(row, 'adaptive', goal)}")
        if "verdict" in row and not pd.isna(row.get("verdict")):
            width = "" if isnan(row["gain_hw"]) else f" ± {row['gain_hw']:.1%}"
            reason = f" ({row['because']})" if row["because"] and "(" not in row["verdict"] else ""
            parts.append(f"adaptive gains {row['gain']:+.1%}{width} over static: {row['verdict']}{reason}")
        if not parts:
            parts.append(f"no policy reaches any {goal.words}")
        says.append(start + "; ".join(parts) + ".")
    return says


def _choice(row: "pd.Series[Any]", role: str, goal: Goal) -> str:
    speedup = row[f"{role}_speedup"]
    ratio = "" if isnan(speedup) else f"{speedup:.2f}x, "
    return f"{row[role]} ({ratio}{number(row[f'{role}_{goal.metric}'], nan)} {UNITS[goal.metric]})"
