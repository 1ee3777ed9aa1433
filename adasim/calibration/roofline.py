"""Cost from specifications, for hardware nobody profiled."""

from functools import cached_property
from typing import Annotated, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from adasim.calibration.cost import LinearDraft, Ms, TableCost
from adasim.calibration.fitted import FittedCost
from adasim.calibration.formula import FormulaCost
from adasim.calibration.pass_cost import PassCost
from adasim.calibration.specs import MODELS, Hardware, ModelSpec, hardware
from adasim.errors import InputError
from adasim.types import Component


class LayersDraft(Component):
    """A drafter made of ``layers`` layers of the target's shape, priced by the roofline.

    The LM head is the target's, or one of its own over ``vocabulary`` tokens. Autoregressive ones make a pass per
    draft token; trees make ``passes`` (their depth), each over the ``top_k`` leaves of every request.
    """

    kind: Literal["layers"] = "layers"
    layers: int = Field(default=5, ge=1)
    autoregressive: bool = False
    passes: int | None = Field(default=None, ge=1)
    top_k: int = Field(default=1, ge=1)
    vocabulary: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _tree_is_used(self) -> Self:
        if not self.autoregressive and {"passes", "top_k"} & self.model_fields_set:
            raise ValueError("passes and top_k have no effect unless autoregressive is true")
        return self


AnyDraft = Annotated[LinearDraft | LayersDraft, Field(discriminator="kind")]


class RooflineCost(FittedCost):
    """max(memory time, compute time) of every pass, from a hardware and a model specification.

    Unmeasured: an estimate for hardware nobody profiled. Linear layers and attention are maximised apart;
    ``memory_efficiency`` and ``compute_efficiency`` scale the peaks; ``launch_ms`` is paid by every pass,
    ``per_request_ms`` by the target's (sampling and other host work). A mixture of experts reads
    E (1 - (1 - e/E)^t) experts for t tokens. ``calibration.speedups`` fits it to published speed-ups.
    """

    kind: Literal["roofline"] = "roofline"
    hardware: str | Hardware = "h100"
    model: str | ModelSpec = "qwen3-8b"
    memory_efficiency: float = Field(default=0.8, gt=0, le=1)
    compute_efficiency: float = Field(default=0.6, gt=0, le=1)
    launch_ms: Ms = 0.5
    per_request_ms: Ms = 0.0
    draft: AnyDraft = LayersDraft()
    _hardware: Hardware = PrivateAttr()
    _model: ModelSpec = PrivateAttr()

    @model_validator(mode="after")
    def _look_up(self) -> Self:
        self._hardware = hardware(self.hardware)
        if isinstance(self.model, str) and self.model not in MODELS:
            raise InputError(f"model: unknown {self.model!r}; allowed: {', '.join(sorted(MODELS))}")
        self._model = MODELS[self.model] if isinstance(self.model, str) else self.model
        return self

    def verify_s(self, batch: int, tokens: int, context: float) -> float:
        """One pass of all layers and the LM head over ``tokens`` tokens."""
        self._check_range(tokens)
        host_s = self.per_request_ms * batch / 1e3
        return self._pass_s(batch, tokens, context, self._layers, tokens) + host_s

    def _pass_s(
        self, batch: int, tokens: int, context: float, layers: int, head_tokens: int, vocabulary: int | None = None
    ) -> float:
        bandwidth, flops, kv_bytes_per_layer, heads, head_dim, launch_s = self._constants
        key = (tokens, layers, head_tokens, vocabulary)
        linear_s = self._linear.get(key)
        if linear_s is None:
            linear_s = self._linear[key] = self._linear_s(*key)
        kv_bytes = batch * context * layers * kv_bytes_per_layer
        attention = 4 * tokens * context * layers * heads * head_dim
        return linear_s + max(kv_bytes / bandwidth, attention / flops) + launch_s

    def _linear_s(self, tokens: int, layers: int, head_tokens: int, vocabulary: int | None) -> float:
        m, (bandwidth, flops, *_) = self._model, self._constants
        head_params = m.hidden * (vocabulary or m.vocabulary)
        weights = layers * m.layer_params_read(tokens) + head_params
        work = 2 * (layers * m.layer_params_active * tokens + head_params * head_tokens)
        return max(weights * m.bytes_per_param / bandwidth, work / flops)

    @cached_property
    def _linear(self) -> dict[tuple[int, int, int, int | None], float]:
        return {}  # seconds of the linear layers, which the same few token counts ask for again and again

    @cached_property
    def _constants(self) -> tuple[float, float, float, int, int, float]:
        m, bandwidth = self._model, self._hardware.bytes_per_s * self.memory_efficiency
        flops = self._hardware.flop_per_s * self.compute_efficiency
        return bandwidth, flops, m.kv_bytes_per_layer, m.heads, m.head_dim, self.launch_ms / 1e3

    @cached_property
    def _layers(self) -> int:
        return self._model.layers

    def draft_s(self, batch: int, positions: int, longest: int, context: float) -> float:
        """One pass over the blocks, or one per draft token."""
        if isinstance(self.draft, LinearDraft):
            return self.draft.seconds(batch, positions, longest)
        layers, vocabulary = self.draft.layers, self.draft.vocabulary
        if not self.draft.autoregressive:
            return self._pass_s(batch, positions, context, layers, positions, vocabulary)
        leaves = batch * self.draft.top_k
        return (self.draft.passes or longest) * self._pass_s(batch, leaves, context, layers, leaves, vocabulary)

    def prefill_s(self, tokens: int, context: float, verified: int) -> float:
        """The pass with the prefill tokens less the pass without; one LM-head row a prompt is neglected."""
        layers = self._layers
        if not verified:
            return self._pass_s(1, tokens, context, layers, head_tokens=1)
        both = self._pass_s(0, tokens + verified, 0.0, layers, verified)
        alone = self._pass_s(0, verified, 0.0, layers, verified)
        attention = self._pass_s(1, tokens, context, layers, 1) - self._pass_s(0, tokens, 0.0, layers, 1)
        return both - alone + attention

    @property
    def notes(self) -> list[str]:
        """A roofline is a guess, unless it was fitted."""
        if self.fitted_tokens is not None:
            return super().notes
        return ["cost is a roofline estimate: nothing was measured on this hardware"]


AnyCost = Annotated[TableCost | RooflineCost | FormulaCost | PassCost, Field(discriminator="kind")]
