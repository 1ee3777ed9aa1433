"""Trying distillation settings on buffers that a run kept: what would another loss have made of the same traffic?

Buffers are trained on in order, the last ones are never trained on and judge every version: tau as full-block
greedy speculation would walk through their texts. They must have been served greedily.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from adasim.errors import InputError
from adasim.real.checkpoint import load_checkpoint
from adasim.real.evaluate import Tau, evaluate
from adasim.real.opd import Opd
from adasim.real.opd_process import Folder, make_teacher
from adasim.real.samples import read_samples
from adasim.real.train_opd import OpdTrainer, Progress


@dataclass(frozen=True, slots=True)
class Tried:
    """A version and how it does on the buffers that were held out."""

    buffer: int  # trained on last; 0 = the drafter before any training
    train_s: float
    progress: Progress | None
    tau: dict[str, Tau]  # by domain


def kept_settings(kept: Path) -> tuple[Folder, dict[str, Any]]:
    """A folder that a run kept, and what it says of itself.

    Raises:
        InputError: it holds no buffers to train on and judge by.
    """
    folder = Folder(kept)
    if not (kept / "settings.json").is_file():
        raise InputError(f"{kept}: holds no settings.json; give the folder of one run under backend.opd.keep")
    return folder, json.loads((kept / "settings.json").read_text())


def replay(kept: Path, opd: Opd, hold: int = 1) -> Iterator[Tried]:
    """Train on all buffers but the last ``hold``, one after the other, from the drafter the run began with.

    Raises:
        InputError: too few buffers, or they were not served greedily.
    """
    from safetensors.torch import load_file

    folder, said = kept_settings(kept)
    buffers = sorted(folder.buffers.glob("[0-9]*.npz"))
    problems = []
    if len(buffers) <= hold:
        problems.append(f"{kept}: {len(buffers)} buffers; at least {hold + 1} are needed to hold out {hold}")
    if said["sampling"]["temperature"] > 0:
        problems.append(f"{kept}: sampled at temperature {said['sampling']['temperature']}; only greedy text can judge")
    if opd.positions == "all" and said["opd"]["positions"] != "all":
        problems.append(
            f"{kept}: positions: all needs what the target said behind rejected drafts; only a run with it keeps that"
        )
    if problems:
        raise InputError(*problems)
    base = load_checkpoint(kept / "base")
    frozen = load_file(kept / "frozen.safetensors")
    teacher = make_teacher(said, opd, base, frozen["embedding"].dtype, torch.device("cpu"))
    trainer = OpdTrainer(opd, base, frozen["embedding"], frozen["head"], teacher)
    judges = [s.lesson for path in buffers[-hold:] for s in read_samples(path)]

    def tau() -> dict[str, Tau]:
        now = trainer.checkpoint()
        weights = {k: w.to(frozen["embedding"].dtype) for k, w in now.weights.items()}
        return evaluate(
            now.shape, weights, frozen["embedding"], frozen["head"], trainer.vocab, judges, said["domains"]
        )  # fmt: skip

    yield Tried(0, 0.0, None, tau())
    for number, path in enumerate(buffers[:-hold], 1):
        start = time.monotonic()
        progress = trainer.train(read_samples(path))
        yield Tried(number, time.monotonic() - start, progress, tau())
