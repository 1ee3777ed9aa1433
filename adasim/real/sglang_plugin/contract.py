"""Which SGLang this plugin fits, checked by version and by the signatures it relies on, before a server starts."""

import inspect
from importlib import import_module
from importlib.metadata import version
from typing import Any

from adasim.errors import InputError

SUPPORTED = ("0.5.23",)

_SRT = "sglang.srt."
_WORKER = _SRT + "speculative.dflash_worker_v2:DFlashWorkerV2."
_PARTS = _SRT + "managers.scheduler_components."
_DSPARK = "sglang.kernels.ops.speculative.dspark.dspark_verify_window:"

SIGNATURES: dict[str, str] = {
    _SRT + "plugins.hook_registry:HookRegistry.register": "target hook hook_type source",
    _SRT + "speculative.spec_info:SpeculativeAlgorithm.register": (
        "name supports_overlap validate_server_args spec_class"
    ),
    _SRT + "speculative.spec_registry:CustomSpecAlgo.__init__": (
        "self name factory supports_overlap validate_server_args"
    ),
    _SRT + "speculative.spec_info:SpeculativeAlgorithm.create_future_map": (
        "self device req_to_token_pool needs_cpu_seq_lens needs_confidence_relay"
    ),
    _SRT + "speculative.base_spec_worker:BaseSpecWorker.on_verify_complete_cpu": (
        "self num_correct_drafts_per_req batch_size"
    ),
    _SRT + "speculative.base_spec_worker:BaseSpecWorker.note_request_finished": "self rid natural_stop",
    _WORKER + "__init__": "self server_args gpu_id nccl_port target_worker",
    _WORKER + "forward_batch_generation": "self batch on_publish grammar_barrier pp_proxy_tensors",
    _WORKER + "init_cuda_graphs": "self",
    _WORKER + "_maybe_build_draft_sampler": "self",
    _WORKER + "_init_fused_kv_helper": "self",
    _WORKER + "_draft_write_ids": "self plan",
    _WORKER + "_append_target_hidden_to_draft_kv_by_loc": (
        "self target_hidden cache_loc positions cache_loc_2d commit_lens extend_lens"
    ),
    _WORKER + "_make_next_draft_input_decode": "self bonus_tokens new_seq_lens",
    _SRT + "speculative.dflash_info:DFlashVerifyInput.__init__": (
        "self draft_token positions draft_token_num topk custom_mask capture_hidden_mode num_tokens_per_req "
        "ragged_verify_layout live_seq_lens_cpu candidate_max_seq_len_upper_bound kv_loc_plan kv_loc_cols"
    ),
    _SRT + "speculative.dflash_info:DFlashVerifyInput.prepare_for_verify": (
        "self batch target_worker defer_metadata_init"
    ),
    _SRT + "speculative.ragged_verify:RaggedVerifyLayout.from_verify_lens": (
        "verify_lens_cpu device grid graph_num_tokens_floor"
    ),
    _DSPARK + "BuildRaggedVerifyWindow.torch": (
        "batch layout draft_block_ids draft_tokens bs device verify_num_draft_tokens model_runner"
    ),
    _DSPARK + "ScatterCompactToStrided.torch": "compact layout fill_value verify_num_draft_tokens",
    _SRT + "managers.scheduler:Scheduler.flush_cache": "self empty_cache",
    _SRT + "mem_cache.kv_loc_plan:KVLocPlan.bind": "self batch reader cols",
    _SRT + "models.dflash:DFlashDraftModel.__init__": "self config quant_config prefix",
    _SRT + "models.dflash:DFlashDraftModel.forward": (
        "self input_ids positions forward_batch input_embeds get_embedding pp_proxy_tensors"
    ),
    _SRT + "models.dflash:DFlashDraftModel.load_weights": "self weights",
    _SRT + "managers.scheduler:Scheduler.run_batch": "self batch pp_proxy_tensors",
    _SRT + "managers.scheduler:Scheduler.get_new_batch_prefill": "self running_batch",
    _PARTS + "internal_state:SchedulerInternalStateController._add_speculative": "self state",
    _PARTS + "internal_state:SchedulerInternalStateController.set_internal_state": "self recv_req",
    _PARTS + "weight_updater:SchedulerWeightUpdaterManager.update_weights_from_tensor": "self recv_req",
    _PARTS + "weight_updater:SchedulerWeightUpdaterManager.end_weight_update": "self recv_req",
    _SRT + "models.dflash:DFlashAttention.__init__": "self config layer_id quant_config prefix",
    _SRT + "layers.attention.torch_native_backend:TorchNativeAttnBackend.forward_extend": (
        "self q k v layer forward_batch save_kv_cache"
    ),
}  # fmt: skip


def check(signatures: dict[str, str] | None = None, supported: tuple[str, ...] = SUPPORTED) -> None:
    """Refuse an SGLang that this plugin was not written for.

    Raises:
        InputError: the versions, and every signature that differs.
    """
    installed = version("sglang")
    problems = [p for p in (_difference(*item) for item in (signatures or SIGNATURES).items()) if p]
    if installed in supported and not problems:
        return
    head = f"ADAFLASH fits SGLang {', '.join(supported)}; SGLang {installed} is installed"
    raise InputError(head, *problems)


def _difference(where: str, expected: str) -> str | None:
    """What is different at a place, written ``module:Class.method``; None = nothing."""
    module, _, path = where.partition(":")
    try:
        found: Any = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return f"{where} is not there"
    names = " ".join(inspect.signature(found).parameters)
    return None if names == expected else f"{where} takes ({names}), expected ({expected})"
