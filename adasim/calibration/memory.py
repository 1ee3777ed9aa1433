"""What a model takes of its GPUs' memory."""

from dataclasses import dataclass

from adasim.calibration.parallel import Split
from adasim.calibration.specs import Hardware, ModelSpec
from adasim.errors import InputError


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Weights and KV cache on each of the GPUs that share a model. Activations and graphs are not counted."""

    model: ModelSpec
    hardware: Hardware
    split: Split
    draft_layers: int = 0  # of a drafter that is loaded beside the model; it keeps a KV cache too

    @property
    def weight_bytes(self) -> float:
        """Layers, embedding and LM head; attention is whole on every rank, the rest is divided by all GPUs.

        Beside attention ranks the embedding is whole on every GPU, as SGLang keeps it.
        """
        m, s = self.model, self.split
        per_layer = m.attention_params_on(s.attention_tp) + m.mlp_params * max(m.experts, 1) / s.tp
        embedding = m.head_params / (s.tp if s.dp == 1 else 1)
        return m.bytes_per_param * ((m.layers + self.draft_layers) * per_layer + embedding + m.head_params / s.tp)

    @property
    def kv_bytes_per_token(self) -> float:
        """KV cache of one token on all GPUs of its rank, copies not counted."""
        return (self.model.layers + self.draft_layers) * self.model.kv_bytes_per_layer

    def check(self) -> None:
        """Refuse a model that does not fit.

        Raises:
            InputError: how much is missing.
        """
        size = self.hardware.memory_gib
        if size is not None and self.weight_bytes > size * 2**30:
            raise InputError(f"parallel: {self.split} leaves {self._weights} on every GPU, which has {size:g} GiB")

    def kv_tokens(self, fraction: float) -> int:
        """Tokens whose KV cache a rank holds, when weights and KV cache together fill that share of each GPU.

        Raises:
            InputError: the memory's size is unknown, or the weights leave no room.
        """
        size = self.hardware.memory_gib
        if size is None:
            raise InputError("memory_fraction: hardware.memory_gib is unknown; give it, or kv.blocks instead")
        left = fraction * size * 2**30 - self.weight_bytes
        if left <= 0:
            raise InputError(
                f"memory_fraction: {fraction:g} of {size:g} GiB does not hold the {self._weights} on every GPU "
                f"({self.split}); use more GPUs"
            )
        return int(left / (self.kv_bytes_per_token / self.model.kv_split(self.split.attention_tp)))

    @property
    def _weights(self) -> str:
        return f"{self.weight_bytes / 2**30:.0f} GiB of weights"
