"""What the command line shows."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from adasim.files import to_json

if TYPE_CHECKING:
    import pandas as pd

    from adasim.page import Story
    from adasim.plan import Plan
    from adasim.tables import Tables


@contextmanager
def progress_bar(total: int, done: int, *, quiet: bool, what: str = "trials") -> Iterator[Callable[[], None]]:
    """A bar with rate and remaining time on standard error; yields a function to call per finished trial."""
    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TextColumn("remaining"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as bar:
        task = bar.add_task("trials", total=total, completed=done, rate="")

        def advance() -> None:
            bar.advance(task)
            seconds = bar.tasks[task].elapsed or 0.0
            ran = bar.tasks[task].completed - done
            bar.update(task, rate=f"{ran / seconds:.1f}/s" if seconds else "")

        yield advance


@contextmanager
def budget_bar(budget_s: float, *, quiet: bool) -> Iterator[Callable[[str, int], None]]:
    """A bar over a time budget on standard error; yields a function that tells what is going on, and how much is done.

    Drawn only when told: nothing else runs while something is measured.
    """
    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("of {task.fields[budget]}, {task.fields[done]} runs;"),
               TextColumn("{task.description}"))  # fmt: skip
    start = time.monotonic()
    with Progress(*columns, console=Console(stderr=True), disable=quiet, auto_refresh=False) as bar:
        task = bar.add_task("", total=budget_s, budget=f"{timedelta(seconds=round(budget_s))}", done=0)

        def say(what: str, done: int) -> None:
            spent_s = min(time.monotonic() - start, budget_s)
            bar.update(task, completed=spent_s, description=what, done=done, refresh=True)

        yield say


def show_tables(story: "Story", tables: "Tables", out: Path) -> None:
    """The answer and one summary table."""
    from adasim import report  # brings the plotting stack
    from adasim.shown_tables import SUMMARY
    from adasim.tables import RATIO

    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(f"\n[bold]{story.title}[/bold] ({story.kind})")
    metrics = [m for m in (RATIO, "output_tok_s", "tau", "verify_len", "tpot_p50_ms") if tables.summary[m].notna().any()]
    metrics += ["goodput_rps"] if story.goodput else []
    grouped = {a.label for a in story.design.arms if a.group}
    shown = tables.summary[~tables.summary["policy"].isin(grouped)]
    table = Table("policy", *(p.rsplit(".", 1)[-1] for p in story.design.point), *(SUMMARY[m] for m in metrics))
    for i in range(1, len(table.columns)):
        table.columns[i].justify = "right"
    for policy, rows in shown.groupby("policy", sort=False):
        for _, row in rows.iterrows():
            values = [f"{row[m]:.0f}" if m == "output_tok_s" else f"{row[m]:.2f}" for m in metrics]
            table.add_row(str(policy), *(str(row[p]) for p in story.design.point), *values)
        table.add_section()
    console.print(table)
    for line in report.answer(tables, story):
        console.print(f"• {line}", highlight=False)
    if tables.errors.get("cells"):
        e = tables.errors
        console.print(
            f"• Against the published cells: mean error {e['mean_abs']:.1%}, worst {e['worst']:.1%} over "
            f"{e['cells']:.0f} predicted cells.",
            highlight=False,
        )
    for line in report.failures(tables, story):
        console.print(f"• [bold red]Missed:[/bold red] {line}", highlight=False)
    console.print(f"Report: {out / 'report.html'}", highlight=False)


def show_json(plan: "Plan", out: Path, tables: "Tables | None", errors: list[str]) -> None:
    """One JSON document on standard output."""
    document: dict[str, Any] = {
        "scenario": plan.scenario.name,
        "out": str(out),
        "backend": plan.scenario.backend.kind,
        "trials": len(plan.trials),
        "failed": errors,
    }
    if tables is not None:
        for name in ("summary", "best", "crossover", "reference"):
            table = getattr(tables, name)
            document[name] = None if table is None else json.loads(table.to_json(orient="records"))
        document["errors"] = tables.errors
    print(to_json(document), end="")


def show_answer(
    name: str,
    out: Path,
    says: list[str],
    tables: "dict[str, pd.DataFrame]",
    errors: list[str],
    *,
    as_json: bool,
    report: str = "report.html",
) -> None:
    """What a command found: sentences, or one JSON document with its tables; ``report`` is where to read on."""
    if as_json:
        document: dict[str, Any] = {"scenario": name, "out": str(out), "failed": errors, "answer": says}
        document |= {k: json.loads(t.to_json(orient="records")) for k, t in tables.items()}
        print(to_json(document), end="")
        return
    console = Console(width=None if sys.stdout.isatty() else 140)
    for line in says:
        console.print(f"• {line}", highlight=False, markup=False)
    console.print(f"Report: {out / report}", highlight=False)


def show_facts(says: list[str], tables: "dict[str, pd.DataFrame]", *, as_json: bool, shown: str | None = None) -> None:
    """Sentences and one of the tables, or one JSON document with all of them."""
    if as_json:
        document: dict[str, Any] = {"answer": says}
        document |= {k: json.loads(t.to_json(orient="records")) for k, t in tables.items()}
        print(to_json(document), end="")
        return
    console = Console(width=None if sys.stdout.isatty() else 140)
    if shown is not None:
        part = tables[shown]
        table = Table(*part.columns)
        for row in part.itertuples(index=False):
            table.add_row(*(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row))
        console.print(table)
    for line in says:
        console.print(f"• {line}", highlight=False, markup=False)


def show_errors(errors: list[str], word: str = "failed") -> None:
    """Failed trials, and what else must be known of a run, on standard error."""
    for error in errors:
        Console(stderr=True).print(f"{word}: {error}", highlight=False, markup=False)


def show_list(what: str, rows: list[dict[str, str]], *, as_json: bool) -> None:
    """A catalogue as a table or as JSON."""
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    table = Table(*rows[0].keys() if rows else (what,))
    for row in rows:
        table.add_row(*row.values())
    Console().print(table)
