"""A profile: everything known about one model on one machine, with its provenance."""

from pathlib import Path
from typing import Self

from pydantic import Field, ValidationError

from adasim.calibration.acceptance import AnyAcceptance
from adasim.calibration.adjust import Uncertainty
from adasim.calibration.draft_model import DraftModel
from adasim.calibration.fitted_on import FittedRun
from adasim.calibration.roofline import AnyCost
from adasim.errors import InputError
from adasim.explain import explain
from adasim.files import BASE, PROFILES, find, load_yaml
from adasim.types import Component


class Provenance(Component):
    """Where numbers come from."""

    source: str
    hardware: str
    model: str
    engine: str
    date: str
    how: str
    inputs: list[str] = Field(min_length=1)  # what was measured or fitted, line by line
    assumptions: list[str] = Field(default_factory=list)


class Profile(Component):
    """Cost and acceptance of one model on one machine, how far off they may be, and the drafters compared on it."""

    version: int = Field(default=1, ge=1, le=1)
    name: str
    provenance: Provenance
    cost: AnyCost
    acceptance: AnyAcceptance
    drafters: dict[str, DraftModel] = Field(default_factory=dict)
    uncertainty: Uncertainty = Uncertainty()
    fitted_on: list[FittedRun] = Field(default_factory=list)

    @classmethod
    def load(cls, name: str) -> Self:
        """The packaged profile of that name, or the file at that path.

        Raises:
            InputError: no such profile, or what is wrong in it.
        """
        if name.endswith((".yaml", ".yml")):
            path = find(name, "profile")
        elif (path := PROFILES / f"{name}.yaml") not in packaged():
            known = ", ".join(p.stem for p in packaged())
            raise InputError(f"profile: unknown {name!r}; allowed: {known}, or a path that ends in .yaml")
        token = BASE.set(path.parent)
        try:
            return cls.model_validate(load_yaml(find(str(path.resolve()), "profile")))
        except ValidationError as error:
            raise InputError(*(f"{path}: {line}" for line in explain(error, cls))) from error
        finally:
            BASE.reset(token)


def packaged() -> list[Path]:
    """Files of the profiles that come with adasim."""
    return sorted(PROFILES.glob("*.yaml"))
