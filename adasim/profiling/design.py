"""Which visits a profile makes, the most informative first."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple, cast

import numpy as np

from adasim.errors import InputError
from adasim.plan import Plan, Trial
from adasim.policies.fixed import Fixed
from adasim.policies.probe import Shape
from adasim.profile_grid import ProfileGrid
from adasim.profiling.visit import Kind, Measurable, Visit

PLAIN = Shape(draft_len=0, verify_len=1)
TOKENS_A_VISIT = 32  # requests x passes, at least: small batches play more rounds
GROWTH = 128  # tokens that a visit adds to its context, about
HEADS = ("accept_len", "survival", "margin")


class Grid(NamedTuple):
    """See :class:`~adasim.profile_grid.ProfileGrid`; nothing is left open, values rise."""

    batches: list[int]
    contexts: list[int]
    verify_lens: list[int]
    prefill_tokens: list[int]


@dataclass(frozen=True, slots=True)
class Design:
    """A profile to make.

    Attributes:
        plan: the scenario's.
        engine: what is measured.
        visits: all of them, without the reference.
        reference: measures the machine's speed again and again.
        repeats: times each visit is made at most.
        seed: of their order.
        notes: limits that a reader must know.
    """

    plan: Plan
    engine: Measurable
    visits: list[Visit]
    reference: Visit
    repeats: int
    seed: int
    notes: list[str] = field(default_factory=list)
    _trials: dict[tuple[Visit, int], Trial] = field(default_factory=dict)
    _keys: dict[tuple[Visit, int], str] = field(default_factory=dict)

    def trial(self, visit: Visit, repeat: int) -> Trial:
        """One making of a visit."""
        if (visit, repeat) not in self._trials:
            domain = self.plan.scenario.workload.domain_names[0]
            self._trials[visit, repeat] = visit.trial(self.plan.trials[0], self.engine, domain, repeat)
        return self._trials[visit, repeat]

    def key(self, visit: Visit, repeat: int) -> str:
        """That trial's."""
        if (visit, repeat) not in self._keys:
            self._keys[visit, repeat] = self.trial(visit, repeat).key
        return self._keys[visit, repeat]

    def sequence(self) -> list[tuple[Visit, int]]:
        """Every visit with its repeats, in the order to make them.

        Visits take turns, so that a machine whose speed drifts changes all of them alike. Finer tiers join later.
        """
        order: list[tuple[Visit, int]] = []
        for repeat in range(self.repeats):
            rng = Random(f"{self.seed}/{repeat}")
            for tier in range(min(repeat, 2) + 1 if repeat + 1 < self.repeats else 3):
                due = [v for v in self.visits if v.tier == tier]
                rng.shuffle(due)
                order += [(v, repeat) for v in due]
        return order


def design(plan: Plan) -> Design:
    """The profile of a scenario's engine, over the scenario's own range of batches, contexts and lengths.

    Raises:
        InputError: the backend is simulated, has no drafter, or the grid does not fit it; all problems.
    """
    scenario = plan.scenario
    if scenario.backend.mark != "measured":
        raise InputError(f"backend: kind {scenario.backend.kind} is a simulation; profile measures a real engine")
    problems = [
        f"sweep.{key}: profile measures one engine; choose with --set {key}=VALUE"
        for key in plan.trials[0].point
        if key.startswith("backend.")
    ]
    engine = cast(Measurable, scenario.backend)
    given = scenario.profile or ProfileGrid()
    caps = engine.caps()
    if caps.max_draft_len < 2:
        problems.append("backend.drafter: profile needs one; without drafts there is nothing to verify")
    if problems:
        raise InputError(*problems)
    grid = _derived(given, plan, engine)
    too_big = [b for b in grid.batches if b > engine.max_running_requests]
    problems = [f"profile.batches: {b}; the engine runs 1..{engine.max_running_requests}" for b in too_big]
    problems += [f"profile.verify_lens: {v}; allowed 1..{caps.block}" for v in grid.verify_lens if v > caps.block]
    problems += [
        f"profile.prefill_tokens: {t}; backend.max_prefill_tokens is {engine.max_prefill_tokens}"
        for t in grid.prefill_tokens
        if t > engine.max_prefill_tokens
    ]
    if problems:
        raise InputError(*problems)
    visits = _rounds(plan, engine, grid) + _prefills(plan, engine, grid)
    fits = [v for v in visits if _fits(v, engine)]
    notes = [f"left out: {v.place}: more than backend.kv holds" for v in visits if v not in fits]
    for name, values in (("batch size", grid.batches), ("context", grid.contexts)):
        if len(values) == 1:
            notes.append(f"thin: one {name} ({values[0]}), so nothing is known of others; see profile.* to widen it")
    if not any(v.kind == "probe" for v in fits):
        raise InputError("profile: no batch fits backend.kv", *notes)
    reference = Visit("reference", 1, grid.contexts[0], (PLAIN,), 16)
    found = Design(plan, engine, fits, reference, given.repeats, given.seed, notes)
    for visit in (reference, *fits):
        trial = found.trial(visit, 0).scenario()
        trial.backend.check_policy(trial.policies[0])
    return found


