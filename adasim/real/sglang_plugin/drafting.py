"""The first half of a round: blocks drafted in one pass, and what the policy may know of them."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    enable_num_token_non_padded,
)
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import draft_tp_context
from torch import Tensor

from adasim.real.sglang_plugin.draft_head import DraftHead
from adasim.real.sglang_plugin.packing import Packed, Window, pack
from adasim.types import DraftView, FloatArray, IntArray


def draft(
    worker: Any, window: Window, head: DraftHead, draft_lens: IntArray, needs: frozenset[str]
) -> tuple[Tensor, DraftView]:
    """Draft for every request; a draft length of 0 drafts nothing.

    Args:
        worker: the DFLASH worker, for its model, embedding and runners.
        draft_lens: draft tokens [n], 0..B - 1.
        needs: what the policy asks for.
    Returns:
        candidate blocks [n, B], the anchor first, mask tokens after the drafts; and the policy's view, which comes from
        hidden states and logits alone, never from the tokens drawn.
    """
    n, block = window.positions.shape
    blocks = torch.full((n, block), int(worker._mask_token_id), dtype=torch.long, device=window.positions.device)
    blocks[:, 0] = window.batch.spec_info.bonus_tokens
    curve = np.zeros((n, block - 1)) if "survival" in needs else None
    margin = np.zeros((n, block - 1)) if "margin" in needs else None
    lengths = np.ones(n) if "accept_len" in needs else None
    if draft_lens.any():
        packed = pack(window, blocks, draft_lens + 1)
        hidden = _hidden(worker, window, packed)  # [sum of blocks, D]
        anchors = np.cumsum(draft_lens + 1) - draft_lens - 1
        rows = np.delete(np.arange(len(hidden)), anchors)  # an anchor's row predicts nothing
        with draft_tp_context(worker.draft_parallel_layout):
            drafted = head(hidden[torch.from_numpy(rows).to(hidden.device)])
        here = np.arange(block - 1) < draft_lens[:, None]
        blocks[:, 1:].masked_scatter_(torch.from_numpy(here).to(hidden.device), drafted.tokens)
        if curve is not None:
            curve[here] = drafted.confidence.double().cpu().numpy()
            curve = np.where(here, np.cumprod(np.where(here, curve, 1.0), 1), 0.0)
        if margin is not None:
            margin[here] = drafted.lead.double().cpu().numpy()
        if lengths is not None:
            lengths = _accept_lens(worker.draft_model.length_head, hidden, draft_lens, anchors, block)
    return blocks, DraftView(draft_lens, survival=curve, accept_len=lengths, margin=margin)


def _hidden(worker: Any, window: Window, packed: Packed) -> Tensor:
    """The drafter's hidden states of packed blocks [S, D]. Graphs fit whole blocks; shorter ones run eagerly."""
    tokens, batch, block = packed.tokens, window.batch, window.positions.shape[1]
    if worker._full_embed_gpu is not None:
        embedded = torch.nn.functional.embedding(tokens, worker._full_embed_gpu)
    else:
        embedded = unwrap_lora_layer(window.runner.model.get_input_embeddings())(tokens)
    if worker._noise_embed_scale != 1.0:
        embedded = embedded * worker._noise_embed_scale
    info = worker._draft_block_spec_info
    if packed.layout is not None:
        info = DFlashVerifyInput(
            draft_token=tokens[:0],
            positions=packed.positions[:0],
            draft_token_num=block,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            num_tokens_per_req=1,  # no graph has this width
            ragged_verify_layout=packed.layout,
        )
    host_lens = window.host_lens + block
    padded = enable_num_token_non_padded()
    forward = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=len(batch.seq_lens),
        input_ids=tokens,
        req_pool_indices=batch.req_pool_indices,
        seq_lens=batch.seq_lens,
        out_cache_loc=packed.slots,
        seq_lens_sum=int(host_lens.sum()),
        seq_lens_cpu=host_lens,
        positions=packed.positions,
        input_embeds=embedded,
        spec_algorithm=SpeculativeAlgorithm.DFLASH,
        spec_info=info,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        num_token_non_padded=torch.full((), len(tokens), dtype=torch.int32, device=tokens.device) if padded else None,
        global_num_token_non_padded_cpu=len(tokens),
        can_run_decode_cuda_graph=batch.can_run_decode_cuda_graph and packed.layout is None,
    )
    window.plan.bind(forward, worker.draft_model_runner.kv_index_translator, cols=packed.columns)
    with torch.inference_mode(), draft_tp_context(worker.draft_parallel_layout):
        hidden: Tensor = worker.draft_model_runner.forward(forward).logits_output.hidden_states
    return hidden[: len(tokens)]


@torch.inference_mode()
def _accept_lens(
    head: torch.nn.Module, hidden: Tensor, draft_lens: IntArray, anchors: NDArray[np.int64], block: int
) -> FloatArray:
    """The length head's estimates of the accepted length [n], the anchor counted; 1 where nothing was drafted."""
    estimates = np.ones(len(draft_lens))
    for k in np.unique(draft_lens[draft_lens > 0]):  # the head takes blocks of one length at a time
        same = np.flatnonzero(draft_lens == k)
        rows = torch.from_numpy(anchors[same, None] + 1 + np.arange(k)).to(hidden.device)
        estimates[same] = (block * head(hidden[rows].float())).double().cpu().numpy()
    return estimates
