"""Cost from specifications, for hardware nobody profiled."""

from functools import cached_property
from typing import Annotated, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from adasim.calibration.cost import LinearDraft, Ms, TableCost
from adasim.calibration.fitted import FittedCost
from adasim.calibration.formula import FormulaCost
from adasim.calibration.memory import GpuMemory
from adasim.calibration.parallel import Load, Parallel
from adasim.calibration.pass_cost import PassCost
from adasim.calibration.specs import MODELS, Hardware, ModelSpec, hardware
from adasim.errors import InputError
from adasim.types import Component, StepSeconds

ACTIVATION_BYTES = 2  # bf16, whatever the weights are kept in


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
        if not self.autoregressive and (self.passes is not None or self.top_k != 1):
            raise ValueError("passes and top_k have no effect unless autoregressive is true")
        return self


AnyDraft = Annotated[LinearDraft | LayersDraft, Field(discriminator="kind")]


class RooflineCost(FittedCost):
    """max(memory time, compute time) of every pass, from a hardware and a model specification.

    Unmeasured: an estimate for hardware nobody profiled. Linear layers and attention are maximised apart;
    ``memory_efficiency`` and ``compute_efficiency`` scale the peaks; ``launch_ms`` is paid by every pass,
    ``per_request_ms`` by the target's (sampling and other host work). A mixture of experts reads
    E (1 - (1 - e/E)^t) experts for t tokens. ``calibration.speedups`` fits it to published speed-ups.

    On several GPUs (``on``) each holds its share of weights, experts and KV heads, evenly used. Per layer two ring
    all-reduces move the tokens' hidden states; between data-parallel attention and MLPs it is an all-gather and a
    reduce-scatter of the tokens of all ranks, as engines do by default. The logits are gathered. Nothing overlaps.
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
    _parallel: Parallel = PrivateAttr(default_factory=Parallel)

    @model_validator(mode="after")
    def _look_up(self) -> Self:
        self._hardware = hardware(self.hardware)
        if isinstance(self.model, str) and self.model not in MODELS:
            raise InputError(f"model: unknown {self.model!r}; allowed: {', '.join(sorted(MODELS))}")
        self._model = MODELS[self.model] if isinstance(self.model, str) else self.model
        return self

    def verify_s(self, batch: int, tokens: int, context: float) -> float:
        """One pass of all layers and the LM head over ``tokens`` tokens."""
        if self.fitted_tokens is not None:
            self._check_range(tokens)
        host_s = self.per_request_ms * batch / 1e3
        return self._pass_s(batch, tokens, context, self._layers, tokens) + host_s

    def _pass_s(
        self, batch: int, tokens: int, context: float, layers: int, head_tokens: int, vocabulary: int | None = None
    ) -> float:
        bandwidth, flops, kv_bytes_per_layer, heads, head_dim, launch_s = self._constants  # of one GPU
        key = (tokens, layers, head_tokens, vocabulary)
        linear_s = self._linear.get(key)
        if linear_s is None:
            linear_s = self._linear[key] = self._linear_s(*key)
        kv_bytes = batch * context * layers * kv_bytes_per_layer
        attention = 4 * tokens * context * layers * heads * head_dim
        return linear_s + max(kv_bytes / bandwidth, attention / flops) + launch_s

    def _linear_s(self, tokens: int, layers: int, head_tokens: int, vocabulary: int | None) -> float:
        """Linear layers over ``tokens`` of a rank, and the collectives between them."""
        m, p, (bandwidth, flops, *_) = self._model, self._parallel, self._constants
        collectives_s = self._collectives_s(tokens, layers, head_tokens, vocabulary)
        if p.dp > 1:
            weights, work = (
                layers * m.attention_params_on(p.attention_tp),
                2 * layers * m.attention_params * tokens / p.attention_tp,
            )
            attention_s = max(weights * m.bytes_per_param / bandwidth, work / flops)
            return attention_s + self._shared_s(p.dp * tokens, layers, p.dp * head_tokens, vocabulary) + collectives_s
        head_params = m.hidden * (vocabulary or m.vocabulary)
        mlp_params = m.mlp_params * m.mlps_touched(tokens) / p.attention_tp
        weights = layers * (m.attention_params_on(p.attention_tp) + mlp_params) + head_params / p.attention_tp
        work = 2 * (layers * m.layer_params_active * tokens + head_params * head_tokens) / p.attention_tp
        return max(weights * m.bytes_per_param / bandwidth, work / flops) + collectives_s

    def _shared_s(self, tokens: int, layers: int, head_tokens: int, vocabulary: int | None = None) -> float:
        """MLPs and LM head, which all GPUs share, over ``tokens`` of all ranks."""
        m, gpus, (bandwidth, flops, *_) = self._model, self._parallel.tp, self._constants
        head_params = m.hidden * (vocabulary or m.vocabulary)
        weights = (layers * m.mlp_params * m.mlps_touched(tokens) + head_params) / gpus
        active = layers * m.mlp_params * max(m.top_experts, 1)
        work = 2 * (active * tokens + head_params * head_tokens) / gpus
        return max(weights * m.bytes_per_param / bandwidth, work / flops)

    def _collectives_s(self, tokens: int, layers: int, head_tokens: int, vocabulary: int | None) -> float:
        m, p = self._model, self._parallel
        if p.tp == 1:
            return 0.0
        latency_s, per_byte_s = p.collective_us / 1e6, 1 / self._link_bytes_per_s
        hidden_s = tokens * m.hidden * ACTIVATION_BYTES * per_byte_s
        all_reduce_s = 2 * (p.attention_tp - 1) / p.attention_tp * hidden_s + latency_s if p.attention_tp > 1 else 0.0
        exchange_s = 2 * ((p.tp - 1) / p.tp * p.dp * hidden_s + latency_s) if p.dp > 1 else all_reduce_s
        logits = p.dp * head_tokens * (vocabulary or m.vocabulary) * ACTIVATION_BYTES
        logits_s = (p.tp - 1) / p.tp * logits * per_byte_s + latency_s
        return layers * (all_reduce_s + exchange_s) + logits_s

    @cached_property
    def _link_bytes_per_s(self) -> float:
        given, peak = self._parallel.link_gb_s, self._hardware.link_gb_s
        if given is None and peak is None:
            raise InputError("parallel.link_gb_s: unknown for this hardware; give it here or as hardware.link_gb_s")
        return 1e9 * (given or 0.8 * (peak or 0.0))

    def on(self, parallel: Parallel) -> Self:
        """The same model on several GPUs; arguments of its methods are then those of one attention rank.

        Raises:
            InputError: the model cannot be divided like that, or does not fit the GPUs' memory.
        """
        if parallel.assume is not None:
            raise InputError("parallel.assume has no effect on a roofline, which computes what parallelism does")
        self._model.check_split(parallel.attention_tp, parallel.tp)
        copy = self.model_copy()
        copy._parallel = parallel
        if parallel.tp > 1:
            copy._link_bytes_per_s  # noqa: B018 - refuses an unknown link now rather than in a run
        copy.memory(drafter_loaded=False).check()
        return copy

    def memory(self, *, drafter_loaded: bool) -> GpuMemory:
        """What it takes of the GPUs' memory, with or without the drafter."""
        layers = self.draft.layers if drafter_loaded and isinstance(self.draft, LayersDraft) else 0
        return GpuMemory(self._model, self._hardware, self._parallel, layers)

    def padding(self, slowest: Load, everybody: Load, longest_draft: int) -> StepSeconds:
        """See :meth:`CostModel.padding`: MLPs and LM head see only tokens that exist."""
        padded = Load(*(self._parallel.dp * n for n in slowest))

        def excess(tokens: tuple[int, int], layers: int, head: tuple[int, int], vocabulary: int | None = None) -> float:
            if not tokens[1]:
                return 0.0
            more, fewer = (self._shared_s(t, layers, h, vocabulary) for t, h in zip(tokens, head, strict=True))
            return more - fewer

        verified = padded.verified, everybody.verified
        verify_s = excess(verified, self._layers, verified)
        draft_s = prefill_s = 0.0
        if everybody.positions and isinstance(self.draft, LayersDraft):
            drafted, passes = (padded.positions, everybody.positions), 1
            if self.draft.autoregressive:
                drafted = self.draft.top_k * padded.requests, self.draft.top_k * everybody.requests
                passes = self.draft.passes or longest_draft
            draft_s = passes * excess(drafted, self.draft.layers, drafted, self.draft.vocabulary)
        if everybody.prefill:
            both = padded.prefill + padded.verified, everybody.prefill + everybody.verified
            head = verified if everybody.verified else (self._parallel.dp, 1)
            prefill_s = excess(both, self._layers, head) - verify_s
        return self._stretch(StepSeconds(-draft_s, -verify_s, 0.0, -prefill_s))

    @cached_property
    def _linear(self) -> dict[tuple[int, int, int, int | None], float]:
        return {}  # seconds of the linear layers, which the same few token counts ask for again and again

    @cached_property
    def _constants(self) -> tuple[float, float, float, float, int, float]:
        m, tp, bandwidth = self._model, self._parallel.attention_tp, self._hardware.bytes_per_s * self.memory_efficiency
        flops = self._hardware.flop_per_s * self.compute_efficiency
        kv_bytes_per_layer = m.kv_bytes_per_layer / m.kv_split(tp)
        return bandwidth, flops, kv_bytes_per_layer, m.heads / tp, m.head_dim, self.launch_ms / 1e3

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
        if self.fitted_tokens is None:
            return ["cost is a roofline estimate: nothing was measured on this hardware", *self._parallel_notes]
        return [*super().notes, *self._parallel_notes]

    @property
    def _parallel_notes(self) -> list[str]:
        p = self._parallel
        if p.tp == 1:
            return []
        linear = isinstance(self.draft, LinearDraft)
        return [
            "cost divides the model over GPUs by formula: nothing overlaps, experts are evenly used",
            *["draft times are linear: taken as they are, whatever the parallelism"] * linear,
        ]


AnyCost = Annotated[TableCost | RooflineCost | FormulaCost | PassCost, Field(discriminator="kind")]