def _derived(given: ProfileGrid, plan: Plan, engine: Measurable) -> Grid:
    """The grid with what was left to the scenario."""
    served = [r for t in _points(plan) for r in engine.served_requests(t.scenario().workload, t.seed)]
    prompts = sorted({r.prompt_len for r in served})
    longest = max(r.prompt_len + r.output_len for r in served)
    batches = given.batches or _batches(plan, engine)
    most = min(engine.max_prefill_tokens, max(batches) * prompts[len(prompts) // 2])
    middle = round((prompts[0] * most) ** 0.5)
    lists = (
        batches,
        given.contexts or _contexts(prompts[0], max(prompts[-1], longest - GROWTH)),
        given.verify_lens or _verify_lens(plan, engine.caps().block),
        given.prefill_tokens or [min(t, most) for t in (prompts[0], prompts[-1], middle, most)],
    )
    return Grid(*(sorted(set(values)) for values in lists))


def _points(plan: Plan) -> list[Trial]:
    """A trial for each point of the sweep."""
    return list({str(t.point): t for t in reversed(plan.trials)}.values())


def _batches(plan: Plan, engine: Measurable) -> list[int]:
    clients = [t.scenario().workload.clients or engine.max_running_requests for t in _points(plan)]
    sizes = {min(c, engine.max_running_requests) for c in clients}
    return sorted(sizes | {1 << i for i in range(max(sizes).bit_length()) if 1 << i <= max(sizes)})


def _contexts(shortest: int, last: int) -> list[int]:
    """Both ends, and their geometric middle where they are far apart; one where they hardly differ."""
    middle = [round((shortest * last) ** 0.5)] if last >= 4 * shortest else []
    return [shortest, *middle, last] if last >= 1.25 * shortest else [shortest]


def _verify_lens(plan: Plan, block: int) -> list[int]:
    powers = [1 << i for i in range(block.bit_length())]
    between = [3 * p // 2 for p in powers if p > 1]
    return [n for n in {*powers, *between, block, *_fixed(plan)} if n <= block]


def _fixed(plan: Plan) -> set[int]:
    """Verify lengths of policies that always use the same one."""
    return {p.verify_len for t in _points(plan) for p in t.scenario().policies if isinstance(p, Fixed)}


def _rounds(plan: Plan, engine: Measurable, grid: Grid) -> list[Visit]:
    """Visits that play rounds."""
    caps, batches, contexts, lens = engine.caps(), grid.batches, grid.contexts, grid.verify_lens
    full = caps.max_draft_len
    core = [n for n in lens if n in {1, 4, 8, lens[-1]} | _fixed(plan)] or lens
    fine = [n for n in lens if n not in core]
    cut = max(min(core[len(core) // 2], full), 2)  # a whole block drafted, part of it verified
    corners = {batches[0], batches[len(batches) // 2], batches[-1]}

    def visit(kind: Kind, batch: int, context: int, shapes: Sequence[Shape], tier: int) -> Visit:
        return Visit(kind, batch, context, tuple(shapes), int(np.clip(TOKENS_A_VISIT // batch, 1, 4)), tier)

    def shapes(lengths: Sequence[int], batch: int) -> list[Shape]:
        cuts = [Shape(draft_len=full, verify_len=cut)]
        if batch > 1 and cut >= 3:
            cuts.append(Shape(draft_len=full, verify_len=cut, ragged=True))
        return [PLAIN, *(Shape(draft_len=n - 1, verify_len=n) for n in lengths if n > 1), *cuts]

    needs = {"accept_len"}.union(*(p.needs for t in _points(plan) for p in t.scenario().policies))
    heads = [h for h in HEADS if h in needs & caps.provides]
    visits = []
    for batch in batches:
        for i, context in enumerate(contexts):
            end = i in {0, len(contexts) - 1}
            tier = 0 if batch in corners and i == 0 else 1 if end else 2
            read = [Shape(draft_len=full, verify_len=cut, reads=(head,)) for head in heads] if tier == 0 else []
            visits.append(visit("probe", batch, context, [*shapes(core, batch), *read], tier))
        if fine:
            visits.append(visit("probe", batch, contexts[0], shapes(fine, batch), 2))
        many = max(1, 12 // int(np.clip(TOKENS_A_VISIT // batch, 1, 4)))
        visits.append(visit("plain", batch, contexts[0], [PLAIN] * many, 1))
    return visits


def _prefills(plan: Plan, engine: Measurable, grid: Grid) -> list[Visit]:
    """Visits that compute prompts: few long ones and many short ones give the same tokens."""
    served = engine.served_requests(plan.scenario.workload, plan.scenario.seeds[0])
    typical = float(np.median([r.prompt_len for r in served]))
    visits = []
    for i, tokens in enumerate(grid.prefill_tokens):
        prompts = int(np.clip(round(tokens / typical), 1, engine.max_running_requests))
        tier = 0 if i in {0, len(grid.prefill_tokens) - 1} else 1
        passes = int(np.clip(1024 // tokens, 1, 4))
        visits.append(Visit("prefill", prompts, tokens // prompts, (PLAIN,), passes, tier))
    return list(dict.fromkeys(visits))


def _fits(visit: Visit, engine: Measurable) -> bool:
    """Whether all requests of a visit find room at once."""
    blocks = engine.kv.blocks
    return blocks is None or blocks >= visit.batch * engine.kv.blocks_for(
        visit.context + visit.output_len + engine.caps().block
    )
