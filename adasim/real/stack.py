"""Transformer layers for inference, packed over requests: what target and drafter have in common.

Shape suffixes as in ``layers``.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from adasim.real.kv import KVCache, Span
from adasim.real.layers import Arch, Linear, Rope, rms_norm, rotate

BATCH = 16  # requests attended together: padding stays small, and keys in the core's cache


class Layer:
    """Weights of one layer, projections fused."""

    def __init__(self, arch: Arch, weights: Mapping[str, Tensor], prefix: str) -> None:
        def w(name: str) -> Tensor:
            return weights[f"{prefix}{name}.weight"]

        attn, mlp = "self_attn.", "mlp."
        self.qkv = Linear(torch.cat([w(attn + "q_proj"), w(attn + "k_proj"), w(attn + "v_proj")]))
        self.out = Linear(w(attn + "o_proj"))
        self.gate_up = Linear(torch.cat([w(mlp + "gate_proj"), w(mlp + "up_proj")]))
        self.down = Linear(w(mlp + "down_proj"))
        self.norm_in, self.norm_mlp = w("input_layernorm"), w("post_attention_layernorm")
        self.qk_norm = (w(attn + "q_norm"), w(attn + "k_norm")) if arch.qk_norm else None


class Stack:
    """Layers run one after the other over packed tokens."""

    def __init__(self, arch: Arch, weights: Mapping[str, Tensor], prefix: str, rope: Rope) -> None:
        self.arch, self.rope = arch, rope
        self.layers = [Layer(arch, weights, f"{prefix}{i}.") for i in range(arch.layers)]

    def __call__(
        self, x_SD: Tensor, spans: list[Span], kv: KVCache, causal: bool, taps: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Run embedded tokens through all layers; writes their keys and values.

        Args: x [S, D]; spans in packing order; causal: each token sees the cache up to itself, else up to
        the end of its own span; taps: layers whose output is returned, 0 = the first.
        Returns: hidden [S, D] (no final norm) and taps side by side [S, len(taps) * D], None without taps.
        """
        arch, split = self.arch, self.arch.heads + self.arch.kv_heads
        cos, sin = self.rope.at(positions(spans).to(x_SD.device))
        rows = kv.rows(spans)
        attend = _Attention(arch, spans, kv, causal, x_SD)
        x, tapped = x_SD, dict[int, Tensor]()
        for i, layer in enumerate(self.layers):
            qkv = layer.qkv(rms_norm(x, layer.norm_in, arch.eps)).view(len(x), -1, arch.head_dim)
            qk = qkv[:, :split]
            if layer.qk_norm is not None:
                q_norm, k_norm = layer.qk_norm
                q, k = qk[:, : arch.heads], qk[:, arch.heads :]
                qk = torch.cat([rms_norm(q, q_norm, arch.eps), rms_norm(k, k_norm, arch.eps)], 1)
            qkv[:, :split] = rotate(qk, cos, sin)
            kv.write(i, rows, qkv[:, arch.heads :])
            x = x + layer.out(attend(i, qkv[:, : arch.heads]))
            gate, up = layer.gate_up(rms_norm(x, layer.norm_mlp, arch.eps)).chunk(2, -1)
            x = x + layer.down(F.silu(gate) * up)
            if i in taps:
                tapped[i] = x
        return x, torch.cat([tapped[i] for i in taps], -1) if taps else None


def positions(spans: list[Span]) -> Tensor:
    """Position of each packed token. [S]"""
    return torch.cat([torch.arange(s.start, s.start + s.length) for s in spans])


class _Attention:
    """Attention of packed queries over the cache; heads of one KV group become query rows.

    Equal spans in neighbouring slots run together; others one request at a time (a padded mask would cost
    more than the calls save).
    """

    def __init__(self, arch: Arch, spans: list[Span], kv: KVCache, causal: bool, like: Tensor) -> None:
        self.arch, self.kv = arch, kv
        self.groups = [(g, _mask(arch, g, causal, like)) for g in _groups(spans)]

    def __call__(self, layer: int, q_SHE: Tensor) -> Tensor:
        """Args: rotated queries [S, H, E]. Returns [S, H * E]."""
        outs, at = [], 0
        for spans, mask in self.groups:
            size = len(spans) * spans[0].length
            outs.append(self._group(layer, q_SHE[at : at + size], spans, mask))
            at += size
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _group(self, layer: int, q: Tensor, spans: list[Span], mask: Tensor) -> Tensor:
        n, length, g = len(spans), spans[0].length, self.arch.kv_heads
        q = q.view(n, length, g, -1, self.arch.head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
        k, v = self.kv.read(layer, spans[0].slot, n, mask.shape[-1])
        out = attention(q, k, v, mask)
        return out.view(n, g, -1, length, self.arch.head_dim).permute(0, 3, 1, 2, 4).reshape(n * length, -1)


def _groups(spans: list[Span]) -> list[list[Span]]:
    """Runs of equal lengths in neighbouring slots, at most BATCH each."""
    groups: list[list[Span]] = []
    for span in spans:
        last = groups[-1][-1] if groups else None
        joins = last is not None and (last.slot + 1, last.length) == (span.slot, span.length)
        if joins and len(groups[-1]) < BATCH:
            groups[-1].append(span)
        else:
            groups.append([span])
    return groups


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Softmax attention of [n, G, rows, E] queries over [n, G, T, E] keys with an additive mask.

    On a CPU with few query rows two products beat the fused kernel two to one; the keys must be the left
    factor, where oneDNN takes them as they lie.
    """
    if q.device.type != "cpu" or q.shape[2] > 64:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    q_EH = (q * q.shape[-1] ** -0.5).transpose(-1, -2)
    scores = torch.matmul(k, q_EH).transpose(-1, -2)
    return torch.matmul(torch.softmax(scores + mask, -1), v)


def _mask(arch: Arch, spans: list[Span], causal: bool, like: Tensor) -> Tensor:
    """Additive mask [n, 1, heads a group * length, T]."""
    starts = torch.tensor([s.start for s in spans])
    length = spans[0].length
    total = int(starts.max()) + length
    newest = torch.arange(length) if causal else torch.full((length,), length - 1)
    hidden = torch.arange(total) > (starts[:, None] + newest)[..., None]  # [n, length, T]
    mask = torch.zeros(hidden.shape, dtype=like.dtype).masked_fill_(hidden, float("-inf"))
    rows = mask[:, None].expand(-1, arch.heads // arch.kv_heads, -1, -1).flatten(1, 2)
    return rows[:, None].to(like.device)
