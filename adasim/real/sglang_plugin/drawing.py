"""The target's token at every verified position: its best one, or a draw shaped as the request asks."""

from typing import Any

import torch
from torch import Tensor


def draw(logits: Tensor, info: Any, positions: Tensor) -> Tensor:
    """One token a row.

    Args:
        logits: of n blocks of B positions, [n * B, V].
        info: SGLang's SamplingBatchInfo of the n requests. Greedy requests in a mixed batch have top_k = 1.
        positions: [n, B], which seeded requests draw by.
    Returns:
        tokens [n * B].
    """
    if info is None or info.is_all_greedy:
        return logits.argmax(-1)
    from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch

    block = positions.shape[1]

    def each(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.view(len(positions), -1).repeat_interleave(block, 0).squeeze(-1)

    temperatures = each(info.temperatures)
    assert temperatures is not None
    probs = torch.softmax(logits.float() / temperatures[:, None], -1)
    tokens: Tensor = top_k_top_p_min_p_sampling_from_probs_torch(
        probs,
        each(info.top_ks),
        each(info.top_ps),
        each(info.min_ps),
        info.need_min_p_sampling,
        each(info.sampling_seed),
        positions.reshape(-1),
    )
    return tokens.long()
