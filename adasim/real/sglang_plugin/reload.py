"""Replace drafter and length head of a running engine, while its requests wait in place. The target is never touched.

SGLang's other way, loading from disk, has no selector and would overwrite the target: it must not be used for drafters.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from adasim.errors import InputError
from adasim.real.checkpoint import HEAD_PREFIX, Checkpoint, load_checkpoint, read_shape


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
    from sglang.srt.utils import MultiprocessingSerializer

    checkpoint = fitting(folder, Path(manager.server_args.speculative_draft_model_path))
    tensors = list((checkpoint.weights | {HEAD_PREFIX + k: w for k, w in checkpoint.head.items()}).items())
    payload = [MultiprocessingSerializer.serialize(tensors) for _ in range(manager.server_args.tp_size)]
    await manager.pause_generation(io.PauseGenerationReqInput(mode="in_place"))
    try:
        await manager.begin_weight_update(io.BeginWeightUpdateReqInput(selector="draft"))
        try:
            update = io.UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=payload, flush_cache=False, selector="draft", weight_version=version
            )
            done, message = await manager.update_weights_from_tensor(update)
        finally:
            await manager.end_weight_update(io.EndWeightUpdateReqInput())
    finally:
        await manager.continue_generation(io.ContinueGenerationReqInput(torch_empty_cache=False))
    if not done:
        raise InputError(*(f"drafter {str(folder)!r}: {line}" for line in message.splitlines()))


def fitting(folder: Path, served: Path) -> Checkpoint:
    """A checkpoint that can take the place of the one in ``served``.

    Raises:
        InputError: it cannot be read, is damaged, or has another shape, head or draft vocabulary.
    """
    try:
        new = load_checkpoint(folder)
    except SafetensorError as error:
        raise InputError(f"drafter {str(folder)!r}: model.safetensors cannot be read: {error}") from error
    old = read_shape(json.loads((served / "config.json").read_text()), served)
    problems = []
    if new.shape != old:
        problems.append(f"its shape is {new.shape}; served is {old}")
    ids = served / "draft_vocab.npy"
    if (new.vocab is not None) != ids.is_file() or (new.vocab is not None and not _same(new.vocab, ids)):
        problems.append(f"its draft vocabulary is not the one of {served}")
    problems += [f"{HEAD_PREFIX}{k} holds values that are not finite" for k, w in new.head.items() if not _finite(w)]
    if problems:
        raise InputError(*(f"drafter {str(folder)!r}: {p}" for p in problems))
    return new


def _same(vocab: torch.Tensor, ids: Path) -> bool:
    import numpy as np

    return bool(np.array_equal(vocab.numpy(), np.load(ids)))


def _finite(weights: torch.Tensor) -> bool:
    return bool(torch.isfinite(weights).all())
