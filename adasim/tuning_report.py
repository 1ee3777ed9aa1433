"""What a search found: advice, standings, and the frontier of throughput against time per token."""

from math import isnan, nan
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from adasim.figures import png
from adasim.page import Page, Story, Table, number, short, write_page
from adasim.search import METRICS, Tune
from adasim.shown_tables import SUMMARY
from adasim.statistics import CONFIDENCE, simultaneous
from adasim.tables import MATERIAL, Goal
from adasim.tuning import ALIKE, BEST, FAILED, NEAR, OVER, Point, Standing

LATENCY = "tpot_p50_ms"
CAPTION = (
    "Every candidate that ran in full length, throughput against median time per output token; ringed and joined: the "
    "frontier, where nothing else is both faster for the user and in sum. Bars: 95 % intervals over seeds, where all ran."
)


def frontier_metric(goal: Goal) -> str:
    """The vertical axis: the goal if it is a rate, else tokens per second."""
    return goal.metric if goal.metric in {"output_tok_s", "goodput_rps", "requests_per_s"} else "output_tok_s"


def pareto(rate: np.ndarray, latency: np.ndarray) -> np.ndarray:
    """Which of [n] choices no other beats: as much rate at no more latency, and better in one. NaNs are not."""
    order = np.lexsort((-rate, latency))
    kept, best = np.zeros(len(rate), dtype=bool), -np.inf
    for i in order:
        if rate[i] > best and not np.isnan(latency[i]):
            kept[i], best = True, rate[i]
    return kept


def candidates_table(points: list[Point], goal: Goal) -> pd.DataFrame:
    """One row a candidate and point, in the order of the standings; ``frontier``: full-length runs that nothing beats."""
    metric = frontier_metric(goal)
    shown = list(
        dict.fromkeys([goal.metric, metric, "output_tok_s", LATENCY, "tpot_p99_ms", "ttft_p99_ms", "goodput_rps"])
    )
    rows = []
    for point in points:
        for s in point.standings:
            row: dict[str, object] = {"policy": s.candidate.label, **point.point, "status": s.status, "limits": s.limits}
            row |= {
                "advised": s is point.advised,
                "rung": s.rung + 1,
                "seeds": len(s.rungs.seeds),
                "share": s.rungs.share,
            }
            row |= {"behind": s.behind, "behind_hw": s.behind_hw}
            for m in shown:
                if m in s.values:
                    row |= {m: s.values[m], f"{m}_hw": s.widths[m]}
            rows.append(row)
    table = pd.DataFrame(rows)
    full = (table["share"] == 1) & (table["status"] != FAILED)
    table["frontier"] = False
    table.loc[full, "frontier"] = pareto(table.loc[full, metric].to_numpy(), table.loc[full, LATENCY].to_numpy())
    return table


def answer(points: list[Point], goal: Goal, tune: Tune) -> list[str]:
    """What to use, a sentence a point."""
    names = short(list(points[0].point))
    says = []
    for point in points:
        place = ", ".join(f"{n} {v}" for n, v in zip(names, point.point.values(), strict=True))
        start = f"At {place}: " if place else ""
        advised = point.advised
        if advised is None:
            over = [s for s in point.standings if s.status == OVER]
            nearest = f"; nearest is {_with_numbers(over[0], goal, tune)}" if over else ""
            says.append(f"{start}no candidate meets the limits{nearest}.")
            continue
        rivals = [s for s in point.standings if s.near and s is not advised]
        hidden = [s.candidate.label for s in point.standings if s.status == ALIKE and not s.near]
        text = f"{start}use {_with_numbers(advised, goal, tune)}"
        if rivals:
            leader = next((s for s in rivals if s.status == BEST), None)
            gap = (
                f"; the best on average, {leader.candidate.label}, is {_gap(advised.behind, advised.behind_hw)} ahead"
                if leader is not None
                else ""
            )
            others = ", ".join(s.candidate.label for s in rivals)
            text += f"; cannot tell it from {others} (the simplest stands first{gap})"
        elif not hidden:
            text += "; better than every other candidate"
        if hidden:
            text += f"; behind on average, but noise hides whether worse: {', '.join(hidden)} (more seeds may tell)"
        if advised.limits == "cannot tell":
            text += "; whether it keeps the limits cannot be told"
        says.append(text + ".")
    return says


def _gap(gain: float, half_width: float) -> str:
    if isnan(gain):
        return "–"
    return f"{gain:+.1%}" if isnan(half_width) else f"{gain:+.1%} ± {'>100%' if half_width > 1 else f'{half_width:.1%}'}"


def _with_numbers(s: Standing, goal: Goal, tune: Tune) -> str:
    shown = dict.fromkeys([goal.metric, LATENCY, *tune.limits])
    return f"{s.candidate.label} ({', '.join(f'{_name(m)} {number(s.values[m], nan)}' for m in shown if m in s.values)})"


def _name(metric: str) -> str:
    return SUMMARY.get(metric, metric.replace("_", " "))


