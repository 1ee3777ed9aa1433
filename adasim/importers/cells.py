"""The cells of a table's row, under our names."""

from collections.abc import Mapping

from adasim.importers.columns import column_of
from adasim.importers.fields import Malformed, needed, number
from adasim.importers.lengths import COLUMNS
from adasim.importers.shapes import is_number
from adasim.importers.source import Source

NAMED = {"policy", "model", "dataset"}  # labels that need no name


def understood(source: Source, cells: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Cells under our names, and those that only label the row.

    Raises:
        Malformed: no number where one must be, or two columns that differ.
    """
    values, said = dict[str, str](), dict[str, str]()
    loads = [n for n in cells if column_of(n) == "concurrency"]
    for name, cell in cells.items():
        known = column_of(name)
        if known == "concurrency" and "requests" in name.lower():
            known = _of_requests(source, name, alone=len(loads) == 1)
        if known == "concurrency" and "best_k" in map(column_of, cells) and not is_number(cell):
            said[name] = cell  # a range of loads
        elif known is None or known in NAMED:
            if cell:
                said[known or name] = cell
            if known is None and is_number(cell):
                source.note(f"column {name} is not understood: it is kept in the label")
        elif cell:
            if known not in COLUMNS:  # a length may be a word: autospec
                number(cells, name, low=1 if known == "concurrency" else 0)
            if name.endswith("_pct"):
                values[known] = str(needed(number(cells, name, high=100), name) / 100)
            elif values.setdefault(known, cell) != cell:
                raise Malformed(f"two columns give {known}: {values[known]} and {cell}")
            if part := next((p for p in ("rank", "gpu") if known == "output_tok_s" and p in name.lower()), None):
                source.note(f"{name} is of one {part}, not of the whole engine")
    return values, said


def _of_requests(source: Source, name: str, *, alone: bool) -> str:
    """What ``num_requests`` means: the concurrency, unless another column gives it."""
    if not alone:
        return "requests"
    source.note(f"{name} is taken for the concurrency: if it counts a benchmark's requests, call it requests")
    return "concurrency"
