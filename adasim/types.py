"""The vocabulary every part of adasim shares.

Glossary (one definition each; importers convert at the border):

- ``k`` / ``draft_len``: draft tokens of one request in one round, the anchor excluded.
- ``verify_len``: tokens of one request the target verifies, the anchor counted: 1 = plain decoding,
  ``draft_len + 1`` = the full block. ``B = max_draft_len + 1`` is the block.
- ``L``: run of drafts, from the anchor, that the target would accept if all were verified.
- ``accepted``: drafts accepted in a round, ``min(L, verify_len - 1)``; the bonus token is extra.
- ``tau``: tokens emitted per request and round, the bonus token counted, the prefill's token not;
  pooled: total tokens / total request-rounds.
- ``survival[k]``: P(first k drafts are all accepted). Not the conditional rate.
- ``round``: draft -> length policy -> verify -> accept, once, for the whole batch.
- ``step``: what the engine does between two clock readings: a round, a prefill, or both (chunked).

Seconds inside, milliseconds in files that people write and in reports.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
HEAD_OUTPUTS = frozenset({"survival", "accept_len"})  # of what policies may need, that which a head has to compute


@lru_cache(maxsize=1024)
def constant(n: int, value: int) -> IntArray:
    """[n] times the same number; shared, and read-only for that reason."""
    array = np.full(n, value, dtype=np.int64)
    array.flags.writeable = False
    return array


class Component(BaseModel):
    """A part of a scenario: fields are its configuration, methods its behaviour, private attributes its state."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Private attributes, which rounds ask for, in a quarter of the time that pydantic's own way takes."""
            try:
                return object.__getattribute__(self, "__pydantic_private__")[name]
            except (AttributeError, KeyError, TypeError):
                return super().__getattr__(name)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with other fields; what was cached of the old ones stays behind."""
        copy = super().model_copy(update=update, deep=deep)
        for name in set(copy.__dict__) - set(type(self).model_fields):
            del copy.__dict__[name]
        return copy


class RoundCost(Protocol):
    """What a policy may know about time."""

    def round_s(self, batch: int, draft_positions: int, verified: int, context: float) -> float:
        """Seconds of one round. See ``calibration.cost.CostModel.round_s``."""
        ...


@dataclass(frozen=True, slots=True)
class EngineCaps:
    """What an engine can do and what it provides; policies fail at start when it lacks what they need."""

    max_draft_len: int
    max_running_requests: int
    ragged: bool = True  # False: every request is verified as long as the longest (padded)
    captured_tokens: tuple[int, ...] = ()  # graph sizes; () = none captured, no padding
    captured_lens: tuple[int, ...] = ()  # verify lengths of uniform rounds with a graph; () = graphs fit all
    lag_steps: int = 0  # rounds after which a policy sees an outcome
    provides: frozenset[str] = frozenset()  # "survival", "accept_len", "margin", "cost", "truth", "predicted_len"
    cost: RoundCost | None = None
    drafters: frozenset[str] = frozenset()  # names a policy may choose by; its own drafter needs none

    @property
    def block(self) -> int:
        """Positions of a full block, the anchor counted."""
        return self.max_draft_len + 1


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the workload made it. ``output_len`` is known to the engine's clockwork, never to a policy."""

    id: int
    domain: int
    prompt_len: int
    output_len: int
    arrival_s: float = 0.0  # closed loops: set when a client sends it
    hash_ids: tuple[int, ...] = ()  # one id per full 512 prompt tokens


@dataclass(slots=True)  # not frozen: one is made every round, and that would take five times as long
class BatchView:
    """What a policy sees before drafting. No output length, no future: the oracle boundary is this type."""

    step: int
    now_s: float
    caps: EngineCaps
    request_ids: IntArray  # [n]
    context_lens: IntArray  # [n] tokens known so far
    queue_depth: int

    def __len__(self) -> int:
        return len(self.request_ids)


@dataclass(slots=True)  # not frozen: one is made every round, and that would take five times as long
class DraftView:
    """What a policy sees after drafting. Entry i of a row never depends on the sampled token at i or later.

    ``survival`` is a calibrated curve (confidence heads); ``accept_len`` is a length head's raw estimate of
    the accepted length, the anchor counted. ``margin`` is what the drafter itself shows: by how many nats its
    likeliest token leads the second, informative but not calibrated. ``truth`` exists in the simulator only.
    """

    draft_lens: IntArray  # [n]
    survival: FloatArray | None = None  # [n, max_draft_len] P(first k drafts accepted), k = 1..
    accept_len: FloatArray | None = None  # [n] estimate of L + 1; may lie outside 1..B
    truth: IntArray | None = None  # [n] L
    margin: FloatArray | None = None  # [n, max_draft_len] logit of the likeliest token less that of the second

    @property
    def confidence(self) -> FloatArray | None:
        """Drafts that the curves say will be accepted, of those made, [n]; None: nobody asked for curves."""
        if self.survival is None:
            return None
        made = np.arange(self.survival.shape[1]) < self.draft_lens[:, None]
        total: FloatArray = np.where(made, self.survival, 0.0).sum(axis=1)
        return total

    def take(self, rows: IntArray) -> "DraftView":
        """The same view for some of its rows."""
        return DraftView(
            self.draft_lens[rows],
            None if self.survival is None else self.survival[rows],
            None if self.accept_len is None else self.accept_len[rows],
            None if self.truth is None else self.truth[rows],
            None if self.margin is None else self.margin[rows],
        )


@dataclass(slots=True)  # not frozen: one is made every round, and that would take five times as long
class StepOutcome:
    """What a round did: the feedback of policies and schedulers."""

    step: int
    request_ids: IntArray  # [n]
    draft_lens: IntArray  # [n]
    verify_lens: IntArray  # [n]
    accepted: IntArray  # [n] drafts accepted, at most verify_len - 1
    emitted: IntArray  # [n] tokens given to the user, clipped at the request's end
    seconds: float
    queue_depth: int

    def __len__(self) -> int:
        return len(self.request_ids)


@dataclass(slots=True)  # not frozen, see BatchView
class QueueView:
    """Waiting requests that could be admitted now, the longest-waiting first.

    A scheduler that looks no further than the head of the queue is shown only as many as there are places.
    """

    request_ids: IntArray  # [m]
    arrival_s: FloatArray  # [m]
    prompt_lens: IntArray  # [m]
    blocks: IntArray  # [m] KV blocks each would take, its first round's reservation included
    now_s: float = 0.0
    predicted_lens: FloatArray | None = None  # [m] a predictor's guess of output tokens, never the truth itself


@dataclass(slots=True)  # not frozen, see BatchView
class RunningView:
    """Requests that hold KV memory, the longest-running first."""

    request_ids: IntArray  # [n]
    context_lens: IntArray  # [n]
    blocks: IntArray  # [n] KV blocks each would give back


class Slo(Component):
    """Latency limits of one request, milliseconds; null = no limit."""

    ttft_ms: float | None = Field(default=None, gt=0)
    tpot_ms: float | None = Field(default=None, gt=0)
    e2e_ms: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _limits_something(self) -> Self:
        if self.ttft_ms is None and self.tpot_ms is None and self.e2e_ms is None:
            raise ValueError("give at least one of ttft_ms, tpot_ms, e2e_ms")
        return self


class StepSeconds(NamedTuple):
    """Where the time of one step goes."""

    draft: float = 0.0
    verify: float = 0.0
    overhead: float = 0.0
    prefill: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.draft + self.verify + self.overhead + self.prefill
