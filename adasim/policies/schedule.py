"""A table made beforehand."""

from bisect import bisect_right
from typing import Annotated, Literal

from pydantic import Field, PrivateAttr

from adasim.policies.one_length import OneLength, floors
from adasim.types import BatchView, EngineCaps

Size = Annotated[int, Field(ge=1)]
Drafts = Annotated[int, Field(ge=0)]


class Schedule(OneLength):
    """k by batch size, and by context where wanted: ``drafts`` is {from this batch on: k} or {...: {from this mean
    context on: k}}.

    Source: vLLM's num_speculative_tokens_per_batch_size, TensorRT-LLM's draft_len_schedule, and the context axis of
    vLLM RFC 48627. The best static k per concurrency is deployed in this way: find it in a sweep over fixed lengths, then
    write it down. Knows the load, not the text. See ``draft_block`` in :class:`OneLength`.
    """

    kind: Literal["schedule"] = "schedule"
    drafts: dict[Size, Drafts | dict[Size, Drafts]] = Field(default={1: 7, 8: 5, 32: 3, 64: 0}, min_length=1)
    _batches: list[int] = PrivateAttr()
    _contexts: dict[int, list[int]] = PrivateAttr()

    def start(self, caps: EngineCaps) -> None:
        """Every batch and context needs an entry that the engine can draft."""
        self._batches = floors(dict(self.drafts), "drafts", self.label)
        tables = {b: k for b, k in self.drafts.items() if isinstance(k, dict)}
        self._contexts = {b: floors(dict(t), f"drafts[{b}]", self.label) for b, t in tables.items()}
        lengths = [k for entry in self.drafts.values() for k in (entry.values() if isinstance(entry, dict) else [entry])]
        self.check_drafts(lengths, caps)

    def choose(self, batch: BatchView) -> int:
        """The entry for this batch and its mean context."""
        size = at_least(self._batches, len(batch))
        entry = self.drafts[size]
        if not isinstance(entry, dict):
            return entry
        return entry[at_least(self._contexts[size], float(batch.context_lens.mean()))]


def at_least(bounds: list[int], value: float) -> int:
    """The last of the rising lower bounds that ``value`` reaches; the first if none."""
    return bounds[max(bisect_right(bounds, value) - 1, 0)]
