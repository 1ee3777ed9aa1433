"""Models that stay in memory between the runs of one process: loading them takes longer than many a run.

One target and one drafter at a time. Nobody changes their weights: a trainer is a process of its own.
"""

from functools import lru_cache
from pathlib import Path

import torch

from adasim.real.checkpoint import Checkpoint, load_checkpoint
from adasim.real.draft import Drafter, ready
from adasim.real.length_head import PaperHead, ReleasedHead
from adasim.real.target import Target
from adasim.real.weights import RANDOM, load_target, model_dir

Stamp = tuple[tuple[str, int, int], ...]  # name, size and time of every file of a folder


def keep_target(name: str, dtype: torch.dtype, device: torch.device) -> Target:
    """The target of that name; see ``weights.load_target``."""
    return _target(name, dtype, device, () if name in RANDOM else _stamp(model_dir(name)))


def keep_checkpoint(folder: Path, dtype: torch.dtype) -> Checkpoint:
    """The checkpoint in a folder; see ``checkpoint.load_checkpoint``."""
    return _checkpoint(folder, dtype, _stamp(folder))


def keep_ready(folder: Path, target: Target) -> tuple[Drafter, PaperHead | ReleasedHead | None]:
    """Drafter and head of the checkpoint in a folder, beside a target; see ``draft.ready``."""
    return _ready(folder, target, _stamp(folder))


def _stamp(folder: Path) -> Stamp:
    """Changes when a file of the folder does."""
    return tuple((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(folder.glob("*")))


@lru_cache(maxsize=1)
def _target(name: str, dtype: torch.dtype, device: torch.device, stamp: Stamp) -> Target:
    return load_target(name, dtype, device)


@lru_cache(maxsize=1)
def _checkpoint(folder: Path, dtype: torch.dtype, stamp: Stamp) -> Checkpoint:
    return load_checkpoint(folder, dtype)


@lru_cache(maxsize=1)
def _ready(folder: Path, target: Target, stamp: Stamp) -> tuple[Drafter, PaperHead | ReleasedHead | None]:
    return ready(_checkpoint(folder, target.dtype, stamp), target)
