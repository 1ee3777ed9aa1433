"""Draft lengths of a table's row, from columns or from what its policy is called."""

import re
from collections.abc import Mapping

from adasim.importers.columns import BASELINE, k_of
from adasim.importers.fields import whole
from adasim.importers.shapes import is_number

COLUMNS = ("k", "best_k", "steps")


def lengths_of(values: Mapping[str, str], said: dict[str, str], label: str) -> tuple[int | None, int | None]:
    """Drafts verified per round and the most that can be accepted; None: not told, or they vary.

    Args:
        values: cells under our names.
        said: labels; takes a length that is a word.
        label: the variant that a column's name told.

    Raises:
        Malformed: a length that cannot be.
    """
    names = [said.get("policy", ""), label]
    if any(BASELINE.fullmatch(n.strip()) for n in names):
        return 0, 0
    adaptive = next((n for n in names if re.search(r"adapt|auto", n, re.IGNORECASE)), None)
    if adaptive is not None:
        return None, k_of(adaptive)
    for column in COLUMNS:
        cell = values.get(column)
        if cell and not is_number(cell):
            said[column] = cell  # "autospec": lengths that vary
            return None, None
    verified, steps = whole(values, "verify_len"), whole(values, "steps")
    drafts = None if verified is None else max(verified - 1, 0)  # SGLang's num_draft_tokens: the root counted
    told = [drafts, *(whole(values, n) for n in COLUMNS), *map(k_of, names)]
    k = next((found for found in told if found is not None), None)
    if not k or (whole(values, "topk") or 1) == 1:
        return k, k
    return k, None if steps is None else min(steps, k)
