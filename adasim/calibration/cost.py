"""Cost models: seconds of a step, by what it does."""

from abc import ABC, abstractmethod
from bisect import bisect_left
from itertools import product
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
import pandas as pd
from pydantic import Field, PrivateAttr, model_validator

from adasim.calibration.grid import Grid
from adasim.calibration.parallel import Load, Split
from adasim.errors import InputError
from adasim.files import Columns, find, read_columns
from adasim.types import Component, StepSeconds

Ms = Annotated[float, Field(ge=0)]


class Overhead(Component):
    """Seconds of a round outside draft and verification, in milliseconds per unit.

    ``per_draft_position_ms`` counts every position the drafter fills, anchors included;
    ``per_verified_ms`` every verified token. The ``speculative_*``, ``per_draft_position_ms`` and ``per_verified_ms``
    terms are paid only by rounds that draft, ``round_ms`` by all, ``per_request_ms`` by all for every decoding request,
    ``head_ms`` and, for every decoding request, ``head_per_request_ms`` by rounds that draft and read a head.
    ``idle_drafter_ms`` is the price of "off": rounds that do not draft pay it while a drafter is loaded, whose context
    has to follow; ``drafter_per_request_ms`` is paid for every decoding request
    by all rounds beside a loaded drafter. ``time_share`` is the share of all time that the engine
    spends on something else than steps (hot reloads, shipping samples to a trainer).
    """

    round_ms: Ms = 0.0
    per_request_ms: Ms = 0.0
    speculative_ms: Ms = 0.0
    per_draft_position_ms: Ms = 0.0
    per_verified_ms: Ms = 0.0
    head_ms: Ms = 0.0
    head_per_request_ms: Ms = 0.0
    idle_drafter_ms: Ms = 0.0
    drafter_per_request_ms: Ms = 0.0
    time_share: float = Field(default=0.0, ge=0, lt=1)

    def seconds(
        self, draft_positions: int, verified: int, reads_head: bool, drafter_loaded: bool = True, batch: int = 0
    ) -> float:
        """Seconds of one round's overhead."""
        ms = self.round_ms + self.per_request_ms * batch
        if draft_positions:
            ms += self.speculative_ms + self.per_draft_position_ms * draft_positions
            heads = self.head_ms + self.head_per_request_ms * batch if reads_head else 0.0
            ms += self.per_verified_ms * verified + heads
        elif drafter_loaded:
            ms += self.idle_drafter_ms
        if draft_positions or drafter_loaded:
            ms += self.drafter_per_request_ms * batch
        return ms / 1e3


class LinearDraft(Component):
    """Draft time = passes x (base + per request x n) + per position x positions.

    One-pass drafters (DFlash) make one pass; autoregressive ones (EAGLE, MTP) one per draft token: passes =
    ``passes`` where given (a tree's depth), else the longest draft of the round.
    """

    kind: Literal["linear"] = "linear"
    base_ms: Ms = 0.0
    per_request_ms: Ms = 0.0
    per_position_ms: Ms = 0.0
    autoregressive: bool = False
    passes: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _passes_used(self) -> Self:
        if self.passes is not None and not self.autoregressive:
            raise ValueError("passes has no effect unless autoregressive is true")
        return self

    def seconds(self, batch: int, positions: int, longest: int) -> float:
        """Seconds to fill ``positions`` draft positions of ``batch`` requests, drafts up to ``longest``."""
        passes = (self.passes or longest) if self.autoregressive else 1
        return (passes * (self.base_ms + self.per_request_ms * batch) + self.per_position_ms * positions) / 1e3


class LinearPrefill(Component):
    """Prefill time = base (when the step does nothing else) + per token; 0 and 0 = not modelled."""

    base_ms: Ms = 0.0
    per_token_ms: Ms = 0.0

    def seconds(self, tokens: int, alone: bool) -> float:
        """Seconds of ``tokens`` prefill tokens."""
        return ((self.base_ms if alone else 0.0) + self.per_token_ms * tokens) / 1e3


