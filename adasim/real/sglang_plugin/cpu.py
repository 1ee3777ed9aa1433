"""Makes SGLang's DFLASH family run without a GPU, for tests: off unless ``ADASIM_SGLANG_CPU=1``.

SGLang 0.5.23 has a CPU engine, but not for this family. Needs ``environment()`` in the server's environment, and
``attention_backend="torch_native"`` for target and drafter.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

SWITCH = "ADASIM_SGLANG_CPU"


def asked_for() -> bool:
    """Whether the environment switches it on."""
    return os.environ.get(SWITCH) == "1"


def environment(ranks: int = 1) -> dict[str, str]:
    """What a server without a GPU needs in its environment, before its first import of SGLang."""
    here, old = str(Path(__file__).parent / "cpu_path"), os.environ.get("PYTHONPATH", "")
    return {
        SWITCH: "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0"] * ranks),
        "SGLANG_NCCL_SO_PATH": "none",  # several ranks would take a library that is there for one that can be used
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": here if not old else f"{here}{os.pathsep}{old}",
    }


def install() -> None:
    """Register the hooks; SGLang applies them when all plugins are loaded."""
    import torch
    from sglang.srt.arg_groups import choices, speculative_hook
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if "torch_native" not in choices.DRAFT_ATTENTION_BACKEND_CHOICES:
        choices.add_draft_attention_backend_choices(["torch_native"])
    speculative_hook.current_platform = _Platform(speculative_hook.current_platform)
    torch.Tensor.record_stream = _no_stream  # type: ignore[method-assign, assignment]
    backend = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    HookRegistry.register(f"{backend}.forward_extend", _verify_as_extend, HookType.AROUND)
    HookRegistry.register("sglang.srt.models.dflash.DFlashAttention.__init__", _without_triton, HookType.AFTER)
    HookRegistry.register("sglang.srt.models.dflash.DFlashDraftModel.forward", _in_its_own_type, HookType.BEFORE)


class _Platform:
    """SGLang's platform, as its check of DFLASH's arguments sees it."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def is_out_of_tree(self) -> bool:
        return True

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return True

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return backend == "torch_native"

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return "torch_native"


def _no_stream(self: Any, stream: Any) -> None:
    """A CPU has no streams to tell the allocator about."""


def _verify_as_extend(
    original: Callable[..., Any], self: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kw: Any
) -> Any:
    """The torch backend does not know TARGET_VERIFY: run it as an extension of the prefix by the block."""
    import torch

    batch = forward_batch
    if not batch.forward_mode.is_target_verify():
        return original(self, q, k, v, layer, batch, *args, **kw)
    layout = batch.spec_info.ragged_verify_layout
    old = batch.seq_lens, batch.extend_prefix_lens, batch.extend_seq_lens
    prefix = old[0].to(torch.int64)
    lengths = torch.full_like(prefix, batch.spec_info.draft_token_num) if layout is None else layout.verify_lens.long()
    batch.seq_lens, batch.extend_prefix_lens, batch.extend_seq_lens = prefix + lengths, prefix, lengths
    try:
        return original(self, q, k, v, layer, batch, *args, **kw)
    finally:
        batch.seq_lens, batch.extend_prefix_lens, batch.extend_seq_lens = old


def _without_triton(result: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Norm and rotation of queries and keys one after the other, not in a Triton kernel."""
    self.use_table_qk_norm_rope = False


def _in_its_own_type(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """SGLang casts embeddings to bf16 on the way to the drafter; stock DFLASH in fp32 needs them back."""
    model, embeds = args[0], kwargs.get("input_embeds")
    if embeds is not None:
        kwargs["input_embeds"] = embeds.to(model.norm.weight.dtype)
    return args, kwargs
