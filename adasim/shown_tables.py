"""The tables of an experiment's page."""

from math import inf, isnan, nan

import pandas as pd

from adasim.adaptation import Timeline
from adasim.choice import HIGHER_IS_BETTER, best_constant, choices
from adasim.page import ReferenceStory, Story, Table, number, short
from adasim.tables import RATIO, Design, Tables

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
