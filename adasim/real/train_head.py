"""Offline training of a length head: labels from full blocks on stored greedy text."""

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from adasim.real.drafter import DrafterShape, Weights, block_hidden
from adasim.real.features import Lesson
from adasim.real.layers import Rope


class Blocks(NamedTuple):
    """Drafted blocks and what became of them."""

    hidden: Tensor  # [P, B - 1, D] draft rows
    run: Tensor  # [P] L, the whole block compared


@torch.inference_mode()
def drafted_blocks(
    shape: DrafterShape, weights: Weights, embedding: Tensor, head: Tensor, vocab: Tensor,
    lessons: Sequence[Lesson], anchors: int, seed: int = 0,
) -> Iterator[Blocks]:  # fmt: skip
    """Full blocks at up to ``anchors`` random answer positions of each lesson, one result a lesson.

    Args: head [V', D]: rows of the target's head for ``vocab``, the token ids the drafter may draft.
    """
    rng = random.Random(seed)
    rope = Rope(shape.arch, 4096, embedding.dtype, embedding.device)
    for lesson in lessons:
        tokens = torch.from_numpy(lesson.text.tokens.astype(np.int64))
        allowed = range(lesson.text.prompt_len, len(tokens) - 1)
        if not allowed:
            continue
        starts = torch.tensor(sorted(rng.sample(allowed, min(anchors, len(allowed)))))
        context = lesson.hidden_tensor()[None, : int(starts[-1])].to(embedding.dtype)
        hidden = block_hidden(shape, weights, embedding, rope, context, tokens[starts][None], starts[None], shape.block)[
            0, :, 1:
        ]
        at = starts[:, None] + torch.arange(1, shape.block)
        drafts = vocab[(hidden @ head.T).argmax(-1)]
        same = (drafts == tokens[at.clamp_max(len(tokens) - 1)]) & (at < len(tokens))
        yield Blocks(hidden.clone(), same.long().cumprod(-1).sum(-1))
