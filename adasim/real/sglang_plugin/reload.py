"""Replace drafter and length head of a running engine, while its requests wait in place. The target is never touched.

SGLang's other way, loading from disk, has no selector and would overwrite the target: it must not be used for drafters.
"""

import asyncio
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from adasim.errors import InputError
from adasim.real.checkpoint import HEAD_PREFIX, Checkpoint, check_tensors, load_checkpoint, read_config, read_shape


async def reload_drafter(manager: Any, folder: Path, version: str) -> None:
    """Load a checkpoint's drafter and head into a running engine.

    Args:
        manager: the engine's ``tokenizer_manager``.
        folder: a draft checkpoint, of the same shape and draft vocabulary as the one that is served.
        version: name under which requests report the weights they were drafted with.

    Raises:
        InputError: what is wrong with the checkpoint: it was not sent, or was refused; the old one goes on.
    """
    from sglang.srt.managers import io_struct as io

    args = manager.server_args
    served = Path(args.speculative_draft_model_path)
    payload = await asyncio.to_thread(_payload, folder, served, args.tp_size)  # others are served meanwhile
    update = io.UpdateWeightsFromTensorReqInput(
        serialized_named_tensors=payload, flush_cache=False, selector="draft", weight_version=version
    )
    await manager.pause_generation(io.PauseGenerationReqInput(mode="in_place"))
    try:
        problems = await _send(manager, update)
    finally:
        await manager.continue_generation(io.ContinueGenerationReqInput(torch_empty_cache=False))
    if problems:
        raise InputError(*(f"drafter {str(folder)!r}: {p}" for p in problems))


async def _send(manager: Any, update: Any) -> list[str]:
    """One session of a weight update; what went wrong, empty when nothing did."""
    from sglang.srt.managers import io_struct as io

    begun, said = await manager.begin_weight_update(io.BeginWeightUpdateReqInput(selector="draft"))
    if not begun:
        return [f"the server began no update: {said}"]
    try:
        done, said = await manager.update_weights_from_tensor(update)
        problems = [] if done else said.splitlines() or ["the server refused it and did not say why"]
    finally:
        ended, said = await manager.end_weight_update(io.EndWeightUpdateReqInput())
    return problems if ended else [*problems, f"the server did not end the update: {said}"]


def _payload(folder: Path, served: Path, ranks: int) -> list[Any]:
    """What is sent to each rank, when it fits."""
    from sglang.srt.utils import MultiprocessingSerializer

    checkpoint = fitting(folder, served)
    tensors = list((checkpoint.weights | {HEAD_PREFIX + k: w for k, w in checkpoint.head.items()}).items())
    return [MultiprocessingSerializer.serialize(tensors) for _ in range(ranks)]


def fitting(folder: Path, served: Path) -> Checkpoint:
    """A checkpoint that can take the place of the one in ``served``.

    Raises:
        InputError: it cannot be read, is damaged, or has another shape, head or draft vocabulary.
    """
    try:
        new = load_checkpoint(folder)
    except SafetensorError as error:
        raise InputError(f"drafter {str(folder)!r}: model.safetensors cannot be read: {error}") from error
    old = read_shape(read_config(served), served)
    problems = []
    if new.shape != old:
        problems.append(f"its shape is {new.shape}; served is {old}")
    ids = served / "draft_vocab.npy"
    if (new.vocab is not None) != ids.is_file() or (new.vocab is not None and not _same(new.vocab, ids)):
        problems.append(f"its draft vocabulary is not the one of {served}")
    problems += check_tensors(_head_sizes(served), {HEAD_PREFIX + k: w for k, w in new.head.items()})
    if problems:
        raise InputError(*(f"drafter {str(folder)!r}: {p}" for p in problems))
    return new


def _head_sizes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint's length head."""
    sizes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            names = [k for k in file.keys() if k.startswith(HEAD_PREFIX)]  # noqa: SIM118
            sizes |= {k: tuple(file.get_slice(k).get_shape()) for k in names}
    return sizes


def _same(vocab: torch.Tensor, ids: Path) -> bool:
    import numpy as np

    return bool(np.array_equal(vocab.numpy(), np.load(ids)))
