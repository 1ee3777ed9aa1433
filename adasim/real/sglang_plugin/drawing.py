"""The target's token at every verified position: its best one, or a draw shaped as the request asks."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from adasim.types import IntArray


def draw(logits: Tensor, info: Any, positions: Tensor, lengths: IntArray) -> Tensor:
    """One token for every row that was verified.

    Args:
        logits: of n blocks of B positions, [n * B, V].
        info: SGLang's SamplingBatchInfo of the n requests. Greedy requests in a mixed batch have top_k = 1.
        positions: [n, B], which seeded requests draw by.
        lengths: verified tokens of each block [n], 1..B; rows behind them are left out.
    Returns:
        tokens [n, B]; zeros at and after a block's length.
    """
    n, block = positions.shape
    rows = torch.from_numpy(np.flatnonzero(np.arange(block) < lengths[:, None])).to(logits.device)
    if len(rows) < n * block:
        logits = logits[rows]
    tokens = torch.zeros(n * block, dtype=torch.long, device=logits.device)
    if info is None or info.is_all_greedy:
        tokens[rows] = logits.argmax(-1)
    else:
        tokens[rows] = _sample(logits, info, rows // block, positions.reshape(-1)[rows])
    return tokens.view(n, block)


def _sample(logits: Tensor, info: Any, of: Tensor, positions: Tensor) -> Tensor:
    """Draws [S] from logits [S, V]. Args: of: which of n requests each row belongs to [S]; positions [S]."""
    from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch

    temperatures, seeds = info.temperatures.view(-1)[of], info.sampling_seed
    tokens: Tensor = top_k_top_p_min_p_sampling_from_probs_torch(
        torch.softmax(logits.float() / temperatures[:, None], -1),
        info.top_ks[of],
        info.top_ps[of],
        info.min_ps[of],
        info.need_min_p_sampling,
        None if seeds is None else seeds[of],
        positions,
    )
    return tokens.long()
