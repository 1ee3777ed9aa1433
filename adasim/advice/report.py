"""The report of advice: a page, tables, pictures; and what the terminal shows."""

import json
import sys
from dataclasses import asdict, dataclass, field, replace
from math import nan
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table as Grid

from adasim.advice.choice import Loop
from adasim.advice.figures import CAPTIONS, draw
from adasim.advice.memory import GIB
from adasim.advice.money import Money
from adasim.advice.sharpen import Next, sharpen
from adasim.advice.study import Findings
from adasim.advice.words import sentences
from adasim.files import to_json
from adasim.page import Page, Story, Table, number, write_page
from adasim.story import tell
from adasim.tables import RATIO, Design

COLUMNS = {
    RATIO: "speed-up",
    "output_tok_s": "tok/s",
    "tau": "tau",
    "ttft_p50_ms": "TTFT p50 ms",
    "ttft_p99_ms": "TTFT p99 ms",
    "tpot_p50_ms": "TPOT p50 ms",
    "tpot_p99_ms": "TPOT p99 ms",
    "itl_p50_ms": "ITL p50 ms",
    "itl_p99_ms": "ITL p99 ms",
    "goodput_rps": "goodput req/s",
    "slo_met": "met SLO",
    "usd_per_million": "USD / 1M tokens",
}
LOADS = {"closed": "at a time", "open": "per second"}
UNMEASURED = "simulated from unmeasured inputs"


@dataclass(slots=True)
class Advice:
    """What is shown and written."""

    name: str
    mark: str
    says: list[str]
    notes: list[str]
    commands: list[str]
    tables: dict[str, pd.DataFrame] = field(default_factory=dict)


def write(found: Findings, money: Money | None, out: Path) -> Advice:
    """Write report.html, report.md, tables and figures; returns what was found."""
    following = sharpen(found)
    says = sentences(found, following, money)
    mark = "simulated" if found.known.measured else UNMEASURED
    tables = _tables(found, money, following)
    story = _story(found, mark)
    page = Page(
        answer=says,
        shown=_shown(found, tables, following),
        tables=tables,
        pictures=draw(found, None if following is None else following.parts, mark),
        captions=CAPTIONS,
        method=_method(found),
        about_error=_about(found),
    )
    write_page(page, story, out)
    commands = [] if following is None else following.commands
    return Advice(found.known.profile.name, mark, says, story.notes, commands, tables)


def _story(found: Findings, mark: str) -> Story:
    facts = found.known.profile.provenance
    title = f"Advice for {facts.model} on {facts.hardware}"
    if found.loops:
        first = next(iter(found.loops.values()))
        story = tell(first.plan, len(first.trials), [])
        trials = sum(len(s.trials) for s in found.sessions)
        return replace(
            story,
            name="advice",
            title=title,
            description=f"Speculative decoding for {found.traffic.title}.",
            assumptions=[*facts.assumptions, *found.known.profile.notes, *found.notes],
            notes=_first(found),
            kind=mark,
            trials=(trials, trials),
            inputs=list(dict.fromkeys([*story.inputs, *_workloads(found)])),
        )
    return Story(
        "advice", title, f"Speculative decoding for {found.traffic.title}.", Design([], None), [("source", facts.source)],
        facts.inputs, [*facts.assumptions, *found.notes], _first(found), 0, (0, 0), kind=mark,
    )  # fmt: skip


def _workloads(found: Findings) -> list[str]:
    return [f"{kind} loop: {kind}.yaml in this folder, for adasim run" for kind in found.loops]


def _first(found: Findings) -> list[str]:
    """What a reader must know first: doubts about the data, extrapolations, policies that could not be predicted."""
    doubts = [a for a in found.known.profile.provenance.assumptions if a.startswith("doubtful")]
    said = [n for s in found.sessions for n in s.notes if not n.startswith("KV memory holds")]  # the answer does
    failed: dict[str, set[str]] = {}
    for session in found.sessions:
        for f in session.failures:
            failed.setdefault(f.error, set()).add(f"{f.trial.policy} at {', '.join(map(str, f.trial.point.values()))}")
    lines = [f"not predicted: {', '.join(sorted(where))}: {error}" for error, where in failed.items()]
    return list(dict.fromkeys([*doubts, *lines, *found.notes, *said]))


