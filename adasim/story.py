"""From a plan to what its report says."""

from typing import Any

from adasim.plan import Plan
from adasim.report import ReferenceStory, Story
from adasim.scenario import Scenario
from adasim.tables import GOODPUT, TPOT, Arm, Design, Role
from adasim.types import Component

STATIC_KINDS = {"fixed"}


def tell(plan: Plan, finished: int, notes: list[str]) -> Story:
    """Everything about a plan that a report shows."""
    scenario = plan.scenario
    profile = scenario.backend.calibration
    calibration: list[tuple[str, str]] = [("backend", scenario.backend.kind)]
    inputs: list[str] = []
    assumptions = list(scenario.assumptions)
    if profile is not None:
        facts = profile.provenance
        calibration += [("profile", profile.name), ("source", facts.source), ("hardware", facts.hardware)]
        calibration += [
            ("model", facts.model),
            ("engine", facts.engine),
            ("date", facts.date),
            ("read", facts.how),
        ]
        inputs += facts.inputs
        assumptions += facts.assumptions
        notes = [*notes, *(f"profile {profile.name}: {mark}" for mark in profile.marks)]
    inputs += [f"{part} given in the scenario: {_plain(model)}" for part, model in scenario.backend.inputs.items()]
    inputs.append(f"workload: {_plain(scenario.workload)}")
    outside = {"kind", "profile", "drafters", *scenario.backend.inputs}
    limits = scenario.backend.model_dump(mode="json", exclude=outside, exclude_none=True)
    inputs.append(f"engine: {_words(limits)}")
    inputs += [f"file {name}, SHA-256 {digest[:16]}" for name, digest in plan.files.items()]
    return Story(
        name=scenario.name,
        title=scenario.title,
        description=scenario.description.strip(),
        design=design(plan),
        calibration=calibration,
        inputs=inputs,
        assumptions=assumptions,
        notes=notes,
        seeds=len(scenario.seeds),
        trials=(finished, len(plan.trials)),
        goodput=scenario.slo is not None,
        reference=_reference(scenario),
        slo=_slo(scenario),
        policies=_policies(plan),
        kind=scenario.backend.mark,
    )


def design(plan: Plan) -> Design:
    """The first swept field that holds numbers is the axis of figures; the others are facets."""
    swept = {k: [t.point[k] for t in plan.trials] for k in (plan.trials[0].point if plan.trials else {})}
    numeric = [
        k for k, values in swept.items() if all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    ]
    x = numeric[0] if numeric else None
    group = {label: name for name, labels in plan.groups.items() for label in labels}
    arms = [Arm(p.label, _role(p.kind, p.needs), group.get(p.label)) for p in plan.scenario.policies]
    facets = [k for k in swept if k != x]
    if plan.scenario.workload.clients is not None:
        return Design(arms, x, facets)
    return Design(arms, x, facets, speed=TPOT, goal=GOODPUT if plan.scenario.slo else TPOT)


def _role(kind: str, needs: frozenset[str]) -> Role:
    if kind == "off":
        return "baseline"
    if "truth" in needs:
        return "bound"
    return "static" if kind in STATIC_KINDS else "adaptive"


def _reference(scenario: Scenario) -> ReferenceStory | None:
    r = scenario.reference
    if r is None:
        return None
    at: Any = scenario.model_dump(mode="json")
    for part in r.field.split("."):
        at = at.get(part) if isinstance(at, dict) else None
    tolerated = (r.mean_abs_error, r.max_abs_error, r.side_margin)
    return ReferenceStory(r.source, r.cells, r.field, r.metric, *tolerated, at, r.null_model)


def _slo(scenario: Scenario) -> list[str]:
    if scenario.slo is None:
        return []
    limits = scenario.slo.model_dump(exclude_none=True)
    return [f"{name.removesuffix('_ms').upper()} <= {value:g} ms" for name, value in limits.items()]


def _policies(plan: Plan) -> list[str]:
    """One line a policy, one a group."""
    group = {label: name for name, labels in plan.groups.items() for label in labels}
    lines = [
        f"{p.label}: {_words(p.model_dump(mode='json', exclude={'name'}))}"
        for p in plan.scenario.policies
        if p.label not in group
    ]
    return lines + [f"{name}, searched over: {'; '.join(labels)}" for name, labels in plan.groups.items()]


def _plain(component: Component) -> str:
    return _words(component.model_dump(mode="json", exclude_none=True))


def _words(fields: dict[str, Any]) -> str:
    return ", ".join(f"{k} {v}" for k, v in fields.items())
