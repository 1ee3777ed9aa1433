"""A profile: everything known about one model on one machine, with its provenance."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import Field, ValidationError

from adasim.calibration.acceptance import AnyAcceptance
from adasim.calibration.adjust import Uncertainty
from adasim.calibration.draft_model import DraftModel
from adasim.calibration.fitted_on import FittedRun
from adasim.calibration.interval import Estimate, Residual
from adasim.calibration.learning import LearningCurve
from adasim.calibration.roofline import AnyCost
from adasim.errors import InputError
from adasim.explain import explain
from adasim.files import BASE, PROFILES, find, load_yaml, parse_yaml, write_atomic
from adasim.identity import EngineIdentity
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
    """Cost and acceptance of one model on one machine, how far off they may be, and the drafters compared on it.

    What ``adasim calibrate`` writes also says where it was measured and how well it is known.

    Attributes:
        identity: engine, model and machine that were measured; null = published or simulated numbers.
        learning: how each domain's drafter learned while serving, for ``backend.learning.curves``.
        fitted_on: the runs with acceptance of its own that were fitted; ``adasim validate`` does not count these.
        fitted: lowest and highest value of each input that was seen; outside it is extrapolation.
        counts: of what the fit rests on.
        intervals: every fitted parameter with its 95 % interval.
        residuals: how far off the fit is, by part and region.
        notes: what could not be told, and what was left out.
        digest: SHA-256 of all the rest, as written; a file that was changed since is refused.
    """

    version: int = Field(default=1, ge=1, le=1)
    name: str
    provenance: Provenance
    cost: AnyCost
    acceptance: AnyAcceptance
    drafters: dict[str, DraftModel] = Field(default_factory=dict)
    uncertainty: Uncertainty = Uncertainty()
    identity: EngineIdentity | None = None
    learning: dict[str, LearningCurve] = Field(default_factory=dict)
    fitted_on: list[FittedRun] = Field(default_factory=list)
    fitted: dict[str, list[float]] = Field(default_factory=dict)
    counts: dict[str, int] = Field(default_factory=dict)
    intervals: dict[str, Estimate] = Field(default_factory=dict)
    residuals: list[Residual] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)
    digest: str | None = None

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
            raw = load_yaml(find(str(path.resolve()), "profile"))
            if "digest" in raw and raw["digest"] != digest(raw):
                raise InputError(
                    f"{path}: was changed after adasim calibrate wrote it. To use it as it is, remove its line digest; "
                    "reports then say that it was edited by hand"
                )
            return cls.model_validate(raw)
        except ValidationError as error:
            raise InputError(*(f"{path}: {line}" for line in explain(error, cls))) from error
        finally:
            BASE.reset(token)

    def write(self, path: Path) -> str:
        """Write it as one YAML file with its digest, which is returned; file names in it are beside ``path``."""
        raw = self.model_dump(mode="python", exclude_none=True, exclude={"digest"})
        text = yaml.safe_dump(raw, sort_keys=False, allow_unicode=True, width=120)
        found = digest(parse_yaml(text, str(path)))
        write_atomic(path, f"{text}digest: {found}\n")
        return found

    @property
    def edited(self) -> bool:
        """Calibrated, then changed by hand: what it says of its accuracy may no longer hold."""
        return self.digest is None and bool(self.identity or self.intervals)

    @property
    def marks(self) -> list[str]:
        """What every report made with it must say."""
        by_hand = (
            "the profile was edited by hand after it was calibrated: its stated intervals and residuals may not hold"
        )
        return [by_hand] * self.edited + self.notes

    def differs(self, engine: EngineIdentity) -> list[str]:
        """How ``engine`` differs from the one that was measured, a line each; empty = it is the same.

        A profile that does not say where it was measured differs.
        """
        if self.identity is None:
            return [f"the profile {self.name} does not say which engine was measured"]
        return engine.differs(self.identity)

    def refuse_other(self, engine: EngineIdentity, *, force: bool = False) -> list[str]:
        """Refuse predictions for another engine than was measured; with ``force``, what a report must say instead.

        Raises:
            InputError: every difference.
        """
        differences = self.differs(engine)
        if differences and not force:
            raise InputError(*(f"profile {self.name}: another engine: {d}" for d in differences))
        return [f"profile {self.name} used for another engine: {d}" for d in differences]


def digest(raw: dict[str, Any]) -> str:
    """SHA-256 of a profile's content as read from its file, whatever its layout; its own digest left out."""
    rest = {k: v for k, v in raw.items() if k != "digest"}
    return sha256(json.dumps(rest, sort_keys=True, ensure_ascii=True, default=str).encode()).hexdigest()


def packaged() -> list[Path]:
    """Files of the profiles that come with adasim."""
    return sorted(PROFILES.glob("*.yaml"))
