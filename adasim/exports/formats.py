"""Every format, by name."""

from dataclasses import dataclass
from pathlib import Path

from adasim.errors import InputError
from adasim.exports import adaflash, sglang, sps, vllm
from adasim.exports.best_k import ALIKE, ranges
from adasim.exports.export import Chosen, Export, chosen_by, read_best_k
from adasim.exports.source import Source
from adasim.policies.base import Policy

FORMATS = ("vllm", "sglang", "sps", "adaflash")
HOW = f"most expected tokens/s by formula; lengths within {ALIKE:.0%} of the best count as best"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be exported.

    Attributes:
        formats: names; () = all that fit the drafter.
        model: path or name of the draft model, as the server is told.
        method: vLLM's name of the drafter's kind; None = dflash or eagle3.
        policy: label of one of the scenario's policies, for adaflash; None = the best k as a schedule.
        best_k: a table of batch and k to write down, instead of the formula's.
    """

    formats: tuple[str, ...] = ()
    model: str = "DRAFTER"
    method: str | None = None
    policy: str | None = None
    best_k: Path | None = None


def make(source: Source, wanted: Wanted) -> tuple[list[Export], list[str]]:
    """The exports, and which formats were left out and why.

    Raises:
        InputError: an unknown format or policy, or one that does not fit.
    """
    unknown = [f for f in wanted.formats if f not in FORMATS]
    problems = [f"--to {f}: unknown; allowed: {', '.join(FORMATS)}" for f in unknown]
    policy = None
    try:
        policy = policy_of(source, wanted.policy)
    except InputError as error:
        problems += error.problems
    if problems:
        raise InputError(*problems)
    if wanted.formats:
        return [_make(f, source, wanted, policy) for f in wanted.formats], []
    refused = {"sglang": sglang.refuse(source), "adaflash": adaflash.refuse(source)}
    left_out = [f"{f}: left out: {p}" for f, why in refused.items() for p in why]
    return [_make(f, source, wanted, policy) for f in FORMATS if not refused.get(f)], left_out


def _make(name: str, source: Source, wanted: Wanted, policy: Policy | None) -> Export:
    if name == "sps":
        return sps.export(source)
    if name == "vllm":
        return vllm.export(source, lengths(source, wanted.best_k), wanted.model, wanted.method)
    if name == "sglang":
        return sglang.export(source, lengths(source, wanted.best_k), wanted.model)
    if policy is not None:
        return adaflash.export(source, policy)
    chosen = lengths(source, wanted.best_k, draft_block=source.one_pass)
    return adaflash.export(source, adaflash.scheduled(source, chosen), chosen)


def lengths(source: Source, table: Path | None = None, *, draft_block: bool = False) -> Chosen:
    """Draft lengths by batch: those of a table, else the best ones by formula."""
    if table is not None:
        return chosen_by(source, *read_best_k(table, source.max_draft_len, source.context))
    return chosen_by(source, ranges(source.rates(draft_block=draft_block)), HOW)


def policy_of(source: Source, label: str | None) -> Policy | None:
    """The scenario's policy of that label; None = none was asked for."""
    if label is None:
        return None
    if source.plan is None:
        raise InputError(f"--policy {label}: a profile has no policies; give a scenario")
    labels = {t.policy: t for t in source.plan.trials}
    if label not in labels:
        raise InputError(f"--policy {label}: unknown; allowed: {', '.join(labels)}")
    return labels[label].scenario().policies[0]
