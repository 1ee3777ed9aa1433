"""Which input would change the answer: one table, sorted by how much each moves the leader's gain."""

from math import isnan
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from adasim.calibration.adjust import Adjust
from adasim.figures import MAX_TIME_PANELS, png
from adasim.page import Page, Story, Table, short, write_page
from adasim.sensitivity import FLIPS, HOLDS, UNSURE, break_even
from adasim.statistics import CONFIDENCE
from adasim.tables import MATERIAL

CAPTION = (
    "Gain of the leader over its rival when each input is moved to its limits, the same seeds throughout; the line is "
    "the gain as calibrated. Beyond 0 the rival is ahead."
)
ADDED = {name for name, f in Adjust.model_fields.items() if f.default == 0}


def by_input(rows: pd.DataFrame, fields: list[str]) -> pd.DataFrame:
    """One row an input and point, the largest swing first.

    Columns: input, point, moved to, leader, rival, gain, gain at the values, swing (largest change of the gain) and the
    half-width of what noise does to it, break-even, ranking.
    """
    table = []
    for key, part in rows.groupby(["input", *fields], sort=False):
        first = part.iloc[0]
        told = list(part["ranking"])
        ranking = next((r for r in ("failed", FLIPS, UNSURE) if r in told), HOLDS)
        to = list(dict.fromkeys(str(p) for p in part.loc[part["ranking"].isin([FLIPS, UNSURE]), "moved_leader"]))
        swing = float((part["moved_gain"] - part["gain"]).abs().max())
        numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in part["value"])
        row: dict[str, Any] = dict(zip(["input", *fields], key, strict=True))
        row |= {"moved_to": " / ".join(_value(str(key[0]), v) for v in part["value"]), "source": first["source"]}
        row |= {"leader": first["leader"], "rival": first["rival"], "gain": first["gain"], "gain_hw": first["gain_hw"]}
        row |= {"moved_gains": " / ".join(f"{g:+.1%}" for g in part["moved_gain"]), "swing": swing}
        row |= {"swing_hw": float(part["change_hw"].max())}
        row |= {"break_even": break_even(part) if numeric else float("nan"), "ranking": ranking, "to": ", ".join(to)}
        table.append(row)
    return pd.DataFrame(table).sort_values([*fields, "swing"], ascending=[*[True] * len(fields), False], kind="stable")


def _value(name: str, value: Any) -> str:
    if name in ADDED:
        return f"{value:+.3g}"
    return f"x {value:.3g}" if name in Adjust.model_fields else f"{value}"


def answer(table: pd.DataFrame, fields: list[str]) -> list[str]:
    """Does the ranking hold, a sentence a point."""
    says = []
    for key, part in _groups(table, fields):
        place = ", ".join(f"{n} {v}" for n, v in zip(short(fields), key, strict=True))
        first = part.iloc[0]
        width = "" if isnan(first["gain_hw"]) else f" ± {first['gain_hw']:.1%}"
        text = f"At {place}: " if place else ""
        text += f"{first['leader']} leads {first['rival']} by {first['gain']:+.1%}{width}; "
        parts = []
        for ranking, words in ((FLIPS, "changes"), (UNSURE, "may change"), ("failed", "is unknown")):
            some = part[part["ranking"] == ranking]
            if len(some):
                names = (f"{r['input']} (to {r['to']})" if r["to"] else str(r["input"]) for _, r in some.iterrows())
                parts.append(f"the leader {words} with {', '.join(names)}")
        text += "; ".join(parts) or "it leads wherever each input is moved"
        told = part[part["swing"] > part["swing_hw"]]
        if len(told):
            text += f". What matters most is {told.iloc[0]['input']}: gains of {told.iloc[0]['moved_gains']}"
        elif part["swing"].notna().any():
            text += ". No input changes the gain by more than the noise: more seeds may tell"
        says.append(text + ".")
    return says


def _groups(table: pd.DataFrame, fields: list[str]) -> list[tuple[tuple[Any, ...], pd.DataFrame]]:
    return [(key, part) for key, part in table.groupby(fields, sort=False)] if fields else [((), table)]


