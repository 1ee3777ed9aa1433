"""The target: a Llama- or Qwen3-form causal LM in plain torch, one packed forward over many requests.

Shape suffixes as in ``layers``.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from adasim.real.kv import KVCache, Span
from adasim.real.layers import Arch, Linear, Rope, rms_norm, rotate

BATCH = 16  # requests attended together: padding stays small, and keys in the core's cache


class _Layer:
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


class Target:
    """A causal LM ready to run. Build it with ``weights.load_target``."""

    def __init__(self, arch: Arch, weights: Mapping[str, Tensor]) -> None:
        self.arch = arch
        self.embedding = weights["model.embed_tokens.weight"]
        self.dtype, self.device = self.embedding.dtype, self.embedding.device
        self.head_weight = self.embedding if arch.tied else weights["lm_head.weight"]
        self.head = Linear(self.head_weight)
        self.layers = [_Layer(arch, weights, f"model.layers.{i}.") for i in range(arch.layers)]
        self.norm = weights["model.norm.weight"]
        self.rope = Rope(arch, arch.max_context, self.dtype, self.device)

    def cache(self, slots: int, max_len: int) -> KVCache:
        """KV memory that fits this model."""
        return KVCache(self.arch, slots, min(max_len, self.arch.max_context), self.dtype, self.device)

    @torch.inference_mode()
    def forward(
        self, tokens_S: Tensor, spans: list[Span], kv: KVCache, taps: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Run new tokens of many requests, packed one after the other; writes their keys and values.

        Args: tokens [S] int64 on the model's device; spans in packing order; taps: layers after which hidden
        states are returned (0 = after the first).
        Returns: final normed hidden [S, D] and taps side by side [S, len(taps) * D], or None without taps.
        """
        positions = torch.cat([torch.arange(s.start, s.start + s.length) for s in spans]).to(self.device)
        cos, sin = self.rope.at(positions)
        rows = kv.rows(spans)
        attend = _Attention(self.arch, spans, kv, self.dtype, self.device)
        arch, rotated = self.arch, self.arch.heads + self.arch.kv_heads
        x = self.embedding[tokens_S]
        tapped: dict[int, Tensor] = {}
        for i, layer in enumerate(self.layers):
            h = rms_norm(x, layer.norm_in, arch.eps)
            qkv = layer.qkv(h).view(len(x), -1, arch.head_dim)
            qk = qkv[:, :rotated]
            if layer.qk_norm is not None:
                q_norm, k_norm = layer.qk_norm
                q = rms_norm(qk[:, : arch.heads], q_norm, arch.eps)
                qk = torch.cat([q, rms_norm(qk[:, arch.heads :], k_norm, arch.eps)], 1)
            qkv[:, :rotated] = rotate(qk, cos, sin)
            kv.write(i, rows, qkv[:, arch.heads :])
            x = x + layer.out(attend(i, qkv[:, : arch.heads]))
            h = rms_norm(x, layer.norm_mlp, arch.eps)
            gate, up = layer.gate_up(h).chunk(2, -1)
            x = x + layer.down(F.silu(gate) * up)
            if i in taps:
                tapped[i] = x
        return rms_norm(x, self.norm, arch.eps), torch.cat([tapped[i] for i in taps], -1) if taps else None

    @torch.inference_mode()
    def logits(self, hidden_SD: Tensor) -> Tensor:
        """Next-token logits [S, vocab] of final hidden states."""
        return self.head(hidden_SD)


class _Attention:
    """Causal attention of packed queries over the cache; heads of one KV group become query rows.

    Equal spans in neighbouring slots run as one batch; others one request at a time (a padded mask would
    cost more than the calls save).
    """

    def __init__(
        self, arch: Arch, spans: list[Span], kv: KVCache, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.arch, self.kv = arch, kv
        first, length = spans[0].slot, spans[0].length
        together = all(s.length == length and s.slot == first + i for i, s in enumerate(spans))
        size = BATCH if together else 1
        groups = [spans[i : i + size] for i in range(0, len(spans), size)]
        self.groups = [(g, _causal_mask(arch, g, dtype, device)) for g in groups]

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


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Softmax attention of [n, G, rows, E] queries over [n, G, T, E] keys with an additive mask.

    On a CPU with few query rows two products beat the fused kernel two to one; in bf16 the keys must be the
    left factor, where oneDNN takes them as they lie.
    """
    if q.device.type != "cpu" or q.shape[2] > 64:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    q_EH = (q * q.shape[-1] ** -0.5).transpose(-1, -2)
    scores = torch.matmul(k, q_EH).transpose(-1, -2)
    return torch.matmul(torch.softmax(scores + mask, -1), v)


def _causal_mask(arch: Arch, spans: list[Span], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Additive mask [n, 1, heads-per-group * length, T]."""
    starts = torch.tensor([s.start for s in spans])
    length = spans[0].length
    total = int(starts.max()) + length
    last = starts[:, None] + torch.arange(length)  # [n, length] newest key each query may see
    hidden = torch.arange(total) > last[..., None]  # [n, length, T]
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
    return mask[:, None].expand(-1, arch.heads // arch.kv_heads, -1, -1).flatten(1, 2)[:, None].to(device)