class CostModel(Component, ABC):
    """Prices steps. Excludes queueing. ``context`` is the mean context length of the batch, in tokens.

    ``captured_tokens``: graph sizes; a pass pays for the next one up. Beyond the largest it runs eagerly and
    pays ``eager_penalty_ms`` more: the cliff. ``captured_lens``: verify lengths of rectangular engines that have
    a graph; rounds of other shapes run eagerly, which policies that ask for ``round_s`` do not see coming.
    ``ragged``: share by which verification takes longer where requests verify different lengths than where all verify
    the same, of as many tokens; policies that ask for ``round_s`` do not see that coming either.
    """

    kind: str
    overhead: Overhead = Overhead()
    captured_tokens: list[Annotated[int, Field(ge=1)]] | None = Field(default=None, min_length=1)
    captured_lens: list[Annotated[int, Field(ge=1)]] | None = Field(default=None, min_length=1)
    eager_penalty_ms: Ms = 0.0
    ragged: float = Field(default=0.0, ge=0, le=10)

    @model_validator(mode="after")
    def _captured(self) -> Self:
        given = {"captured_tokens": self.captured_tokens, "captured_lens": self.captured_lens}
        for name, sizes in given.items():
            if sizes is not None and sizes != sorted(set(sizes)):
                raise ValueError(f"{name} must rise")
        if self.eager_penalty_ms and not any(given.values()):
            raise ValueError("eager_penalty_ms has no effect without captured_tokens or captured_lens")
        return self

    def step(
        self,
        batch: int,
        draft_positions: int,
        verified: int,
        context: float,
        *,
        longest_draft: int = 0,
        prefill: int = 0,
        prefill_context: float = 0.0,
        reads_head: bool = False,
        drafter_loaded: bool = True,
        eager: bool = False,
        ragged: bool = False,
    ) -> StepSeconds:
        """Seconds of one step, by part.

        Args:
            batch: requests that decode; 0 = a prefill-only step.
            draft_positions: positions the drafter fills, anchors included; 0 = plain decoding.
            verified: tokens in the verification pass, anchors included.
            context: mean context of the decoding requests, tokens.
            longest_draft: longest draft of the round, tokens.
            prefill: prompt tokens computed in this step.
            prefill_context: mean context they attend to, tokens.
            reads_head: the policy read a length or confidence head.
            drafter_loaded: even if nothing is drafted.
            eager: no graph was captured for the shape of this round.
            ragged: requests verify different lengths.
        """
        prefill_s = self.prefill_s(prefill, prefill_context, verified) if prefill else 0.0
        if not batch:
            step = StepSeconds(prefill=prefill_s)
            return self._stretch(step) if self.overhead.time_share else step
        draft_s = self.draft_s(batch, draft_positions, longest_draft, context) if draft_positions else 0.0
        overhead_s = self.overhead.seconds(draft_positions, verified, reads_head, drafter_loaded, batch)
        if eager or self.captured_tokens is not None:
            verify_s = self.staircase_s(batch, verified, context, prefill, eager)
        else:
            verify_s = self.verify_s(batch, verified, context)
        if ragged:
            verify_s *= 1 + self.ragged
        step = StepSeconds(draft_s, verify_s, overhead_s, prefill_s)
        return self._stretch(step) if self.overhead.time_share else step

    def _stretch(self, step: StepSeconds) -> StepSeconds:
        """The step with the time lost beside it."""
        share = self.overhead.time_share
        return step._replace(overhead=step.overhead + step.total * share / (1 - share))

    def round_s(self, batch: int, draft_positions: int, verified: int, context: float) -> float:
        """Seconds of one round without prefill, as a policy may ask."""
        longest = draft_positions // batch - 1 if draft_positions else 0
        return self.step(batch, draft_positions, verified, context, longest_draft=longest, reads_head=True).total

    def staircase_s(self, batch: int, tokens: int, context: float, prefill: int = 0, eager: bool = False) -> float:
        """Seconds of verifying ``tokens`` tokens, graph padding and the cliff included.

        ``prefill`` tokens run in the same pass: they count for its size, their own time is ``prefill_s``.
        """
        sizes = self.captured_tokens
        if eager or (sizes is not None and tokens + prefill > sizes[-1]):
            return self.verify_s(batch, tokens, context) + self.eager_penalty_ms / 1e3
        return self.verify_s(batch, self.captured(tokens + prefill) - prefill, context)

    def captured(self, tokens: int) -> int:
        """Tokens that a pass pays for: those of the next graph up, where there is one."""
        sizes = self.captured_tokens
        return tokens if sizes is None or tokens > sizes[-1] else sizes[bisect_left(sizes, tokens)]

    def check_batches(self, smallest: int, largest: int | None) -> None:
        """Refuse a run whose batches will leave the measured range; ``largest`` None: unknown.

        Raises:
            InputError: which batch, and what was measured.
        """

    @property
    def measured(self) -> dict[str, tuple[float, float]]:
        """Lowest and highest value that was measured, by input: batch, tokens or tokens_per_request, context.

        What is missing is unknown, or has no effect.
        """
        return {}

    @abstractmethod
    def verify_s(self, batch: int, tokens: int, context: float) -> float:
        """Seconds of the target's pass over ``tokens`` tokens of ``batch`` requests.

        Raises:
            InputError: outside the measured range.
        """

    @abstractmethod
    def draft_s(self, batch: int, positions: int, longest: int, context: float) -> float:
        """Seconds of the drafter."""

    @abstractmethod
    def prefill_s(self, tokens: int, context: float, verified: int) -> float:
        """Extra seconds of ``tokens`` prefill tokens in a step that also verifies ``verified`` tokens."""

    def padding(self, slowest: Load, everybody: Load, longest_draft: int) -> StepSeconds:
        """Seconds to add (at most 0) to a step priced as if every attention rank did what the slowest does.

        Nothing, where only balanced ranks were measured.

        Args:
            slowest: maxima over the ranks.
            everybody: sums over the ranks.
            longest_draft: of the round, tokens.
        """
        return StepSeconds()

    @property
    def notes(self) -> list[str]:
        """What a report must say about this model, after a run."""
        return []


