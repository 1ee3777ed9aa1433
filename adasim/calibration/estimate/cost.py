"""The whole cost model of recorded runs."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from adasim.calibration.cost import CostModel, Overhead
from adasim.calibration.estimate.draft import fit_draft
from adasim.calibration.estimate.overhead import fit_overhead
from adasim.calibration.estimate.part import FittedPart
from adasim.calibration.estimate.prefill import fit_prefill
from adasim.calibration.estimate.recording import RecordedTrial
from adasim.calibration.estimate.steps import machine_speed, rounds_table
from adasim.calibration.estimate.verify import fit_verify

MOST_ROUNDS = 5000  # that are priced one by one


def fit_cost(trials: Sequence[RecordedTrial], seed: int = 0) -> FittedPart[CostModel]:
    """Verification, draft, prefill and overhead together; ``parts_of`` gives each with its own error.

    Raises:
        InputError: too few different passes to fit anything.
    """
    return join_cost(parts_of(trials, seed))


def parts_of(trials: Sequence[RecordedTrial], seed: int = 0) -> dict[str, FittedPart[Any]]:
    """By name: verify (a CostModel), draft, prefill, overhead."""
    speed = machine_speed(trials)
    return {
        "verify": fit_verify(trials, seed, speed),
        "draft": fit_draft(trials, seed, speed),
        "prefill": fit_prefill(trials, seed, speed),
        "overhead": fit_overhead(trials, seed, speed),
    }


def join_cost(parts: dict[str, FittedPart[Any]]) -> FittedPart[CostModel]:
    """One cost model of its parts."""
    verify = parts["verify"]
    own = {name: parts[name].model for name in ("draft", "prefill", "overhead")}
    own["overhead"] = _complete(parts["overhead"].model, verify.extra, parts["draft"].extra)
    joined: FittedPart[CostModel] = FittedPart(verify.model.model_copy(update=own), error=verify.error)
    for part in parts.values():
        joined.intervals |= part.intervals
        joined.residuals += part.residuals
        joined.ranges |= part.ranges
        joined.counts |= part.counts
        joined.notes += part.notes
        joined.points |= part.points
    return joined


def _complete(overhead: Overhead, verify: dict[str, float], draft: dict[str, float]) -> Overhead:
    """The overhead with what was measured elsewhere and cost models have no other place for: what verification takes
    longer beside a loaded drafter, and heads that are read while drafting.
    """
    both, each = verify.get("drafter_ms", 0.0), verify.get("drafter_per_request_ms", 0.0)
    return overhead.model_copy(
        update={
            "speculative_ms": overhead.speculative_ms + both,
            "idle_drafter_ms": overhead.idle_drafter_ms + both,
            "drafter_per_request_ms": overhead.drafter_per_request_ms + each,
            "head_ms": overhead.head_ms + draft.get("head_ms", 0.0),
            "head_per_request_ms": overhead.head_per_request_ms + draft.get("head_per_request_ms", 0.0),
        }
    )


def left_out(model: CostModel, trials: Sequence[RecordedTrial], seed: int = 0) -> float:
    """Share of the recorded rounds' time that the model does not account for, at the machine's speed of then.

    Medians leave single pauses out, which yet take time: a machine that is interrupted often is slower on average than
    any of its usual steps. Below 0: the model takes longer than the rounds did.
    """
    rows = rounds_table(trials)
    rows = rows.sample(MOST_ROUNDS, random_state=seed) if len(rows) > MOST_ROUNDS else rows
    slow = rows["block"].map(machine_speed(trials).factors).to_numpy()
    taken_s = float(rows[["verify_s", "draft_s", "overhead_s"]].to_numpy().sum())
    asked = rows[["batch", "positions", "tokens", "context", "reads_head", "drafter_loaded", "ragged"]].itertuples(
        index=False
    )
    priced = [
        model.step(int(b), int(p), int(t), float(c), reads_head=bool(h), drafter_loaded=bool(d), ragged=bool(r)).total
        for b, p, t, c, h, d, r in asked
    ]
    return 1 - float(np.dot(priced, slow)) / taken_s
