"""What a drafter brings along: a method compared on the same engine and target."""

from typing import Self

from pydantic import Field, model_validator

from adasim.calibration.acceptance import AcceptanceModel, AnyAcceptance
from adasim.calibration.cost import CostModel, LinearDraft, Overhead
from adasim.calibration.roofline import AnyDraft, RooflineCost
from adasim.errors import InputError
from adasim.types import Component


class DraftModel(Component):
    """A named drafter of an engine; what is left out is the engine's own.

    Attributes:
        max_draft_len: drafts of its full block; a tree's tokens less one.
        acceptance: what the target accepts of it, and how good its heads are.
        draft: seconds of drafting.
        overhead: of its rounds, in place of the engine's.
    """

    max_draft_len: int | None = Field(default=None, ge=1)
    acceptance: AnyAcceptance | None = None
    draft: AnyDraft | None = None
    overhead: Overhead | None = None

    @model_validator(mode="after")
    def _differs(self) -> Self:
        if not self.model_fields_set:
            raise ValueError("give at least one of max_draft_len, acceptance, draft, overhead")
        return self

    def cost_of(self, engine: CostModel) -> CostModel:
        """The engine's cost with this drafter.

        Raises:
            InputError: the engine's cost cannot price this kind of draft.
        """
        if self.draft is not None and not isinstance(self.draft, LinearDraft) and not isinstance(engine, RooflineCost):
            raise InputError("drafters: draft of kind layers needs a cost of kind roofline")
        own = {"draft": self.draft, "overhead": self.overhead}
        return engine.model_copy(update={name: part for name, part in own.items() if part is not None})

    def acceptance_of(self, engine: AcceptanceModel) -> AcceptanceModel:
        """What is accepted of this drafter."""
        return self.acceptance or engine
