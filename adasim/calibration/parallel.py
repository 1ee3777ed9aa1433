"""How one engine's model is spread over GPUs, and what a step weighs on them."""

from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from adasim.types import Component

Factor = Annotated[float, Field(gt=0, le=100)]


class Assumed(Component):
    """Times on these GPUs, as multiples of those measured on others. An assumption, and reported as one."""

    verify: Factor = 1.0
    draft: Factor = 1.0
    prefill: Factor = 1.0


class Split(Component):
    """GPUs of one engine, and attention ranks among them.

    Attributes:
        tp: GPUs. They share the MLPs and the LM head; ``tp / dp`` of them share a request's attention and KV cache.
        dp: attention ranks, a divisor of ``tp``.
    """

    tp: int = Field(default=1, ge=1)
    dp: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _whole_ranks(self) -> Self:
        if self.tp % self.dp:
            raise ValueError(f"dp: {self.dp} attention ranks cannot divide {self.tp} GPUs (tp) among themselves")
        return self

    @property
    def attention_tp(self) -> int:
        """GPUs of one attention rank."""
        return self.tp // self.dp

    def __str__(self) -> str:
        """For messages."""
        return f"tp {self.tp}, dp {self.dp}"


class Parallel(Split):
    """One engine on ``tp`` GPUs: tensor parallelism, and data-parallel attention whose ranks run in lock step.

    With ``dp`` > 1 each of ``dp`` attention ranks has its own requests, queue, scheduler and KV memory, while all GPUs
    share MLPs and LM head. All ranks run every step together, as long as the slowest; those without work wait. Verify
    lengths are still decided once, for the requests of all ranks. The fields are SGLang's ``--tp-size`` and ``--dp-size``
    (with ``--enable-dp-attention``); vLLM's ``--tensor-parallel-size`` is ``tp / dp`` here.

    With dp > 1, ``max_running_requests`` is divided among the ranks; ``kv.blocks``, ``chunked_prefill``,
    ``max_prefill_tokens``, a scheduler's own limits, captured sizes and measured costs are those of one rank.

    Attributes:
        tp: GPUs.
        dp: attention ranks.
        routing: which rank an arriving request joins: each in turn, or the one with the fewest waiting and running.
        collective_us: what a collective operation takes beside moving bytes (assumed, of the usual size in one node).
        link_gb_s: bandwidth that collectives reach, GB/s out of each GPU; null = 0.8 of the hardware's.
        assume: factors for a cost that was measured under another parallelism; null = such a cost is refused.
    """

    routing: Literal["round_robin", "least_requests"] = "round_robin"
    collective_us: float = Field(default=10.0, ge=0)
    link_gb_s: float | None = Field(default=None, gt=0)
    assume: Assumed | None = None


class Load(NamedTuple):
    """What a step does, on one rank or on all."""

    requests: int  # that decode
    positions: int  # that drafters fill
    verified: int  # tokens
    prefill: int = 0  # tokens
