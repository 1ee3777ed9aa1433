"""vLLM's dynamic speculative decoding: the number of draft tokens by range of batch sizes.

Format: ``num_speculative_tokens_per_batch_size`` of ``--speculative-config``, a list of [first batch, last batch, k] with
inclusive ranges (vLLM PR 32374; documentation of vLLM 0.24.0, Dynamic Speculative Decoding). Batches in a gap and
beyond the last range take the k before. vLLM cannot be installed beside adasim: :class:`VllmConfig` checks the documented
rules.
"""

import json
from typing import Annotated, Self

from pydantic import Field, ValidationError, model_validator

from adasim.errors import InputError
from adasim.explain import explain
from adasim.exports.export import Chosen, Export
from adasim.exports.source import Source
from adasim.types import Component

DOCUMENTED = "vLLM 0.24.0"
Size = Annotated[int, Field(ge=1)]
Drafts = Annotated[int, Field(ge=0)]


class VllmConfig(Component):
    """The part of ``--speculative-config`` that matters here, by its documented rules."""

    method: str = Field(min_length=1)
    model: str = Field(min_length=1)
    num_speculative_tokens: int = Field(ge=1)
    num_speculative_tokens_per_batch_size: list[tuple[Size, Size, Drafts]] = Field(min_length=1)

    @model_validator(mode="after")
    def _covers(self) -> Self:
        entries, problems = self.num_speculative_tokens_per_batch_size, []
        if entries[0][0] != 1:
            problems.append(f"the first range must start at 1, it starts at {entries[0][0]}")
        before = 0
        for first, last, k in entries:
            if first > last:
                problems.append(f"[{first}, {last}, {k}]: ends before it starts")
            if first <= before:
                problems.append(f"[{first}, {last}, {k}]: overlaps the range before, or is not in order")
            if k > self.num_speculative_tokens:
                problems.append(f"[{first}, {last}, {k}]: k exceeds num_speculative_tokens {self.num_speculative_tokens}")
            before = max(before, last)
        if problems:
            raise InputError(*problems)
        return self

    def drafts(self, batch: int) -> int:
        """What vLLM drafts for a batch of that size."""
        return next(k for first, _, k in reversed(self.num_speculative_tokens_per_batch_size) if first <= batch)


def check(text: str, where: str) -> VllmConfig:
    """A configuration, JSON, that vLLM's documentation allows.

    Raises:
        InputError: every rule that it breaks.
    """
    try:
        return VllmConfig.model_validate_json(text)
    except ValidationError as error:
        raise InputError(*(f"{where}: {line}" for line in explain(error, VllmConfig))) from error


def export(source: Source, chosen: Chosen, model: str, method: str | None = None) -> Export:
    """The schedule. Nothing, where plain decoding is best at every batch."""
    name, about = (
        "vllm_speculative_config.json",
        source.about()
        | {
            "format": f"--speculative-config, as documented for {DOCUMENTED}",
            "chosen_by": chosen.how,
            "extrapolates": chosen.extrapolated,
        },
    )
    if not chosen.longest:
        says = ["plain decoding is best at every batch: serve without a drafter"]
        return Export("vLLM speculative K schedule", name, None, about, says=says)
    config = {
        "method": method or ("dflash" if source.one_pass else "eagle3"),
        "model": model,
        "num_speculative_tokens": chosen.longest,
        "num_speculative_tokens_per_batch_size": [list(r) for r in chosen.ranges],
    }
    check(json.dumps(config), name)
    says = [
        f"k follows the batch alone: for contexts of {source.context:.0f} tokens and this mix of domains",
        "one k for all requests; all drafts are verified",
        f"batches beyond {chosen.ranges[-1].last} take the last k",
        "not with data parallelism: vLLM then takes num_speculative_tokens everywhere",
    ]
    flags = [f'--speculative-config "$(cat {name})"']
    return Export("vLLM speculative K schedule", name, config, about, flags, says)
