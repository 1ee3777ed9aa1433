"""The running requests, in order of admission."""

from typing import NamedTuple

import numpy as np

from adasim.kernels import kernels
from adasim.serving.lives import Lives
from adasim.types import IntArray


class Prefill(NamedTuple):
    """Prompt tokens that one step computes."""

    ids: IntArray  # [m] requests
    tokens: IntArray  # [m] of each, > 0
    total: int  # tokens of all
    context: float  # mean context that they attend to


class Batch:
    """Who runs. Its columns [n] are copies of those of ``lives``, one entry per running request."""

    def __init__(self, lives: Lives) -> None:
        self.lives, self._kernels = lives, kernels()
        self.prefilling: IntArray = np.empty(0, dtype=np.int64)  # indices of those with tokens left to prefill
        self._set(self.prefilling)

    def _set(self, request: IntArray) -> None:
        request.flags.writeable = False  # policies see it
        self.request = request  # indices

    def __len__(self) -> int:
        return len(self.request)

    @property
    def domain(self) -> IntArray:
        """Index of each request's domain."""
        return self.lives.domain[self.request]

    @property
    def want(self) -> IntArray:
        """Output tokens each will get."""
        return self.lives.want[self.request]

    @property
    def done(self) -> IntArray:
        """Output tokens given to each."""
        return self.lives.done[self.request]

    @property
    def prefill_left(self) -> IntArray:
        """Tokens still to prefill; 0 = decoding."""
        return self.lives.prefill_left[self.request]

    @property
    def held(self) -> IntArray:
        """Private KV blocks of each."""
        return self.lives.held[self.request]

    @property
    def context(self) -> IntArray:
        """Tokens known of each request, the anchor counted."""
        return self.lives.context[self.request]

    @property
    def decoding(self) -> IntArray:
        """Indices of the requests that take part in a round."""
        return self.request[self.prefill_left == 0] if len(self.prefilling) else self.request

    def whole_prompts(self, limit: int) -> Prefill:
        """A prefill step of its own: whole prompts, in order, up to ``limit`` tokens or one prompt."""
        return self._prefill(limit, whole=True)

    def chunk(self, limit: int) -> Prefill:
        """The prefill of a mixed step: ``limit`` tokens in all, in order."""
        return self._prefill(limit, whole=False)

    def _prefill(self, limit: int, whole: bool) -> Prefill:
        ids, tokens = self.prefilling, np.empty(len(self.prefilling), dtype=np.int64)
        count, total, context = self._kernels.prefill(self.lives.table, ids, limit, whole, tokens)
        return Prefill(ids[:count], tokens[:count], total, context)

    def add(self, indices: IntArray) -> None:
        """Append requests."""
        self._set(np.concatenate([self.request, indices]))
        indices = indices[self.lives.prefill_left[indices] > 0]
        self.prefilling = np.concatenate([self.prefilling, indices]) if len(self.prefilling) else indices

    def prefilled(self) -> None:
        """Some of ``prefilling`` have no token left to prefill."""
        self.prefilling = self.prefilling[self.lives.prefill_left[self.prefilling] > 0]

    def exchange(self, indices: IntArray) -> None:
        """From now on run these, whose prompts are computed."""
        self._set(indices)

    def keep(self, indices: IntArray) -> None:
        """Drop the others; ``indices`` are in the batch's order."""
        self._set(indices)
        if len(self.prefilling):
            self.prefilling = self.request[self.prefill_left > 0]
