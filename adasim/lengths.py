"""Prompt and output lengths."""

from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from adasim.traces import MAX_TOKENS
from adasim.types import Component, IntArray


class FixedLength(Component):
    """Always the same."""

    kind: Literal["fixed"] = "fixed"
    tokens: int = Field(ge=1, le=MAX_TOKENS)

    def draw(self, rng: np.random.Generator, n: int) -> IntArray:
        """``n`` lengths."""
        return np.full(n, self.tokens, dtype=np.int64)


class _Bounded(Component):
    minimum: int = Field(ge=1, le=MAX_TOKENS)
    maximum: int = Field(ge=1, le=MAX_TOKENS)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.maximum < self.minimum:
            raise ValueError("maximum is below minimum")
        return self


class LognormalLength(_Bounded):
    """Log-normal with this mean and coefficient of variation, rounded, clipped to minimum..maximum."""

    kind: Literal["lognormal"] = "lognormal"
    mean: float = Field(gt=0, le=MAX_TOKENS)
    cv: float = Field(gt=0, le=100)
    minimum: int = Field(default=1, ge=1, le=MAX_TOKENS)
    maximum: int = Field(default=32768, ge=1, le=MAX_TOKENS)

    def draw(self, rng: np.random.Generator, n: int) -> IntArray:
        """``n`` lengths."""
        sigma = np.sqrt(np.log1p(self.cv**2))
        values = rng.lognormal(np.log(self.mean) - sigma**2 / 2, sigma, n)
        return np.rint(values).astype(np.int64).clip(self.minimum, self.maximum)


class UniformLength(_Bounded):
    """Every whole number from ``minimum`` to ``maximum`` alike."""

    kind: Literal["uniform"] = "uniform"

    def draw(self, rng: np.random.Generator, n: int) -> IntArray:
        """``n`` lengths."""
        return rng.integers(self.minimum, self.maximum + 1, n)


AnyLength = Annotated[FixedLength | LognormalLength | UniformLength, Field(discriminator="kind")]
