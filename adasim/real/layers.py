"""Small building blocks shared by target and drafter.

Shape suffixes: S packed tokens, D hidden, H query heads, G KV heads, E head size, n requests, T cached tokens.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Arch:
    """The shape of a Llama- or Qwen3-form transformer."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    rope_theta: float = 10_000.0
    eps: float = 1e-6
    qk_norm: bool = False
    tied: bool = True
    max_context: int = 8192


class Linear:
    """``x @ W.T`` for inference; on a CPU the weight is laid out once for oneDNN (2x faster at few rows)."""

    def __init__(self, weight: Tensor) -> None:
        self.rows, self.columns = weight.shape
        self._packed = weight.device.type == "cpu" and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
        weight = weight.detach().contiguous()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, 16) if self._packed else weight

    def __call__(self, x_SD: Tensor) -> Tensor:
        """Args: x [S, columns] of the weight's dtype. Returns [S, rows]."""
        if self._packed:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x_SD, self._weight, None, "none", [], "")
            return out
        return F.linear(x_SD, self._weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, weighted."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


class Rope:
    """Rotary position tables; ``sin`` carries the sign of the half-rotation."""

    def __init__(self, arch: Arch, length: int, dtype: torch.dtype, device: torch.device) -> None:
        inverse = arch.rope_theta ** (-torch.arange(0, arch.head_dim, 2, dtype=torch.float32) / arch.head_dim)
        angle = torch.arange(length, dtype=torch.float32)[:, None] * inverse
        cos, sin = angle.cos(), angle.sin()
        self.cos_LE = torch.cat([cos, cos], -1).to(device, dtype)
        self.sin_LE = torch.cat([-sin, sin], -1).to(device, dtype)

    def at(self, positions_S: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine rows, each [S, 1, E]."""
        return self.cos_LE[positions_S][:, None], self.sin_LE[positions_S][:, None]


def rotate(x_SHE: Tensor, cos_S1E: Tensor, sin_S1E: Tensor) -> Tensor:
    """Apply rotary positions to heads [S, H, E]."""
    half = x_SHE.shape[-1] // 2
    swapped = torch.cat([x_SHE[..., half:], x_SHE[..., :half]], -1)
    return torch.addcmul(x_SHE * cos_S1E, swapped, sin_S1E)
