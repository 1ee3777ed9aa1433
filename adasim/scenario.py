"""A scenario: what to run, from YAML."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from adasim.backends import AnyBackend
from adasim.errors import InputError
from adasim.explain import explain
from adasim.files import is_file
from adasim.policies import AnyPolicy
from adasim.profile_grid import ProfileGrid
from adasim.reference import Reference
from adasim.search import Tune
from adasim.tolerances import Validation
from adasim.types import Component, Slo
from adasim.workload import AnyWorkload

Value = int | float | str | bool | None
Cases = dict[int | str, dict[str, Any]]  # label -> the fields it sets

UNSWEPT = {"name", "title", "description", "seeds", "sweep", "reference", "assumptions", "tune", "profile", "validation"}


class Measure(Component):
    """The part of a run that counts.

    In a closed loop the window opens when ``warmup_requests`` have finished (null: as many as there are clients;
    ``mser5``: as many as that rule finds in each run, or as there are clients where the run is too short for it) and
    counts the requests that finish inside. In an open loop it opens when so many have arrived (null: 0) and counts
    the requests that arrive inside, however late they finish: the same ones for every policy. Both close with the
    last arrival, before the batch thins out, unless ``until_last_arrival`` is false: then with the last finish.
    """

    warmup_requests: Annotated[int, Field(ge=0)] | Literal["mser5"] | None = None
    until_last_arrival: bool = True


class Scenario(Component):
    """What to run: every policy, at every point of the sweep, with every seed.

    Attributes:
        policies: each with a unique label; an entry with ``each: {field: [values]}`` stands for one policy a
            value, and the report picks the best of them at every point.
        sweep: dotted field -> values; the product of all is run. ``policies.LABEL.field`` reaches into one. What belongs
            together goes under a name of its own: ``load: {1: {workload.concurrency: 1, workload.requests: 8}, ...}``.
        slo: limits that make requests count as goodput.
        tune: what ``adasim tune`` searches.
        validation: what ``adasim validate`` holds predictions to.
        profile: what ``adasim profile`` measures, where it is not to derive that itself.
        reference: published or measured numbers to print beside the prediction.
        assumptions: what a reader must know about where the inputs are thin.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    title: str
    description: str = ""
    workload: AnyWorkload
    backend: AnyBackend
    policies: list[AnyPolicy] = Field(min_length=1)
    sweep: dict[str, Annotated[list[Value] | Cases, Field(min_length=1)]] = Field(default_factory=dict)
    seeds: list[Annotated[int, Field(ge=0, lt=2**32)]] = Field(default=[0, 1, 2], min_length=1)
    slo: Slo | None = None
    measure: Measure = Measure()
    tune: Tune | None = None
    validation: Validation = Validation()
    profile: ProfileGrid | None = None
    reference: Reference | None = None
    assumptions: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _unique(self) -> Self:
        labels = [p.label for p in self.policies]
        twice = sorted({x for x in labels if labels.count(x) > 1})
        problems = [f"policies: {', '.join(twice)} stands twice; give each a name"] * bool(twice)
        baselines = [p.label for p in self.policies if p.kind == "off"]
        if len(baselines) > 1:
            problems.append(f"policies: {', '.join(baselines)} are all of kind off, the baseline; keep one")
        if any(p.label == "off" and p.kind != "off" for p in self.policies):
            problems.append("policies: the label off belongs to kind off, the baseline")
        if self.measure.warmup_requests == "mser5" and self.workload.clients is None:
            problems.append(
                "measure.warmup_requests: mser5 is for closed loops; in an open one it would count other requests for "
                "every policy (the report says what it would cut)"
            )
        if len(set(self.seeds)) < len(self.seeds):
            problems.append("seeds: each may stand once")
        set_by: dict[str, str] = {}  # field -> the axis that sets it
        for key, values in self.sweep.items():
            fields = {f for case in values.values() for f in case} if isinstance(values, dict) else {key}
            for field in sorted(fields):
                first, last = field.split(".")[0], field.split(".")[-1]
                if first in UNSWEPT or (first == "policies" and last in {"name", "kind"}):
                    problems.append(f"sweep.{key}: {'' if field == key else f'{field} '}cannot be swept")
                if field in set_by:
                    problems.append(f"sweep.{key}: {field} is already set by sweep.{set_by[field]}")
            set_by |= dict.fromkeys(fields, key)
            if isinstance(values, dict):
                problems += [f"sweep.{key}.{label}: sets nothing" for label, case in values.items() if not case]
            elif len({json.dumps(v) for v in values}) < len(values):
                problems.append(f"sweep.{key}: each value may stand once")
        if problems:
            raise InputError(*problems)
        return self

    @property
    def warmup_requests(self) -> int:
        """Finishes left out before the window opens, unless MSER-5 finds another number."""
        if isinstance(self.measure.warmup_requests, int):
            return self.measure.warmup_requests
        return self.workload.clients or 0


SCENARIOS = (Path(str(files("adasim"))) / "_scenarios", Path(str(files("adasim"))).parent / "scenarios")


def packaged() -> list[Path]:
    """Scenario files that come with adasim."""
    return sorted(p for folder in SCENARIOS if folder.is_dir() for p in folder.glob("*.yaml"))


def find_scenario(name: str) -> Path:
    """The file at that path, or the packaged scenario of that name.

    Raises:
        InputError: neither.
    """
    if is_file(Path(name)):
        return Path(name)
    known = {p.stem: p for p in reversed(packaged())}
    if name in known:
        return known[name]
    raise InputError(f"no scenario {name}: not a file, and not one of {', '.join(sorted(known))}")


def validate(config: dict[str, Any]) -> Scenario:
    """A scenario from its raw form, ``each`` already expanded.

    Raises:
        InputError: all problems, each with its path and what is allowed.
    """
    try:
        return Scenario.model_validate(config)
    except ValidationError as error:
        raise InputError(*explain(error, Scenario)) from error