def _tables(found: Findings, money: Money | None, following: Next | None) -> dict[str, pd.DataFrame]:
    tables: dict[str, pd.DataFrame] = {}
    if len(found.choices):
        tables["choices"] = found.choices
    for kind, loop in found.loops.items():
        summary = loop.summary if money is None else loop.summary.assign(usd_per_million=money.column(loop.summary))
        tables[f"policies_{kind}"] = summary
        tables[f"trials_{kind}"] = loop.trials
        if len(found.curves.get(kind, ())):
            tables[f"speedup_{kind}"] = found.curves[kind]
    crossed = [asdict(c) | {"loop": k, "says": c.says()} for k, c in found.crossovers.items() if c is not None]
    if crossed:
        tables["crossover"] = pd.DataFrame(crossed)
    if len(found.lengths):
        tables["best_k"] = found.lengths
    if following is not None:
        tables["error"] = following.parts
    if (memory := _memory(found)) is not None:
        tables["memory"] = memory
    return tables


def _memory(found: Findings) -> pd.DataFrame | None:
    m = found.memory
    if m is None:
        return None
    tokens = found.traffic.prompt + found.traffic.output
    most = max([int(n) for loop in found.loops.values() if loop.kind == "closed" for n in loop.loads] or [64])
    rows = []
    for drafter in (False, True):
        shape = m.speculative if drafter else m.plain
        rows.append(
            {
                "with": "drafter" if drafter else "plain decoding",
                "gpu_gib": m.size_gib,
                "for_weights_and_kv_gib": m.fraction * m.size_gib,
            }
            | {"weights_gib": shape.weight_bytes / GIB, "kv_tokens": m.kv_tokens(drafter=drafter)}
            | {"requests_held": m.holds(tokens, drafter=drafter), "buffers_gib": m.buffers_gib(most, drafter=drafter)}
            | {"fits": not found.misfits[drafter]}
        )
    return pd.DataFrame(rows)


def _shown(found: Findings, tables: dict[str, pd.DataFrame], following: Next | None) -> list[Table]:
    shown = []
    if "choices" in tables:
        shown.append(_choices(tables["choices"]))
    for kind, loop in found.loops.items():
        shown.append(_policies(loop, tables[f"policies_{kind}"]))
    if "best_k" in tables:
        shown.append(_best(tables["best_k"]))
    if "memory" in tables:
        shown.append(_memory_table(found, tables["memory"]))
    if following is not None:
        rows = [[str(r["part"]), f"± {r['half_width']:.1%}"] for _, r in following.parts.iterrows()]
        shown.append(
            Table("What the error is made of", ["part", "of the speed-up"], rows, "The measurement to make next:")
        )
        shown.append(Table("Run next", ["command"], [[c] for c in following.commands]))
    return shown


def _choices(table: pd.DataFrame) -> Table:
    rows = []
    for _, r in table.iterrows():
        if not r["take"]:
            rows.append([str(r["loop"]), f"{r['load']:g}", "none", "–", "–", "–", "–", str(r["verdict"])])
            continue
        gains = [f"{r[g]:+.1%} ± {_percent(r[e])}" for g, e in (("gain", "error"), ("best_gain", "best_error"))]
        verdict = (
            "cannot tell"
            if r["take"] == "off" and r["best"] != "off"
            else ""
            if r["take"] == "off"
            else str(r["verdict"])
        )
        rows.append(
            [
                str(r["loop"]),
                f"{r['load']:g}",
                str(r["take"]),
                gains[0],
                str(r["best"]),
                gains[1],
                str(r["alike"] or "–"),
                verdict,
            ]
        )
    head = [
        "loop",
        "load",
        "take",
        "gain over plain",
        "best mean",
        "its gain",
        "cannot be told from the best",
        "against plain",
    ]
    return Table(
        "What to take",
        head,
        rows,
        "Take: the simplest of those that cannot be told from the best. ± is everything that may be off, 95 %.",
    )


def _percent(value: float) -> str:
    return "any" if not value < 10 else f"{value:.1%}"


def _policies(loop: Loop, table: pd.DataFrame) -> Table:
    metrics = [m for m in COLUMNS if m in table and table[m].notna().any()]
    rows = [
        [str(r["policy"]), f"{r[loop.x]:g}", *(number(float(r[m]), float(r.get(f"{m}_hw", nan))) for m in metrics)]
        for _, r in table.iterrows()
    ]
    title = "Closed loop: speed and latency side by side" if loop.kind == "closed" else "Open loop: speed and latency"
    return Table(
        title, ["policy", LOADS[loop.kind], *(COLUMNS[m] for m in metrics)], rows, "± is noise over seeds alone."
    )


