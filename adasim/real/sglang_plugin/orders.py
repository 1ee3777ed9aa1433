"""What a running server is told from outside, and what it says of itself: the other side of ``/server_info``.

SGLang's ``/set_internal_state`` takes numbers only, each under a name. So the JSON of ``Orders`` is the name, behind
``PREFIX``, and its number means nothing. It answers yes or no; the reason of a no stands in ``/server_info``.
"""

from typing import Self

from pydantic import Field, ValidationError, model_validator

from adasim.calibration.roofline import AnyCost
from adasim.errors import InputError
from adasim.explain import explain
from adasim.policies import AnyPolicy
from adasim.real.sampling import Forced
from adasim.real.sglang_plugin.settings import ServedOpd
from adasim.types import Component

PREFIX = "adasim "


class Play(Component):
    """How rounds are played from the next one on. What is left out is as the server was started.

    Attributes:
        policy: decides the lengths.
        cost: what it may know of time; null = what the server was started with.
        forced: accept by decree, for measurements; its prompts are the client's affair.
        together: let so many requests in at once, and nobody while fewer wait; 0 = let everybody in. For equal requests
            of as many clients, which also end together.
    """

    policy: AnyPolicy
    cost: AnyCost | None = None
    forced: Forced | None = None
    together: int = Field(default=0, ge=0)

    @property
    def experimental(self) -> list[str]:
        """What only servers take that were started for measurements."""
        return [name for name in ("cost", "forced", "together") if getattr(self, name)]


class Orders(Component):
    """One message.

    Attributes:
        play: how to go on; null = as before.
        forget: records of steps before this one were read.
        opd: what a trainer is shown of the requests to come; null = as before, not ``enabled`` = nothing.
    """

    play: Play | None = None
    forget: int | None = Field(default=None, ge=0)
    opd: ServedOpd | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.play is None and self.forget is None and self.opd is None:
            raise ValueError("give play, forget or opd")
        return self

    def name(self) -> str:
        """The name under which ``/set_internal_state`` gets it."""
        return PREFIX + self.model_dump_json()


def read_orders(name: str) -> Orders:
    """Orders from their name.

    Raises:
        InputError: every problem.
    """
    try:
        return Orders.model_validate_json(name.removeprefix(PREFIX))
    except ValidationError as error:
        raise InputError(*explain(error, Orders)) from error
