"""What drafting a batch gives: tokens, the distributions they came from, and what policies may know of them."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from adasim.real.draft import Drafter
from adasim.real.kv import KVCache, Span
from adasim.real.length_head import PaperHead, ReleasedHead
from adasim.real.sampling import Sampling
from adasim.types import FloatArray


class Proposal(NamedTuple):
    """Drafts of a batch of n requests, block after block.

    ``survival``, ``accept_len`` and ``margin`` come from hidden states and q alone, never from the tokens drawn.
    """

    tokens: list[list[int]]  # [n] lists of draft_len tokens
    hidden: Tensor | None  # [sum of blocks, D], anchors' rows included
    q: list[Tensor]  # [n] of [draft_len, V']; empty tensors when greedy
    survival: FloatArray | None  # [n, max_draft_len]
    accept_len: FloatArray | None  # [n], the anchor counted
    margin: FloatArray | None = None  # [n, max_draft_len] logit of the likeliest token less that of the second


def propose(
    drafter: Drafter, kv: KVCache, anchors: list[int], spans: list[Span], sampling: Sampling,
    generator: torch.Generator, head: PaperHead | ReleasedHead | None = None, survival: bool = False,
    margin: bool = False,
) -> Proposal:  # fmt: skip
    """Draft every request with a span; a span of length 0 is a request that drafts nothing."""
    n, longest = len(spans), drafter.shape.block - 1
    curve = np.zeros((n, longest)) if survival else None
    margins = np.zeros((n, longest)) if margin else None
    lengths = np.ones(n) if head is not None else None
    tokens: list[list[int]] = [[] for _ in spans]
    q: list[Tensor] = [torch.empty(0) for _ in spans]
    active = [i for i, s in enumerate(spans) if s.length]
    if not active:
        return Proposal(tokens, None, q, curve, lengths, margins)
    blocks = [spans[i] for i in active]
    hidden = drafter.draft([anchors[i] for i in active], blocks, kv).hidden_SD
    ends = np.cumsum([s.length for s in blocks])
    drafts = torch.from_numpy(np.setdiff1d(np.arange(ends[-1]), ends - [s.length for s in blocks]))
    logits = drafter.logits(hidden[drafts.to(hidden.device)])  # anchors' rows predict nothing
    probs = None if sampling.greedy else sampling.probabilities(logits)
    rows = logits.argmax(-1) if probs is None else torch.multinomial(probs, 1, generator=generator)[:, 0]
    chosen = drafter.tokens(rows).tolist()
    best = confidence(logits, probs) if survival else None
    lead = leads(logits) if margin else None
    at = 0
    for i, block in zip(active, blocks, strict=True):
        k = block.length - 1
        tokens[i] = chosen[at : at + k]
        if probs is not None:
            q[i] = probs[at : at + k]
        if curve is not None and best is not None:
            curve[i, :k] = np.cumprod(best[at : at + k])
        if margins is not None and lead is not None:
            margins[i, :k] = lead[at : at + k]
        at += k
    if head is not None and lengths is not None:
        lengths[active] = _accept_lens(head, hidden, blocks, drafter.shape.block)
    return Proposal(tokens, hidden, q, curve, lengths, margins)


def confidence(logits: Tensor, probs: Tensor | None) -> FloatArray:
    """Probability of each draft row's likeliest token: how sure the drafter is, whatever token was drawn. [rows]"""
    if probs is not None:
        return probs.amax(-1).double().cpu().numpy()
    wide = logits.float()
    return torch.exp(wide.amax(-1) - wide.logsumexp(-1)).double().cpu().numpy()


def leads(logits: Tensor) -> FloatArray:
    """By how many nats the likeliest token leads the second, at temperature 1. [rows]"""
    first, second = logits.topk(2).values.unbind(-1)
    return (first - second).double().cpu().numpy()


@torch.inference_mode()
def _accept_lens(head: PaperHead | ReleasedHead, hidden: Tensor, blocks: list[Span], block: int) -> FloatArray:
    lengths = [s.length for s in blocks]
    if len(set(lengths)) == 1:
        return (block * head(hidden.view(len(blocks), lengths[0], -1)[:, 1:].float())).double().cpu().numpy()
    parts = hidden.split(lengths)  # type: ignore[no-untyped-call]
    return np.array([block * float(head(part[None, 1:].float())) for part in parts])
