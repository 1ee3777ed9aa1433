"""The target: a Llama- or Qwen3-form causal LM in plain torch, one packed forward over many requests."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from adasim.real.kv import KVCache, Span
from adasim.real.layers import Arch, Linear, Rope, rms_norm
from adasim.real.stack import Stack

SPARE = 64  # positions beyond the context limit that rejected drafts may touch


class Target:
    """A causal LM ready to run. Build it with ``weights.load_target``."""

    def __init__(self, arch: Arch, weights: Mapping[str, Tensor]) -> None:
        self.arch = arch
        self.embedding = weights["model.embed_tokens.weight"]
        self.dtype, self.device = self.embedding.dtype, self.embedding.device
        self.head_weight = self.embedding if arch.tied else weights["lm_head.weight"]
        self.head = Linear(self.head_weight)
        self.norm = weights["model.norm.weight"]
        self.rope = Rope(arch, arch.max_context + SPARE, self.dtype, self.device)
        self.stack = Stack(arch, weights, "model.layers.", self.rope)

    def cache(self, slots: int, max_len: int) -> KVCache:
        """KV memory that fits this model."""
        return KVCache(self.arch, slots, max_len, self.dtype, self.device)

    @torch.inference_mode()
    def forward(
        self, tokens_S: Tensor, spans: list[Span], kv: KVCache, taps: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Run new tokens of many requests, packed one after the other; writes their keys and values.

        Args: tokens [S] int64 on the model's device; spans in packing order; taps: layers after which hidden
        states are returned (0 = after the first).
        Returns: final normed hidden [S, D] and taps side by side [S, len(taps) * D], or None without taps.
        """
        x, tapped = self.stack(self.embedding[tokens_S], spans, kv, causal=True, taps=taps)
        return rms_norm(x, self.norm, self.arch.eps), tapped

    @torch.inference_mode()
    def logits(self, hidden_SD: Tensor) -> Tensor:
        """Next-token logits [S, vocab] of final hidden states."""
        return self.head(hidden_SD)
