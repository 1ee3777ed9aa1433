"""What there is to choose from."""

from inspect import getdoc
from typing import Any, get_args

from adasim.calibration.acceptance import AnyAcceptance
from adasim.calibration.adjust import Adjust
from adasim.calibration.alarm import Alarm
from adasim.calibration.parallel import Parallel
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
from adasim.serving.kv import KvMemory
from adasim.serving.predictor import LengthPredictor
from adasim.simulator.learning import Learning
from adasim.simulator.prefill_pool import Disaggregation
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

PARTS: dict[str, type[Component]] = {  # of a simulated backend, beside the unions
    "kv": KvMemory,
    "parallel": Parallel,
    "disaggregation": Disaggregation,
    "predictor": LengthPredictor,
    "learning": Learning,
    "alarm": Alarm,
    "adjust": Adjust,
}


def catalogue(what: str) -> list[dict[str, str]]:
    """Rows to show for a kind of thing.

    Raises:
        InputError: unknown kind.
    """
    if what in UNIONS:
        kinds = get_args(get_args(UNIONS[what])[0])
        return [{"kind": str(k.model_fields["kind"].default), **_row(k)} for k in kinds]
    if what == "parts":
        return [{"backend": name, **_row(part)} for name, part in PARTS.items()]
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
    allowed = ", ".join(["scenarios", "profiles", *UNIONS, "parts", "hardware", "models"])
    raise InputError(f"list: unknown {what!r}; allowed: {allowed}")


def _row(kind: type[Component]) -> dict[str, str]:
    fields = {n: f for n, f in kind.model_fields.items() if n not in {"kind", "name"}}
    shown = (
        f"{n}" if f.is_required() else f"{n}={_default(f.get_default(call_default_factory=True))}"
        for n, f in fields.items()
    )
    return {
        "what it does": (getdoc(kind) or "").split("\n\n")[0].replace("\n", " "),
        "fields": ", ".join(shown),
    }


def _default(value: Any) -> str:
    return (
        str(value.model_dump(mode="json", exclude_defaults=True) or "default")
        if isinstance(value, Component)
        else str(value)
    )
