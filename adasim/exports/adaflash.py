"""The policy of SGLang's plugin ADAFLASH: the JSON document that lies beside its draft checkpoint.

Format: :class:`adasim.real.sglang_plugin.settings.Settings`.
"""

from typing import Any

from adasim.calibration.cost import CostModel, TableCost
from adasim.errors import InputError
from adasim.exports.export import Chosen, Export
from adasim.exports.source import Source
from adasim.policies.base import Policy
from adasim.policies.driver import PolicyDriver
from adasim.policies.schedule import Schedule
from adasim.real.sglang_plugin.settings import FILE, Settings, parse_settings
from adasim.types import EngineCaps

HEAD_NEEDED = "reads a length head: the draft checkpoint must hold one (adasim train ship)"


def refuse(source: Source) -> list[str]:
    """Why this drafter cannot be served by it."""
    autoregressive = "ADAFLASH drafts blocks in one pass (DFlash), this drafter is autoregressive (EAGLE, MTP)"
    return [autoregressive] * (not source.one_pass)


def scheduled(source: Source, chosen: Chosen) -> Schedule:
    """The chosen lengths as a policy; one-pass drafters fill whole blocks, of which SGLang has captured graphs."""
    return Schedule(
        name="best k", drafts={r.first: r.k for r in chosen.ranges}, draft_block=source.one_pass, drafter=source.drafter
    )


def export(source: Source, policy: Policy, chosen: Chosen | None = None) -> Export:
    """The settings of a server that runs ``policy``, with the cost it asks for.

    Raises:
        InputError: the policy asks for what a server cannot provide, or a field does not fit the block; the drafter is
            autoregressive.
    """
    if problems := refuse(source):
        raise InputError(*problems)
    fields = policy.model_dump(mode="json", exclude={"drafter", "name"}, exclude_defaults=True)
    content: dict[str, Any] = {"policy": {"kind": policy.kind, **fields}}
    if "cost" in policy.needs:
        content["cost"] = _as_given(source.cost)
    text = Export("", FILE, content, {}).documents[FILE]
    settings = parse_settings(text, FILE)  # as the server will read it
    check(settings, source)
    says = []
    if "accept_len" in policy.needs:
        says.append(f"{policy.label} {HEAD_NEEDED}")
    if chosen is not None:
        says.append(f"k follows the batch alone: for contexts of {source.context:.0f} tokens and this mix of domains")
    if policy.drafter is not None:
        says.append(f"drafter {policy.drafter} is the checkpoint that the server is given")
    about = source.about() | {"format": "adasim_policy.json of the plugin for SGLang 0.5.23", "policy": policy.label}
    if chosen is not None:
        about |= {"chosen_by": chosen.how, "extrapolates": chosen.extrapolated}
    elif "cost" in policy.needs:
        full = source.max_batch * (source.max_draft_len + 1)
        about |= {"extrapolates": source.outside(source.max_batch, full)}
    flags = ["--speculative-algorithm ADAFLASH", f"--max-running-requests {source.max_batch}"]
    return Export("AdaFlash policy", FILE, content, about, flags, says)


def check(settings: Settings, source: Source) -> None:
    """Refuse what a server would refuse at its start; see the plugin's algorithm."""
    provides = {"survival", "margin", "accept_len"} | ({"cost"} if settings.cost is not None else set())
    caps = EngineCaps(
        source.max_draft_len, source.backend.max_running_requests, provides=frozenset(provides), cost=settings.cost
    )
    PolicyDriver(settings.policy, caps)


def _as_given(cost: CostModel) -> dict[str, Any]:
    """A cost that stands on its own, whatever files it was read from."""
    if cost.kind not in {"table", "roofline", "formula", "pass"}:
        raise InputError(f"adaflash: a policy that asks for a cost cannot take one of kind {cost.kind} (backend.adjust?)")
    whole = cost.inline() if isinstance(cost, TableCost) else cost
    return whole.model_dump(mode="json", exclude_none=True)