def method(within: float, seeds: int) -> list[str]:
    """How inputs were moved and compared."""
    return [
        "Inputs are moved one at a time to the limits of their uncertainty: the command line's, else the profile's where "
        "it states one, else a default. Policies believe the moved values too: the question is what would be best if the "
        "machine or the text were like that.",
        f"All {seeds} seeds and their luck are the same throughout, so that differences are due to the move alone.",
        f"The leader has the best mean as calibrated; its rival is the best of the other kind (static against adaptive). "
        f"Moved are the policies within {within:.0%} of the leader, and the rival; what lies further behind is not "
        "watched.",
        f"The ranking flips when another policy leads and its gain over the old leader exceeds {MATERIAL:.0%} and the "
        f"half-width of its {CONFIDENCE:.0%} interval, paired by seed; where it leads by less it cannot be told. "
        "Intervals stand each for itself.",
        "Break-even: where the gain over the rival would vanish, on a line through the move that lowers it; beyond the "
        "moved range it is an extrapolation, and is not given beyond three times the move. Moves together may do "
        "what none does alone.",
    ]


def write(
    rows: pd.DataFrame, metrics: pd.DataFrame, story: Story, out: Path, *, within: float
) -> tuple[pd.DataFrame, list[str]]:
    """Write the report of a study; returns the table and the answer."""
    fields = story.design.point
    table = by_input(rows, fields)
    says = answer(table, fields)
    page = Page(
        answer=says,
        shown=[_shown(table, fields)],
        tables={"sensitivity": table, "moves": rows, "trials": metrics},
        pictures={"sensitivity": draw(rows, fields, story.kind)},
        captions={"sensitivity": CAPTION},
        method=method(within, metrics["seed"].nunique()),
        about_error="This is about the inputs; the model's own form is not moved.",
    )
    write_page(page, story, out)
    return table, says


def _shown(table: pd.DataFrame, fields: list[str]) -> Table:
    rows = []
    for _, r in table.iterrows():
        even = "–" if isnan(r["break_even"]) else _value(str(r["input"]), r["break_even"])
        ranking = f"{r['ranking']}: {r['to']}" if r["to"] else str(r["ranking"])
        cells = [str(r["input"]), *(str(r[f]) for f in fields), f"{r['moved_to']} ({r['source']})", str(r["leader"])]
        noise = "–" if isnan(r["swing_hw"]) else f"± {r['swing_hw']:.1%}"
        rows.append([*cells, str(r["rival"]), f"{r['gain']:+.1%}", str(r["moved_gains"]), noise, even, ranking])
    head = ["input", *short(fields), "moved to", "leader", "rival", "gain", "gain when moved", "noise of the change"]
    head += ["break-even", "ranking"]
    return Table("Which input would change the answer", head, rows)


def draw(rows: pd.DataFrame, fields: list[str], mark: str) -> bytes:
    """A tornado a point (five at most) as PNG bytes."""
    with mpl.rc_context({"backend": "Agg"}), sns.axes_style("whitegrid"), sns.plotting_context("notebook", 0.9):
        return png(_figure(rows, fields), mark)


def _figure(rows: pd.DataFrame, fields: list[str]) -> Figure:
    groups = _groups(rows, fields)
    if len(groups) > MAX_TIME_PANELS:
        groups = [groups[round(i)] for i in np.linspace(0, len(groups) - 1, MAX_TIME_PANELS)]
    height = 0.34 * rows["input"].nunique() + 1.8
    figure, axes = plt.subplots(
        1, len(groups), figsize=(3.6 * len(groups) + 2.5, height), squeeze=False, layout="constrained"
    )
    below, above = sns.color_palette("colorblind", 2)
    for ax, (key, part) in zip(axes.flat, groups, strict=True):
        swing = (part["moved_gain"] - part["gain"]).abs().groupby(part["input"]).max().sort_values()
        base = 100 * float(part["gain"].iloc[0])
        for y, name in enumerate(swing.index):
            for i, (_, r) in enumerate(part[part["input"] == name].iterrows()):
                reach = 100 * r["moved_gain"] - base
                ax.barh(y + (0.18 if i == 0 else -0.18), reach, left=base, color=below if i == 0 else above, height=0.36)
        ax.axvline(base, color="0.2", linewidth=1)
        ax.axvline(0, color="0.4", linewidth=1, linestyle="--")
        ax.set_yticks(range(len(swing)), list(swing.index))
        title = ", ".join(f"{n} {v}" for n, v in zip(short(fields), key, strict=True))
        first = part.iloc[0]
        ax.set(title=f"{title}\n{first['leader']}\nover {first['rival']}".strip(), xlabel="gain, %")
        ax.title.set_fontsize(9)
    handles = [Rectangle((0, 0), 1, 1, color=c) for c in (below, above)]
    figure.legend(handles, ["lower value", "higher value"], loc="outside right upper", frameon=False)
    return figure
