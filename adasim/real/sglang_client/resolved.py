"""What a server resolved its arguments to, against what the scenario says: all differences at once."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from adasim import __version__
from adasim.real.asked import config_sha256

if TYPE_CHECKING:
    from adasim.real.sglang_client.backend import SglangBackend

ALSO = (  # of SGLang's resolved arguments: what else decides times, kept beside results
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "speculative_draft_attention_backend",
    "tp_size",
    "quantization",
    "kv_cache_dtype",
    "disable_cuda_graph",
    "mem_fraction_static",
    "schedule_policy",
    "schedule_conservativeness",
    "context_length",
)


def differences(backend: "SglangBackend", info: Mapping[str, Any]) -> list[str]:
    """How a server differs from the scenario, a line each; empty = it is the one that was meant.

    Args:
        backend: what the scenario says.
        info: ``Api.info``.
    """
    own = info["adasim"]
    overlap = 0 if info.get("disable_overlap_schedule") else 1
    compared: list[tuple[str, object, object]] = [
        ("max_running_requests", backend.max_running_requests, own["max_running_requests"]),
        ("kv.block_tokens", backend.kv.block_tokens, own["page_size"]),
        ("kv.blocks", backend.kv.blocks, own["kv_tokens"] // own["page_size"]),
        ("captured_tokens", backend.captured_tokens, own["captured_tokens"]),
        ("drafter (its block)", backend.caps().block, own["block"]),
        ("drafter (its config.json)", config_sha256(backend.draft_folder()), own["drafter_config_sha256"]),
        ("target (its config.json)", config_sha256(backend.target_folder()), own["target_config_sha256"]),
        ("dtype", backend.dtype, own["dtype"]),
        ("device", backend.device, own["device"]),
        ("lag_steps (1 = overlapped scheduling)", backend.lag_steps, overlap),
        ("max_prefill_tokens", backend.max_prefill_tokens, info.get("chunked_prefill_size")),
        ("prefix cache", False, not info.get("disable_radix_cache")),
        ("mixed chunks", False, bool(info.get("enable_mixed_chunk"))),
        ("adasim", __version__, own["adasim"]),
        ("drafter (its version, 0 = as it was started with)", 0, own.get("draft_version")),
        ("opd (where it shows rounds to a trainer)", None, ((own.get("opd") or {}).get("settings") or {}).get("folder")),
    ]
    if backend.device == "cpu":
        compared.append(("threads", backend.threads, own["threads"]))
    return [
        f"{name}: {_short(mine)}, the server has {_short(theirs)}" for name, mine, theirs in compared if mine != theirs
    ]


def resolved(info: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept beside results: limits that were found, and arguments that decide times."""
    own = info["adasim"]
    limits = {name: own[name] for name in ("max_running_requests", "kv_tokens", "page_size", "captured_tokens", "block")}
    more = {
        "torch": own["torch"],
        "chunked_prefill_size": info.get("chunked_prefill_size"),
        "disable_overlap_schedule": info.get("disable_overlap_schedule"),
        "disable_radix_cache": info.get("disable_radix_cache"),
    }
    return limits | more | {name: info.get(name) for name in ALSO}


def _short(value: object) -> str:
    return value[:12] if isinstance(value, str) and len(value) == 64 else str(value)
