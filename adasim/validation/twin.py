"""The simulated twin of a real run: the same engine limits, and the requests as they were served."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import numpy as np
from pydantic import PrivateAttr

from adasim.backends import AnyBackend
from adasim.calibration.acceptance import AcceptanceModel, CurveAcceptance
from adasim.calibration.adjust import Adjust
from adasim.calibration.labels import HeadLearning
from adasim.calibration.profile import Profile
from adasim.errors import InputError
from adasim.policies.base import Policy
from adasim.policies.off import Off
from adasim.records import Records
from adasim.scenario import Scenario
from adasim.simulator.backend import SimBackend
from adasim.simulator.learning import Learning
from adasim.types import Request
from adasim.workload import Workload

if TYPE_CHECKING:
    import pandas as pd

NO_TIME_US = 1e-9  # a token; the whole of a round's time is in its setup
NEVER_S = 1e9
BISECTIONS = 6
LIMITS = ("max_running_requests", "lag_steps", "max_prefill_tokens", "chunked_prefill", "ragged", "kv", "scheduler")


class Served(Workload):
    """Requests that are known one by one: the same ones for every seed, which then stands for luck alone."""

    kind: Literal["served"] = "served"
    concurrency: int | None = None
    drain: bool = True
    _requests: list[Request] = PrivateAttr(default_factory=list)

    @classmethod
    def of(cls, workload: Workload, requests: Sequence[Request]) -> Self:
        """``requests``, sent as ``workload`` sends its own."""
        drain = bool(getattr(workload, "drain", True))
        made = cls(domains=workload.domains, concurrency=workload.clients, drain=drain)
        made._requests = list(requests)
        return made

    @property
    def clients(self) -> int | None:
        """Those of the real workload."""
        return self.concurrency

    @property
    def count(self) -> int:
        """All of them."""
        return len(self._requests)

    def generate(self, seed: int) -> list[Request]:
        """All of them, whatever the seed."""
        return list(self._requests)


def as_served(requests: "pd.DataFrame", workload: Workload) -> list[Request]:
    """The requests of a recorded run: its prompt lengths, and the output it gave where the model ended early.

    Args:
        requests: ``RequestRecord`` columns.
        workload: what the run was asked for.
    """
    number = {name: i for i, name in enumerate(workload.domain_names)}
    finished = requests["status"] == "finished"
    lengths = requests["output_len"].where(~finished, requests["tokens"]).clip(lower=1)
    arrivals = requests["arrival_s"].fillna(0.0) if workload.clients is None else requests["arrival_s"] * 0
    columns = requests["request"], requests["domain"].map(number), requests["prompt_len"], lengths, arrivals.fillna(0.0)
    rows = zip(*(c.tolist() for c in columns), strict=True)
    return [Request(int(i), int(d), int(p), int(o), float(t)) for i, d, p, o, t in rows]


def twin_of(backend: AnyBackend, profile: Profile, learning: Learning | None = None) -> SimBackend:
    """A simulated engine with the limits of ``backend`` and the models of ``profile``.

    Policies believe of time what they believe on the real engine, right or wrong.
    """
    caps = backend.caps()
    given: dict[str, Any] = {name: getattr(backend, name) for name in LIMITS if hasattr(backend, name)}
    given["acceptance"] = acceptance_of(backend, profile)
    sim = SimBackend(
        cost=profile.cost,
        drafters=profile.drafters,
        max_draft_len=caps.max_draft_len,
        **given,
    )
    own: dict[str, Any] = {"believed": caps.cost, "learning": learning}
    own |= {name: getattr(backend, name) for name in ("predictor", "alarm") if hasattr(backend, name)}
    return sim.model_copy(update=own)


def acceptance_of(backend: AnyBackend, profile: Profile) -> AcceptanceModel:
    """The profile's acceptance at the temperature at which ``backend`` samples.

    Raises:
        InputError: outside the temperatures that the profile covers.
    """
    model, sampling = profile.acceptance, getattr(backend, "sampling", None)
    if sampling is None or not isinstance(model, CurveAcceptance) or _silent(profile):
        return model
    known, asked = sorted(model.tau_by_temperature or {0.0: 1.0}), sampling.temperature
    if not known[0] <= asked <= known[-1]:
        raise InputError(
            f"profile {profile.name}: acceptance was measured at temperatures {known[0]:g}..{known[-1]:g}, "
            f"backend.sampling.temperature is {asked:g}"
        )
    return model.model_copy(update={"temperature": asked})


def _silent(profile: Profile) -> bool:
    """Whether it does not say at which temperature its acceptance holds; calibration writes all but 0 down."""
    model = profile.acceptance
    return isinstance(model, CurveAcceptance) and profile.identity is None and model.tau_by_temperature is None


def notes_of(backend: AnyBackend, profile: Profile) -> tuple[str, ...]:
    """What the profile leaves open of an engine."""
    sampling = getattr(backend, "sampling", None)
    if sampling is None or not sampling.temperature or not _silent(profile):
        return ()
    return (
        f"profile {profile.name} does not say at which temperature its acceptance was measured; it is taken to hold at "
        f"{sampling.temperature:g}",
    )


def learning_of(backend: AnyBackend, profile: Profile, domains: Sequence[str], events: "pd.DataFrame") -> Learning | None:
    """How the drafter of the twin learns; None where it stays as it is.

    How fast is the profile's to say; how long a training round and a reload take are the run's own, since the trainer
    has its own machine: they are inputs.

    Args:
        backend: the engine; a simulated one keeps its own learning.
        profile: holds learning curves by domain.
        domains: of the workload.
        events: of the run.

    Raises:
        InputError: the engine trains its drafter, and the profile does not know how it learns.
    """
    if isinstance(backend, SimBackend):
        return backend.learning
    opd = getattr(backend, "opd", None)
    if opd is None or not opd.enabled:
        return None
    trained, loaded = (events.loc[events["kind"] == kind, "seconds"] for kind in ("trained", "reload"))
    if trained.empty and not opd.full_verify_share:
        return None  # no training round ended within the run, and nothing else of it is to be seen
    missing = sorted(set(domains) - set(profile.learning))
    if missing and len(trained):
        raise InputError(f"profile {profile.name}: does not know how the drafter learns {', '.join(missing)}")
    whole = opd.full_verify_share if opd.head_label == "full" else 0.0
    return Learning(
        curves={d: profile.learning[d] for d in domains if d in profile.learning},
        head=HeadLearning(label="full_verify", full_verify_share=whole) if whole else HeadLearning(),
        buffer=opd.buffer,
        max_tokens=opd.max_tokens,
        epochs=opd.epochs,
        gpus=1,
        token_us=NO_TIME_US,
        setup_s=float(trained.mean()) if len(trained) else NEVER_S,
        reload_ms=1e3 * float(loaded.mean()) if len(loaded) else 0.0,
        rollback=opd.rollback,
    )


class OffBesideDrafter(Off):
    """Plain decoding on an engine that has loaded a drafter, to train it."""

    @property
    def loads_drafter(self) -> bool:
        """Yes."""
        return True


@dataclass(frozen=True, slots=True)
class Twin:
    """A real run's scenario, ready to be simulated with other luck or other models."""

    backend: SimBackend
    workload: Served
    policy: Policy
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, scenario: Scenario, profile: Profile, requests: "pd.DataFrame", events: "pd.DataFrame") -> "Twin":
        """The twin of a run.

        Args:
            scenario: of the run, with one policy.
            profile: what is known of the engine.
            requests: as recorded.
            events: as recorded.
        """
        workload = Served.of(scenario.workload, as_served(requests, scenario.workload))
        backend, policy = scenario.backend, scenario.policies[0]
        learning = learning_of(backend, profile, workload.domain_names, events)
        opd = getattr(backend, "opd", None)
        follows = backend.kind == "torch"  # SGLang's drafter takes in nothing of plain decoding, trained or not
        if isinstance(policy, Off) and follows and opd is not None and opd.enabled:
            policy = OffBesideDrafter(name=policy.label)
        return cls(twin_of(backend, profile, learning), workload, policy, notes_of(backend, profile))

    def check(self) -> None:
        """Refuse what the profile's models do not cover.

        Raises:
            InputError: all problems.
        """
        self.backend.check_policy(self.policy)
        self.backend.check_workload(self.workload, 0)

    def run(self, luck: int) -> Records:
        """Simulate it once, with that seed of luck."""
        return self.backend.run(self.workload, self.policy, luck)

    def with_(self, **fields: Any) -> "Twin":
        """The same with other fields of its backend, like ``adjust`` or ``acceptance``."""
        return replace(self, backend=self.backend.model_copy(update=fields))

    def moved(self, name: str, value: float) -> "Twin":
        """The same with one calibrated input moved; see :class:`Adjust`. Policies go on believing what they believed."""
        return self.with_(adjust=Adjust.model_validate({name: value}))


Change = Callable[[Twin], Twin]
Found = TypeVar("Found")


def farthest(found_at: Callable[[float], Found], start: float, end: float) -> tuple[Found, float] | None:
    """What ``found_at`` gives at ``end``, or where that is impossible as far towards it from ``start`` as it goes.

    Returns:
        What was found and the share of the way, (0, 1]; None: nothing but at ``start``.
    """
    best: tuple[Found, float] | None = None
    low, high, share = 0.0, 1.0, 1.0
    for _ in range(BISECTIONS + 1):
        try:
            best, low = (found_at(start + share * (end - start)), share), share
        except (InputError, ValueError):  # what the model cannot be moved to
            high = share
        if low == 1:
            break
        share = (low + high) / 2
    return best


def luck_seeds(seed: int, count: int) -> list[int]:
    """Seeds of luck for the twins of the run of ``seed``: apart from each other, and from those of other runs."""
    return np.random.default_rng([seed, 77]).integers(0, 2**31, size=count).tolist()
