"""Draft checkpoints in the public DFlash layout, with our extras beside it.

``config.json`` and ``model.safetensors`` are what DFlash loaders expect: no embedding, no head. Extras:
``draft_vocab.npy`` (sorted token ids that may be drafted) and, under ``length_head.*``, the length head; then
``architectures`` says AdaFlashDraftModel.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adasim.errors import InputError
from adasim.real.drafter import DrafterShape, Weights
from adasim.real.layers import Arch
from adasim.real.weights import load_weights

HEAD_PREFIX = "length_head."
NEEDED = (
    "block_size", "num_target_layers", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size", "rms_norm_eps", "max_position_embeddings",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A drafter on disk, with what belongs to it."""

    shape: DrafterShape
    weights: Weights
    vocab: Tensor | None = None  # sorted token ids it may draft; None = all
    head: Weights = field(default_factory=dict)  # length head's weights; empty = none


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write bf16 weights, config and extras into ``folder``."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    named = checkpoint.weights | {HEAD_PREFIX + k: w for k, w in checkpoint.head.items()}
    tensors = {k: w.detach().to("cpu", torch.bfloat16).contiguous() for k, w in named.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config(checkpoint), indent=1) + "\n")
    if checkpoint.vocab is not None:
        np.save(folder / "draft_vocab.npy", checkpoint.vocab.cpu().numpy().astype(np.int32))


def load_checkpoint(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Checkpoint:
    """Read and check a draft checkpoint.

    Raises InputError: no config, wrong or missing tensors (every one is named), or values that are not finite.
    """
    shape = read_shape(read_config(folder), folder)
    tensors = load_weights(folder, dtype)
    head = {k.removeprefix(HEAD_PREFIX): w for k, w in tensors.items() if k.startswith(HEAD_PREFIX)}
    weights = {k: w for k, w in tensors.items() if not k.startswith(HEAD_PREFIX)}
    problems = check_weights(shape, weights)
    if problems:
        raise InputError(*(f"drafter {str(folder)!r}: {p}" for p in problems))
    ids = folder / "draft_vocab.npy"
    vocab = torch.from_numpy(np.load(ids).astype(np.int64)) if ids.is_file() else None
    return Checkpoint(shape, weights, vocab, head)


def read_config(folder: Path) -> dict[str, Any]:
    """A checkpoint's config. Raises InputError: there is none, or it is no JSON object."""
    if not (folder / "config.json").is_file():
        raise InputError(f"drafter {str(folder)!r}: no such folder with a config.json")
    try:
        config = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        raise InputError(f"drafter {str(folder)!r}: config.json is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise InputError(f"drafter {str(folder)!r}: config.json holds no object")
    return config


def check_weights(shape: DrafterShape, weights: Weights) -> list[str]:
    """What is wrong with these weights for this shape; empty when nothing is."""
    return check_tensors(shape.sizes(), weights)


def check_tensors(sizes: Mapping[str, tuple[int, ...]], weights: Weights) -> list[str]:
    """What is wrong with tensors that should have these names and sizes; empty when nothing is."""
    problems = [f"tensor {k!r} is missing" for k in sizes if k not in weights]
    problems += [f"tensor {k!r} is unknown" for k in weights if k not in sizes]
    for name, size in sizes.items():
        w = weights.get(name)
        if w is not None and tuple(w.shape) != size:
            problems.append(f"tensor {name!r} has shape {list(w.shape)}, expected {list(size)}")
        elif w is not None and not bool(torch.isfinite(w).all()):
            problems.append(f"tensor {name!r} holds values that are not finite")
    return problems


def misfits(new: Checkpoint, old: Checkpoint) -> list[str]:
    """Why a checkpoint cannot take the place of another in a running engine; empty when it can."""
    problems = []
    if new.shape != old.shape:
        problems.append(f"its shape is {new.shape}; in use is {old.shape}")
    if not torch.equal(_drafted(new), _drafted(old)):
        problems.append("its draft vocabulary is not the one of the drafter in use")
    sizes = {HEAD_PREFIX + k: tuple(w.shape) for k, w in old.head.items()}
    return problems + check_tensors(sizes, {HEAD_PREFIX + k: w for k, w in new.head.items()})


def _drafted(checkpoint: Checkpoint) -> Tensor:
    """Token ids it may draft."""
    return torch.arange(checkpoint.shape.arch.vocab) if checkpoint.vocab is None else checkpoint.vocab.cpu()


def _config(checkpoint: Checkpoint) -> dict[str, Any]:
    shape, a = checkpoint.shape, checkpoint.shape.arch
    return {
        "architectures": ["AdaFlashDraftModel" if checkpoint.head else "DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": a.hidden,
        "intermediate_size": a.intermediate,
        "num_hidden_layers": a.layers,
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.kv_heads,
        "head_dim": a.head_dim,
        "vocab_size": a.vocab,
        "max_position_embeddings": a.max_context,
        "rms_norm_eps": a.eps,
        "rope_theta": a.rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "layer_types": ["full_attention"] * a.layers,
        "use_sliding_window": False,
        "num_target_layers": shape.target_layers,
        "block_size": shape.block,
        "dflash_config": {"mask_token_id": shape.mask_token, "target_layer_ids": list(shape.taps)},
    }


def read_shape(config: dict[str, Any], folder: Path) -> DrafterShape:
    """The drafter's shape in a checkpoint's config. Raises InputError: what is missing or not supported."""
    inner = config.get("dflash_config") or {}
    rope = config.get("rope_parameters") or {}
    needed = [k for k in NEEDED if k not in config]
    needed += [] if rope.get("rope_theta") or "rope_theta" in config else ["rope_theta"]
    needed += [f"dflash_config.{k}" for k in ("mask_token_id", "target_layer_ids") if k not in inner]
    if needed:
        raise InputError(*(f"drafter {str(folder)!r}: config.json lacks {k}" for k in needed))
    if (folder / "mask_embedding.pt").exists():
        raise InputError(f"drafter {str(folder)!r}: mask_embedding.pt is not supported, allowed: a mask_token_id alone")
    arch = Arch(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        intermediate=config["intermediate_size"],
        vocab=config["vocab_size"],
        rope_theta=float(rope.get("rope_theta") or config["rope_theta"]),
        eps=config["rms_norm_eps"],
        qk_norm=True,
        max_context=config["max_position_embeddings"],
    )
    return DrafterShape(
        arch,
        tuple(inner["target_layer_ids"]),
        config["num_target_layers"],
        config["block_size"],
        inner["mask_token_id"],
    )
