"""Calibrated inputs moved away from what was measured, and how far off each may be."""

from typing import Annotated, Literal, Self

from pydantic import Field, PrivateAttr

from adasim.calibration.acceptance import AcceptanceModel, CurveAcceptance
from adasim.calibration.cost import CostModel, Overhead
from adasim.calibration.head_quality import HeadQuality
from adasim.calibration.parallel import Load
from adasim.errors import InputError
from adasim.types import Component, StepSeconds

Factor = Annotated[float, Field(gt=0, le=100)]
Share = Annotated[float, Field(ge=0, lt=1)]


class Adjust(Component):
    """Moves calibrated inputs: what if the measurement was off? Policies believe the moved values too.

    Attributes:
        verify: verification takes this many times as long, graph cliffs included.
        draft: drafting does.
        overhead: every term of a round's overhead does.
        prefill: prefills do.
        acceptance: tau of full blocks times this, by hardening or softening every position alike.
        correlation: added to the correlation along the text.
        range_tokens: range of that correlation times this.
        head_noise: noise of the heads times this.
        head_bias: added to the bias of the heads, tokens.
    """

    verify: Factor = 1.0
    draft: Factor = 1.0
    overhead: Factor = 1.0
    prefill: Factor = 1.0
    acceptance: Factor = 1.0
    correlation: float = Field(default=0.0, ge=-1, le=1)
    range_tokens: Factor = 1.0
    head_noise: Factor = 1.0
    head_bias: float = Field(default=0.0, ge=-30, le=30)

    def cost(self, model: CostModel) -> CostModel:
        """The model with its times moved."""
        if self.verify == self.draft == self.overhead == self.prefill == 1:
            return model
        return ScaledCost.of(model, self)

    def luck(self, model: AcceptanceModel) -> AcceptanceModel:
        """The model with its text and heads moved.

        Raises:
            InputError: it has no such input, or the value would be impossible.
        """
        text = {"acceptance": self.acceptance, "correlation": self.correlation, "range_tokens": self.range_tokens}
        moved = [name for name, value in text.items() if value != type(self).model_fields[name].default]
        updates: dict[str, object] = {}
        if moved and not isinstance(model, CurveAcceptance):
            raise InputError(f"backend.adjust.{moved[0]}: acceptance of kind {model.kind} cannot be moved")
        if isinstance(model, CurveAcceptance):
            correlation = model.correlation + self.correlation
            if not 0 <= correlation < 1 - model.spread:
                raise InputError(
                    f"backend.adjust.correlation: gives {correlation:.3g}; allowed 0..{1 - model.spread:g}, exclusive"
                )
            updates = {"correlation": correlation, "range_tokens": model.range_tokens * self.range_tokens}
            if self.acceptance != 1:
                factors = model.tau_by_temperature or {model.temperature: 1.0}
                updates["tau_by_temperature"] = {t: f * self.acceptance for t, f in factors.items()}
        if self.head_noise != 1 or self.head_bias:
            updates["head"] = self._head(model.head)
        return model.model_copy(update=updates)

    def _head(self, model: HeadQuality) -> HeadQuality:
        """Heads and confidences with noise and bias moved."""
        raw = model.model_dump()
        for part in (raw, *(raw["confidence"] or {}).values()):
            part["bias"] += self.head_bias
            for name in {"noise", "claims"} & part.keys():
                part[name] = part[name] and part[name] * self.head_noise
        return HeadQuality.model_validate(raw)


class ScaledCost(CostModel):
    """Another cost model with its parts scaled."""

    kind: Literal["scaled"] = "scaled"
    factors: Adjust
    _inner: CostModel = PrivateAttr()

    @classmethod
    def of(cls, inner: CostModel, factors: Adjust) -> Self:
        """``inner`` with the times of ``factors``."""
        shared = {name: getattr(inner, name) for name in CostModel.model_fields if name != "kind"}
        terms = inner.overhead.model_dump()
        shared["overhead"] = Overhead(**{name: ms * factors.overhead for name, ms in terms.items()})
        shared["eager_penalty_ms"] = inner.eager_penalty_ms * factors.verify
        scaled = cls(factors=factors, **shared)
        scaled._inner = inner
        return scaled

    def verify_s(self, batch: int, tokens: int, context: float) -> float:
        """See :meth:`CostModel.verify_s`."""
        return self.factors.verify * self._inner.verify_s(batch, tokens, context)

    def draft_s(self, batch: int, positions: int, longest: int, context: float) -> float:
        """See :meth:`CostModel.draft_s`."""
        return self.factors.draft * self._inner.draft_s(batch, positions, longest, context)

    def prefill_s(self, tokens: int, context: float, verified: int) -> float:
        """See :meth:`CostModel.prefill_s`."""
        return self.factors.prefill * self._inner.prefill_s(tokens, context, verified)

    def padding(self, slowest: Load, everybody: Load, longest_draft: int) -> StepSeconds:
        """See :meth:`CostModel.padding`."""
        of, part = self.factors, self._inner.padding(slowest, everybody, longest_draft)
        overhead = part.overhead * of.overhead
        return StepSeconds(part.draft * of.draft, part.verify * of.verify, overhead, part.prefill * of.prefill)

    def check_batches(self, smallest: int, largest: int | None) -> None:
        """See :meth:`CostModel.check_batches`."""
        self._inner.check_batches(smallest, largest)

    @property
    def notes(self) -> list[str]:
        """What the model itself says."""
        return self._inner.notes


class Uncertainty(Component):
    """How far each calibrated input may be off; null = nobody said.

    Attributes:
        verify, draft, overhead, prefill: relative, of the times.
        acceptance: relative, of tau.
        correlation: absolute, of the correlation along the text.
        range_tokens: a factor; 2 = half to double.
        head_noise: relative.
        head_bias: tokens.
    """

    verify: Share | None = None
    draft: Share | None = None
    overhead: Share | None = None
    prefill: Share | None = None
    acceptance: Share | None = None
    correlation: Share | None = None
    range_tokens: float | None = Field(default=None, ge=1, le=100)
    head_noise: Share | None = None
    head_bias: float | None = Field(default=None, ge=0, le=30)

    def limits(self, name: str) -> tuple[float, float] | None:
        """Lowest and highest value of that field of :class:`Adjust`."""
        size = getattr(self, name)
        if size is None:
            return None
        if name in {"correlation", "head_bias"}:
            return -size, size
        return (1 / size, size) if name == "range_tokens" else (1 - size, 1 + size)


# Where a profile says nothing: rules of thumb, wide enough that a verdict which survives them is worth something.
DEFAULTS = Uncertainty(
    verify=0.05,
    draft=0.10,
    overhead=0.20,
    prefill=0.10,
    acceptance=0.05,
    correlation=0.15,
    range_tokens=2.0,
    head_noise=0.25,
    head_bias=0.5,
)
