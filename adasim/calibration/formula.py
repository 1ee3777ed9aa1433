"""Cost as a formula whose terms can be fitted from few measurements, end-to-end ones included."""

from typing import Literal

from pydantic import Field

from adasim.calibration.cost import LinearDraft, LinearPrefill, Ms
from adasim.calibration.fitted import FittedCost
from adasim.calibration.parallel import Split


class FormulaCost(FittedCost):
    """base + per request + per token + experts x (1 - (1 - expert_share)^tokens), milliseconds of the target's pass.

    The last term is a mixture of experts: every token touches the share ``expert_share`` of them, and the weights of
    all that any token touched are read once. With independent tokens the share is top_experts / experts; neighbouring
    tokens route alike, so a fitted share is smaller. Per request: KV reads and host work, and ``per_context_ms`` for
    every token of its context; where that is 0, good for the context it was fitted at.

    ``knee_sharpness`` p: weights are read (base and experts) while tokens are computed, (weights^p + computed^p)^(1/p).
    1 is the sum, one after the other; the larger, the flatter before the knee, where both take equally long.

    ``measured_on``: see :class:`~adasim.calibration.cost.TableCost`.
    """

    kind: Literal["formula"] = "formula"
    measured_on: Split | None = None
    base_ms: Ms = 0.0
    per_request_ms: Ms = 0.0
    per_token_ms: Ms = 0.0
    experts_ms: Ms = 0.0
    expert_share: float = Field(default=1.0, gt=0, le=1)
    per_context_ms: Ms = 0.0
    knee_sharpness: float = Field(default=1.0, ge=1, le=64)
    draft: LinearDraft = LinearDraft()
    prefill: LinearPrefill = LinearPrefill()

    def verify_s(self, batch: int, tokens: int, context: float) -> float:
        """The formula."""
        self._check_range(tokens)
        touched = 1 - (1 - self.expert_share) ** tokens
        weights, computed, p = self.base_ms + self.experts_ms * touched, self.per_token_ms * tokens, self.knee_sharpness
        ms = weights + computed if p == 1 else (weights**p + computed**p) ** (1 / p)
        return (ms + batch * (self.per_request_ms + self.per_context_ms * context)) / 1e3

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
