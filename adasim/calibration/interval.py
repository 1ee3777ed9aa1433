"""What is said of fitted numbers."""

from pydantic import Field

from adasim.types import Component


class Estimate(Component):
    """A parameter with its 95 % interval.

    Attributes:
        value: the best guess; what the profile uses.
        low, high: limits of the interval.
        how: it was made: of what, and how much of it.
    """

    value: float
    low: float
    high: float
    how: str


class Residual(Component):
    """How far a fitted part is off in one region of what was measured.

    Attributes:
        part: verify, draft, overhead, prefill, acceptance, head, confidence.
        region: in words.
        error: mean of |fitted / measured - 1|, the largest 5 % left out.
        bias: median of fitted / measured - 1.
        count: measurements in it.
    """

    part: str
    region: str
    error: float = Field(ge=0)
    bias: float
    count: int = Field(ge=1)
