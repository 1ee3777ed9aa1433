"""How tokens are drawn and drafts accepted: settings only, so that importing them loads no torch."""

import random
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from adasim.types import Component

if TYPE_CHECKING:
    from torch import Tensor


class Sampling(Component):
    """How tokens are drawn. Temperature 0 is greedy. Target and drafter are shaped alike."""

    temperature: float = Field(default=0.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0

    def probabilities(self, logits: "Tensor") -> "Tensor":
        """Shaped distributions in fp32 from logits, over the last axis; temperature must not be 0."""
        import torch

        probs = torch.softmax(logits.float() / self.temperature, -1)
        if self.top_p >= 1:
            return probs
        ordered, ids = probs.sort(-1, descending=True)
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= self.top_p, 0.0)  # the best always stays
        kept = torch.zeros_like(probs).scatter_(-1, ids, ordered)
        return kept / kept.sum(-1, keepdim=True)


class Forced(Component):
    """Acceptance by decree, to measure costs. The text means nothing.

    Attributes:
        lengths: each block's L is drawn from them.
        prompts: ``texts`` of the requests' domains, or ``random`` tokens, as many as the workload's ``prompt_len``.
        prefill: false: prompts are not computed; their context is filled with arbitrary values, and takes part in
            rounds like any other.
    """

    lengths: list[Annotated[int, Field(ge=0)]] = Field(min_length=1)
    prompts: Literal["texts", "random"] = "texts"
    prefill: bool = True

    def run(self, verified: int, rng: random.Random) -> int:
        """Drafts accepted of ``verified``."""
        return min(rng.choice(self.lengths), verified)
