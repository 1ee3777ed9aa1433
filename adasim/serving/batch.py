"""The running requests, as parallel arrays in order of admission."""

import numpy as np
from numpy.typing import NDArray

from adasim.types import FloatArray, IntArray


class Batch:
    """One entry per running request in every array, [n]."""

    request: IntArray  # index
    domain: IntArray
    base: IntArray  # where its luck starts
    prompt: IntArray  # prompt tokens
    want: IntArray  # output tokens asked for
    done: IntArray  # output tokens given
    prefill_left: IntArray  # tokens still to prefill; 0 = decoding
    held: IntArray  # private KV blocks
    shared: IntArray  # KV blocks in the prefix cache
    rounds: IntArray  # counters since its arrival
    drafts: IntArray
    verified: IntArray
    accepted: IntArray

    _NAMES = tuple(__annotations__)

    def __init__(self) -> None:
        self.emitted_s: FloatArray = np.empty(0)  # time of its last chunk
        self._set(np.empty((len(self._NAMES), 0), dtype=np.int64))

    def _set(self, rows: IntArray) -> None:
        self._rows = rows  # [names, n]; the named arrays are views of its rows
        for name, row in zip(self._NAMES, rows, strict=True):
            setattr(self, name, row)

    def __len__(self) -> int:
        return self._rows.shape[1]

    @property
    def context(self) -> IntArray:
        """Tokens known of each request, the anchor counted."""
        return self.prompt + self.done

    def whole_prompts(self, limit: int) -> IntArray:
        """Tokens of each row in a prefill step of its own, [n]: whole prompts, in order, up to ``limit`` or one."""
        left = self.prefill_left
        first = np.arange(len(left)) == np.argmax(left > 0)
        return np.where((np.cumsum(left) <= limit) | first, left, 0)

    def add(self, emitted_s: float, **entry: int) -> None:
        """Append a request, whose last chunk came at ``emitted_s``; names that are left out start at 0."""
        column = np.array([[entry.get(name, 0)] for name in self._NAMES], dtype=np.int64)
        self.emitted_s = np.append(self.emitted_s, emitted_s)
        self._set(np.concatenate([self._rows, column], axis=1))

    def keep(self, rows: NDArray[np.bool_]) -> None:
        """Drop the others, keeping the order."""
        self.emitted_s = self.emitted_s[rows]
        self._set(self._rows[:, rows])
