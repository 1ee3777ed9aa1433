"""Stands in for SGLang's CUDA-only kernel package where there is no GPU: four small operations, the rest refused.

Only found when its parent folder is first on PYTHONPATH (``cpu.environment``). Submodules of the real package are plain
Python and still come from it.
"""

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from torch import Tensor, arange

__version__ = "0.4.10+cpu"
_HERE = Path(__file__).resolve().parent
__path__ += [str(p) for p in (Path(entry) / "sgl_kernel" for entry in sys.path) if p.is_dir() and p.resolve() != _HERE]


def assign_req_to_token_pool_cpu(
    rows: Tensor, table: Tensor, starts: Tensor, ends: Tensor, slots: Tensor, width: int
) -> None:
    """Write KV slots, packed request after request, into table[row, start:end]."""
    at = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = slots[at : at + end - start].to(table.dtype)
        at += end - start


def assign_extend_cache_locs_cpu(
    rows: Tensor, table: Tensor, starts: Tensor, ends: Tensor, slots: Tensor, width: int
) -> None:
    """Read KV slots from table[row, start:end], packed request after request."""
    at = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        slots[at : at + end - start] = table[row, start:end].to(slots.dtype)
        at += end - start


def fill_bonus_tokens_cpu(tokens: Tensor, accept_lens: Tensor, bonus: Tensor, stride: int) -> None:
    """The last token of each request's accepted run."""
    bonus.copy_(tokens[arange(accept_lens.numel()) * stride + accept_lens.long() - 1].to(bonus.dtype))


def copy_all_layer_kv_cache_cpu(pointers: Tensor, strides: Tensor, targets: Tensor, sources: Tensor) -> None:
    """Move KV rows of every layer; all are read before any is written."""
    for pointer, stride in zip(pointers.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(pointer + s * stride, stride) for s in sources.tolist()]
        for target, row in zip(targets.tolist(), rows, strict=True):
            ctypes.memmove(pointer + target * stride, row, stride)


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU")

    return missing
