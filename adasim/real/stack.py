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

    Neighbouring slots run together, shorter spans padded to the longest: on a CPU 8 spans of 1 to 15 tokens cost 1.15
    times what 8 equal ones do, against 1.24 one by one.
    """

    def __init__(self, arch: Arch, spans: list[Span], kv: KVCache, causal: bool, like: Tensor) -> None:
        self.arch, self.kv = arch, kv
        self.groups = [_Group(arch, g, causal, like) for g in _groups(spans)]

    def __call__(self, layer: int, q_SHE: Tensor) -> Tensor:
        """Args: rotated queries [S, H, E]. Returns [S, H * E]."""
        outs, at = [], 0
        for group in self.groups:
            k, v = self.kv.read(layer, group.first, group.count, group.mask.shape[-1])
            outs.append(group.attend(q_SHE[at : at + group.size], k, v))
            at += group.size
        return outs[0] if len(outs) == 1 else torch.cat(outs)


class _Group:
    """Spans of neighbouring slots that are attended together."""

    def __init__(self, arch: Arch, spans: list[Span], causal: bool, like: Tensor) -> None:
        self.arch, self.first, self.count = arch, spans[0].slot, len(spans)
        self.size, self.length = sum(s.length for s in spans), max(s.length for s in spans)
        self.mask = _mask(arch, spans, self.length, causal, like)
        self.padded: Tensor | None = None  # [count * length] packed row of each padded one; the last is repeated
        if self.size < self.count * self.length:
            lengths = torch.tensor([s.length for s in spans])
            within = torch.arange(self.length).minimum(lengths[:, None] - 1)
            rows = (lengths.cumsum(0) - lengths)[:, None] + within
            self.padded = rows.flatten().to(like.device)
            self.real = (torch.arange(self.length) < lengths[:, None]).flatten().nonzero()[:, 0].to(like.device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Args: queries [size, H, E]; keys and values [count, G, T, E]. Returns [size, H * E]."""
        g, e = self.arch.kv_heads, self.arch.head_dim
        q = q if self.padded is None else q[self.padded]
        q = q.view(self.count, self.length, g, -1, e).permute(0, 2, 3, 1, 4).flatten(2, 3)
        out = attention(q, k, v, self.mask)
        out = out.view(self.count, g, -1, self.length, e).permute(0, 3, 1, 2, 4).reshape(self.count * self.length, -1)
        return out if self.padded is None else out[self.real]


def _groups(spans: list[Span]) -> list[list[Span]]:
    """Runs of neighbouring slots, at most BATCH each, whose padding does not exceed what they hold."""
    groups: list[list[Span]] = []
    for span in spans:
        last = groups[-1] if groups else []
        together = [*last, span]
        padded = len(together) * max(s.length for s in together)
        fits = len(last) < BATCH and padded <= 2 * sum(s.length for s in together)
        if last and last[-1].slot + 1 == span.slot and fits:
            last.append(span)
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


def _mask(arch: Arch, spans: list[Span], length: int, causal: bool, like: Tensor) -> Tensor:
    """Additive mask [n, 1, heads a group * length, T] of spans padded to ``length``."""
    starts, lengths = torch.tensor([[s.start, s.length] for s in spans]).T
    total = int((starts + lengths).max())
    newest = torch.arange(length).expand(len(spans), -1) if causal else (lengths - 1)[:, None].expand(-1, length)
    hidden = torch.arange(total) > (starts[:, None] + newest)[..., None]  # [n, length, T]
    mask = torch.zeros(hidden.shape, dtype=like.dtype).masked_fill_(hidden, float("-inf"))
    rows = mask[:, None].expand(-1, arch.heads // arch.kv_heads, -1, -1).flatten(1, 2)
    return rows[:, None].to(like.device)
