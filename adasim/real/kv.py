"""Key and value memory of running requests.

Memory is one row of ``max_len`` tokens a slot. The pages behind tokens that were never written take no
memory, so the pool's real limit is the block count the engine accounts for (``KVBlocks``).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from adasim.real.layers import Arch


class Span(NamedTuple):
    """Consecutive new tokens of one request in a packed forward."""

    slot: int
    start: int  # position of the first new token = tokens already cached
    length: int


class KVCache:
    """Keys and values, one tensor [2, slots, G, max_len, E] a layer.

    Written by position: a rejected tail is overwritten by what comes next.
    """

    def __init__(
        self, arch: Arch, slots: int, max_len: int, dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        self.slots, self.max_len, self.kv_heads = slots, max_len, arch.kv_heads
        shape = (2, slots, arch.kv_heads, max_len, arch.head_dim)
        self.layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(arch.layers)]

    def rows(self, spans: list[Span]) -> Tensor:
        """Flat row of each key head, then value head, of each packed token, for ``write``. [S * 2 * G]"""
        heads = torch.arange(self.kv_heads) * self.max_len
        heads = torch.cat([heads, heads + self.slots * self.kv_heads * self.max_len])
        first = [s.slot * self.kv_heads * self.max_len + s.start for s in spans]
        tokens = torch.cat([torch.arange(f, f + s.length) for f, s in zip(first, spans, strict=True)])
        return (tokens[:, None] + heads).flatten().to(self.layers[0].device)

    def write(self, layer: int, rows: Tensor, kv_SGE: Tensor) -> None:
        """Store keys and values [S, 2 * G, E] of packed tokens."""
        self.layers[layer].view(-1, kv_SGE.shape[-1]).index_copy_(0, rows, kv_SGE.flatten(0, 1))

    def read(self, layer: int, first: int, count: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of ``count`` slots from ``first``, each [count, G, length, E], as views."""
        k, v = self.layers[layer][:, first : first + count, :, :length]
        return k, v

    def fill(self, spans: list[Span]) -> None:
        """Arbitrary values for the tokens of ``spans``, as if they had been computed: memory that is really read."""
        for layer in self.layers:
            token = torch.randn(2, self.kv_heads, 1, layer.shape[-1], dtype=layer.dtype, device=layer.device)
            for s in spans:
                layer[:, s.slot, :, s.start : s.start + s.length] = token

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` tokens of one slot over another."""
        for layer in self.layers:
            layer[:, target, :, :length] = layer[:, source, :, :length]
