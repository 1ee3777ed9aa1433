"""SGLang's adaptive speculative steps: candidate k by batch size, from which it chooses by an average of accepted drafts.

Format: ``--speculative-adaptive-config`` of SGLang 0.5.23 (speculative/adaptive_spec_params.py): an object whose keys are
the batch sizes from which on an entry holds; other keys are defaults of all entries, unknown ones are ignored.
"""

from collections.abc import Sequence
from typing import Any

from adasim.errors import InputError
from adasim.exports.best_k import Range, ranges
from adasim.exports.export import Chosen, Export
from adasim.exports.source import Source

NAME = "sglang_adaptive.json"
KIND = "SGLang adaptive steps"


def refuse(source: Source) -> list[str]:
    """Why this drafter cannot have them."""
    return ["SGLang's adaptive steps are for EAGLE alone, this drafter fills blocks in one pass (DFlash)"] * (
        source.one_pass
    )


def export(source: Source, chosen: Chosen, model: str) -> Export:
    """In each tier the k that is best for the mix, and those that are best for one of its domains alone.

    Raises:
        InputError: the drafter is not autoregressive.
    """
    if problems := refuse(source):
        raise InputError(*problems)
    about = source.about() | {"format": "--speculative-adaptive-config of SGLang 0.5.23", "chosen_by": chosen.how}
    about |= {"extrapolates": chosen.extrapolated}
    if not chosen.longest:
        return Export(KIND, NAME, None, about, says=["plain decoding is best at every batch: serve without a drafter"])
    alone = [ranges(source.rates(domain=d)) for d in source.shares] if len(source.shares) > 1 else []
    tiers: dict[str, Any] = {
        str(r.first): {"candidate_steps": sorted({r.k, *(k for found in alone for k in within(found, r))})}
        for r in chosen.ranges
    }
    steps = max(k for tier in tiers.values() for k in tier["candidate_steps"])
    flags = [
        "--speculative-algorithm EAGLE3",
        f"--speculative-draft-model-path {model}",
        "--speculative-eagle-topk 1",
        f"--speculative-num-steps {steps}",
        f"--speculative-num-draft-tokens {steps + 1}",
        "--speculative-adaptive",
        f"--speculative-adaptive-config {NAME}",
    ]
    says = [
        f"tiers follow the batch, candidates the domains: contexts are taken as {source.context:.0f} tokens",
        "one k for all requests; all drafts are verified; which candidate is used follows accepted drafts, not time",
        "batches are rounded up to the next captured graph before their tier is looked up",
    ]
    return Export(KIND, NAME, tiers, about, flags, says, comments=True)


def within(found: Sequence[Range], tier: Range) -> list[int]:
    """Lengths of ``found`` that are used for some batch of a tier; its last entry goes on."""
    ends = [*(r.last for r in found[:-1]), max(found[-1].last, tier.last)]
    return [r.k for r, last in zip(found, ends, strict=True) if r.first <= tier.last and last >= tier.first]
