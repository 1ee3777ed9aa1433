"""Models that stay in memory between the runs of one process: loading them takes longer than many a run.

One target and one drafter at a time: what is kept goes before another is loaded, as both may not fit. Nobody changes
their weights: a trainer is a process of its own.
"""

from pathlib import Path

import torch

from adasim.real.checkpoint import Checkpoint, load_checkpoint
from adasim.real.draft import Drafter, ready
from adasim.real.length_head import PaperHead, ReleasedHead
from adasim.real.target import Target
from adasim.real.weights import RANDOM, Stamp, load_target, model_dir, stamp

Ready = tuple[Drafter, PaperHead | ReleasedHead | None]

_target: dict[tuple[str, torch.dtype, torch.device, Stamp], Target] = {}
_checkpoint: dict[tuple[Path, torch.dtype, Stamp], Checkpoint] = {}
_ready: dict[tuple[Path, Target, Stamp], Ready] = {}  # holds target and checkpoint


def keep_target(name: str, dtype: torch.dtype, device: torch.device) -> Target:
    """The target of that name; see ``weights.load_target``."""
    key = name, dtype, device, () if name in RANDOM else stamp(model_dir(name))
    if key not in _target:
        _ready.clear()
        _target.clear()
        _target[key] = load_target(name, dtype, device)
    return _target[key]


def keep_checkpoint(folder: Path, dtype: torch.dtype) -> Checkpoint:
    """The checkpoint in a folder; see ``checkpoint.load_checkpoint``."""
    key = folder, dtype, stamp(folder)
    if key not in _checkpoint:
        _ready.clear()
        _checkpoint.clear()
        _checkpoint[key] = load_checkpoint(folder, dtype)
    return _checkpoint[key]


def keep_ready(folder: Path, target: Target) -> Ready:
    """Drafter and head of the checkpoint in a folder, beside a target; see ``draft.ready``."""
    key = folder, target, stamp(folder)
    if key not in _ready:
        _ready.clear()
        _ready[key] = ready(keep_checkpoint(folder, target.dtype), target)
    return _ready[key]
