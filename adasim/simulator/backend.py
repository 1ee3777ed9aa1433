"""The simulated backend: a scenario's engine, priced and lucky by its models."""

from collections.abc import Callable
from functools import partial
from typing import Literal, Self

import simpy
from pydantic import Field, PrivateAttr, model_validator

from adasim.calibration.acceptance import AcceptanceModel, AnyAcceptance
from adasim.calibration.adjust import Adjust
from adasim.calibration.cost import CostModel
from adasim.calibration.profile import Profile
from adasim.calibration.roofline import AnyCost
from adasim.errors import InputError
from adasim.policies.base import Policy
from adasim.policies.driver import PolicyDriver
from adasim.policies.scheduler import AnyScheduler, Fcfs
from adasim.records import Records
from adasim.serving.admission import Admission
from adasim.serving.kv import KvMemory
from adasim.serving.predictor import LengthPredictor
from adasim.serving.recorder import Recorder
from adasim.simulator.engine import Engine, Process
from adasim.types import Component, EngineCaps, Request
from adasim.workload import Closed, Workload


class SimBackend(Component):
    """A simulated engine.

    Cost and acceptance come from ``profile``, or are given here; what is given here wins.

    Attributes:
        profile: name of a packaged profile, or a path.
        adjust: moves the calibrated inputs; see ``adasim sensitivity``.
        max_draft_len: drafts of a full block (block - 1).
        max_running_requests: one limit for every policy.
        ragged: pack different verify lengths; false pads everybody to the longest.
        lag_steps: rounds after which a policy sees an outcome.
        chunked_prefill: prefill tokens mixed into each step; null = prefills are steps of their own.
        max_prefill_tokens: prompt tokens of one such step.
        predictor: guesses output lengths for schedulers that ask; null = such schedulers are refused.
    """

    kind: Literal["sim"] = "sim"
    profile: str | None = None
    cost: AnyCost | None = None
    acceptance: AnyAcceptance | None = None
    adjust: Adjust | None = None
    max_draft_len: int = Field(default=15, ge=1)
    max_running_requests: int = Field(default=256, ge=1)
    ragged: bool = True
    lag_steps: int = Field(default=0, ge=0)
    chunked_prefill: int | None = Field(default=None, ge=1)
    max_prefill_tokens: int | None = Field(default=None, ge=1)
    kv: KvMemory = KvMemory()
    scheduler: AnyScheduler = Fcfs()
    predictor: LengthPredictor | None = None
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
        if self.ragged and self._cost().captured_lens is not None:
            raise ValueError("cost.captured_lens is for rectangular engines: set ragged: false")
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
        given = {"cost": self.cost, "acceptance": self.acceptance}
        return {name: model for name, model in given.items() if model is not None}

    @property
    def calibrated_cost(self) -> CostModel:
        """The cost model before ``adjust``."""
        model = self.cost or (self._profile.cost if self._profile else None)
        assert model is not None
        return model

    @property
    def calibrated_acceptance(self) -> AcceptanceModel:
        """The acceptance model before ``adjust``."""
        model = self.acceptance or (self._profile.acceptance if self._profile else None)
        assert model is not None
        return model

    def _cost(self) -> CostModel:
        return self.adjust.cost(self.calibrated_cost) if self.adjust else self.calibrated_cost

    def _acceptance(self) -> AcceptanceModel:
        return self.adjust.luck(self.calibrated_acceptance) if self.adjust else self.calibrated_acceptance

    def caps(self) -> EngineCaps:
        """The engine's limits and what it provides."""
        provides = {"survival", "accept_len", "margin", "cost", "truth"}
        provides |= {"predicted_len"} if self.predictor is not None else set()
        return EngineCaps(
            max_draft_len=self.max_draft_len,
            max_running_requests=self.max_running_requests,
            ragged=self.ragged,
            captured_tokens=tuple(self._cost().captured_tokens or ()),
            captured_lens=tuple(self._cost().captured_lens or ()),
            lag_steps=self.lag_steps,
            provides=frozenset(provides),
            cost=self._cost(),
        )

    def check_policy(self, policy: Policy) -> None:
        """Refuse a policy that needs what this engine lacks.

        Raises:
            InputError: what is missing, or which field does not fit.
        """
        PolicyDriver(policy, self.caps())

    def check_workload(self, workload: Workload, seed: int) -> None:
        """Refuse a workload that the models do not cover or the memory cannot hold.

        Raises:
            InputError: all problems.
        """
        requests, acceptance = workload.generate(seed), self._acceptance()
        smallest, largest = self._batches(workload, len(requests))
        checks: list[Callable[[], None]] = [
            partial(acceptance.check, workload.domain_names, self.max_draft_len),
            partial(acceptance.check_requests, requests),
            partial(self._cost().check_batches, smallest, largest),
            partial(self.kv.check, requests, self.max_draft_len + 1),
            partial(self.scheduler.check, self.caps()),
        ]
        problems: list[str] = []
        for check in checks:
            try:
                check()
            except InputError as error:
                problems += error.problems
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
        cost = self._cost()
        driver = PolicyDriver(policy, self.caps())
        luck = self._acceptance().luck(requests, workload.domain_names, seed, self.max_draft_len)
        recorder = Recorder(workload.domain_names, self.max_draft_len + 1)
        predicted = self.predictor.predict(requests, seed) if self.predictor else None
        admission = Admission(requests, luck.base, self.scheduler, self.kv, driver.caps, predicted)
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
        if predicted is not None and "predicted_len" not in self.scheduler.needs:
            records.notes.append(f"backend.predictor has no effect: scheduler {self.scheduler.kind} does not ask")
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
