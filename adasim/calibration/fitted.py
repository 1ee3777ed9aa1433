"""Cost models that are formulas: good inside the range they were fitted on."""

from abc import ABC
from typing import Annotated

from pydantic import Field, PrivateAttr, model_validator

from adasim.calibration.cost import CostModel
from adasim.errors import InputError


class FittedCost(CostModel, ABC):
    """A formula for the target's pass, with the range of tokens it was fitted on (null: never fitted).

    Outside it is an error, unless ``extrapolate``: then the formula goes on, and the report says how far.
    """

    fitted_tokens: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=2, max_length=2)] | None = None
    extrapolate: bool = False
    _outside: set[int] = PrivateAttr(default_factory=set)

    @model_validator(mode="after")
    def _range(self) -> "FittedCost":
        if self.fitted_tokens is not None and self.fitted_tokens[0] > self.fitted_tokens[1]:
            raise ValueError("fitted_tokens: the first must not exceed the second")
        if self.extrapolate and self.fitted_tokens is None:
            raise ValueError("extrapolate has no effect without fitted_tokens")
        return self

    @property
    def measured(self) -> dict[str, tuple[float, float]]:
        """The range of tokens it was fitted on."""
        return {} if self.fitted_tokens is None else {"tokens": (self.fitted_tokens[0], self.fitted_tokens[1])}

    def _check_range(self, tokens: int) -> None:
        """Refuse, or take note of, a pass outside the fitted range."""
        if self.fitted_tokens is None or self.fitted_tokens[0] <= tokens <= self.fitted_tokens[1]:
            return
        low, high = self.fitted_tokens
        if not self.extrapolate:
            raise InputError(
                f"cost: a pass of {tokens} tokens is outside the fitted {low}..{high}; "
                "fit it, or set cost.extrapolate: true"
            )
        self._outside.add(tokens)

    @property
    def notes(self) -> list[str]:
        """Extrapolations: how far the tokens of a pass went beyond the fitted range."""
        if not self._outside or self.fitted_tokens is None:
            return []
        low, high = self.fitted_tokens
        ends = sorted({min(self._outside), max(self._outside)})
        reached = " to ".join(f"{t}" for t in ends)
        return [f"time was extrapolated: passes of {reached} tokens, fitted {low}..{high}"]
