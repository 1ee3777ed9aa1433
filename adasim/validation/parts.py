"""Seconds of recorded steps by part, measured and as a profile says, both divided in the same way."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from adasim.calibration.adjust import Adjust
from adasim.calibration.cost import CostModel
from adasim.calibration.estimate.recording import RecordedTrial
from adasim.calibration.estimate.steps import pauses, ragged
from adasim.calibration.profile import Profile

TIMES = ("verify", "draft", "overhead", "prefill")
SMALL_S = 1e-7  # a step; what is taken for nothing


@dataclass(frozen=True, slots=True)
class Parts:
    """Seconds of steps, a row each, columns :data:`TIMES`.

    What verification takes longer beside a loaded drafter and what heads take while drafting is part of those times as
    measured; calibrated profiles count it as overhead, where cost models have a place for it. Here it stands where it was
    measured, on both sides. The pause before a step is overhead of a round and prefill of a step that prefills alone, as
    calibration has it.

    Attributes:
        measured: as recorded, with pauses.
        modelled: of the same steps.
        moved: seconds in all that ``modelled`` counts as verify or draft, and the profile's cost as overhead, by part.
    """

    measured: pd.DataFrame
    modelled: pd.DataFrame
    moved: dict[str, float]

    def levels(self, speed: float = 1.0) -> Adjust:
        """Measured over modelled seconds of each part, over all steps: the model's form, the run's own level.

        A part that the model or the run takes for nothing keeps its level. Factors are of the profile's own parts, so
        that with all of them the steps take as long as they did.

        Args:
            speed: how many times longer everything took; no part's own.
        """
        here, there = self.measured.sum() / speed, self.modelled.sum()
        known = [p for p in TIMES if min(here[p], there[p]) > SMALL_S * len(self.measured)]
        for part, seconds in self.moved.items():
            if {part, "overhead"} <= set(known):
                for side in (here, there):
                    side[part] -= seconds
                    side["overhead"] += seconds
        return Adjust.model_validate({p: float(np.clip(here[p] / there[p], 0.01, 100)) for p in known})

    @property
    def speed(self) -> float:
        """How many times longer everything took than the model says."""
        return float(self.measured.to_numpy().sum() / self.modelled.to_numpy().sum())


def together(parts: Sequence[Parts]) -> Parts:
    """The steps of several runs."""
    measured = pd.concat([p.measured for p in parts], ignore_index=True)
    modelled = pd.concat([p.modelled for p in parts], ignore_index=True)
    moved = {part: sum(p.moved[part] for p in parts) for part in parts[0].moved}
    return Parts(measured, modelled, moved)


def measured_parts(trial: RecordedTrial, cost: CostModel, profile: Profile) -> Parts:
    """A recorded run beside what ``cost``, that of ``profile``, says of its steps."""
    steps = trial.records.steps
    measured = pd.DataFrame({part: steps[f"{part}_s"] for part in TIMES})
    alone = (steps["prefill_tokens"] > 0) & (steps["decoding"] == 0)
    pause = pd.Series(pauses(trial), index=steps.index)
    measured["prefill"] += pause.where(alone, 0.0)
    measured["overhead"] += pause.where(~alone, 0.0)
    loaded, reads = trial.drafter_loaded, trial.reads_head
    uneven = ragged(trial.records)
    modelled = step_seconds(steps, cost, reads_head=reads, drafter_loaded=loaded, ragged=uneven)[list(TIMES)]
    batch, drafts = steps["decoding"], steps["draft_tokens"] > 0
    elsewhere = {
        "verify": _rounds_ms(profile, "verify.drafter", batch) * (loaded & (batch > 0)),
        "draft": _rounds_ms(profile, "draft.head", batch) * (drafts & reads),
    }
    for part, ms in elsewhere.items():
        modelled[part] += 1e-3 * ms
        modelled["overhead"] -= 1e-3 * ms
    return Parts(measured, modelled, {part: 1e-3 * float(ms.sum()) for part, ms in elsewhere.items()})


def _rounds_ms(profile: Profile, name: str, batch: "pd.Series[int]") -> "pd.Series[float]":
    """Of rounds, by the profile's intervals: so much, and so much more for every request."""
    both, each = (profile.intervals.get(f"{name}{of}_ms") for of in ("", "_per_request"))
    return (both.value if both else 0.0) + (each.value if each else 0.0) * batch


def step_seconds(
    steps: pd.DataFrame, cost: CostModel, *, reads_head: bool, drafter_loaded: bool, ragged: NDArray[np.bool_]
) -> pd.DataFrame:
    """What a cost model says of recorded steps at their own batch, tokens and context: seconds by part, a row each.

    ``ragged`` [steps]: whether requests verified different lengths.
    """
    numbers = steps[["decoding", "draft_tokens", "verify_tokens", "context", "prefill_tokens"]].to_numpy(dtype=float)
    rows = []
    for (decoding, drafts, verified, context, prefill), uneven in zip(numbers.tolist(), ragged.tolist(), strict=True):
        batch, positions = int(decoding), int(drafts + decoding) if drafts else 0
        longest = round(drafts / decoding) if decoding else 0
        step = cost.step(
            batch, positions, int(verified), context, longest_draft=longest, prefill=int(prefill), reads_head=reads_head,
            drafter_loaded=drafter_loaded, ragged=uneven,
        )  # fmt: skip
        rows.append(step._asdict())
    return pd.DataFrame(rows, index=steps.index, dtype=float)
