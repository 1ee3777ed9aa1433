"""Acceptance of drafts that were drafted greedily, over blocks cut to different lengths.

Such a draft is a point mass, so speculative sampling has a simple form: draw the target's token at every verified
position and accept while it equals the draft; the first that differs is the token to emit. Draft x is accepted with
probability p(x), and given a rejection the emitted token follows p without x: exactly p, wherever the block was cut.
"""

import random
from typing import NamedTuple

import torch
from torch import Tensor

from adasim.real.sampling import Forced
from adasim.types import IntArray


class Accepted(NamedTuple):
    """Of n requests: how many drafts were accepted, and the target's own token after them."""

    run: Tensor  # [n] int64
    token: Tensor  # [n] int64


def accept(candidates: Tensor, target: Tensor, verify_lens: Tensor) -> Accepted:
    """Accept drafts while they equal the target's tokens.

    Args:
        candidates: blocks [n, B], the anchor first; whatever lies at or after a block's length is not looked at.
        target: the target's token after each position [n, B]; junk at or after a block's length.
        verify_lens: lengths of the blocks [n], 1..B, the anchor counted.
    """
    positions = torch.arange(1, candidates.shape[1], device=candidates.device)
    verified = positions < verify_lens[:, None]
    run = ((candidates[:, 1:] == target[:, :-1]) & verified).long().cumprod(1).sum(1)
    return Accepted(run, target.gather(1, run[:, None])[:, 0])


def by_decree(target: Tensor, verify_lens: IntArray, forced: Forced, rng: random.Random) -> Accepted:
    """So many drafts as was said beforehand, for measurements: the text means nothing.

    Args:
        target: the target's token after each position [n, B].
        verify_lens: lengths of the blocks [n], 1..B, the anchor counted.
        forced: what is decreed.
        rng: draws from it; the same on all ranks.
    """
    run = torch.tensor([forced.run(v - 1, rng) for v in verify_lens.tolist()], device=target.device)
    return Accepted(run, target.gather(1, run[:, None])[:, 0])


def committed(candidates: Tensor, accepted: Accepted) -> Tensor:
    """The tokens to emit [n, B]: accepted drafts, then the target's token; zeros after it."""
    n, block = candidates.shape
    at = torch.arange(block, device=candidates.device).expand(n, block)
    shifted = torch.cat([candidates[:, 1:], candidates.new_zeros(n, 1)], 1)
    shifted = torch.where(at < accepted.run[:, None], shifted, 0)
    return torch.where(at == accepted.run[:, None], accepted.token[:, None], shifted)
