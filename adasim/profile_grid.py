"""What ``adasim profile`` measures, where the scenario says so itself."""

from typing import Annotated

from pydantic import Field

from adasim.types import Component

Count = Annotated[int, Field(ge=1)]


class ProfileGrid(Component):
    """The grid of a profile; null = derived from the scenario.

    Attributes:
        batches: requests of a round. Derived: the concurrencies of the sweep, and powers of two below the largest.
        contexts: tokens known of each request when a run of rounds begins. Derived: from the shortest prompt to the
            longest prompt with its output.
        verify_lens: tokens verified of a request, the anchor counted. Derived: those of fixed policies, and 1, 2, 3, 4,
            6, 8, 12, 16, ... up to the block.
        prefill_tokens: prompt tokens of one prefill step. Derived: one short and one long prompt, and the largest burst.
        repeats: times each visit is made at most.
        seed: of the order of visits.
    """

    batches: list[Count] | None = Field(default=None, min_length=1)
    contexts: list[Count] | None = Field(default=None, min_length=1)
    verify_lens: list[Count] | None = Field(default=None, min_length=1)
    prefill_tokens: list[Count] | None = Field(default=None, min_length=1)
    repeats: int = Field(default=5, ge=1, le=100)
    seed: int = Field(default=0, ge=0)