def _best(table: pd.DataFrame) -> Table:
    rows = [
        [f"{r['batch']:g}", f"{r['context']:g}", f"{r['k']:g}", f"{r['k_low']:g} to {r['k_high']:g}", f"{r['sure']:.0%}",
         f"{r['gain']:+.0%} ({r['gain_low']:+.0%} to {r['gain_high']:+.0%})"]
        for _, r in table.iterrows()
    ]  # fmt: skip
    head = ["batch", "context", "best k", "95 % of worlds", "worlds with that k", "gain over plain"]
    note = "A batch that decodes steadily, by formula; k = 0 is plain decoding without a drafter."
    return Table("Best draft length by batch and context", head, rows, note)


def _memory_table(found: Findings, table: pd.DataFrame) -> Table:
    rows = [
        [
            str(r["with"]),
            *(f"{r[name]:.1f}" for name in ("weights_gib", "for_weights_and_kv_gib", "buffers_gib")),
            *(f"{r[name]:,}" for name in ("kv_tokens", "requests_held")),
            "yes" if r["fits"] else "NO",
        ]
        for _, r in table.iterrows()
    ]
    head = ["", "weights GiB", "for weights and KV GiB", "pass buffers GiB", "KV tokens", "requests held", "fits"]
    m = found.memory
    assert m is not None
    note = f"Each of {m.plain.split.tp} GPU(s) of {m.size_gib:g} GiB. Buffers are an estimate by shapes."
    if m.assumed_layers:
        note += f" The drafter is taken for {m.speculative.draft_layers} layers of the model's shape (--draft-layers)."
    return Table("Memory", head, rows, note)


def _about(found: Findings) -> str:
    if not found.loops:
        return "Nothing was simulated."
    model = {name: size for loop in found.loops.values() for name, size in loop.model.items()}
    known = ", ".join(f"{name} {size:.1%}" for name, size in model.items())
    text = "A gain that is smaller than its error is “cannot tell”. The error is noise, what each input may be off"
    return f"{text}, and {known}." if known else f"{text}; the model's own error was not validated (--validation)."


def _method(found: Findings) -> list[str]:
    if not found.loops:
        return ["Memory is counted by shapes of the model."]
    loop = next(iter(found.loops.values()))
    seeds = loop.trials["seed"].nunique()
    how = (
        "Inputs: each is moved alone to the limit of its uncertainty that is worse for speculation, with the same luck; "
        "the steps add in squares."
    )
    if found.known.posterior is not None:
        how = "Inputs: worlds drawn in proportion to how well they explain the measurements, same luck; 1.96 x rms."
    return [
        f"Noise: {seeds} seeds; policies of a seed meet the same requests and luck, and gains are paired by it (95 % "
        "t-interval of logarithms).",
        how,
        "Fit: rms error on the fitted rows. Validation: mean error of throughput over plain decoding in the folder "
        "given. All parts are taken as independent half-widths of the logarithm.",
        "Where speculation stops paying: the last fall through 1 of the speed-up of the fixed length (of at least one "
        "draft) that is fastest at each load; its limits are the same falls of the band's edges.",
        "Policies within 10 % of the best are compared with it; what lies further behind is behind.",
        *found.method,
    ]


def show(advice: Advice, out: Path, *, as_json: bool) -> None:
    """The answer on the terminal, or one JSON document with all tables."""
    if as_json:
        document: dict[str, Any] = {"name": advice.name, "out": str(out), "numbers": advice.mark, "answer": advice.says}
        document |= {"next": advice.commands, "notes": advice.notes}
        document |= {k: json.loads(t.to_json(orient="records")) for k, t in advice.tables.items() if "trials" not in k}
        print(to_json(document), end="")
        return
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(f"\n[bold]{advice.name}[/bold] ({advice.mark})")
    if "choices" in advice.tables:
        shown = _choices(advice.tables["choices"])
        grid = Grid(*shown.head)
        for row in shown.rows:
            grid.add_row(*row)
        console.print(grid)
    for line in advice.says:
        style = "bold red" if line.startswith(("Infeasible", "UNMEASURED")) else None
        console.print(f"• {line}", highlight=False, markup=False, style=style)
    for command in advice.commands:
        console.print(f"    {command}", highlight=False, markup=False, soft_wrap=True)
    for note in advice.notes:
        console.print(f"note: {note}", highlight=False, markup=False, style="dim")
    console.print(f"Report: {out / 'report.html'}", highlight=False)
