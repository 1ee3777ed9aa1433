"""Blocks of a round in SGLang's terms: where they lie, and how they are cut and packed.

``n`` requests, ``B`` positions of a block, ``S`` the sum of lengths (more when a graph's size is filled up).
"""

from dataclasses import dataclass
from typing import Any

from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_func
from sglang.kernels.ops.speculative.dspark.dspark_verify_window import BuildRaggedVerifyWindow
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout
from torch import Tensor, tensor

from adasim.types import IntArray


@dataclass(slots=True)
class Window:
    """Positions and KV slots of every request's whole block; drafting, verifying and absorbing all write there."""

    batch: Any
    runner: Any  # the target's ModelRunner
    positions: Tensor  # [n, B]
    slots: Tensor  # [n, B]
    host_lens: Tensor  # [n] upper bounds of committed lengths, on the host
    plan: Any  # KVLocPlan


@dataclass(slots=True)
class Packed:
    """Blocks cut to their lengths, one behind the other."""

    layout: RaggedVerifyLayout | None  # None: all are whole
    tokens: Tensor  # [S]
    positions: Tensor  # [S]
    slots: Tensor  # [S]
    columns: Tensor | None  # [S] which entry of [n, B] each is; -1 in a filled-up tail


def open_window(batch: Any, runner: Any, offsets: Tensor) -> Window:
    """The window of a decoding batch. Args: offsets: 0..B - 1."""
    prefix, n, block = batch.seq_lens, len(batch.seq_lens), len(offsets)
    slots = assign_extend_cache_locs_func(
        req_pool_indices=batch.req_pool_indices,
        req_to_token=runner.req_to_token_pool.req_to_token,
        start_offset=prefix,
        end_offset=prefix + block,
        batch_size=n,
        draft_token_num=block,
        device=runner.device,
    )
    host_lens = batch.seq_lens_cpu if batch.seq_lens_cpu is not None else batch.spec_info.nxt_kv_lens_cpu
    if host_lens is None:
        host_lens = tensor([r.kv.kv_allocated_len for r in batch.reqs])
    plan = runner.kv_index_translator.plan(
        req_pool_indices=batch.req_pool_indices,
        seq_lens=prefix,
        seq_lens_cpu=host_lens,
        write_virtual=slots,
        read_extent=block,
    )
    return Window(batch, runner, prefix[:, None] + offsets, slots.view(n, block), host_lens, plan)


def pack(window: Window, blocks: Tensor, lengths: IntArray, sizes: list[int] | None = None) -> Packed:
    """Cut blocks [n, B] to their lengths [n], 1..B. Args: sizes: numbers of tokens that graphs were captured for."""
    n, block = blocks.shape
    total = int(lengths.sum())
    if sizes is None and total == n * block:
        return Packed(None, blocks.reshape(-1), window.positions.reshape(-1), window.slots.reshape(-1), None)
    fits = sizes is not None and total <= sizes[-1]
    layout = RaggedVerifyLayout.from_verify_lens(
        verify_lens_cpu=lengths.tolist(), device=blocks.device, grid=sizes if fits else [total]
    )
    packed = BuildRaggedVerifyWindow.execute(
        batch=window.batch,
        layout=layout,
        draft_block_ids=blocks[:, :-1],  # read for its anchors only, at the stride of ``draft_tokens``
        draft_tokens=blocks[:, 1:],
        bs=n,
        device=window.runner.device,
        verify_num_draft_tokens=block,
        model_runner=window.runner,
    )
    return Packed(layout, packed.verify_ids, packed.positions, packed.verify_cache_loc, packed.window_index)
