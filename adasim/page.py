"""A page: what a report says and shows, whatever it is about, and how it is written."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import DictLoader, Environment

from adasim import __version__
from adasim.adaptation import Timeline
from adasim.files import write_atomic
from adasim.tables import Design


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


@dataclass(slots=True)
class Page:
    """What a page shows besides its story."""

    answer: list[str]
    shown: list[Table]
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
