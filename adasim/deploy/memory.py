"""GPU memory of a deployment: weights, drafter, KV cache, and what SGLang keeps free for graphs and activations."""

from dataclasses import dataclass, replace

from adasim.calibration.memory import GpuMemory
from adasim.calibration.parallel import Split
from adasim.calibration.roofline import LayersDraft, RooflineCost
from adasim.calibration.specs import HARDWARE, MODELS
from adasim.errors import InputError
from adasim.exports.source import Source

DRAFT_LAYERS = 5  # of the published DFlash drafters for Qwen3-8B
CHUNK_TOKENS = 8192  # SGLang's chunked prefill on GPUs of 60 to 160 GB
GRAPH_MB, TOKEN_MB, BASE_MB, GPU_MB = 2.0, 1.5, 512.0, 1024 / 8  # by graph batch size, by chunk token, always, by GPU
LARGE_GIB, LEAST_LARGE_MB = 60.0, 10 * 1024.0  # GPUs larger than this keep at least so much free


@dataclass(frozen=True, slots=True)
class Needs:
    """What each GPU holds, GiB, and how many requests fit.

    Attributes:
        weights: of the target.
        drafter: its layers; embedding and LM head are the target's.
        kv_gib_per_1k_tokens: target and drafter together, of 1,000 tokens.
        reserved: for activations and graphs, by SGLang 0.5.23's own rule.
        size: of the GPU's memory.
        kv_tokens: tokens of all requests that fit beside the rest.
        at_mean: requests that fit at the mean context.
        at_longest: requests that fit at the longest; None = nobody says how long.
    """

    weights: float
    drafter: float
    kv_gib_per_1k_tokens: float
    reserved: float
    size: float
    kv_tokens: int
    at_mean: int
    at_longest: int | None

    @property
    def fraction(self) -> float:
        """``--mem-fraction-static``: weights and KV cache, of the whole."""
        return round(1 - self.reserved / self.size, 3)


def specs_of(source: Source, hardware: str | None, model: str | None, draft_layers: int | None) -> GpuMemory | None:
    """Shapes of model and GPU: as told, else a roofline cost's own; None = nobody says.

    Raises:
        InputError: an unknown name, or one of the two alone.
    """
    problems = [f"--hardware {hardware}: unknown; allowed: {', '.join(HARDWARE)}"] * (
        hardware is not None and hardware not in HARDWARE
    )
    problems += [f"--model {model}: unknown; allowed: {', '.join(MODELS)}"] * (model is not None and model not in MODELS)
    problems += ["--hardware and --model go together"] * ((hardware is None) != (model is None))
    if problems:
        raise InputError(*problems)
    split = source.backend.parallel or Split()
    if hardware is not None and model is not None:
        return GpuMemory(MODELS[model], HARDWARE[hardware], split, draft_layers or DRAFT_LAYERS)
    if not isinstance(source.cost, RooflineCost):
        return None
    layers = source.cost.draft.layers if isinstance(source.cost.draft, LayersDraft) else DRAFT_LAYERS
    known = source.cost.memory(drafter_loaded=True)
    return replace(known, draft_layers=draft_layers or layers)


def needs(memory: GpuMemory, source: Source, running: int) -> Needs:
    """What ``running`` requests need; each also holds the slots of a full block while it is verified.

    Raises:
        InputError: the GPU's size is unknown, or weights and reserve leave no room.
    """
    size = memory.hardware.memory_gib
    reserved_mb = BASE_MB + TOKEN_MB * CHUNK_TOKENS + GPU_MB * memory.split.tp + GRAPH_MB * running
    if size is not None and size > LARGE_GIB:
        reserved_mb = max(reserved_mb, LEAST_LARGE_MB)
    reserved = reserved_mb / 1024
    tokens = memory.kv_tokens(1 - reserved / (size or 1.0))
    alone = replace(memory, draft_layers=0)
    block, longest = source.max_draft_len + 1, _longest(source)
    per_token = memory.kv_bytes_per_token / memory.model.kv_split(memory.split.attention_tp)
    return Needs(
        weights=alone.weight_bytes / 2**30,
        drafter=(memory.weight_bytes - alone.weight_bytes) / 2**30,
        kv_gib_per_1k_tokens=1e3 * per_token / 2**30,
        reserved=reserved,
        size=size or 0.0,
        kv_tokens=tokens,
        at_mean=int(tokens // (source.context + block)),
        at_longest=None if longest is None else tokens // (longest + block),
    )


def _longest(source: Source) -> int | None:
    """Tokens of the longest request; None = there is no traffic."""
    if source.plan is None:
        return None
    scenario = source.plan.scenario
    return max(r.prompt_len + r.output_len for r in scenario.workload.requests_of(scenario.seeds[0]))
