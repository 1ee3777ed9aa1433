"""The DFlash drafter: one bidirectional pass over a block of anchor + masks, the target's hidden states as context.

Every draft layer attends over keys and values made from the target's hidden states (of chosen layers, fused by
``fc`` and normed) and over its own block. Embedding and head are the target's, frozen. This file is the
trainable, eager form; ``draft_engine`` is the fast one, held to it by tests.

Shapes: M sequences, T context tokens, A anchors a sequence, B block (anchor counted), D hidden, H / G heads,
E head size.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from adasim.real.layers import Arch, Rope, rms_norm

Weights = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class DrafterShape:
    """Everything but the weights.

    ``arch.layers`` counts draft layers; ``taps`` are the target layers it reads, 0 = after the first.
    """

    arch: Arch
    taps: tuple[int, ...]
    target_layers: int
    block: int  # anchor counted
    mask_token: int

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every weight, in the public checkpoint's names."""
        a = self.arch
        d, q, kv = a.hidden, a.heads * a.head_dim, a.kv_heads * a.head_dim
        sizes: dict[str, tuple[int, ...]] = {
            "fc.weight": (d, len(self.taps) * d),
            "hidden_norm.weight": (d,),
            "norm.weight": (d,),
        }
        for i in range(a.layers):
            p = f"layers.{i}."
            sizes |= {
                p + "input_layernorm.weight": (d,),
                p + "post_attention_layernorm.weight": (d,),
                p + "self_attn.q_proj.weight": (q, d),
                p + "self_attn.k_proj.weight": (kv, d),
                p + "self_attn.v_proj.weight": (kv, d),
                p + "self_attn.o_proj.weight": (d, q),
                p + "self_attn.q_norm.weight": (a.head_dim,),
                p + "self_attn.k_norm.weight": (a.head_dim,),
                p + "mlp.gate_proj.weight": (a.intermediate, d),
                p + "mlp.up_proj.weight": (a.intermediate, d),
                p + "mlp.down_proj.weight": (d, a.intermediate),
            }
        return sizes

    def fresh(self, seed: int) -> Weights:
        """Random initial weights in fp32: norms one, matrices scaled by their width, residual writers smaller."""
        generator = torch.Generator().manual_seed(seed)
        weights = {}
        for name, size in self.sizes().items():
            if len(size) == 1:
                weights[name] = torch.ones(size)
                continue
            gain = (2 * self.arch.layers) ** -0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            weights[name] = torch.randn(size, generator=generator) * gain * size[1] ** -0.5
        return weights


