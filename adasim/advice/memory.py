"""Does it fit? Weights, drafter, KV cache and the buffers of captured graphs, before anything is predicted."""

from dataclasses import dataclass, replace

from adasim.advice.known import Known
from adasim.advice.traffic import Traffic
from adasim.calibration.memory import GpuMemory
from adasim.calibration.parallel import Split
from adasim.calibration.roofline import ACTIVATION_BYTES, LayersDraft, RooflineCost
from adasim.calibration.specs import HARDWARE, MODELS
from adasim.errors import InputError

GIB = 2**30
LOGIT_BYTES = 4 + ACTIVATION_BYTES  # fp32 for sampling, beside what the LM head wrote


@dataclass(frozen=True, slots=True)
class Memory:
    """What every GPU has to hold.

    ``fraction`` of it is for weights and KV cache (SGLang's mem_fraction_static, vLLM's gpu_memory_utilization without
    activations), the rest for the buffers of passes and what the driver takes.
    """

    plain: GpuMemory
    speculative: GpuMemory
    fraction: float
    block: int  # tokens of a request in a pass
    assumed_layers: bool  # of the drafter

    @property
    def size_gib(self) -> float:
        """Of a GPU."""
        return float(self.plain.hardware.memory_gib or 0)

    def kv_tokens(self, *, drafter: bool) -> int:
        """Tokens whose KV cache fits beside the weights; 0 when the weights alone do not fit."""
        try:
            return (self.speculative if drafter else self.plain).kv_tokens(self.fraction)
        except InputError:
            return 0

    def buffers_gib(self, requests: int, *, drafter: bool) -> float:
        """Of a pass over full blocks of so many requests, which all captured graphs share: hidden states, attention and
        MLP of one layer, and logits of every verified token. An estimate by shapes; graphs' own nodes are not counted.
        """
        m, split = self.plain.model, self.plain.split
        tokens = requests * (self.block if drafter else 1)
        heads = (m.heads + 2 * m.kv_heads) * m.head_dim / split.attention_tp
        width = 3 * m.hidden + heads + 2 * m.intermediate * max(m.top_experts, 1) / split.tp
        return tokens * (width * ACTIVATION_BYTES + m.vocabulary * LOGIT_BYTES) / GIB

    def holds(self, tokens: float, *, drafter: bool) -> int:
        """Requests of that many tokens that fit at once, a block of drafts reserved for each."""
        return int(self.kv_tokens(drafter=drafter) / (tokens + (self.block if drafter else 1)))

    def misfits(self, tokens: float, requests: int, *, drafter: bool) -> list[str]:
        """Why this cannot run at all with batches of up to ``requests``; empty = it can."""
        model, whose = (self.speculative, "weights and drafter") if drafter else (self.plain, "weights")
        room = self.fraction * self.size_gib
        weights = model.weight_bytes / GIB
        if weights > room:
            share = f"{self.fraction:g} of {self.size_gib:g} GiB is {room:.1f}"
            return [f"{whose} take {weights:.1f} GiB of each GPU, where {share}"]
        if not self.holds(tokens, drafter=drafter):
            return [f"beside {weights:.1f} GiB of {whose} no KV cache of a request of {tokens:.0f} tokens fits"]
        rest, buffers = self.size_gib - room, self.buffers_gib(requests, drafter=drafter)
        if buffers > rest:
            block = self.block if drafter else 1
            return [
                f"passes over {requests} x {block} tokens need {buffers:.1f} GiB of buffers (mostly logits), where "
                f"{1 - self.fraction:.2g} of {self.size_gib:g} GiB is {rest:.1f}: run fewer requests at a time, verify "
                "fewer tokens, or lower --memory-fraction"
            ]
        return []


def memory_of(
    known: Known,
    *,
    hardware: str | None,
    model: str | None,
    draft_layers: int | None,
    gpus: int,
    fraction: float,
) -> Memory | None:
    """What the GPUs hold; None where neither the data nor options tell hardware and model.

    Raises:
        InputError: the model cannot be divided among so many GPUs.
    """
    cost, split = known.profile.cost, Split(tp=gpus)
    if isinstance(cost, RooflineCost) and not (hardware and model):
        shape = cost.memory(drafter_loaded=True)
        spec, machine, layers = shape.model, shape.hardware, shape.draft_layers
    elif hardware and model:
        spec, machine = MODELS[model], HARDWARE[hardware]
        layers = cost.draft.layers if isinstance(cost.draft, LayersDraft) else LayersDraft().layers
    else:
        return None
    if machine.memory_gib is None:
        return None
    spec.check_split(split.attention_tp, split.tp)
    told = draft_layers is not None or isinstance(cost.draft, LayersDraft)
    plain = GpuMemory(spec, machine, split)
    layers = layers if draft_layers is None else draft_layers
    return Memory(plain, replace(plain, draft_layers=layers), fraction, known.max_draft_len + 1, not told)


def whole(traffic: Traffic) -> float:
    """Tokens of a request at its end."""
    return traffic.prompt + traffic.output
