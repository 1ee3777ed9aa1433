"""Cost as a formula with a knee: fitted to profiles of real engines."""

from bisect import bisect_left
from functools import cached_property
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from adasim.calibration.cost import LinearDraft, LinearPrefill, Ms
from adasim.calibration.fitted import FittedCost
from adasim.calibration.parallel import Split


class PassCost(FittedCost):
    """Milliseconds of the target's pass over ``tokens`` tokens of ``batch`` requests with mean ``context``:

    base + per_request x batch + per_context x batch x context + per_attended x tokens x context
    + per_token x (tokens^p + knee^p)^(1/p), p = ``sharpness``.

    The last term is flat while weights are what takes time (tokens well below ``knee_tokens``) and rises in proportion
    beyond; a GPU's knee is at some hundred tokens, a CPU's near one. ``knee_tokens`` 0: it rises from the first token.
    ``at_tokens_ms``, where given, stands for base and the last term: milliseconds at some numbers of tokens, linear
    between, and beyond the last as between the last two. ``per_context_ms`` is reading a request's keys and values, ``per_attended_ms`` a token's attention to each of them.
    ``measured_on``: see :class:`~adasim.calibration.cost.TableCost`.
    """

    kind: Literal["pass"] = "pass"
    measured_on: Split | None = None
    base_ms: Ms = 0.0
    per_request_ms: Ms = 0.0
    per_token_ms: Ms = 0.0
    at_tokens_ms: dict[Annotated[int, Field(ge=1)], Ms] | None = Field(default=None, min_length=2)
    knee_tokens: float = Field(default=0.0, ge=0)
    sharpness: float = Field(default=4.0, ge=1, le=64)
    per_context_ms: Ms = 0.0
    per_attended_ms: Ms = 0.0
    draft: LinearDraft = LinearDraft()
    prefill: LinearPrefill = LinearPrefill()

    @model_validator(mode="after")
    def _one_rise(self) -> Self:
        if self.at_tokens_ms is not None and (self.base_ms or self.per_token_ms or self.knee_tokens):
            raise ValueError("base_ms, per_token_ms and knee_tokens have no effect with at_tokens_ms")
        return self

    @cached_property
    def _nodes(self) -> tuple[list[int], list[float]]:
        points = sorted((self.at_tokens_ms or {}).items())
        return [tokens for tokens, _ in points], [ms for _, ms in points]

    def _rise(self, tokens: int) -> float:
        """Milliseconds by tokens alone."""
        if self.at_tokens_ms is None:
            return self.base_ms + self.per_token_ms * bend(tokens, self.knee_tokens, self.sharpness)
        at, ms = self._nodes
        i = min(max(bisect_left(at, tokens), 1), len(at) - 1)
        share = (tokens - at[i - 1]) / (at[i] - at[i - 1])
        return max((1 - share) * ms[i - 1] + share * ms[i], 0.0)

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
