"""Takes down every request of every round."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from adasim.records import RoundRecord, table
from adasim.serving.lives import Lives
from adasim.types import FloatArray, IntArray

if TYPE_CHECKING:
    import pandas as pd


class Rounds:
    """Rows of :class:`~adasim.records.RoundRecord`, a column of arrays each."""

    def __init__(self) -> None:
        self._columns: list[list[NDArray[Any]]] = [[] for _ in RoundRecord._fields]

    def add(
        self,
        step: int,
        ids: IntArray,
        lives: Lives,
        draft_lens: IntArray,
        verify_lens: IntArray,
        run: IntArray,
        accept_len: FloatArray | None,
        whole: NDArray[np.bool_] | None,
        draft_version: int,
        confidence: FloatArray | None = None,
    ) -> None:
        """A round is about to land: [n] each, see :class:`~adasim.records.RoundRecord`.

        Args:
            step: of the engine.
            ids: requests that take part.
            lives: of all requests, as they were before the round.
            draft_lens: drafts of each.
            verify_lens: tokens verified of each, the anchor counted.
            run: drafts the target agrees with, verified or not.
            accept_len: what the length head reported; None = nobody asked.
            whole: drawn by chance to be verified in full; None = nobody was.
            draft_version: of the drafter in use.
            confidence: drafts that confidences said would be accepted; None = nobody asked.
        """
        n = len(ids)
        unknown = np.full(n, np.nan)
        row: tuple[NDArray[Any], ...] = (
            np.full(n, step), ids, lives.domain[ids], lives.done[ids], lives.context[ids], draft_lens, verify_lens,
            np.minimum(run, verify_lens - 1), unknown if accept_len is None else accept_len,
            np.zeros(n, dtype=np.bool_) if whole is None else whole, np.full(n, draft_version),
            unknown if confidence is None else confidence,
        )  # fmt: skip
        for column, values in zip(self._columns, row, strict=True):
            column.append(values.copy())

    def frame(self, domains: Sequence[str]) -> "pd.DataFrame":
        """All of them as a table; ``domains`` names what ``Lives.domain`` counts."""
        columns = [np.concatenate(c) if c else np.empty(0, dtype=np.int64) for c in self._columns]
        at = RoundRecord._fields.index("domain")
        columns[at] = np.array(domains, dtype=object)[columns[at]]
        return table(RoundRecord, columns)
