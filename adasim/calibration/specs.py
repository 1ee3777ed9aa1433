"""What hardware can do and what models weigh, from vendors' data sheets and published configurations."""

from typing import Self

from pydantic import Field, model_validator

from adasim.errors import InputError
from adasim.types import Component


class Hardware(Component):
    """One accelerator (vendor data sheets).

    Attributes:
        tflops: dense bf16 peak.
        tb_per_s: memory bandwidth.
        memory_gib: size of the memory; null = unknown.
        link_gb_s: bandwidth to the others of its node, GB/s in each direction; null = unknown.
    """

    tflops: float = Field(gt=0)
    tb_per_s: float = Field(gt=0)
    memory_gib: float | None = Field(default=None, gt=0)
    link_gb_s: float | None = Field(default=None, gt=0)

    @property
    def flop_per_s(self) -> float:
        """Peak, floating-point operations per second."""
        return self.tflops * 1e12

    @property
    def bytes_per_s(self) -> float:
        """Peak memory bandwidth, bytes per second."""
        return self.tb_per_s * 1e12


class ModelSpec(Component):
    """A decoder's shape; ``experts`` > 0 makes the MLPs a mixture of which each token uses ``top_experts``."""

    layers: int = Field(gt=0)
    hidden: int = Field(gt=0)
    heads: int = Field(gt=0)
    kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    intermediate: int = Field(gt=0)  # of one expert, where there are experts
    vocabulary: int = Field(gt=0)
    bytes_per_param: float = Field(default=2.0, gt=0)
    kv_bytes_per_value: float = Field(default=2.0, gt=0)
    experts: int = Field(default=0, ge=0)
    top_experts: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _experts(self) -> Self:
        if self.top_experts > self.experts or (self.experts > 0) != (self.top_experts > 0):
            raise ValueError("experts and top_experts go together, top_experts at most experts")
        return self

    @property
    def attention_params(self) -> float:
        """Parameters of one layer's attention."""
        return self.attention_params_on(1)

    def attention_params_on(self, tp: int) -> float:
        """Those on each of ``tp`` GPUs; KV heads are copied where there are too few."""
        return self.hidden * self.head_dim * (2 * self.heads / tp + 2 * self.kv_heads / self.kv_split(tp))

    def kv_split(self, tp: int) -> int:
        """Parts into which ``tp`` GPUs divide a token's KV cache: at most one a KV head."""
        return min(tp, self.kv_heads)

    @property
    def mlp_params(self) -> float:
        """Parameters of one MLP or expert (gated: three matrices)."""
        return 3 * self.hidden * self.intermediate

    @property
    def layer_params_active(self) -> float:
        """Parameters one token multiplies with in one layer."""
        return self.attention_params + self.mlp_params * max(self.top_experts, 1)

    def mlps_touched(self, tokens: int) -> float:
        """MLPs one layer reads for ``tokens`` tokens: of E experts, E (1 - (1 - e/E)^tokens)."""
        return self.experts * (1 - (1 - self.top_experts / self.experts) ** tokens) if self.experts else 1

    @property
    def head_params(self) -> float:
        """Parameters of the LM head."""
        return self.hidden * self.vocabulary

    @property
    def kv_bytes_per_layer(self) -> float:
        """KV-cache bytes of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.kv_bytes_per_value

    def check_split(self, attention_tp: int, gpus: int) -> None:
        """Refuse to spread attention over ``attention_tp`` and MLPs over ``gpus`` GPUs where parts would be unequal.

        Raises:
            InputError: all problems.
        """
        problems = []
        if self.heads % attention_tp:
            problems.append(
                f"parallel: {attention_tp} GPUs a rank do not divide the model's {self.heads} attention heads"
            )
        if self.kv_heads % attention_tp and attention_tp % self.kv_heads:
            problems.append(
                f"parallel: {attention_tp} GPUs a rank neither divide nor copy the model's {self.kv_heads} KV heads"
            )
        if self.intermediate % gpus and (not self.experts or self.experts % gpus):
            parts = f"MLP width of {self.intermediate}" + f" nor {self.experts} experts" * bool(self.experts)
            problems.append(f"parallel: {gpus} GPUs do not divide the model's {parts}")
        if problems:
            raise InputError(*problems)


HARDWARE = {
    "a100": Hardware(tflops=312, tb_per_s=2.04, memory_gib=80, link_gb_s=300),
    "h20": Hardware(tflops=148, tb_per_s=4.0, memory_gib=96, link_gb_s=450),
    "h100": Hardware(tflops=989, tb_per_s=3.35, memory_gib=80, link_gb_s=450),
    "h200": Hardware(tflops=989, tb_per_s=4.8, memory_gib=141, link_gb_s=450),
    "b200": Hardware(tflops=2250, tb_per_s=8.0, memory_gib=180, link_gb_s=900),
    "l40s": Hardware(tflops=362, tb_per_s=0.864, memory_gib=48, link_gb_s=32),
}

MODELS = {
    "qwen3-8b": ModelSpec(
        layers=36,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        intermediate=12288,
        vocabulary=151936,
    ),
    "llama-3.1-8b": ModelSpec(
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        intermediate=14336,
        vocabulary=128256,
    ),
    "qwen3-30b-a3b": ModelSpec(
        layers=48,
        hidden=2048,
        heads=32,
        kv_heads=4,
        head_dim=128,
        intermediate=768,
        vocabulary=151936,
        experts=128,
        top_experts=8,
    ),
    "qwen3-235b-a22b": ModelSpec(
        layers=94,
        hidden=4096,
        heads=64,
        kv_heads=4,
        head_dim=128,
        intermediate=1536,
        vocabulary=151936,
        experts=128,
        top_experts=8,
    ),
}


def hardware(name: str | Hardware) -> Hardware:
    """The accelerator of that name.

    Raises:
        InputError: unknown name.
    """
    if isinstance(name, Hardware):
        return name
    if name not in HARDWARE:
        raise InputError(f"hardware: unknown {name!r}; allowed: {', '.join(sorted(HARDWARE))}")
    return HARDWARE[name]
