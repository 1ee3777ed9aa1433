"""Cost from kernels that others measured: the tables of aiconfigurator-core (NVIDIA, Apache-2.0; extra: kernels).

A pass is the sum of its layers' matrix products and attention, as the tables have them for one GPU under SGLang. They
hold no speculative decoding: a verification reads the KV cache once, as plain decoding of the same batch does, and its
products are those of its tokens. Elementwise kernels and launches are not in them (``LAUNCH_MS``, assumed).
"""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd

from adasim.calibration.cost import LinearDraft, LinearPrefill, Overhead, TableCost
from adasim.calibration.specs import ModelSpec
from adasim.errors import InputError
from adasim.types import FloatArray

PACKAGE = "aiconfigurator_core"
SYSTEMS = {"a100": "a100_sxm", "h100": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm", "l40s": "l40s"}
DTYPE = "bfloat16"
LAUNCH_MS = 0.5  # of a round: what the roofline assumes too
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TOKENS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)
CONTEXTS = (128, 512, 1024, 2048, 4096, 8192, 16384, 32768)


def kernel_cost(hardware: str, model: ModelSpec, draft_layers: int, host_ms: float) -> tuple[TableCost, str]:
    """Verification, drafting and prefill from measured kernels, and which tables they come from.

    Args:
        hardware: of ``SYSTEMS``.
        model: a dense one, on one GPU.
        draft_layers: of a one-pass drafter, of the model's shape.
        host_ms: of a speculative round beside its passes.

    Raises:
        InputError: the package is not installed, or its tables do not hold this GPU or shape.
    """
    products, attention, source = _tables(hardware)
    if model.experts:
        raise InputError("--kernels: mixtures of experts are not read from kernel tables")
    linear = np.array([_layer_ms(products, model, t) for t in TOKENS])
    head = np.array([_product_ms(products, model.vocabulary, model.hidden, t) for t in TOKENS])
    reads = _attention_ms(attention, model)
    points = [
        {"batch": b, "tokens": t, "context": float(c), "ms": float(model.layers * (linear[j] + reads[i, k]) + head[j])}
        for i, b in enumerate(BATCHES)
        for j, t in enumerate(TOKENS)
        for k, c in enumerate(CONTEXTS)
    ]
    at = [TOKENS.index(n) for n in (16, 2048)]
    drafting = draft_layers * linear[at] + head[at]
    per_position = float(drafting[1] - drafting[0]) / (TOKENS[at[1]] - TOKENS[at[0]])
    draft = LinearDraft(
        base_ms=max(float(drafting[0]) - per_position * TOKENS[at[0]], 0.0),
        per_request_ms=float(draft_layers * (reads[4, 1] - reads[0, 1]) / (BATCHES[4] - BATCHES[0])),
        per_position_ms=per_position,
    )
    prefill = LinearPrefill(base_ms=LAUNCH_MS, per_token_ms=float(model.layers * linear[-1] / TOKENS[-1]))
    cost = TableCost.model_validate(
        {
            "kind": "table", "points": points, "extrapolate": True, "draft": draft, "prefill": prefill,
            "overhead": Overhead(round_ms=LAUNCH_MS, speculative_ms=host_ms),
        }
    )  # fmt: skip
    return cost, source


def _tables(hardware: str) -> tuple[pd.DataFrame, pd.DataFrame, str]:
    """Matrix products, attention of decoding, and where they come from."""
    found = find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise InputError("--kernels needs aiconfigurator-core: pip install 'adasim[kernels]'")
    if hardware not in SYSTEMS:
        raise InputError(f"--kernels: no tables of {hardware}; there are {', '.join(SYSTEMS)}")
    folder = Path(found.submodule_search_locations[0]) / "systems" / "data" / SYSTEMS[hardware]
    files = [
        _newest(folder / part / "sglang", name)
        for part, name in (("gemm", "gemm"), ("attention", "generation_attention"))
    ]
    if files[0] is None or files[1] is None:
        raise InputError(f"--kernels: {folder.name} holds no tables of SGLang")
    products, attention = (pd.read_parquet(f) for f in files if f is not None)
    products = products[products["gemm_dtype"] == DTYPE]
    attention = attention[
        (attention["kv_cache_dtype"] == DTYPE) & (attention["attn_dtype"] == DTYPE) & (attention["window_size"] == 0)
    ]
    return products, attention, f"{PACKAGE}: {folder.name}, SGLang {files[0].parent.name}, {DTYPE}"


def _newest(folder: Path, name: str) -> Path | None:
    """The table of the newest version of the engine."""
    files = sorted(
        folder.glob(f"*/{name}_perf.parquet"), key=lambda f: [int(n) for n in f.parent.name.split(".") if n.isdecimal()]
    )
    return files[-1] if files else None


def _layer_ms(products: pd.DataFrame, model: ModelSpec, tokens: int) -> float:
    """The four products of one layer (query, key and value together; gate and up as two)."""
    heads, wide = (model.heads + 2 * model.kv_heads) * model.head_dim, model.heads * model.head_dim
    shapes = [(heads, model.hidden), (model.hidden, wide), (model.intermediate, model.hidden)]
    shapes += [(model.intermediate, model.hidden), (model.hidden, model.intermediate)]
    return sum(_product_ms(products, n, k, tokens) for n, k in shapes)


def _product_ms(products: pd.DataFrame, n: int, k: int, tokens: int) -> float:
    """[tokens, k] x [k, n], linear between the measured widths; beyond them in proportion."""
    at = products[products["k"] == k]
    widths = np.sort(at["n"].unique())
    if not len(widths):
        raise InputError(f"--kernels: the tables hold no product over {k} inputs")
    times = np.array([_at_tokens(at[at["n"] == w], tokens) for w in widths])
    if n > widths[-1]:
        return float(times[-1] * n / widths[-1])
    return float(np.interp(n, widths, times))


def _at_tokens(rows: pd.DataFrame, tokens: int) -> float:
    ordered = rows.groupby("m")["latency"].min()  # of several kernels, the one an engine would take
    return float(np.interp(tokens, ordered.index.to_numpy(dtype=float), ordered.to_numpy(dtype=float)))


def _attention_ms(attention: pd.DataFrame, model: ModelSpec) -> FloatArray:
    """One layer's attention while decoding, [batches, contexts]."""
    shape = {"num_heads": model.heads, "num_key_value_heads": model.kv_heads, "head_dim": model.head_dim}
    rows = attention
    for name, value in shape.items():
        rows = rows[rows[name] == value]
    if rows.empty:
        words = ", ".join(f"{n} {v}" for n, v in shape.items())
        raise InputError(f"--kernels: the tables hold no attention of {words}")
    found = np.zeros((len(BATCHES), len(CONTEXTS)))
    for i, batch in enumerate(BATCHES):
        by = rows[rows["batch_size"] == batch].groupby("step")["latency"].min()
        if by.empty:
            raise InputError(f"--kernels: the tables hold no attention of batch {batch}")
        steps, times = by.index.to_numpy(dtype=float), by.to_numpy(dtype=float)
        found[i] = np.interp(CONTEXTS, steps, times)
        beyond = np.array(CONTEXTS) > steps[-1]  # too much memory to measure: in proportion
        found[i, beyond] = times[-1] * np.array(CONTEXTS)[beyond] / steps[-1]
    return found
