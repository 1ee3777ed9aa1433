"""The command line and environment of a server that is started for a scenario."""

import json
import subprocess
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from adasim.errors import InputError
from adasim.real.sglang_client.process import Launch, command_line
from adasim.real.sglang_plugin import cpu
from adasim.real.sglang_plugin.settings import VARIABLE

if TYPE_CHECKING:
    from adasim.real.sglang_client.backend import SglangBackend

KEPT = 20_000  # steps that a server of one's own keeps until they are read
OURS = {  # of SGLang's arguments, those that fields of the scenario or the backend itself decide -> the field
    "model_path": "target", "speculative_draft_model_path": "drafter", "device": "device", "dtype": "dtype",
    "max_running_requests": "max_running_requests", "max_total_tokens": "kv.blocks", "page_size": "kv.block_tokens",
    "chunked_prefill_size": "max_prefill_tokens", "max_prefill_tokens": "max_prefill_tokens",
    "disable_overlap_schedule": "lag_steps", "disable_radix_cache": "", "enable_mixed_chunk": "", "host": "", "port": "",
    "speculative_algorithm": "", "enable_metrics": "", "speculative_num_draft_tokens": "drafter", "random_seed": "",
    "dp_size": "", "log_level": "",
}  # fmt: skip


def launch_of(backend: "SglangBackend") -> Launch:
    """How a server of that scenario is started: for measurements, so it takes every order."""
    gpu = backend.device == "cuda"
    arguments: dict[str, Any] = {
        "model_path": str(backend.target_folder()),
        "device": backend.device,
        "dtype": backend.dtype,
        "max_running_requests": backend.max_running_requests,
        "max_total_tokens": (backend.kv.blocks or 0) * backend.kv.block_tokens,
        "page_size": backend.kv.block_tokens,
        "chunked_prefill_size": backend.max_prefill_tokens,
        "max_prefill_tokens": backend.max_prefill_tokens,
        "disable_radix_cache": True,
        "disable_overlap_schedule": not backend.lag_steps,
        "speculative_algorithm": "ADAFLASH",
        "speculative_draft_model_path": str(backend.draft_folder()),
        "enable_metrics": True,
        "random_seed": 0,
        "log_level": "warning",
    }
    if not gpu:
        arguments |= {"attention_backend": "torch_native", "speculative_draft_attention_backend": "torch_native"}
        arguments |= {"disable_cuda_graph": True, "sleep_on_idle": True}
    settings = {"policy": {"kind": "off"}, "kept_rounds": KEPT, "experiments": True}
    own = {"SGLANG_RAGGED_VERIFY_MODE": "compact"}
    if not gpu:
        own = cpu.environment(ranks_of(backend)) | {"OMP_NUM_THREADS": str(backend.threads)}
    return Launch(command_line(arguments | backend.arguments), tuple((own | {VARIABLE: json.dumps(settings)}).items()))


def ranks_of(backend: "SglangBackend") -> int:
    """Tensor-parallel ranks of a server that is started."""
    return int(str(backend.arguments.get("tp_size") or 1))


@lru_cache
def gpu_name(tp_size: int) -> str:
    """The name of this machine's GPUs.

    Raises:
        InputError: there is none.
    """
    ask = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        name = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError) as error:
        raise InputError(f"backend.device: cuda, and no GPU is here: {error}; or give backend.url") from error
    return name if tp_size == 1 else f"{tp_size} x {name}"
