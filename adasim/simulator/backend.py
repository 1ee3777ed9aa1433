"""The simulated backend: a scenario's engine, priced and lucky by its models."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, Self

import simpy
from pydantic import Field, PrivateAttr, model_validator

from adasim.calibration.acceptance import AcceptanceModel, AnyAcceptance, CurveAcceptance
from adasim.calibration.adjust import Adjust
from adasim.calibration.alarm import Alarm
from adasim.calibration.cost import CostModel
from adasim.calibration.draft_model import DraftModel
from adasim.calibration.luck import Luck
from adasim.calibration.parallel import Parallel
from adasim.calibration.parallel_cost import cost_on
from adasim.calibration.profile import Profile
from adasim.calibration.roofline import AnyCost, LayersDraft, RooflineCost
from adasim.calibration.versioned import VersionedLuck
from adasim.errors import InputError
from adasim.policies.base import Policy
from adasim.policies.driver import PolicyDriver
from adasim.policies.scheduler import AnyScheduler, Fcfs
from adasim.records import PrefillRecord, Records, VersionRecord, frame
from adasim.serving.admission import Admission
from adasim.serving.drift import tell_drift
from adasim.serving.kv import KvMemory
from adasim.serving.lives import RUNNING, Lives
from adasim.serving.monitor import Monitor
from adasim.serving.predictor import LengthPredictor
from adasim.serving.ranks import Ranks
from adasim.serving.recorder import Recorder
from adasim.simulator.engine import Engine
from adasim.simulator.learning import Learning
from adasim.simulator.lock_step import BalancedRanks, LockStep
from adasim.simulator.prefill_pool import Disaggregation, PrefillPool
from adasim.simulator.source import Source
from adasim.simulator.trainer import Trainer
from adasim.types import Component, EngineCaps, FloatArray, Request, RoundCost
from adasim.workload import Closed, Workload

MAX_PREFILL_TOKENS = 16384


class SimBackend(Component):
    """A simulated engine.

    Cost, acceptance and drafters come from ``profile``, or are given here; what is given here wins.

    Attributes:
        profile: name of a packaged profile, or a path.
        drafters: further drafters by name, for policies that choose one (``drafter``).
        adjust: moves the calibrated inputs; see ``adasim sensitivity``.
        believed: what policies know of time; null = the truth.
        max_draft_len: drafts of a full block (block - 1).
        max_running_requests: one limit for every policy.
        ragged: pack different verify lengths; false pads everybody to the longest.
        lag_steps: rounds after which a policy sees an outcome.
        chunked_prefill: prefill tokens mixed into each step; null = prefills are steps of their own.
        max_prefill_tokens: prompt tokens of one such step.
        memory_fraction: share of each GPU's memory for weights and KV blocks together, from which ``kv.blocks`` follows;
            null = ``kv.blocks`` says.
        parallel: GPUs of the engine; null = the cost's own.
        disaggregation: engines of their own prefill; null = this one does.
        predictor: guesses output lengths for schedulers that ask; null = such schedulers are refused.
        learning: online distillation of the drafter; null = it stays as loaded.
        alarm: watches tau; null = nobody does.
        rounds: record every request of every round, as the torch engine does.
    """

    kind: Literal["sim"] = "sim"
    profile: str | None = None
    cost: AnyCost | None = None
    acceptance: AnyAcceptance | None = None
    drafters: dict[str, DraftModel] = Field(default_factory=dict)
    adjust: Adjust | None = None
    believed: AnyCost | None = None
    max_draft_len: int = Field(default=15, ge=1)
    max_running_requests: int = Field(default=256, ge=1)
    ragged: bool = True
    lag_steps: int = Field(default=0, ge=0)
    chunked_prefill: int | None = Field(default=None, ge=1)
    max_prefill_tokens: int | None = Field(default=None, ge=1)
    kv: KvMemory = KvMemory()
    memory_fraction: float | None = Field(default=None, gt=0, le=1)
    parallel: Parallel | None = None
    disaggregation: Disaggregation | None = None
    scheduler: AnyScheduler = Fcfs()
    predictor: LengthPredictor | None = None
    learning: Learning | None = None
    alarm: Alarm | None = None
    rounds: bool = False
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
        problems = list(self._misfits())
        if problems:
            raise InputError(*problems)
        return self

    def _misfits(self) -> Iterator[str]:
        """What does not go together among GPUs, memory and disaggregation."""
        roofline = isinstance(self.calibrated_cost, RooflineCost)
        if self.max_running_requests % self._dp:
            yield f"max_running_requests: {self.max_running_requests} cannot be divided among {self._dp} attention ranks"
        try:
            self._believed_cost(self.calibrated_cost)
        except InputError as error:
            yield from (f"believed: {problem}" for problem in error.problems)
        if self.memory_fraction is not None and self.kv.blocks is not None:
            yield "memory_fraction has no effect: kv.blocks is given"
        if self.memory_fraction is not None and not roofline:
            yield "memory_fraction needs a cost of kind roofline, which knows weights and memory; give kv.blocks instead"
        elif self.memory_fraction is not None:
            self._memory(None, drafter_loaded=True)
        pool = self._prefills
        if pool is None:
            return
        if self.chunked_prefill is not None:
            yield "chunked_prefill has no effect with disaggregation: the decoding engine never prefills"
        if self.kv.prefix_cache:
            yield "kv.prefix_cache is not modelled with disaggregation"
        if self._dp > 1 and pool.parallel is None and pool.cost is None:
            yield "disaggregation.parallel: give the GPUs of a prefill engine; it has no attention ranks as this one has"
        elif not self._prefill_cost().prefill_s(64, 32.0, 0):
            yield "disaggregation needs a cost that prices prefill: set cost.prefill, or disaggregation.cost"
        if pool.kv_bytes_per_token is None and not roofline:
            yield "disaggregation.kv_bytes_per_token: give it; only a cost of kind roofline knows the model's shape"

    @property
    def mark(self) -> str:
        """How a report marks numbers of this backend."""
        return "simulated"

    def identity(self) -> None:
        """A simulation has none; see ``EngineIdentity``."""
        return None

    @property
    def calibration(self) -> Profile | None:
        """The profile in use."""
        return self._profile

    @property
    def inputs(self) -> dict[str, Component]:
        """Models given in the scenario instead of a profile, or beside it."""
        given: dict[str, Component | None] = {
            "cost": self.cost,
            "acceptance": self.acceptance,
            "learning": self.learning,
            "alarm": self.alarm,
            "parallel": self.parallel,
            "disaggregation": self.disaggregation,
        }
        given |= {f"drafter {name}": model for name, model in self.drafters.items()}
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

    @property
    def _dp(self) -> int:
        return self.parallel.dp if self.parallel else 1

    @property
    def _prefills(self) -> Disaggregation | None:
        """Engines that prefill, if there are any."""
        return self.disaggregation if self.disaggregation and self.disaggregation.prefill_engines else None

    def _cost(self) -> CostModel:
        return self._adjusted(cost_on(self.calibrated_cost, self.parallel))

    def _adjusted(self, cost: CostModel) -> CostModel:
        return self.adjust.cost(cost) if self.adjust else cost

    def _prefill_cost(self) -> CostModel:
        """What a prefill engine pays."""
        pool = self._prefills
        assert pool is not None
        parallel = pool.parallel or (None if pool.cost else self.parallel)
        return self._adjusted(cost_on(pool.cost or self.calibrated_cost, parallel))

    def _memory(self, drafter: str | None, *, drafter_loaded: bool) -> KvMemory:
        """KV memory of one attention rank."""
        if self.memory_fraction is None:
            return self.kv
        cost = self._on_gpus(drafter)
        assert isinstance(cost, RooflineCost)
        tokens = cost.memory(drafter_loaded=drafter_loaded).kv_tokens(self.memory_fraction)
        return self.kv.model_copy(update={"blocks": tokens // self.kv.block_tokens})

    def _on_gpus(self, drafter: str | None) -> CostModel:
        """The cost with a drafter, before ``adjust``."""
        own = self._drafters().get(drafter) if drafter is not None else None
        return cost_on(own.cost_of(self.calibrated_cost) if own else self.calibrated_cost, self.parallel)

    def _drafters(self) -> dict[str, DraftModel]:
        return (self._profile.drafters if self._profile else {}) | self.drafters

    def models(self, drafter: str | None) -> tuple[CostModel, AcceptanceModel, int]:
        """Cost, acceptance and longest draft with a drafter; null or an unknown name: the engine's own."""
        cost, acceptance, longest = self._adjusted(self._on_gpus(drafter)), self.calibrated_acceptance, self.max_draft_len
        if drafter is not None and (own := self._drafters().get(drafter)) is not None:
            acceptance = own.acceptance_of(acceptance)
            longest = own.max_draft_len or longest
        return cost, self.adjust.luck(acceptance) if self.adjust else acceptance, longest

    def caps(self, drafter: str | None = None) -> EngineCaps:
        """The engine's limits and what it provides, with one of its drafters."""
        cost, _, max_draft_len = self.models(drafter)
        provides = {"survival", "accept_len", "margin", "cost", "truth"}
        provides |= {"predicted_len"} if self.predictor is not None else set()
        return EngineCaps(
            max_draft_len=max_draft_len,
            max_running_requests=self.max_running_requests,
            ragged=self.ragged,
            captured_tokens=tuple(self._dp * size for size in cost.captured_tokens or ()),
            captured_lens=tuple(cost.captured_lens or ()),
            lag_steps=self.lag_steps,
            provides=frozenset(provides),
            cost=self._believed_cost(cost),
            drafters=frozenset(self._drafters()),
        )

    def _believed_cost(self, true: CostModel) -> RoundCost:
        """What policies know of time, on this engine's GPUs."""
        cost = true if self.believed is None else cost_on(self.believed, self.parallel)
        return cost if self._dp == 1 else BalancedRanks(cost, self._dp)

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
        requests = workload.requests_of(seed)
        smallest, largest = self._batches(workload, len(requests))
        checks: list[tuple[str, Callable[[], None]]] = [
            ("", partial(self._cost().check_batches, smallest, largest)),
            ("", partial(self.scheduler.check, self.caps())),
        ]
        longest = 0
        for drafter in (None, *self._drafters()):
            _, acceptance, max_draft_len = self.models(drafter)
            whose = f"drafter {drafter}: " if drafter else ""
            checks.append((whose, partial(acceptance.check, workload.domain_names, max_draft_len)))
            checks.append((whose, partial(acceptance.check_requests, requests)))
            if self.learning is not None:
                checks.append((whose, partial(self.learning.check, acceptance, workload.domain_names, max_draft_len)))
            longest = max(longest, max_draft_len)
        memories = (self._memory(drafter, drafter_loaded=True) for drafter in (None, *self._drafters()))
        memory = min(memories, key=lambda m: m.blocks or 0)
        checks.append(("", partial(memory.check, requests, longest + 1)))
        problems: list[str] = []
        for whose, check in checks:
            try:
                check()
            except InputError as error:
                problems += [f"{whose}{p}" for p in error.problems]
        if problems:
            raise InputError(*problems)

    def _batches(self, workload: Workload, requests: int) -> tuple[int, int | None]:
        """Smallest and largest batch that a run is sure to have on an attention rank; None = unknown."""
        if workload.clients is None:
            return 1, None
        largest = -(-min(workload.clients, self.max_running_requests, requests) // self._dp)
        steady = isinstance(workload, Closed) and not workload.drain and workload.clients < requests
        return (largest if steady else 1), largest

    def run(self, workload: Workload, policy: Policy, seed: int) -> Records:
        """Simulate one run. The same arguments give the same records."""
        requests = workload.requests_of(seed)
        domains = workload.domain_names
        cost, acceptance, max_draft_len = self.models(policy.drafter)
        driver = PolicyDriver(policy, self.caps(policy.drafter))
        luck = self._luck(acceptance, max_draft_len, requests, domains, seed)
        recorder = Recorder(domains, max_draft_len + 1, rounds=self.rounds)
        predicted = self.predictor.predict(requests, seed) if self.predictor else None
        env, lives = simpy.Environment(), Lives(requests, luck.base)
        memory = self._memory(policy.drafter, drafter_loaded=policy.loads_drafter)
        pool = self._pool(env, policy, lives, recorder)
        admission = self._admission(requests, lives, memory, driver.caps, predicted, pool)
        source = Source(env, workload, requests, admission)
        trainer, monitor = None, None
        if isinstance(luck, VersionedLuck) and self.learning is not None:
            tokens = partial(_context_tokens, admission)
            trainer = Trainer(env, self.learning, luck, len(requests), domains, seed, tokens, recorder.events)
            source.watchers.append(trainer.on_finish)
            if self.learning.trains:
                env.process(trainer.run())
        if self.alarm is not None:
            monitor = Monitor(self.alarm, domains, lambda: recorder.draft_version, recorder.events)
            source.watchers.append(monitor.on_finish)
        engine = Engine(
            env,
            admission,
            driver,
            cost,
            luck,
            recorder,
            chunk=self.chunked_prefill,
            max_prefill_tokens=self.max_prefill_tokens or MAX_PREFILL_TOKENS,
            source=source,
            trainer=trainer,
            lock_step=LockStep(cost, admission, ragged=self.ragged) if isinstance(admission, Ranks) else None,
            pool=pool,
        )
        if pool is not None:
            pool.start(engine.join, source.on_finish)
        source.start(engine, engine.submit if pool is None else pool.submit)
        env.process(engine.run())
        env.run(until=source.over)
        if pool is not None:
            pool.close()
        if trainer is not None or monitor is not None:
            tell_drift(recorder.events, workload, requests, lives)
        running = (lives.status == RUNNING) & (lives.rounds > 0)
        lives.draft_version[running] = recorder.draft_version
        records = recorder.records(lives)
        records.notes.extend([*cost.notes, *self._hardware_notes(policy)])
        if pool is not None and records.steps["queued"].any():
            records.notes.append(
                "requests waited for the decoding engine with their KV cache sent; engines that first make room for it "
                "add the transfer to the wait"
            )
        if pool is not None:
            records.prefills = frame(PrefillRecord, pool.records)
            records.notes.extend(f"prefill engines: {n}" for n in pool.cost.notes if n not in records.notes)
        if predicted is not None and "predicted_len" not in self.scheduler.needs:
            records.notes.append(f"backend.predictor has no effect: scheduler {self.scheduler.kind} does not ask")
        if trainer is not None:
            records.notes.extend(trainer.learning.notes)
            records.versions = frame(VersionRecord, trainer.records())
        return records

    def _admission(
        self,
        requests: Sequence[Request],
        lives: Lives,
        memory: KvMemory,
        caps: EngineCaps,
        predicted: FloatArray | None,
        pool: PrefillPool | None,
    ) -> Admission | Ranks:
        """One admission, or one for each attention rank."""
        prefilled = None if pool is None else pool.park
        one = partial(Admission, requests, lives.base, memory=memory, predicted_lens=predicted, lives=lives)
        if self.parallel is None or self.parallel.dp == 1:
            return one(scheduler=self.scheduler, caps=caps, prefilled=prefilled)
        share = replace(caps, max_running_requests=caps.max_running_requests // self._dp)
        schedulers = [self.scheduler.model_copy() for _ in range(self._dp)]
        ranks = [one(scheduler=scheduler, caps=share, prefilled=prefilled) for scheduler in schedulers]
        return Ranks(ranks, self.parallel.routing)

    def _pool(self, env: simpy.Environment, policy: Policy, lives: Lives, recorder: Recorder) -> PrefillPool | None:
        """Engines that prefill; None = this one does."""
        config = self._prefills
        if config is None:
            return None
        sent = config.kv_bytes_per_token
        if sent is None:
            cost = self._on_gpus(policy.drafter)
            assert isinstance(cost, RooflineCost)
            sent = cost.memory(drafter_loaded=policy.loads_drafter).kv_bytes_per_token
        limit = self.max_prefill_tokens or MAX_PREFILL_TOKENS
        return PrefillPool(env, config, self._prefill_cost(), sent, limit, lives, recorder)

    def _hardware_notes(self, policy: Policy) -> list[str]:
        """What the numbers are of."""
        notes = []
        if self._prefills is not None:
            notes.append("prefill engines are hardware beside the decoding one: throughput is that of all together")
        if self.memory_fraction is not None:
            memory = self._memory(policy.drafter, drafter_loaded=policy.loads_drafter)
            tokens, ranked = (memory.blocks or 0) * memory.block_tokens, " a rank" * (self._dp > 1)
            notes.append(f"KV memory holds {tokens:,} tokens{ranked} beside {self._weights(policy)} (memory_fraction)")
        return notes

    def _weights(self, policy: Policy) -> str:
        """What fills the memory that ``memory_fraction`` divides."""
        if not policy.loads_drafter:
            return "the weights"
        cost = self._on_gpus(policy.drafter)
        assert isinstance(cost, RooflineCost)
        sized = isinstance(cost.draft, LayersDraft)
        return "weights and drafter" if sized else "the weights; a drafter's, whose size draft does not tell, not counted"

    def _luck(
        self, model: AcceptanceModel, max_draft_len: int, requests: Sequence[Request], domains: list[str], seed: int
    ) -> Luck:
        if self.learning is None:
            return model.luck(requests, domains, seed, max_draft_len)
        assert isinstance(model, CurveAcceptance)  # checked with the workload
        knows_text = self.learning.head.knows == "text"
        return VersionedLuck(model, requests, domains, seed, max_draft_len, heads_know_text=knows_text)


def _context_tokens(admission: Admission | Ranks) -> int:
    """Tokens of all running requests."""
    return int(admission.batch.context.sum())
