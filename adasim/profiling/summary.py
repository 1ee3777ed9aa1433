"""What a profile says, in lines and in pictures."""

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from adasim.figures import png
from adasim.profiling.points import Profiled

NAMED = 3  # outliers that are named


def lines(found: Profiled) -> list[str]:
    """The answer in sentences; milliseconds are medians, corrected for the machine's speed."""
    points, says = found.points, []
    even = _of(points, "verify").query("not ragged and drafter")
    for batch, rows in even[even["context"] == even["context"].min()].groupby("batch"):
        costs = "; ".join(f"{r.verify_len:.0f}: {r.steady_ms:.1f}" for r in rows.sort_values("verify_len").itertuples())
        says.append(f"Verification, batch {batch}, ms by tokens a request: {costs}")
    says += _ragged(points) + _draft(points) + _plain(points) + _prefill(points) + _heads(points)
    return says + _machine(found) + _once(points) + _outliers(found)


def _of(points: pd.DataFrame, what: str) -> pd.DataFrame:
    return points[points["what"] == what]


def _paired(left: pd.DataFrame, right: pd.DataFrame, on: list[str]) -> pd.DataFrame:
    """Medians of equal configurations side by side: ``steady_ms_x`` and ``steady_ms_y``."""
    return left.merge(right, on=on)


def _ragged(points: pd.DataFrame) -> list[str]:
    verify = _of(points, "verify")
    ragged, even = verify.query("ragged"), verify.query("not ragged and drafter")
    both = _paired(ragged, even, ["batch", "verify_len", "context"])
    if both.empty:
        return []
    times = both["steady_ms_x"] / both["steady_ms_y"]
    return [
        f"Ragged rounds verify in {times.median():.2f} times what equal lengths take (batches {_list(both['batch'])})"
    ]


def _draft(points: pd.DataFrame) -> list[str]:
    draft = _of(points, "draft")
    draft = draft[draft["reads"] == ""]
    rows = draft[draft["draft_len"] == draft["draft_len"].max()].groupby("batch")["steady_ms"].median()
    if rows.empty:
        return []
    longest = int(draft["draft_len"].max())
    return [f"Drafting {longest}, ms by batch: " + "; ".join(f"{b}: {ms:.1f}" for b, ms in rows.items())]


def _plain(points: pd.DataFrame) -> list[str]:
    total = points[points["what"].isin(["verify", "overhead"]) & (points["verify_len"] == 1) & (points["reads"] == "")]
    first = total.groupby(["batch", "drafter", "what"])["steady_ms"].min().groupby(["batch", "drafter"]).sum()
    table = first.unstack("drafter").reindex(columns=[False, True]).dropna()
    if table.empty:
        return []
    costs = "; ".join(f"{b}: {without:.1f}, {loaded:.1f}" for b, without, loaded in table.itertuples())
    return [f"Plain rounds, ms by batch, without and with the drafter loaded: {costs}"]


def _prefill(points: pd.DataFrame) -> list[str]:
    rows = _of(points, "prefill").sort_values("tokens")
    if rows.empty:
        return []
    each = "; ".join(f"{r.tokens:.0f} of {r.batch}: {r.steady_ms:.0f}" for r in rows.itertuples())
    return [f"Prefill, ms by tokens of so many prompts: {each}"]


def _heads(points: pd.DataFrame) -> list[str]:
    draft = _of(points, "draft").assign(reads=lambda t: t["reads"].astype(str))
    says = []
    for head, rows in draft[draft["reads"] != ""].groupby("reads"):
        both = _paired(rows, draft[draft["reads"] == ""], ["batch", "draft_len", "context"]).groupby("batch").first()
        more = both["steady_ms_x"] - both["steady_ms_y"]
        if len(more):
            costs = "; ".join(f"{b}: {ms:+.2f}" for b, ms in more.items())
            says.append(f"Reading {head} beside drafts, ms by batch: {costs}")
    return says


def _machine(found: Profiled) -> list[str]:
    speed = found.reference["speed"]
    if len(speed) < 2:
        return ["The machine's speed was measured once: drift is unknown"]
    raw, steady = (found.points[name].median() for name in ("spread", "steady_spread"))
    return [
        f"The machine's speed, by {len(speed)} references: {speed.min():.2f} to {speed.max():.2f} of its median; the "
        f"spread within a point is {raw:.1%}, {steady:.1%} with its power of {found.follows:g} corrected"
    ]


def _outliers(found: Profiled) -> list[str]:
    table, total = found.outliers, int(found.points["n"].sum())
    if table.empty:
        return [f"No outlier among {total} values"]
    named = [
        f"{r.what} {r.ms:.0f} ms, {r.times:.1f} times the median ({r.place}, run {r.run}, step {r.step})"
        for r in table.head(NAMED).itertuples()
    ]
    return [f"{len(table)} outliers among {total} values; those that weigh most: {'; '.join(named)}"]


def _once(points: pd.DataFrame) -> list[str]:
    """A point of one run tells nothing of the machine's moods."""
    once = int((points["runs"] == 1).sum())
    return [f"{once} of {len(points)} points rest on one run each; repeat them with a larger budget"] if once else []


def _list(values: "pd.Series[int]") -> str:
    return ", ".join(str(v) for v in sorted(set(values)))


def pictures(found: Profiled) -> dict[str, bytes]:
    """Figures by name, as PNG bytes."""
    with mpl.rc_context({"backend": "Agg"}), sns.axes_style("whitegrid"), sns.plotting_context("notebook", 0.9):
        drawn = {"verify": _verify(found.points), "drift": _drift(found.reference)}
        return {name: png(figure, "measured") for name, figure in drawn.items()}


def _verify(points: pd.DataFrame) -> Figure:
    """Verification and drafting over the tokens of a pass, a line a batch; ragged rounds are crosses."""
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.4), layout="constrained")
    for ax, what, label in zip(axes, ("verify", "draft"), ("verification", "drafting"), strict=True):
        rows = _of(points, what)
        rows = rows[rows["reads"] == ""] if what == "draft" else rows
        batches = sorted(rows["batch"].unique())
        for batch, color in zip(batches, sns.color_palette("viridis", len(batches)), strict=True):
            mine = rows[rows["batch"] == batch]
            ragged = mine["ragged"].astype(bool) if what == "verify" else np.zeros(len(mine), dtype=bool)
            line = mine[~ragged].sort_values("tokens")
            middle = line.groupby("tokens")["steady_ms"].median()
            ax.plot(middle.index, middle, color=color, linewidth=1)
            bars = [line["median_ms"] - line["low_ms"], line["high_ms"] - line["median_ms"]]
            ax.errorbar(line["tokens"], line["median_ms"], np.clip(bars, 0, None), fmt="o", ms=3.5, lw=0.8, color=color,
                        label=f"batch {batch}")  # fmt: skip
            ax.plot(mine[ragged]["tokens"], mine[ragged]["steady_ms"], "x", color=color)
        ax.set(xscale="log", yscale="log", xlabel="tokens of the pass", ylabel=f"{label}, ms")
    axes[0].legend(frameon=False, fontsize=8)
    return figure


def _drift(reference: pd.DataFrame) -> Figure:
    """The reference's step over the time of the profile."""
    figure, ax = plt.subplots(figsize=(7, 3.4), layout="constrained")
    minutes = (reference["at_s"] - reference["at_s"].min()) / 60
    ax.plot(minutes, reference["step_ms"], "o-", ms=3.5, lw=1)
    ax.set(xlabel="minutes since the first reference", ylabel="plain decoding, ms a round", ylim=(0, None))
    return figure