class Point(Component):
    """One measured pass: ``tokens`` of the whole batch, or ``tokens_per_request``."""

    batch: int = Field(ge=1)
    tokens: int | None = Field(default=None, ge=1)
    tokens_per_request: float | None = Field(default=None, gt=0)
    context: float | None = Field(default=None, gt=0)
    ms: float = Field(gt=0)


class TableCost(CostModel):
    """Measured verification times over batch x tokens x context, linear in between.

    Give ``verify``, a CSV, or the same rows as ``points``. It has the columns ``batch``, ``tokens`` (of the whole batch)
    or ``tokens_per_request``, optionally ``context``, and ``ms``; every combination must be there. Outside it is an
    error, unless ``extrapolate``: then the last two points go on, and the report says how often and how far.
    ``measured_on`` tells the parallelism of the engine that was measured; with dp > 1 times are over what one of balanced
    ranks does.
    """

    kind: Literal["table"] = "table"
    verify: str | None = None
    points: list[Point] | None = Field(default=None, min_length=1)
    measured_on: Split | None = None
    extrapolate: bool = False
    draft: LinearDraft = LinearDraft()
    prefill: LinearPrefill = LinearPrefill()
    _grid: Grid = PrivateAttr()
    _per_request: bool = PrivateAttr(default=False)

    @model_validator(mode="after")
    def _read(self) -> Self:
        if (self.verify is None) == (self.points is None):
            raise ValueError("give verify or points")
        if self.verify is not None:
            path = str(find(self.verify, "verify"))
            numbers = ("batch", "tokens", "tokens_per_request", "context", "ms")
            table = read_columns(Path(path), Columns(("batch", "ms"), (*numbers[1:4], "note"), positive=numbers))
        else:
            path = "points"
            table = pd.DataFrame([p.model_dump(exclude_none=True) for p in self.points or []])
            if partly := [c for c in table.columns if table[c].isna().any()]:
                raise ValueError(f"points: {', '.join(partly)} must be in all of them or in none")
        self._per_request = "tokens_per_request" in table
        if self._per_request == ("tokens" in table):
            raise InputError(f"{path}: needs one of the columns tokens and tokens_per_request")
        tokens = "tokens_per_request" if self._per_request else "tokens"
        if "context" not in table:
            table["context"] = 1.0
        keys = ["batch", tokens, "context"]
        twice = table[table.duplicated(keys)]
        problems = [f"{path}: {_cell(keys, row)} is measured twice" for row in twice[keys].to_numpy()]
        axes = [sorted(float(v) for v in table[k].unique()) for k in keys]
        cells = table.drop_duplicates(keys).set_index(keys)["ms"].reindex(pd.MultiIndex.from_product(axes))
        problems += [f"{path}: {_cell(keys, key)} is missing" for key in cells.index[cells.isna()]]
        if problems:
            raise InputError(*problems[:10])
        seconds = (cells.to_numpy().reshape([len(a) for a in axes]) / 1e3).tolist()
        if self._per_request and self.captured_tokens is not None:
            raise ValueError("captured_tokens needs a table over tokens of the whole batch, not tokens_per_request")
        self._grid = Grid(
            f"cost.verify {self.verify}" if self.verify else "cost.points",
            keys,
            axes,
            seconds,
            extrapolate=self.extrapolate,
        )
        return self

    def inline(self) -> Self:
        """The same without a file."""
        if self.verify is None:
            return self
        of, axes = "tokens_per_request" if self._per_request else "tokens", self._grid.axes
        points = [
            {"batch": int(b), of: t, "context": c, "ms": 1e3 * self._grid.at(b, t, c)} for b, t, c in product(*axes)
        ]
        return type(self).model_validate(self.model_dump() | {"verify": None, "points": points})

    @property
    def batches(self) -> list[float]:
        """Batches that were measured, rising."""
        return list(self._grid.axes[0])

    @property
    def measured(self) -> dict[str, tuple[float, float]]:
        """The ends of the table's axes."""
        axes = zip(self._grid.labels, self._grid.axes, strict=True)
        return {label: (axis[0], axis[-1]) for label, axis in axes if label != "context" or len(axis) > 1}

    def verify_s(self, batch: int, tokens: int, context: float) -> float:
        """Linear interpolation in each axis."""
        return self._grid.at(batch, tokens / batch if self._per_request else tokens, context)

    def check_batches(self, smallest: int, largest: int | None) -> None:
        """See :meth:`CostModel.check_batches`."""
        for batch in (smallest, largest):
            if batch is not None:
                self._grid.check(0, batch)

    def draft_s(self, batch: int, positions: int, longest: int, context: float) -> float:
        """See :class:`LinearDraft`."""
        return self.draft.seconds(batch, positions, longest)

    def prefill_s(self, tokens: int, context: float, verified: int) -> float:
        """See :class:`LinearPrefill`."""
        return self.prefill.seconds(tokens, alone=not verified)

    @property
    def notes(self) -> list[str]:
        """Every extrapolation, and prefills that take no time."""
        free = self.prefill == LinearPrefill()
        return ["cost does not model prefill: TTFT is queueing only"] * free + [
            f"time was extrapolated: {label} outside the measured {axis[0]:g}..{axis[-1]:g}"
            for label, axis in zip(self._grid.labels, self._grid.axes, strict=True)
            if label in self._grid.outside
        ]


def _cell(keys: list[str], values: object) -> str:
    return ", ".join(f"{k} {v:g}" for k, v in zip(keys, np.asarray(values, dtype=float), strict=True))
