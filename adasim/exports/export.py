"""One export: what an engine reads, how it is told to, and what must be known of it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adasim.errors import InputError
from adasim.exports.best_k import Range
from adasim.exports.source import Source
from adasim.files import Columns, read_columns, to_json, write_atomic

BEST_K = Columns(
    ("batch", "k"),
    ("context", "k_low", "k_high", "sure", "gain", "gain_low", "gain_high", "best_drafts", "note"),
    whole=("batch", "k"),
    positive=("context",),
)


@dataclass(frozen=True, slots=True)
class Export:
    """A file for an engine.

    Attributes:
        kind: of the format.
        file: its name.
        content: the JSON document; None = there is nothing to tell the engine, ``says`` has the reason.
        about: where it comes from and where it extrapolates.
        flags: how the engine is told to read it.
        says: what the format cannot express, and what it cost to express the rest.
        comments: the format takes keys it does not know: ``about`` goes into the file. Else it lies beside it.
    """

    kind: str
    file: str
    content: dict[str, Any] | None
    about: dict[str, Any]
    flags: Sequence[str] = ()
    says: Sequence[str] = ()
    comments: bool = False

    @property
    def documents(self) -> dict[str, str]:
        """Text by file name; none without content."""
        if self.content is None:
            return {}
        about = {"what": f"{self.kind}, exported by adasim: not measured by this engine", **self.about}
        about |= {"limits": list(self.says)}
        if self.comments:
            return {self.file: _text(self.content | {"about": about})}
        return {self.file: _text(self.content), f"{Path(self.file).stem}.about.json": to_json(about)}

    def write(self, folder: Path) -> list[Path]:
        """Write its files, each whole or not at all."""
        for name, text in self.documents.items():
            write_atomic(folder / name, text)
        return [folder / name for name in self.documents]


@dataclass(frozen=True, slots=True)
class Chosen:
    """Draft lengths by batch, and whose choice they are."""

    ranges: Sequence[Range]
    how: str
    extrapolated: list[str] = field(default_factory=list)

    @property
    def longest(self) -> int:
        """The longest draft."""
        return max(r.k for r in self.ranges)


def chosen_by(source: Source, ranges: Sequence[Range], how: str) -> Chosen:
    """Lengths, with every range whose passes leave what was measured."""
    left = []
    for r in ranges:
        outside = {o: None for n in (r.first, r.last) for o in source.outside(n, n * (r.k + 1))}
        left += [f"batches {r.first}..{r.last}, k {r.k}: {', '.join(outside)}"] * bool(outside)
    return Chosen(ranges, how, left)


def read_best_k(path: Path, longest: int, context: float) -> tuple[list[Range], str]:
    """Lengths from a table with the columns batch (from this one on) and k, and how they were found, in words.

    Of a column context, where there is one as in ``best_k.csv`` of ``adasim advise``, the rows nearest to ``context``.

    Raises:
        InputError: unreadable, a batch twice, or a length that the engine does not draft.
    """
    table = read_columns(path, BEST_K)
    how = f"the table {path.name}"
    if "context" in table:
        nearest = float(table["context"].iloc[(table["context"] - context).abs().argmin()])
        table = table[table["context"] == nearest]
        how += f", its rows of context {nearest:g}"
    table = table.sort_values("batch")
    batches, lengths = table["batch"].tolist(), table["k"].tolist()
    problems = [f"{path}: batch {b} stands twice" for b in sorted({b for b in batches if batches.count(b) > 1})]
    problems += [f"{path}: batches must begin at 1, they begin at {batches[0]}"] * (batches[0] != 1)
    problems += [f"{path}: k {k}; allowed 0..{longest}" for k in sorted(set(lengths)) if k > longest]
    if problems:
        raise InputError(*problems)
    ends = [*(b - 1 for b in batches[1:]), batches[-1]]
    return [Range(*r) for r in zip(batches, ends, lengths, strict=True)], how


def _text(value: dict[str, Any]) -> str:
    """JSON with one line for what lies deepest."""
    lines = [f" {json.dumps(k)}: {_entry(v)}" for k, v in value.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _entry(value: Any) -> str:
    whole = json.dumps(value, allow_nan=False)
    if len(whole) <= 100 or not isinstance(value, dict):
        return whole
    inner = [f"  {json.dumps(k)}: {json.dumps(v, allow_nan=False)}" for k, v in value.items()]
    return "{\n" + ",\n".join(inner) + "\n }"
