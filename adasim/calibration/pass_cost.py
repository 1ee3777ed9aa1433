"""Cost as a formula with a knee: fitted to profiles of real engines."""

from bisect import bisect_left
from functools import cached_property
from itertools import pairwise
from typing import Literal, Self

from pydantic import Field, model_validator

from adasim.calibration.cost import LinearDraft, LinearPrefill, Ms
from adasim.calibration.fitted import FittedCost
from adasim.calibration.parallel import Split
from adasim.types import Component


class Node(Component):
    """What a pass takes at some number of tokens, but for what its requests and contexts add."""

    tokens: int = Field(ge=1)
    ms: Ms


class PassCost(FittedCost):
    """Milliseconds of the target's pass over ``tokens`` tokens of ``batch`` requests with mean ``context``:

    base + per_request x batch + per_context x batch x context + per_attended x tokens x context
    + per_token x (tokens^p + knee^p)^(1/p), p = ``sharpness``.

    The last term is flat while weights are what takes time (tokens well below ``knee_tokens``) and rises in proportion
    beyond; a GPU's knee is at some hundred tokens, a CPU's near one. ``knee_tokens`` 0: it rises from the first token.
    ``nodes``, where given, stand for base and the last term: milliseconds at some numbers of tokens, linear between, and
    beyond the outermost as between the two before. ``per_context_ms`` is reading a request's keys and values,
    ``per_attended_ms`` a token's attention to each of them.
    ``measured_on``: see :class:`~adasim.calibration.cost.TableCost`.
    """

    kind: Literal["pass"] = "pass"
    measured_on: Split | None = None
    base_ms: Ms = 0.0
    per_request_ms: Ms = 0.0
    per_token_ms: Ms = 0.0
    nodes: list[Node] | None = Field(default=None, min_length=2)
    knee_tokens: float = Field(default=0.0, ge=0)
    sharpness: float = Field(default=4.0, ge=1, le=64)
    per_context_ms: Ms = 0.0
    per_attended_ms: Ms = 0.0
    draft: LinearDraft = LinearDraft()
    prefill: LinearPrefill = LinearPrefill()

    @model_validator(mode="after")
    def _one_rise(self) -> Self:
        if self.nodes is None:
            return self
        if self.base_ms or self.per_token_ms or self.knee_tokens:
            raise ValueError("base_ms, per_token_ms and knee_tokens have no effect with nodes")
        if any(after.tokens <= before.tokens for before, after in pairwise(self.nodes)):
            raise ValueError("nodes: tokens must rise")
        return self

    @cached_property
    def _at(self) -> list[int]:
        return [node.tokens for node in self.nodes or []]

    def _rise(self, tokens: int) -> float:
        """Milliseconds by tokens alone."""
        if self.nodes is None:
            return self.base_ms + self.per_token_ms * bend(tokens, self.knee_tokens, self.sharpness)
        i = min(max(bisect_left(self._at, tokens), 1), len(self.nodes) - 1)
        low, high = self.nodes[i - 1], self.nodes[i]
        return max(low.ms + (high.ms - low.ms) * (tokens - low.tokens) / (high.tokens - low.tokens), 0.0)

    def verify_s(self, batch: int, tokens: int, context: float) -> float:
        """The formula."""
        self._check_range(tokens)
        ms = self._rise(tokens) + self.per_request_ms * batch
        return (ms + context * (self.per_context_ms * batch + self.per_attended_ms * tokens)) / 1e3

    def draft_s(self, batch: int, positions: int, longest: int, context: float) -> float:
        """See :class:`~adasim.calibration.cost.LinearDraft`."""
        return self.draft.seconds(batch, positions, longest)

    def prefill_s(self, tokens: int, context: float, verified: int) -> float:
        """See :class:`~adasim.calibration.cost.LinearPrefill`."""
        return self.prefill.seconds(tokens, alone=not verified)

    @property
    def notes(self) -> list[str]:
        """Extrapolations, and prefills that take no time."""
        free = self.prefill == LinearPrefill()
        return ["cost does not model prefill: TTFT is queueing only"] * free + super().notes


def bend(tokens: float, knee: float, sharpness: float) -> float:
    """max(tokens, knee), rounded off: (tokens^p + knee^p)^(1/p); does not overflow."""
    high, low = max(tokens, knee), min(tokens, knee)
    return float(high * (1 + (low / high) ** sharpness) ** (1 / sharpness)) if high else 0.0
