"""How one engine's model is spread over GPUs, and what a step weighs on them."""

from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from adasim.types import Component

Factor = Annotated[float, Field(gt=0, le=100)]


class MeasuredOn(Component):
    """The parallelism that times were measured under; see :class:`Parallel`."""

    tp: int = Field(default=1, ge=1)
    dp: int = Field(default=1, ge=1)


class Assumed(Component):
    """Times on these GPUs, as multiples of those measured on others. An assumption, and reported as one."""

    verify: Factor = 1.0
    draft: Factor = 1.0
    prefill: Factor = 1.0


class Parallel(Component):
    """One engine on ``tp x dp`` GPUs.

    ``tp`` of them share a request's attention and KV cache (tensor parallelism). With ``dp`` > 1 attention is data
    parallel: each of ``dp`` ranks has its own requests, queue, scheduler and KV memory, while MLPs and LM head are
    spread over all GPUs. All ranks then run every step together, as long as the slowest; those without work wait. Verify
    lengths are still decided once, for the requests of all ranks. vLLM counts GPUs in the same way; SGLang's
    ``--tp-size`` is ``tp x dp`` here, beside ``--dp-size`` dp and ``--enable-dp-attention``.

    With dp > 1, ``max_running_requests`` is divided among the ranks; ``kv.blocks``, ``chunked_prefill``,
    ``max_prefill_tokens``, a scheduler's own limits, captured sizes and measured costs are those of one rank.

    Attributes:
        tp: GPUs that share one request.
        dp: attention ranks.
        routing: which rank an arriving request joins: each in turn, or the one with the fewest waiting and running.
        collective_us: what a collective operation takes beside moving bytes (assumed, of the usual size in one node).
        link_gb_s: bandwidth that collectives reach, GB/s out of each GPU; null = 0.8 of the hardware's.
        assume: factors for a cost that was measured under another parallelism; null = such a cost is refused.
    """

    tp: int = Field(default=1, ge=1)
    dp: int = Field(default=1, ge=1)
    routing: Literal["round_robin", "least_requests"] = "round_robin"
    collective_us: float = Field(default=10.0, ge=0)
    link_gb_s: float | None = Field(default=None, gt=0)
    assume: Assumed | None = None

    @property
    def gpus(self) -> int:
        """GPUs of the engine."""
        return self.tp * self.dp

    def __str__(self) -> str:
        """For messages."""
        return f"tp {self.tp}, dp {self.dp}"


class Load(NamedTuple):
    """What a step does, on one rank or on all."""

    requests: int  # that decode
    positions: int  # that drafters fill
    verified: int  # tokens
    prefill: int = 0  # tokens
