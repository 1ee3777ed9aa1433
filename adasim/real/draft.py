"""Drafting for the engine: the fast form of ``drafter``, with the context's keys and values cached.

A block is a span that sees the whole cache before it and all of itself; its own keys and values lie at its
positions until the target's hidden states for them arrive and take their place.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from adasim.real.checkpoint import Checkpoint
from adasim.real.drafter import DrafterShape, Weights
from adasim.real.kv import KVCache, Span
from adasim.real.layers import Linear, rms_norm, rotate
from adasim.real.length_head import PaperHead, ReleasedHead, load_head
from adasim.real.stack import Stack, positions
from adasim.real.target import Target


class Drafts(NamedTuple):
    """Hidden states of drafted blocks, packed: the anchor's row first in each span."""

    spans: list[Span]
    hidden_SD: Tensor


class Drafter:
    """A drafter ready to run beside its target. ``vocab``: sorted token ids it may draft; None = all."""

    def __init__(self, shape: DrafterShape, weights: Weights, target: Target, vocab: Tensor | None = None) -> None:
        self.shape, self.target, self.vocab = shape, target, vocab
        weights = {k: w.to(target.device, target.dtype) for k, w in weights.items()}
        arch, e = shape.arch, shape.arch.head_dim
        self.stack = Stack(arch, weights, "layers.", target.rope)
        self.fc, self.hidden_norm, self.norm = (
            Linear(weights["fc.weight"]),
            weights["hidden_norm.weight"],
            weights["norm.weight"],
        )
        names = [f"layers.{i}.self_attn.{part}_proj.weight" for i in range(arch.layers) for part in "kv"]
        self.context_kv = Linear(torch.cat([weights[n] for n in names]))  # of all layers at once
        self.k_norms = [weights[f"layers.{i}.self_attn.k_norm.weight"] for i in range(arch.layers)]
        self.head = target.head if vocab is None else Linear(target.head_weight[vocab])
        self._kv_rows, self._e = 2 * arch.kv_heads, e

    def cache(self, slots: int, max_len: int) -> KVCache:
        """KV memory that fits this drafter."""
        return KVCache(self.shape.arch, slots, max_len, self.target.dtype, self.target.device)

    @torch.inference_mode()
    def absorb(self, taps_SD: Tensor, spans: list[Span], kv: KVCache) -> None:
        """Keep the target's hidden states of committed tokens as context, [S, taps * D]."""
        arch = self.shape.arch
        c = rms_norm(self.fc(taps_SD), self.hidden_norm, arch.eps)
        made = self.context_kv(c).view(len(c), arch.layers, self._kv_rows, self._e)
        cos, sin = self.target.rope.at(positions(spans).to(c.device))
        rows = kv.rows(spans)
        for i, k_norm in enumerate(self.k_norms):
            k = rotate(rms_norm(made[:, i, : arch.kv_heads], k_norm, arch.eps), cos, sin)
            kv.write(i, rows, torch.cat([k, made[:, i, arch.kv_heads :]], 1))

    @torch.inference_mode()
    def draft(self, anchors: list[int], spans: list[Span], kv: KVCache) -> Drafts:
        """One pass over blocks of anchor + masks. Args: one anchor token and one span (block) a request."""
        tokens = torch.full((sum(s.length for s in spans),), self.shape.mask_token)
        at = 0
        for anchor, span in zip(anchors, spans, strict=True):
            tokens[at] = anchor
            at += span.length
        x = self.target.embedding[tokens.to(self.target.device)]
        x, _ = self.stack(x, spans, kv, causal=False)
        return Drafts(spans, rms_norm(x, self.norm, self.shape.arch.eps))

    @torch.inference_mode()
    def logits(self, hidden_SD: Tensor) -> Tensor:
        """Logits over the draft vocabulary [S, V']."""
        return self.head(hidden_SD)

    def tokens(self, rows: Tensor) -> Tensor:
        """Token ids of draft-vocabulary rows."""
        return rows if self.vocab is None else self.vocab[rows]


def ready(found: Checkpoint, target: Target) -> tuple[Drafter, PaperHead | ReleasedHead | None]:
    """A checkpoint's drafter and length head (None: it has none), on the target's device."""
    head = load_head(found.head).to(target.device) if found.head else None
    return Drafter(found.shape, found.weights, target, found.vocab), head
