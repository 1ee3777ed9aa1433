"""Rounds of every shape in turn: a policy to measure costs with."""

from collections.abc import Iterator
from itertools import islice
from typing import Literal, Self

import numpy as np
from pydantic import Field, PrivateAttr, model_validator

from adasim.errors import InputError
from adasim.policies.base import Policy
from adasim.types import BatchView, Component, DraftView, EngineCaps, IntArray, constant


class Shape(Component):
    """Lengths of one round: ``draft_len`` drafts of every request, ``verify_len`` tokens verified, anchor counted.

    ``ragged``: each request's verify length is drawn, evenly around ``verify_len`` and not below 2. ``reads``: what the
    engine is asked for beside drafts, and nobody uses: the price of heads.
    """

    draft_len: int = Field(ge=0)
    verify_len: int = Field(ge=1)
    ragged: bool = False
    reads: tuple[Literal["survival", "accept_len", "margin"], ...] = Field(default=(), strict=False)

    @model_validator(mode="after")
    def _drafted(self) -> Self:
        if self.verify_len > self.draft_len + 1:
            raise ValueError(f"verify_len {self.verify_len} needs draft_len {self.verify_len - 1} or more")
        if self.ragged and not 3 <= self.verify_len <= self.draft_len:
            raise ValueError("ragged needs verify_len 3..draft_len: lengths vary around it")
        return self

    @property
    def bounds(self) -> tuple[int, int]:
        """Shortest and longest verify length; the mean lies halfway."""
        if not self.ragged:
            return self.verify_len, self.verify_len
        longest = min(2 * self.verify_len - 2, self.draft_len + 1)
        return 2 * self.verify_len - longest, longest


class Probe(Policy):
    """Visits every shape of ``shapes`` equally often, in an order drawn anew each time through, to measure costs.

    The first of them is played once more at the start: a run's first round pays for what later ones find ready. ``seed``
    draws orders and ragged lengths. Not meant for serving.
    """

    kind: Literal["probe"] = "probe"
    shapes: list[Shape] = Field(
        default=[
            Shape(draft_len=0, verify_len=1),
            Shape(draft_len=3, verify_len=4),
            Shape(draft_len=7, verify_len=4, ragged=True),
            Shape(draft_len=7, verify_len=8),
        ],
        min_length=1,
    )
    seed: int = Field(default=0, ge=0)
    _rng: np.random.Generator = PrivateAttr()
    _next: Iterator[Shape] = PrivateAttr()
    _shape: Shape | None = PrivateAttr(default=None)

    @property
    def needs(self) -> frozenset[str]:
        """What the round's shape reads; before the first, what any of them does."""
        shapes = self.shapes if self._shape is None else [self._shape]
        return frozenset(name for s in shapes for name in s.reads)

    def start(self, caps: EngineCaps) -> None:
        """Back to the first order; every shape must fit the engine's block."""
        longest = max(s.draft_len for s in self.shapes)
        if longest > caps.max_draft_len:
            raise InputError(f"{self.label}: draft_len {longest}; the engine drafts 0..{caps.max_draft_len}")
        self._rng, self._next, self._shape = np.random.default_rng([self.seed, 1]), self._played(), None

    def played(self, rounds: int) -> list[Shape]:
        """Shapes of the first ``rounds`` rounds of a run, in order: what its records were made by."""
        return list(islice(self._played(), rounds))

    def draft_lens(self, batch: BatchView) -> IntArray:
        """Those of the next shape, [n]."""
        self._shape = next(self._next)
        return constant(len(batch), self._shape.draft_len)

    def verify_lens(self, batch: BatchView, draft: DraftView) -> IntArray:
        """Those of the same shape, [n]."""
        assert self._shape is not None
        low, high = self._shape.bounds
        if low == high:
            return constant(len(batch), low)
        return self._rng.integers(low, high + 1, len(batch))

    def _played(self) -> Iterator[Shape]:
        yield self.shapes[0]
        rng = np.random.default_rng([self.seed, 0])
        while True:
            yield from (self.shapes[i] for i in rng.permutation(len(self.shapes)))
