"""The simulated backend: a scenario's engine, priced and lucky by its models."""

from collections.abc import Callable
from functools import partial
from typing import Literal, Self

import simpy
from pydantic import Field, PrivateAttr, model_validator

from adasim.calibration.acceptance import AcceptanceModel, AnyAcceptance
from adasim.calibration.cost import CostModel
from adasim.calibration.draft_model import DraftModel
from adasim.calibration.profile import Profile
from adasim.calibration.roofline import AnyCost
from adasim.errors import InputError
from adasim.policies.base import Policy
from adasim.policies.driver import PolicyDriver
from adasim.policies.scheduler import AnyScheduler, Fcfs
from adasim.records import Records
from adasim.serving.admission import Admission
from adasim.serving.kv import KvMemory
from adasim.serving.recorder import Recorder
from adasim.simulator.engine import Engine, Process
from adasim.types import Component, EngineCaps, Request
from adasim.workload import Closed, Workload


class SimBackend(Component):
    """A simulated engine.

    Cost, acceptance and drafters come from ``profile``, or are given here; what is given here wins.

    Attributes:
        profile: name of a packaged profile, or a path.
        drafters: further drafters by name, for policies that choose one (``drafter``).
        max_draft_len: drafts of a full block (block - 1).
        max_running_requests: one limit for every policy.
        ragged: pack different verify lengths; false pads everybody to the longest.
        lag_steps: rounds after which a policy sees an outcome.
        chunked_prefill: prefill tokens mixed into each step; null = prefills are steps of their own.
        max_prefill_tokens: prompt tokens of one such step.
    """

    kind: Literal["sim"] = "sim"
    profile: str | None = None
    cost: AnyCost | None = None
    acceptance: AnyAcceptance | None = None
    drafters: dict[str, DraftModel] = Field(default_factory=dict)
    max_draft_len: int = Field(default=15, ge=1)
    max_running_requests: int = Field(default=256, ge=1)
    ragged: bool = True
    lag_steps: int = Field(default=0, ge=0)
    chunked_prefill: int | None = Field(default=None, ge=1)
    max_prefill_tokens: int | None = Field(default=None, ge=1)
    kv: KvMemory = KvMemory()
    scheduler: AnyScheduler = Fcfs()
    _profile: Profile | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.profile is not None:
            self._profile = Profile.load(self.profile)
            if self.cost is not None and self.acceptance is not None:
                raise ValueError("profile has no effect: cost and acceptance are both given")
        elif self.cost is None or self.acceptance is None:
            raise ValueError("give a profile, or both cost and acceptance")
        if self.chunked_prefill is not None and self.max_prefill_tokens is not None:
            raise ValueError("max_prefill_tokens has no effect with chunked_prefill")
        return self

    @property
    def mark(self) -> str:
        """How a report marks numbers of this backend."""
        return "simulated"

    @property
    def calibration(self) -> Profile | None:
        """The profile in use."""
        return self._profile

    @property
    def inputs(self) -> dict[str, Component]:
        """Models given in the scenario instead of a profile."""
        given: dict[str, Component | None] = {"cost": self.cost, "acceptance": self.acceptance}
        given |= {f"drafter {name}": model for name, model in self.drafters.items()}
        return {name: model for name, model in given.items() if model is not None}

    def _cost(self) -> CostModel:
        model = self.cost or (self._profile.cost if self._profile else None)
        assert model is not None
        return model

    def _acceptance(self) -> AcceptanceModel:
        model = self.acceptance or (self._profile.acceptance if self._profile else None)
        assert model is not None
        return model

    def _drafters(self) -> dict[str, DraftModel]:
        return (self._profile.drafters if self._profile else {}) | self.drafters

    def _with(self, drafter: str | None) -> tuple[CostModel, AcceptanceModel, int]:
        """Cost, acceptance and longest draft with a drafter; null or an unknown name: the engine's own."""
        cost, acceptance = self._cost(), self._acceptance()
        if drafter is None or (own := self._drafters().get(drafter)) is None:
            return cost, acceptance, self.max_draft_len
        return own.cost_of(cost), own.acceptance_of(acceptance), own.max_draft_len or self.max_draft_len

    def caps(self, drafter: str | None = None) -> EngineCaps:
        """The engine's limits and what it provides, with one of its drafters."""
        cost, _, max_draft_len = self._with(drafter)
        return EngineCaps(
            max_draft_len=max_draft_len,
            max_running_requests=self.max_running_requests,
            ragged=self.ragged,
            captured_tokens=tuple(cost.captured_tokens or ()),
            lag_steps=self.lag_steps,
            provides=frozenset({"survival", "accept_len", "cost", "truth"}),
            cost=cost,
            drafters=frozenset(self._drafters()),
        )

    def check_policy(self, policy: Policy) -> None:
        """Refuse a policy that needs what this engine lacks.

        Raises:
            InputError: what is missing, or which field does not fit.
        """
        PolicyDriver(policy, self.caps(policy.drafter))

    def check_workload(self, workload: Workload, seed: int) -> None:
        """Refuse a workload that the models do not cover or the memory cannot hold.

        Raises:
            InputError: all problems.
        """
        requests = workload.generate(seed)
        smallest, largest = self._batches(workload, len(requests))
        checks: list[tuple[str, Callable[[], None]]] = [("", partial(self._cost().check_batches, smallest, largest))]
        longest = 0
        for drafter in (None, *self._drafters()):
            _, acceptance, max_draft_len = self._with(drafter)
            whose = f"drafter {drafter}: " if drafter else ""
            checks.append((whose, partial(acceptance.check, workload.domain_names, max_draft_len)))
            checks.append((whose, partial(acceptance.check_requests, requests)))
            longest = max(longest, max_draft_len)
        checks.append(("", partial(self.kv.check, requests, longest + 1)))
        problems: list[str] = []
        for whose, check in checks:
            try:
                check()
            except InputError as error:
                problems += [f"{whose}{p}" for p in error.problems]
        if problems:
            raise InputError(*problems)

    def _batches(self, workload: Workload, requests: int) -> tuple[int, int | None]:
        """Smallest and largest batch that a run is sure to have; None = unknown."""
        if workload.clients is None:
            return 1, None
        largest = min(workload.clients, self.max_running_requests, requests)
        steady = isinstance(workload, Closed) and not workload.drain and workload.clients < requests
        return (largest if steady else 1), largest

    def run(self, workload: Workload, policy: Policy, seed: int) -> Records:
        """Simulate one run. The same arguments give the same records."""
        requests = workload.generate(seed)
        cost, acceptance, max_draft_len = self._with(policy.drafter)
        driver = PolicyDriver(policy, self.caps(policy.drafter))
        luck = acceptance.luck(requests, workload.domain_names, seed, max_draft_len)
        recorder = Recorder(workload.domain_names, max_draft_len + 1)
        admission = Admission(requests, luck.base, self.scheduler, self.kv, driver.caps)
        env = simpy.Environment()
        source = _Source(env, workload, requests)
        engine = Engine(
            env,
            admission,
            driver,
            cost,
            luck,
            recorder,
            chunk=self.chunked_prefill,
            max_prefill_tokens=self.max_prefill_tokens or 16384,
            on_finish=source.on_finish,
        )
        source.start(engine)
        env.process(engine.run())
        env.run(until=source.over)
        admission.save()
        records = recorder.records(admission.lives)
        records.notes.extend(cost.notes)
        return records


class _Source:
    """Sends requests to the engine: clients of a closed loop, or arrivals on the clock."""

    def __init__(self, env: simpy.Environment, workload: Workload, requests: list[Request]) -> None:
        self.env, self.clients = env, workload.clients
        self.requests, self.sent, self.finished = requests, 0, 0
        self.drain = workload.drain if isinstance(workload, Closed) else True
        self.over = env.event()

    def start(self, engine: Engine) -> None:
        self.engine = engine
        if self.clients is None:
            self.env.process(self._arrivals())
        else:
            for _ in range(self.clients):
                self._send()

    def on_finish(self, index: int) -> None:
        self.finished += 1
        if self.clients is not None:
            self._send()
        if self.finished == len(self.requests):
            self._end()

    def _send(self) -> None:
        if self.sent == len(self.requests):
            return
        self.engine.submit(self.sent)
        self.sent += 1
        if self.sent == len(self.requests) and not self.drain:
            self._end()

    def _arrivals(self) -> Process:
        for request in self.requests:
            if request.arrival_s > self.env.now:
                yield self.env.timeout(request.arrival_s - self.env.now)
            self._send()

    def _end(self) -> None:
        if not self.over.triggered:
            self.over.succeed()
