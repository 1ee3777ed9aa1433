"""The second half of a round: the target over blocks cut to their lengths, in one packed forward."""

from typing import Any

import torch
from sglang.kernels.ops.speculative.dspark.dspark_verify_window import ScatterCompactToStrided
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dflash_utils import apply_dflash_verify_logits_adjustments
from torch import Tensor

from adasim.real.sglang_plugin.packing import Window, pack
from adasim.types import IntArray


def verify(worker: Any, window: Window, candidates: Tensor, verify_lens: IntArray) -> tuple[Any, bool]:
    """Run the target over the first ``verify_lens`` [n] tokens of candidate blocks [n, B].

    Returns:
        its output, and whether a graph ran. Logits and hidden states are spread to rows [n * B, ...], zeros behind a
        block's length; penalties, biases and the like are applied.
    """
    batch, block = window.batch, candidates.shape[1]
    sizes = graph_sizes(window.runner)
    packed = pack(window, candidates, verify_lens, sizes)
    eager = packed.layout is not None and sizes is None  # graphs of whole blocks go by width alone: they must not fit
    info = DFlashVerifyInput(
        draft_token=packed.tokens,
        positions=packed.positions,
        draft_token_num=block,
        custom_mask=None,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        num_tokens_per_req=1 if eager else block,
        ragged_verify_layout=packed.layout,
        live_seq_lens_cpu=batch.seq_lens_cpu,
        kv_loc_plan=window.plan,
        kv_loc_cols=packed.columns,
    )
    batch.out_cache_loc = packed.slots
    old = batch.seq_lens_cpu, batch.seq_lens_sum
    batch.seq_lens_cpu = window.host_lens + torch.from_numpy(verify_lens).to(window.host_lens.dtype)
    batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
    forward, _ = info.prepare_for_verify(batch, worker.target_worker)
    batch.seq_lens_cpu, batch.seq_lens_sum = old
    result = worker.target_worker.forward_batch_generation(
        batch=None, forward_batch=forward, is_verify=True, skip_attn_backend_init=True
    )
    output, processor = result.logits_output, worker._target_logits_processor
    if processor is not None and processor.is_deferred_shard(output.next_token_logits):
        output.next_token_logits = processor.finish_deferred_gather(output.next_token_logits)
    if packed.layout is not None:
        output.next_token_logits = _spread(output.next_token_logits, packed.layout, block)
        output.hidden_states = _spread(output.hidden_states, packed.layout, block)
    apply_dflash_verify_logits_adjustments(
        next_token_logits=output.next_token_logits, sampling_info=batch.sampling_info, draft_token_num=block
    )
    return output, bool(result.can_run_cuda_graph)


def graph_sizes(runner: Any) -> list[int] | None:
    """Numbers of tokens that the target's graphs were captured for; None = none is keyed by tokens."""
    graphs = runner.decode_cuda_graph_runner
    if graphs is None or not graphs.ragged_verify_mode:
        return None
    return list(graphs.capture_num_tokens)


def _spread(rows: Tensor, layout: Any, block: int) -> Tensor:
    spread: Tensor = ScatterCompactToStrided.execute(
        compact=rows, layout=layout, fill_value=0.0, verify_num_draft_tokens=block
    )
    return spread