def block_hidden(
    shape: DrafterShape, weights: Weights, embedding: Tensor, rope: Rope,
    context: Tensor, anchors: Tensor, starts: Tensor, block: int,
) -> Tensor:  # fmt: skip
    """Normed hidden states of drafted blocks, gradients included.

    Args: context [M, T, taps * D] target hidden states; anchors [M, A] tokens; starts [M, A] their positions
    (a block sees context before its start only); block: B, at most ``shape.block``.
    Returns [M, A, B, D]; row 0 is the anchor's, rows 1.. predict the drafts.
    """
    a = shape.arch
    m, t, _ = context.shape
    n = anchors.shape[1]
    rows = n * block
    tokens = torch.full((m, n, block), shape.mask_token)
    tokens[:, :, 0] = anchors
    x = embedding[tokens.view(-1)]
    c = rms_norm(F.linear(context.flatten(0, 1), weights["fc.weight"]), weights["hidden_norm.weight"], a.eps)
    own = (starts[..., None] + torch.arange(block)).view(-1)
    cos, sin = rope.cos_LE[own], rope.sin_LE[own]
    hidden = torch.arange(t) >= starts[..., None]  # [M, A, T]
    mask = torch.zeros(hidden.shape, dtype=x.dtype).masked_fill_(hidden, float("-inf"))
    mask = mask[:, None, :, None].expand(m, a.heads // a.kv_heads, n, block, t).reshape(m, 1, -1, t)

    def heads(y: Tensor, name: str, count: int, norm: str | None) -> Tensor:
        z = F.linear(y, weights[name]).view(len(y), count, a.head_dim)
        return z if norm is None else rms_norm(z, weights[norm], a.eps)

    for i in range(a.layers):
        p = f"layers.{i}.self_attn."
        h = rms_norm(x, weights[f"layers.{i}.input_layernorm.weight"], a.eps)
        q = _rotate(heads(h, p + "q_proj.weight", a.heads, p + "q_norm.weight"), cos, sin)
        k = _rotate(heads(h, p + "k_proj.weight", a.kv_heads, p + "k_norm.weight"), cos, sin)
        v = heads(h, p + "v_proj.weight", a.kv_heads, None)
        k_context = heads(c, p + "k_proj.weight", a.kv_heads, p + "k_norm.weight").view(m, t, -1, a.head_dim)
        k_context = _rotate(k_context, rope.cos_LE[:t], rope.sin_LE[:t])
        v_context = heads(c, p + "v_proj.weight", a.kv_heads, None).view(m, t, -1, a.head_dim)
        y = _attend(q.view(m, n, block, a.kv_heads, -1, a.head_dim), k.view(m, n, block, a.kv_heads, -1),
                    v.view(m, n, block, a.kv_heads, -1), k_context, v_context, mask)  # fmt: skip
        x = x + F.linear(y.reshape(m * rows, -1), weights[p + "o_proj.weight"])
        p = f"layers.{i}.mlp."
        h = rms_norm(x, weights[f"layers.{i}.post_attention_layernorm.weight"], a.eps)
        h = F.silu(F.linear(h, weights[p + "gate_proj.weight"])) * F.linear(h, weights[p + "up_proj.weight"])
        x = x + F.linear(h, weights[p + "down_proj.weight"])
    return rms_norm(x, weights["norm.weight"], a.eps).view(m, n, block, -1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions for [..., L, heads, E] by rows [L, E]."""
    half = x.shape[-1] // 2
    swapped = torch.cat([x[..., half:], x[..., :half]], -1)
    return torch.addcmul(x * cos[:, None], swapped, sin[:, None])


def _attend(q: Tensor, k: Tensor, v: Tensor, k_context: Tensor, v_context: Tensor, mask: Tensor) -> Tensor:
    """Attention over context and own block in one softmax.

    Args: q [M, A, B, G, R, E]; k, v [M, A, B, G, E]; context keys and values [M, T, G, E];
    mask [M, 1, R * A * B, T].
    Returns [M, A, B, G, R, E].
    """
    m, n, block, g, r, e = q.shape
    t = k_context.shape[1]
    q = q * e**-0.5
    wide = q.permute(0, 3, 4, 1, 2, 5).reshape(m, g, r * n * block, e)
    far = torch.matmul(wide, k_context.permute(0, 2, 3, 1)) + mask  # [M, G, R * A * B, T]
    near = torch.matmul(
        q.permute(0, 1, 3, 4, 2, 5).reshape(m, n, g, r * block, e), k.permute(0, 1, 3, 4, 2)
    )  # [M, A, G, R * B, B]
    near = near.view(m, n, g, r, block, block).permute(0, 2, 3, 1, 4, 5).reshape(m, g, -1, block)
    probs = torch.softmax(torch.cat([far, near], -1), -1)
    out = torch.matmul(probs[..., :t], v_context.transpose(1, 2)).view(m, g, r, n, block, e)
    p_near = probs[..., t:].view(m, g, r, n, block, block).permute(0, 3, 1, 2, 4, 5).reshape(m, n, g, r * block, block)
    close = torch.matmul(p_near, v.transpose(2, 3)).view(m, n, g, r, block, e)
    return out.permute(0, 3, 4, 1, 2, 5) + close.permute(0, 1, 4, 2, 3, 5)
