"""Whether a table's accept lengths count the bonus token, as plain decoding or a column's name tells."""

from collections.abc import Iterable, Mapping

from adasim.importers.columns import column_of
from adasim.importers.fields import Malformed, number
from adasim.importers.lengths import lengths_of
from adasim.importers.shapes import Cells, variants_of
from adasim.importers.source import Source

PLAIN_TAU = {"1": True, "1.0": True, "1.00": True, "0": False, "0.0": False, "0.00": False}  # the bonus is counted


def bonus_of(source: Source, rows: Iterable[Cells]) -> bool | None:
    """Whether accept lengths count the bonus token, from those of plain decoding; None: these tell nothing."""
    told = set[bool]()
    for cells in rows:
        for label, variant in variants_of(cells):
            values = {column_of(n) or n: c for n, c in variant.items() if c}
            if values.get("tau") in PLAIN_TAU and _plain(values, label):
                told.add(PLAIN_TAU[values["tau"]])
    if told == {False}:
        source.note("accept lengths of plain decoding are 0: they leave out the bonus token, one was added to all")
    return told.pop() if len(told) == 1 else None


def _plain(values: dict[str, str], label: str) -> bool:
    try:
        return lengths_of(values, dict(values), label)[0] == 0
    except Malformed:
        return False  # to be said when the row is read


def tau_of(source: Source, values: Mapping[str, str], k: int | None, bonus: bool | None) -> float | None:
    """The accept length with the bonus token.

    Raises:
        Malformed: plain decoding gives another one.
    """
    drafts, tau = number(values, "accepted_per_round"), number(values, "tau")
    if k == 0:
        if tau is not None and tau != (bonus is not False):
            raise Malformed(f"accept length of plain decoding is {tau:g}, allowed: 1, or 0 in all rows")
        return 1.0 if tau is not None or drafts is not None else None
    if tau is None:
        return None if drafts is None else 1 + drafts
    if bonus is None and not {"acceptance_rate", "accepted"} & values.keys():
        source.note(
            "accept lengths are taken to count the bonus token, as SGLang's and vLLM's do: name the column "
            "accepted_per_round if they do not"
        )
    return tau + (bonus is False)
