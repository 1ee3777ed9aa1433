"""Where an export's numbers come from: a profile, and the traffic of a scenario where there is one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from adasim import __version__
from adasim.calibration.acceptance import AcceptanceModel, CurveAcceptance
from adasim.calibration.cost import CostModel
from adasim.calibration.profile import Profile
from adasim.calibration.roofline import RooflineCost
from adasim.calibration.survival import Tree, harden
from adasim.errors import InputError
from adasim.explain import explain
from adasim.exports.best_k import Rates, rates, tokens_per_round
from adasim.files import find, is_file, load_yaml
from adasim.plan import Plan, load
from adasim.scenario import find_scenario
from adasim.simulator.backend import SimBackend
from adasim.types import FloatArray
from adasim.validation.twin import twin_of
from adasim.workload import Workload

CONTEXT = 512.0  # tokens, where nobody says
MAX_DRAFT_LEN = 15


@dataclass(frozen=True, slots=True)
class Asked:
    """What a user says beside profile and scenario; None = what those say."""

    profile: str | None = None
    drafter: str | None = None
    context: float | None = None
    max_batch: int | None = None
    shares: Mapping[str, float] = field(default_factory=dict)  # of the output tokens by domain
    settings: Sequence[str] = ()  # of the scenario


@dataclass(frozen=True, slots=True)
class Source:
    """An engine's cost and acceptance under some traffic.

    Attributes:
        name: of the scenario or profile.
        backend: the simulated engine.
        cost: with the drafter.
        acceptance: with the drafter.
        max_draft_len: K, drafts of a full block.
        shares: of the output tokens by domain, sum 1.
        context: mean tokens of a decoding request's context.
        max_batch: requests that run together at most (of one attention rank).
        profile: where the numbers come from; None = the scenario itself.
        plan: of the scenario; None = there is none.
        drafter: name of one of the profile's drafters; None = the engine's own.
        twin: ``backend`` has the limits of the scenario's engine and the models of another profile.
        notes: what was assumed.
    """

    name: str
    backend: SimBackend
    cost: CostModel
    acceptance: AcceptanceModel
    max_draft_len: int
    shares: dict[str, float]
    context: float
    max_batch: int
    profile: Profile | None
    plan: Plan | None = None
    drafter: str | None = None
    twin: bool = False
    notes: tuple[str, ...] = ()

    @property
    def one_pass(self) -> bool:
        """Whether the drafter fills a block in one pass (DFlash); autoregressive ones (EAGLE) make one a token."""
        draft = getattr(self.cost, "draft", None)
        return not getattr(draft, "autoregressive", False)

    def curve(self, domain: str) -> FloatArray:
        """Survival of a domain at this context, [K]."""
        luck = self.acceptance.luck((), [domain], 0, self.max_draft_len)  # of no request: its curves are what counts
        table = self.acceptance.tau_by_context if isinstance(self.acceptance, CurveAcceptance) else None
        if not table:
            return luck.curves[0]
        points = sorted(table)
        return harden(luck.curves[0], float(np.interp(self.context, points, [table[p] for p in points])))

    def rates(self, *, draft_block: bool = False, domain: str | None = None) -> list[Rates]:
        """Tokens per second by batch and draft length, of all traffic or of one domain alone.

        Raises:
            InputError: the cost knows no batch at all.
        """
        names = list(self.shares) if domain is None else [domain]
        shares = np.array([self.shares[d] for d in names]) if domain is None else np.ones(1)
        tokens = tokens_per_round(np.stack([self.curve(d) for d in names]), shares)
        found = rates(self.cost, tokens, range(1, self.max_batch + 1), self.context, draft_block=draft_block)
        if not found:
            raise InputError(f"{self.name}: its cost covers no batch of 1..{self.max_batch} at context {self.context:g}")
        return found

    @property
    def fitted(self) -> dict[str, tuple[float, float]]:
        """Lowest and highest value that was measured of batch, tokens (or tokens_per_request) and context."""
        own = {k: (v[0], v[1]) for k, v in (self.profile.fitted if self.profile else {}).items() if len(v) == 2}
        known = self.backend.calibrated_cost.measured | own
        return {k: known[k] for k in ("batch", "tokens", "tokens_per_request", "context") if k in known}

    def outside(self, batch: int, tokens: int) -> list[str]:
        """Which inputs of a pass lie where nothing was measured, each with its range."""
        values = {"batch": batch, "tokens": tokens, "tokens_per_request": tokens / batch, "context": self.context}
        fitted = self.fitted.items()
        return [f"{k} {values[k]:g} (measured {a:g}..{b:g})" for k, (a, b) in fitted if not a <= values[k] <= b]

    def about(self) -> dict[str, Any]:
        """What every export says of where it comes from."""
        profile = self.profile
        facts: dict[str, Any] | None = None
        if profile is not None:
            p = profile.provenance
            facts = {"name": profile.name, "digest": profile.digest, "source": p.source, "hardware": p.hardware}
            facts |= {"model": p.model, "engine": p.engine, "date": p.date, "says": profile.marks}
        return {
            "adasim": __version__,
            "from": self.name,
            "profile": facts,
            "measured": {k: list(v) for k, v in self.fitted.items()},
            "traffic": {"context": round(self.context, 1), "max_batch": self.max_batch, "domains": self.shares},
            "notes": list(self.notes),
        }


def read_source(name: str, asked: Asked) -> Source:
    """The scenario or profile of that name; a scenario where both are packaged, since it has traffic.

    Raises:
        InputError: neither, or what is wrong in it or in what was asked.
    """
    return from_profile(name, asked) if _is_profile(name) else from_scenario(name, asked)


def _is_profile(name: str) -> bool:
    if name.endswith((".yaml", ".yml")) and is_file(find(name, "profile")):
        return {"provenance", "cost", "acceptance"} <= load_yaml(find(name, "profile")).keys()
    try:
        find_scenario(name)
    except InputError as error:
        try:
            Profile.load(name)
        except InputError:
            raise error from None
        return True
    return False


def from_profile(name: str, asked: Asked) -> Source:
    """A profile, without traffic: every domain alike unless ``asked`` says."""
    problems = [f"{n}: has no effect on a profile" for n in ("--profile",) if asked.profile is not None]
    problems += ["--set: has no effect on a profile; give a scenario"] * bool(asked.settings)
    if problems:
        raise InputError(*problems)
    profile = Profile.load(name)
    model = profile.drafters[asked.drafter].acceptance if asked.drafter in profile.drafters else None
    acceptance = model or profile.acceptance
    longest = _longest(acceptance)
    backend = _valid(partial(SimBackend, profile=name, max_draft_len=longest), SimBackend)
    domains = acceptance.domains
    notes = []
    if asked.context is None:
        notes.append(f"nobody says how long contexts are: {CONTEXT:g} tokens are taken (--context)")
    if not asked.shares and len(domains) > 1:
        notes.append(f"nobody says what is asked: {', '.join(domains)} are taken alike (--domain)")
    most = int(profile.fitted.get("batch", [0])[-1])
    if asked.max_batch is None and 0 < most < backend.max_running_requests:
        asked = replace(asked, max_batch=most)
        notes.append(f"batches end at {most}, the largest that was measured (--max-batch)")
    shares = dict.fromkeys(domains, 1.0)
    return _source(profile.name, backend, asked, shares, CONTEXT, profile, notes)


def from_scenario(name: str, asked: Asked) -> Source:
    """A scenario at the first point of its sweep; on a real engine it needs a profile."""
    plan = load(name, asked.settings)
    backend, profile = plan.scenario.backend, None
    if asked.profile is not None:
        profile = Profile.load(asked.profile)
        sim = twin_of(backend, profile)
    elif isinstance(backend, SimBackend):
        sim, profile = backend, backend.calibration
    else:
        raise InputError(f"{name}: runs on a real engine (backend {backend.kind}); give its --profile")
    shares, context = traffic(plan.scenario.workload, plan.scenario.seeds[0])
    swept = [k for k in plan.scenario.sweep if k.split(".")[0] in {"workload", "backend"}]
    swept = [k for k in swept if k not in {"workload.concurrency", "workload.rate_rps"}]
    notes = [f"{key} is swept: this is for its first value; choose with --set" for key in swept]
    if not isinstance(backend, SimBackend):
        notes.append("prompts are taken to be as long as the workload says, whatever the real ones are")
    return _source(plan.scenario.name, sim, asked, shares, context, profile, notes, plan)


def traffic(workload: Workload, seed: int) -> tuple[dict[str, float], float]:
    """Share of the output tokens by domain, and the mean context of a token when it is decoded, tokens."""
    requests, names = workload.requests_of(seed), workload.domain_names
    output = np.array([r.output_len for r in requests], dtype=float)
    middle = np.array([r.prompt_len for r in requests]) + output / 2
    of_domain = np.bincount([r.domain for r in requests], weights=output, minlength=len(names))
    shares = {n: float(w) for n, w in zip(names, of_domain / output.sum(), strict=True) if w}
    return shares, float(middle @ output / output.sum())


def _source(
    name: str, backend: SimBackend, asked: Asked, shares: dict[str, float], context: float, profile: Profile | None,
    notes: list[str], plan: Plan | None = None,
) -> Source:  # fmt: skip
    cost, acceptance, longest = backend.models(_known(backend, asked.drafter))
    shares, context = dict(asked.shares) or shares, asked.context or context
    acceptance.check(list(shares), longest)
    problems = []
    if isinstance(acceptance, CurveAcceptance):
        trees = sorted(d for d in shares if isinstance(acceptance.curves[d], Tree))
        problems += [f"{name}: {', '.join(trees)} is a draft tree, which has no length to choose"] * bool(trees)
        reach = sorted(acceptance.tau_by_context or [])
        if reach and not reach[0] <= context <= reach[-1]:
            problems.append(f"--context {context:g}: acceptance is known for {reach[0]}..{reach[-1]}")
    if problems:
        raise InputError(*problems)
    total = sum(shares.values())
    if backend.parallel is not None and backend.parallel.dp > 1:
        notes = [*notes, f"batch sizes are those of one of {backend.parallel.dp} attention ranks"]
    if isinstance(cost, RooflineCost) and cost.fitted_tokens is None:
        notes = [*notes, "cost is a roofline estimate: nothing was measured on this hardware"]
    ranks = backend.parallel.dp if backend.parallel else 1
    return Source(
        name, backend, cost, acceptance, longest, {d: w / total for d, w in shares.items()}, context,
        asked.max_batch or backend.max_running_requests // ranks, profile, plan, asked.drafter,
        asked.profile is not None, tuple(notes),
    )  # fmt: skip


def _known(backend: SimBackend, drafter: str | None) -> str | None:
    known = sorted(backend.caps().drafters)
    if drafter is not None and drafter not in known:
        raise InputError(f"--drafter {drafter}: unknown; allowed: {', '.join(known) or 'none but its own'}")
    return drafter


def _longest(acceptance: AcceptanceModel) -> int:
    """Drafts of a full block, as far as every curve reaches, at most 15."""
    for longest in range(MAX_DRAFT_LEN, 1, -1):
        try:
            acceptance.check(acceptance.domains, longest)
            acceptance.luck((), acceptance.domains, 0, longest)
        except InputError:
            continue
        return longest
    return 1


def _valid(make: Callable[[], SimBackend], model: type[SimBackend]) -> SimBackend:
    from pydantic import ValidationError

    try:
        return make()
    except ValidationError as error:
        raise InputError(*explain(error, model)) from error
