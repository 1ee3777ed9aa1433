"""Replace drafter and length head of a running engine, while its requests wait in place. The target is never touched.

SGLang's other way, loading from disk, has no selector and would overwrite the target: it must not be used for drafters.
"""

import asyncio
import time
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from torch import Tensor
from torch.multiprocessing import get_sharing_strategy, set_sharing_strategy

from adasim.errors import InputError
from adasim.real.checkpoint import HEAD_PREFIX, Checkpoint, load_checkpoint, misfits
from adasim.real.sglang_plugin.link import EngineLink, Link


async def reload_drafter(manager: Any, folder: Path, version: str) -> None:
    """Load a checkpoint's drafter and head into a running engine.

    Args:
        manager: the engine's ``tokenizer_manager``.
        folder: a draft checkpoint, of the same shape, head and draft vocabulary as the one that is served.
        version: name under which requests report the weights they were drafted with; rounds record it when it is a
            number.

    Raises:
        InputError: what is wrong with the checkpoint: it was not sent, or was refused; the old one goes on.
    """
    link = EngineLink(manager)
    served = await link.served()
    new = await asyncio.to_thread(fitting, folder, served.drafter)  # others are served meanwhile
    swapped = await swap(link, new, version, served.ranks)
    if swapped.problems:
        raise InputError(*(f"drafter {str(folder)!r}: {p}" for p in swapped.problems))


class Swapped(NamedTuple):
    """How a change of drafters went."""

    problems: list[str]  # empty = it is in use
    end_s: float  # when requests were told to go on, monotonic seconds
    paused_s: float  # for so long they had been asked to wait


async def swap(link: Link, new: Checkpoint, version: str, ranks: int) -> Swapped:
    """Put a checkpoint that fits in the place of the one in use."""
    payload, shared = await asyncio.to_thread(_payload, new, ranks)
    begin_s = time.monotonic()
    await link.pause()
    try:
        problems = await _update(link, payload, version)
        end_s = time.monotonic()
    finally:
        await link.resume()
        shared.clear()
    return Swapped(problems, end_s, end_s - begin_s)


async def _update(link: Link, payload: list[bytes], version: str) -> list[str]:
    """Send it; what went wrong."""
    begun, said = await link.begin()
    if not begun:
        return [f"the server began no update: {said}"]
    try:
        done, said = await link.update(payload, version)
        problems = [] if done else said.splitlines() or ["the server refused it and did not say why"]
    finally:
        ended, said = await link.end()
    return problems if ended else [*problems, f"the server did not end the update: {said}"]


def fitting(folder: Path, served: Path) -> Checkpoint:
    """A checkpoint that can take the place of the one in ``served``.

    Raises:
        InputError: it cannot be read, is damaged, or has another shape, head or draft vocabulary.
    """
    try:
        new = load_checkpoint(folder)
    except SafetensorError as error:
        raise InputError(f"drafter {str(folder)!r}: model.safetensors cannot be read: {error}") from error
    problems = misfits(new, load_checkpoint(served))
    if problems:
        raise InputError(*(f"drafter {str(folder)!r}: {p}" for p in problems))
    return new


def _payload(new: Checkpoint, ranks: int) -> tuple[list[bytes], list[tuple[str, Tensor]]]:
    """What is sent to each rank: places of tensors in shared memory; and those tensors, which must live until it is read.

    By names of files, not by descriptors: those only travel between processes of one family. Copies, since a checkpoint
    lives on: at its process's end its files would need their keeper, which SGLang's engine kills with all its children.
    """
    named = new.weights | {HEAD_PREFIX + k: w for k, w in new.head.items()}
    tensors = [(name, weight.clone()) for name, weight in named.items()]
    usual = get_sharing_strategy()  # type: ignore[no-untyped-call]
    set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    try:
        return [bytes(ForkingPickler.dumps(tensors)) for _ in range(ranks)], tensors
    finally:
        set_sharing_strategy(usual)  # type: ignore[no-untyped-call]
