"""How many drafts the target accepts, measured on stored greedy text without running the target again.

Greedy text is its own answer key: from an anchor at position s, L is the run of drafts equal to the text.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adasim.real.drafter import DrafterShape, Weights, block_hidden
from adasim.real.features import Lesson
from adasim.real.layers import Rope
from adasim.real.prompts import DOMAINS


class Tau(NamedTuple):
    """Acceptance on a set of texts: pooled tokens a round, and P(first k accepted) at a random position."""

    tau: float
    rounds: int
    survival: list[float]  # k = 1..4


@torch.inference_mode()
def runs(
    shape: DrafterShape, weights: Weights, embedding: Tensor, head: Tensor, vocab: Tensor, lesson: Lesson
) -> NDArray[np.int64]:
    """L at each answer position but the last, the position taken as the anchor. [answer length - 1]"""
    tokens = torch.from_numpy(lesson.text.tokens.astype(np.int64))
    starts = torch.arange(lesson.text.prompt_len, len(tokens) - 1)
    rope = Rope(shape.arch, len(tokens) + shape.block, embedding.dtype, embedding.device)
    context = lesson.hidden_tensor()[None, : len(tokens) - 1].to(embedding.dtype)
    found = []
    for part in starts.split(64):  # type: ignore[no-untyped-call]
        hidden = block_hidden(shape, weights, embedding, rope, context, tokens[part][None], part[None], shape.block)
        drafts = vocab[(hidden[0, :, 1:] @ head.T).argmax(-1)]  # [A, B - 1]
        at = part[:, None] + torch.arange(1, shape.block)
        same = (drafts == tokens[at.clamp_max(len(tokens) - 1)]) & (at < len(tokens))
        found.append(same.long().cumprod(-1).sum(-1))
    return torch.cat(found).numpy().astype(np.int64)


def evaluate(
    shape: DrafterShape, weights: Weights, embedding: Tensor, head: Tensor, vocab: Tensor, lessons: Sequence[Lesson],
    domains: Sequence[str] = DOMAINS,
) -> dict[str, Tau]:  # fmt: skip
    """tau by domain, as full-block greedy speculation would walk through each text.

    Args: domains: names; ``text.domain`` indexes them.
    """
    tokens, rounds = dict.fromkeys(domains, 0), dict.fromkeys(domains, 0)
    lengths: dict[str, list[NDArray[np.int64]]] = {d: [] for d in domains}
    for lesson in lessons:
        domain = domains[lesson.text.domain]
        length = runs(shape, weights, embedding, head, vocab, lesson)
        lengths[domain].append(length)
        at = 0
        while at < len(length):
            emitted = min(int(length[at]) + 1, len(length) - at)
            tokens[domain] += emitted
            rounds[domain] += 1
            at += emitted
    return {
        d: Tau(
            round(tokens[d] / rounds[d], 4),
            rounds[d],
            [round(float((np.concatenate(lengths[d]) >= k).mean()), 4) for k in range(1, 5)],
        )
        for d in domains
        if rounds[d]
    }
