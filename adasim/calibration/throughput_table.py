"""Throughput tables that people have: tokens per second over batch and draft length, in a CSV file."""

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd

from adasim.errors import InputError
from adasim.files import Columns, read_columns

Bonus = Literal["counted", "not counted"]
WHOLE = ("batch", "concurrency", "k", "steps", "top_k")
POSITIVE = ("tok_s", "context")


class Row(NamedTuple):
    """One row: a batch that decodes steadily."""

    batch: int
    k: int  # draft tokens verified per request and round, the anchor not counted; 0 = plain decoding
    tok_s: float | None = None  # output tokens per second of the whole batch
    tau: float | None = None  # tokens per request and round, the bonus token counted
    context: float | None = None  # mean context of a request, tokens
    steps: int | None = None  # draft passes; null: one a draft (chains)
    top_k: int = 1  # above 1: the drafts form a tree

    @property
    def tokens(self) -> int:
        """Tokens of a verification pass."""
        return self.batch * (self.k + 1)

    @property
    def tree(self) -> bool:
        """Whether drafts branch: k is then the tree's tokens less its root."""
        return self.top_k > 1

    @property
    def passes(self) -> int:
        """Draft passes of a round, of an autoregressive drafter."""
        return self.steps if self.steps is not None and self.k else self.k

    @property
    def told_tau(self) -> float | None:
        """tau that needs no model of acceptance: of plain decoding, and of trees where measured."""
        return 1.0 if not self.k else self.tau if self.tree else None


def read_throughput(path: Path, bonus: Bonus | None = None) -> list[Row]:
    """The rows of a CSV or Parquet table.

    Columns: ``batch`` or ``concurrency``; ``k`` drafts (0 = plain decoding); ``tok_s``; optionally ``accept_length``,
    ``context``, and for trees ``steps`` (draft passes) and ``top_k``, ``k`` then being the tree's tokens less its root.
    Cells of ``tok_s`` and ``accept_length`` may be empty.

    Args:
        path: of the table.
        bonus: whether ``accept_length`` counts the bonus token (SGLang and vLLM do: plain decoding is 1), or drafts only
            (plain decoding is 0). Plain rows that hold it say so themselves.

    Raises:
        InputError: what is wrong, all at once.
    """
    optional = ("batch", "concurrency", "tok_s", "accept_length", "context", "steps", "top_k", "note")
    table = read_columns(path, Columns(("k",), optional, whole=("k",)))
    problems = []
    if ("batch" in table) == ("concurrency" in table):
        problems.append(f"{path}: needs one of the columns batch and concurrency")
    if "tok_s" not in table and "accept_length" not in table:
        problems.append(f"{path}: needs the column tok_s or accept_length")
    for name in sorted({*WHOLE, *POSITIVE, "accept_length"} & set(table.columns)):
        problems += _bad_numbers(path, table, name)
    if problems:
        raise InputError(*problems)
    if "accept_length" in table:
        table["accept_length"] += 0 if _bonus(path, table, bonus) == "counted" else 1
    elif bonus is not None:
        raise InputError(f"{path}: bonus has no effect without the column accept_length")
    rows = [_row(r) for r in table.to_dict("records")]
    for i, row in enumerate(rows):
        problems += [f"{path}: row {i + 1}: {p}" for p in _impossible(row)]
    if problems:
        raise InputError(*problems[:10])
    return rows


def _bad_numbers(path: Path, table: pd.DataFrame, name: str) -> list[str]:
    """Complaints about one column of numbers; empty cells are allowed where a value may be missing."""
    numbers = pd.to_numeric(table[name], errors="coerce")
    needed = name in {"batch", "concurrency", "k"}
    bad = numbers.isna() & (table[name].notna() | needed)
    least = 1 if name in {"batch", "concurrency", "steps", "top_k"} else 0
    rule = f"a whole number >= {least}" if name in WHOLE else "a number > 0" if name in POSITIVE else "a number >= 0"
    if name in WHOLE:
        bad |= (numbers % 1 != 0) & numbers.notna() | (numbers < least)
    else:
        bad |= ~np.isfinite(numbers.fillna(1)) | (numbers <= 0 if name in POSITIVE else numbers < 0)
    if name in {"steps", "top_k"}:
        bad &= table["k"] > 0  # of plain rows they mean nothing
    table[name] = numbers
    return [f"{path}: row {i + 1}: {name} is {table[name].iloc[i]}, must be {rule}" for i in np.flatnonzero(bad)[:5]]


def _bonus(path: Path, table: pd.DataFrame, bonus: Bonus | None) -> Bonus:
    """Whether the bonus token is counted, from plain rows or as told."""
    plain = table.loc[(table["k"] == 0) & table["accept_length"].notna(), "accept_length"]
    says: set[Bonus] = {"counted" if v == 1 else "not counted" for v in plain if v in (0, 1)}
    if (~plain.isin([0, 1])).any() or len(says) > 1 or (bonus is not None and says - {bonus}):
        raise InputError(f"{path}: accept_length of plain rows (k 0) must be 1 if the bonus token is counted, else 0")
    if bonus is None and not says:
        raise InputError(
            f"{path}: accept_length: say whether it counts the bonus token (bonus: counted or not counted); "
            "SGLang's accept_len and vLLM's mean acceptance length do"
        )
    return bonus or says.pop()


def _row(cells: Mapping[Hashable, Any]) -> Row:
    def number(name: str) -> float | None:
        value = cells.get(name)
        return None if value is None or pd.isna(value) else float(value)

    k, steps, top_k = int(number("k") or 0), number("steps"), number("top_k")
    return Row(
        batch=int(number("batch") or number("concurrency") or 0),
        k=k,
        tok_s=number("tok_s"),
        tau=number("accept_length") if k else None,
        context=number("context"),
        steps=int(steps) if steps and k else None,
        top_k=int(top_k) if top_k and k else 1,
    )


def _impossible(row: Row) -> list[str]:
    """What cannot be."""
    says = []
    if row.tok_s is None and (row.tau is None or not row.k):
        says.append("holds neither tok_s nor the accept_length of drafts")
    deepest = row.passes if row.tree else row.k
    if row.tau is not None and not 1 <= row.tau <= deepest + 1:
        says.append(f"accept_length is {row.tau:g} with the bonus token, must be 1..{deepest + 1} for {deepest} drafts")
    if row.tree and row.steps is None:
        says.append(f"a tree (top_k {row.top_k}) needs steps")
    if row.tree and row.tok_s is not None and row.tau is None:
        says.append(f"a tree (top_k {row.top_k}) needs its accept_length: no formula for chains gives it")
    if row.steps is not None and row.steps > row.k:
        says.append(f"steps is {row.steps}, must not exceed the {row.k} drafts")
    return says
