"""What there is to choose from."""

from inspect import getdoc
from typing import Any, get_args

from adasim.calibration.acceptance import AnyAcceptance
from adasim.calibration.profile import Profile
from adasim.calibration.profile import packaged as packaged_profiles
from adasim.calibration.roofline import AnyCost
from adasim.calibration.specs import HARDWARE, MODELS
from adasim.calibration.survival import AnyCurve
from adasim.errors import InputError
from adasim.files import load_yaml
from adasim.lengths import AnyLength
from adasim.policies import AnyPolicy
from adasim.policies.scheduler import AnyScheduler
from adasim.scenario import packaged as packaged_scenarios
from adasim.types import Component
from adasim.workload import AnyWorkload

UNIONS: dict[str, Any] = {
    "policies": AnyPolicy,
    "schedulers": AnyScheduler,
    "workloads": AnyWorkload,
    "lengths": AnyLength,
    "costs": AnyCost,
    "acceptances": AnyAcceptance,
    "curves": AnyCurve,
}


def catalogue(what: str) -> list[dict[str, str]]:
    """Rows to show for a kind of thing.

    Raises:
        InputError: unknown kind.
    """
    if what in UNIONS:
        return [_kind(k) for k in get_args(get_args(UNIONS[what])[0])]
    if what == "scenarios":
        return [{"scenario": p.stem, "title": str(load_yaml(p).get("title", ""))} for p in packaged_scenarios()]
    if what == "profiles":
        found = [Profile.load(p.stem) for p in packaged_profiles()]
        return [
            {
                "profile": p.name,
                "model": p.provenance.model,
                "hardware": p.provenance.hardware,
                "source": p.provenance.source,
            }
            for p in found
        ]
    if what in {"hardware", "models"}:
        named: dict[str, Component] = {**(HARDWARE if what == "hardware" else MODELS)}
        return [{"name": n, "spec": ", ".join(f"{k} {v:g}" for k, v in c.model_dump().items())} for n, c in named.items()]
    allowed = ", ".join(["scenarios", "profiles", *UNIONS, "hardware", "models"])
    raise InputError(f"list: unknown {what!r}; allowed: {allowed}")


def _kind(kind: type[Component]) -> dict[str, str]:
    fields = {n: f for n, f in kind.model_fields.items() if n not in {"kind", "name"}}
    shown = (
        f"{n}" if f.is_required() else f"{n}={_default(f.get_default(call_default_factory=True))}"
        for n, f in fields.items()
    )
    return {
        "kind": str(kind.model_fields["kind"].default),
        "what it does": (getdoc(kind) or "").split("\n\n")[0].replace("\n", " "),
        "fields": ", ".join(shown),
    }


def _default(value: Any) -> str:
    return (
        str(value.model_dump(mode="json", exclude_defaults=True) or "default")
        if isinstance(value, Component)
        else str(value)
    )