def method(points: list[Point], goal: Goal, tune: Tune, error: float) -> list[str]:
    """How it was searched, and how sure the order is."""
    rungs = sorted({s.rung: s.rungs for p in points for s in p.standings}.items())
    steps = "; ".join(
        f"{len(r.seeds)} seeds" + (f" of runs cut to {r.share:.0%} of the requests" if r.share < 1 else "")
        for _, r in rungs
    )
    last = max((sum(s.rung == len(rungs) - 1 for s in p.standings) for p in points), default=0)
    way = "least" if goal.lower_is_better else "most"
    limits = ", ".join(f"{_name(m)} {'<=' if METRICS[m] else '>='} {v:g}" for m, v in tune.limits.items())
    return [
        f"Goal: the {way} {_name(goal.metric)}"
        + (f", within the limits {limits} (means over seeds)." if limits else "."),
        f"Successive halving by {tune.eta} ({steps}): at each rung the best go on, and with them the best of every "
        "family that is not told worse than the leader. All candidates of a seed meet the same requests and luck, and "
        "are compared in pairs.",
        f"Cannot tell: the leader's gain does not exceed {MATERIAL:.0%} and the root of the summed squares of its "
        f"interval's half-width ({simultaneous(last - 1):.2%} each, so that the {max(last - 1, 1)} comparisons with the "
        f"leader hold together at {CONFIDENCE:.0%}) and the model's error "
        + (
            "(unknown, left out)."
            if isnan(error)
            else f"({error:.1%}, what the scenario tolerates against its reference)."
        ),
        f"Near-equal: what cannot be told from the leader and is within {np.fmax(NEAR, error):.0%} of it on average; the "
        "simplest of them is advised. Simplest: what needs the fewest signals (none, a head, a head and a cost model), "
        "then the fewest settings.",
        "The best of many is chosen on the runs that report it; a candidate that was dropped early has numbers of fewer, "
        "or shorter, runs.",
        "Decisions are a function of the trials on disk: a search that was interrupted and resumed ends like one that "
        "was not.",
    ]


def write(
    points: list[Point], goal: Goal, tune: Tune, story: Story, trials: pd.DataFrame, out: Path, error: float
) -> pd.DataFrame:
    """Write the report of a search; returns the table of candidates."""
    table = candidates_table(points, goal)
    metric, fields = frontier_metric(goal), list(points[0].point)
    front = table[table["frontier"]].sort_values(LATENCY)
    page = Page(
        answer=answer(points, goal, tune),
        shown=[
            _shown(
                "What may be best, and what was compared with it last",
                table[table["rung"] == table["rung"].max()],
                fields,
            ),
            _shown(f"The frontier: {_name(metric)} against {_name(LATENCY)}", front, fields),
            _shown("All candidates", table, fields, folded=True),
        ],
        tables={"candidates": table, "frontier": front, "trials": trials},
        pictures={"frontier": draw(table, metric, fields, story.kind)},
        captions={"frontier": CAPTION},
        method=method(points, goal, tune, error),
        about_error="The error of the model is "
        + (
            "unknown." if isnan(error) else f"taken to be {error:.1%}, what the scenario tolerates against its reference."
        ),
    )
    write_page(page, story, out)
    return table


def _shown(title: str, table: pd.DataFrame, fields: list[str], *, folded: bool = False) -> Table:
    metrics = [m for m in METRICS if m in table and table[m].notna().any()]
    rows = []
    for _, row in table.iterrows():
        gap = _gap(row["behind"], row["behind_hw"])
        runs = f"{row['seeds']} x {row['share']:.0%}"
        status = f"{row['status']}, advised" if row["advised"] else str(row["status"])
        numbers = [number(row[m], row[f"{m}_hw"]) for m in metrics]
        rows.append([str(row["policy"]), *(str(row[f]) for f in fields), status, gap, runs, *numbers])
    head = ["policy", *short(fields), "verdict", "leader ahead by", "seeds x length", *(_name(m) for m in metrics)]
    return Table(title, head, rows, folded=folded)


def draw(table: pd.DataFrame, metric: str, fields: list[str], mark: str) -> bytes:
    """The frontier as PNG bytes: families by colour, points of the sweep by marker."""
    with mpl.rc_context({"backend": "Agg"}), sns.axes_style("whitegrid"), sns.plotting_context("notebook", 0.9):
        return png(_figure(table, metric, fields), mark)


def _figure(table: pd.DataFrame, metric: str, fields: list[str]) -> Figure:
    figure, ax = plt.subplots(figsize=(9.5, 5.6), layout="constrained")
    full = table[(table["share"] == 1) & table[metric].notna() & table[LATENCY].notna()]
    front = full[full["frontier"]].sort_values(LATENCY)
    ax.plot(front[LATENCY], front[metric], color="0.3", linewidth=1, zorder=1)
    kinds = full["policy"].str.split(" ").str[0]
    names = list(dict.fromkeys(kinds))
    for name, colour in zip(names, sns.color_palette("colorblind", len(names)), strict=True):
        part = full[kinds == name]
        part = part.assign(
            **{f"{m}_hw": part[f"{m}_hw"].where(part["seeds"] == full["seeds"].max()) for m in (LATENCY, metric)}
        )
        ax.errorbar(
            part[LATENCY], part[metric], xerr=part[f"{LATENCY}_hw"], yerr=part[f"{metric}_hw"], fmt="o", markersize=5,
            color=colour, elinewidth=0.8, label=name,
        )  # fmt: skip
    ax.scatter(
        front[LATENCY], front[metric], s=110, facecolors="none", edgecolors="0.2", linewidths=1.2, label="frontier"
    )
    seen: set[str] = set()
    for _, row in front.iterrows():
        text = ", ".join([str(row["policy"]), *(f"{n} {row[f]}" for n, f in zip(short(fields), fields, strict=True))])
        if text not in seen and len(front) <= 15:
            ax.annotate(text, (row[LATENCY], row[metric]), textcoords="offset points", xytext=(7, -9), fontsize=7)
        seen.add(text)
    ax.set(xlabel="median time per output token, ms", ylabel=_name(metric), xlim=(0, None), ylim=(0, None))
    figure.legend(loc="outside right upper", frameon=False)
    return figure
