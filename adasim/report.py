"""Tables, figures and pages of one experiment. Reads metrics only: it cannot tell which backend made them."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from math import inf, isnan, nan
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jinja2 import DictLoader, Environment

from adasim import __version__
from adasim.adaptation import Timeline
from adasim.choice import HIGHER_IS_BETTER, best_constant, choices
from adasim.figures import draw
from adasim.files import write_atomic
from adasim.method import method
from adasim.tables import (
    RATIO,
    Design,
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
SUMMARY = {
    RATIO: "speed-up",
    "output_tok_s": "tok/s",
    "tau": "tau",
    "verify_len": "verified",
    "ttft_p50_ms": "TTFT p50 ms",
    "ttft_p99_ms": "TTFT p99 ms",
    "tpot_p50_ms": "TPOT p50 ms",
    "tpot_p99_ms": "TPOT p99 ms",
    "itl_p99_ms": "ITL p99 ms",
    "goodput_rps": "goodput req/s",
    "slo_met": "met SLO",
    "verify_tokens_per_round": "tokens/verify",
    "prefix_hit_rate": "prefix hits",
    "evictions": "evictions",
}
ONLY_IF_ANY = {"prefix_hit_rate", "evictions"}
UNITS = {"output_tok_s": "tok/s", "tpot_p50_ms": "ms per token", "goodput_rps": "good requests/s"}


@dataclass(slots=True)
class Story:
    """What a report says beyond its tables."""

    name: str
    title: str
    description: str
    design: Design
    calibration: list[tuple[str, str]]  # provenance, name and value
    inputs: list[str]
    assumptions: list[str]
    notes: list[str]  # extrapolations, replaced sweeps, failed trials
    seeds: int
    trials: tuple[int, int]  # finished, planned
    kind: str = "simulated"  # or "measured": how figures are marked
    goodput: bool = False
    reference: "ReferenceStory | None" = None
    slo: list[str] = field(default_factory=list)
    policies: list[str] = field(default_factory=list)  # label: parameters
    timelines: list[Timeline] = field(default_factory=list)


@dataclass(slots=True)
class ReferenceStory:
    """Reference cells and tolerances."""

    source: str
    cells: pd.DataFrame
    x: str
    metric: str
    mean_abs_error: float
    max_abs_error: float
    side_margin: float | None
    x_value: Any = None  # of ``x`` where it was not swept
    null_model: str | None = None  # what the column null holds, in words


@dataclass(slots=True)
class Table:
    """A table as pages show it."""

    title: str
    head: list[str]
    rows: list[list[str]]
    note: str = ""
    folded: bool = False


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


@dataclass(slots=True)
class Page:
    """What a page shows besides its story."""

    answer: list[str]
    shown: list["Table"]
    tables: dict[str, pd.DataFrame]  # CSV files
    pictures: dict[str, bytes]  # PNG files
    captions: dict[str, str]
    method: list[str]
    errors: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    about_error: str = ""  # replaces what a page says of the reference


def write_page(page: Page, story: Story, out: Path) -> None:
    """Write report.html, report.md, and the tables and figures, which replace those that were there."""
    for folder in ("tables", "figures"):
        (out / folder).mkdir(exist_ok=True)
        for old in (out / folder).iterdir():
            old.unlink()
    for name, table in page.tables.items():
        write_atomic(out / "tables" / f"{name}.csv", table.to_csv(index=False, lineterminator="\n"))
    for name, data in page.pictures.items():
        write_atomic(out / "figures" / f"{name}.png", data)

    pages = Environment(
        loader=DictLoader({n: (files("adasim") / "pages" / n).read_text() for n in ("report.html", "report.md")}),
        autoescape=lambda name: name == "report.html",
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters["cell"] = lambda text: text.replace("|", "\\|")
    shared = {
        "story": story,
        "version": __version__,
        "answer": page.answer,
        "tables": page.shown,
        "method": page.method,
        "errors": page.errors,
        "failures": page.failures,
        "about_error": page.about_error,
        "captions": page.captions,
    }
    inline = {n: base64.b64encode(d).decode() for n, d in page.pictures.items()}
    write_atomic(out / "report.html", pages.get_template("report.html").render(**shared, pictures=inline))
    write_atomic(out / "report.md", pages.get_template("report.md").render(**shared, pictures=list(page.pictures)))


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


def shown_tables(tables: Tables, story: Story) -> list[Table]:
    """The tables of a page, reference first."""
    design, shown = story.design, []
    if tables.reference is not None and story.reference is not None:
        r = story.reference
        rows = [
            [
                str(c["policy"]),
                f"{c['at']:g}",
                str(c["role"]),
                f"{c['reference']:.2f}",
                number(c["predicted"], c["half_width"]),
                f"{c['error']:+.1%}",
            ]
            for _, c in tables.reference.iterrows()
        ]
        head = ["policy", r.x.rsplit(".", 1)[-1], "role", f"published {r.metric}", "simulated", "error"]
        note = "«input» cells fixed the model and do not count; «predicted» ones were not used"
        if (tables.reference["role"] == "extrapolated").any():
            note += ", «extrapolated» ones neither, and they lie beyond the fitted range"
        if r.null_model is not None and "null" in tables.reference:
            head += ["null model", "its error"]
            for row, (_, c) in zip(rows, tables.reference.iterrows(), strict=True):
                known = not isnan(c["null"])
                row += [number(c["null"], nan), f"{c['null_error']:+.1%}" if known else "–"]
            note += f". Null model: {r.null_model}"
        shown.append(Table("Predicted beside published", head, rows, f"{note}. Source: {r.source}."))
        shown += _choice_table(tables.reference, r)
    if len(tables.crossover):
        rows = [
            [str(c["policy"]), *(str(c[f]) for f in design.facets), str(c["says"])]
            for _, c in tables.crossover.iterrows()
        ]
        x = (design.x or "").rsplit(".", 1)[-1]
        shown.append(
            Table(
                f"Where speculation stops paying ({x})",
                ["policy", *short(design.facets), "stops paying at"],
                rows,
            )
        )
    shown += _adaptation_tables(tables, design) + _version_table(story.timelines)
    group = {a.label: a.group for a in design.arms}
    alone = tables.summary[tables.summary["policy"].map(group).isna()]
    shown.append(_summary_table("All policies", alone, design))
    members = tables.summary[tables.summary["policy"].map(group).notna()]
    if len(members):
        shown.append(_summary_table("Every member of the searched groups", members, design, folded=True))
    return shown


def _adaptation_tables(tables: Tables, design: Design) -> list[Table]:
    """Whether training pays back, and what the alarms saw."""
    shown, places = [], short(design.point)
    if len(tables.payback):
        rows = [
            [
                str(r["policy"]),
                *(str(r[p]) for p in design.point),
                *(_percent(r[m], r[f"{m}_hw"]) for m in ("throughput", "tpot")),
                *(number(r[m], r[f"{m}_hw"]) for m in ("trainer_share", "reserved_share", "payback")),
                _percent(r["late_saving"], r["late_saving_hw"]),
                "never" if r["engines"] == inf else number(r["engines"], nan),
                _repaid(r["repaid_after_s"]),
            ]
            for _, r in tables.payback.iterrows()
        ]
        head = ["tok/s", "TPOT p50", "training / serving", "held / serving", "saved / training", "saved at the end"]
        head += ["engines a trainer", "repaid after"]
        note = (
            "Against the frozen drafter: output tokens/s and TPOT; GPU-seconds of training, and for which the trainer's "
            "own GPUs were held, per GPU-second of serving; serving GPU-seconds saved per GPU-second of training (above "
            "1 it has paid back within the run), and the share saved in the run's last fifth of tokens. At that saving, "
            "so many engines with the same traffic must share one trainer to pay for the GPUs it holds, or serving must "
            "go on for so long without further training. Worst seed in the last two."
        )
        shown.append(Table("Does training pay back?", ["policy", *places, *head], rows, note))
    if "alarms" in tables.summary:
        counts = ("versions_loaded", "rollbacks", "alarms", "alarms_before_drift", "drifts", "drifts_missed")
        known = [c for c in (*counts, "alarm_delay_s", "alarm_delay_requests") if c in tables.summary]
        watched = tables.summary[tables.summary["alarms"].notna() & tables.summary["picked"].isna()]
        rows = [
            [str(r["policy"]), *(str(r[p]) for p in design.point), *(number(r[c], r[f"{c}_hw"]) for c in known)]
            for _, r in watched.iterrows()
        ]
        note = (
            "Means over seeds. The delay runs from a drift of the mix to the first alarm after it, before the next drift."
        )
        shown.append(Table("Versions and alarms", ["policy", *places, *(c.replace("_", " ") for c in known)], rows, note))
    return shown


def _version_table(timelines: list[Timeline]) -> list[Table]:
    """What each drafter version accepted, where several served."""
    rows = [
        [t.policy, t.place, str(v["domain"]), str(v["draft_version"]), f"{v['rounds']:,}", f"{v['tau']:.3f}"]
        for t in timelines
        for _, v in t.versions.iterrows()
        if t.versions["draft_version"].nunique() > 1
    ]
    if not rows:
        return []
    note = (
        "One seed. tau at the lengths the policy verified; versions met other requests, so small differences say nothing."
    )
    return [Table("Drafter versions", ["policy", "at", "domain", "version", "rounds", "tau"], rows, note, folded=True)]


def _percent(value: float, half_width: float) -> str:
    return "–" if isnan(value) else f"{value:+.1%}" + ("" if isnan(half_width) else f" ± {half_width:.1%}")


def _repaid(seconds: float) -> str:
    if isnan(seconds):
        return "–"
    if seconds == 0:
        return "repaid"
    return "never" if seconds == inf else f"{seconds:.0f} s" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def _choice_table(reference: pd.DataFrame, r: ReferenceStory) -> list[Table]:
    """What choosing by the prediction costs, where there is a choice."""
    if r.metric not in HIGHER_IS_BETTER or len(found := choices(reference)) < 2:
        return []
    rows = [[f"{c['at']:g}", str(c["chosen"]), str(c["best"]), f"{c['regret']:.1%}"] for _, c in found.iterrows()]
    near = (found["regret"] <= 0.02).sum()
    note = f"Within 2 % of the best at {near} of {len(found)} points; mean regret {found['regret'].mean():.2%}"
    constant = best_constant(reference)
    if constant is not None:
        note += f", that of the best constant choice ({constant.policy}) {constant.mean_regret:.2%}"
    head = [r.x.rsplit(".", 1)[-1], "chosen by prediction", f"best published {r.metric}", "regret"]
    return [Table("Choosing by the prediction", head, rows, f"{note}. Regret: published value given away.")]


def _summary_table(title: str, summary: pd.DataFrame, design: Design, *, folded: bool = False) -> Table:
    names = [m for m in SUMMARY if m in summary and summary[m].notna().any()]
    names = [m for m in names if m not in ONLY_IF_ANY or summary[m].any()]
    rows = []
    for _, row in summary.iterrows():
        label = str(row["policy"])
        if isinstance(row["picked"], str):
            label += f" = {row['picked'].removeprefix(label.removeprefix('best ')).strip()}"
        rows.append([label, *(f"{row[p]}" for p in design.point), *(number(row[m], row[f"{m}_hw"]) for m in names)])
    return Table(title, ["policy", *short(design.point), *(SUMMARY[m] for m in names)], rows, folded=folded)


def short(fields: Sequence[str]) -> list[str]:
    """Last parts of dotted fields, whole ones where those are ambiguous."""
    last = [f.rsplit(".", 1)[-1] for f in fields]
    return [f if last.count(s) > 1 else s for f, s in zip(fields, last, strict=True)]


def number(value: float, half_width: float) -> str:
    """Four digits, with the half-width where it shows."""
    if pd.isna(value):
        return "–"
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2
    text = f"{value:.{digits}f}"
    return text if pd.isna(half_width) or half_width < 0.5 * 10**-digits else f"{text} ± {half_width:.{digits}f}"
