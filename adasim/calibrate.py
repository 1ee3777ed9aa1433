"""From recorded runs to a profile."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from math import isnan
from pathlib import Path
from typing import Any

from adasim.calibration.acceptance import CurveAcceptance, RecordedAcceptance
from adasim.calibration.adjust import Uncertainty
from adasim.calibration.estimate.acceptance import fit_acceptance
from adasim.calibration.estimate.confidence import fit_confidence
from adasim.calibration.estimate.cost import join_cost, left_out, parts_of
from adasim.calibration.estimate.head import fit_head
from adasim.calibration.estimate.learning import fit_learning
from adasim.calibration.estimate.part import FittedPart
from adasim.calibration.estimate.recording import RecordedTrial, Recording, max_draft_len, natural, rounds_of
from adasim.calibration.fitted_on import FittedRun, cell_of
from adasim.calibration.interval import Estimate
from adasim.calibration.profile import Profile, Provenance
from adasim.errors import InputError
from adasim.files import BASE, write_atomic
from adasim.types import FloatArray

LARGEST = 0.99  # of a relative uncertainty
COST_PARTS = ("verify", "draft", "prefill", "overhead")


@dataclass(slots=True)
class Calibration:
    """A profile, and what it was fitted to.

    Attributes:
        profile: as it is written.
        parts: verify, draft, prefill, overhead, acceptance, head, confidence, learning.
        recording: what was fitted.
    """

    profile: Profile
    parts: dict[str, FittedPart[Any]]
    recording: Recording
    files: dict[str, str] = field(default_factory=dict)  # beside the profile: name -> content


def calibrate(recording: Recording, name: str, *, acceptance: str = "curves", seed: int = 0) -> Calibration:
    """Fit everything that a profile holds.

    Args:
        recording: of one engine.
        name: of the profile.
        acceptance: "curves", or "recorded": replay the texts of full-block runs as they were (``files`` holds them).
        seed: of the bootstrap.

    Raises:
        InputError: everything that keeps a part from being fitted.
    """
    trials, problems = recording.trials, list[str]()
    parts: dict[str, FittedPart[Any]] = {}
    fits: list[Callable[[], dict[str, FittedPart[Any]]]] = [
        lambda: parts_of(trials, seed),
        lambda: {"acceptance": fit_acceptance(trials, seed)},
        lambda: {"head": fit_head(trials, seed, _survival(parts, trials))},
        lambda: {"confidence": fit_confidence(trials, seed, _survival(parts, trials))},
        lambda: {"learning": fit_learning(trials, seed)},
    ]
    for fit in fits:
        try:
            parts |= fit()
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(*problems)
    cost = join_cost({name: parts[name] for name in COST_PARTS})
    head = parts["head"].model.model_copy(update={"confidence": parts["confidence"].model or None})
    curves: CurveAcceptance = parts["acceptance"].model.model_copy(update={"head": head})
    model: CurveAcceptance | RecordedAcceptance = curves
    files: dict[str, str] = {}
    if acceptance == "recorded":
        model, files = _recorded(recording, name, curves)
    share = left_out(cost.model, trials, seed)
    cost.notes.append(
        f"times: {share:+.1%} of what the recorded rounds took is not in the fit of their usual times: pauses of the "
        "machine, and misfit"
    )
    rest = [parts[n] for n in ("acceptance", "head", "confidence", "learning")]
    fields: dict[str, Any] = {
        "name": name,
        "provenance": _provenance(recording, files),
        "cost": cost.model,
        "acceptance": model,
        "uncertainty": uncertainty(parts),
        "identity": recording.identity,
        "learning": parts["learning"].model,
        "fitted_on": [FittedRun(key=t.key, policy=t.label, cell=cell_of(t.policy, t.workload)) for t in natural(trials)],
        "fitted": {k: list(v) for p in (cost, *rest) for k, v in p.ranges.items()},
        "counts": {k: v for p in (cost, *rest) for k, v in p.counts.items()},
        "intervals": {k: v for p in (cost, *rest) for k, v in p.intervals.items()},
        "residuals": [r for p in (cost, *rest) for r in p.residuals],
        "notes": recording.notes + [note for p in (cost, *rest) for note in p.notes],
    }
    with beside(files):
        return Calibration(Profile(**fields), parts, recording, files)


def _survival(parts: Mapping[str, FittedPart[Any]], trials: Sequence[RecordedTrial]) -> dict[str, FloatArray] | None:
    """Of full blocks by domain, as the profile will have it; None = acceptance could not be fitted."""
    if "acceptance" not in parts:
        return None
    model: CurveAcceptance = parts["acceptance"].model
    return {d: model.survival(d, max_draft_len(trials)) for d in model.curves}


def uncertainty(parts: dict[str, FittedPart[Any]]) -> Uncertainty:
    """How far each input may be off, for ``adasim sensitivity``: half-widths of what was fitted."""
    size: dict[str, float | None] = {}
    for name in (*COST_PARTS, "acceptance"):
        error = parts[name].error
        size[name] = None if isnan(error) else min(error, LARGEST)
    known = parts["acceptance"].intervals
    size["correlation"] = min(_half(known["acceptance.correlation"]), LARGEST)
    reach = known["acceptance.range_tokens"]
    size["range_tokens"] = min(max(reach.high / reach.value, reach.value / reach.low), 100.0)
    head, sure = parts["head"].intervals, parts["confidence"].intervals  # both are moved together: the widest counts
    noise = [head["head.noise"], *(e for n, e in sure.items() if n.startswith("confidence.noise."))]
    bias = [head["head.bias"], *(e for n, e in sure.items() if n.startswith("confidence.bias."))]
    size["head_noise"] = min(max(_half(e) / e.value for e in noise), LARGEST)
    size["head_bias"] = min(max(map(_half, bias)), 30.0)
    return Uncertainty(**size)


def _half(estimate: Estimate) -> float:
    """The larger half of an interval."""
    return max(estimate.high - estimate.value, estimate.value - estimate.low)


def _provenance(recording: Recording, files: dict[str, str]) -> Provenance:
    engine = recording.identity
    inputs = recording.sources + [f"file {n}, SHA-256 {sha256(t.encode()).hexdigest()[:16]}" for n, t in files.items()]
    backend = recording.trials[0].backend
    return Provenance(
        source="adasim calibrate",
        hardware=f"{engine.hardware}, {engine.device}, {engine.threads} threads" if engine else "simulated",
        model=f"{engine.target} with drafter {engine.drafter or 'none'}, {engine.dtype}" if engine else "simulated",
        engine=f"{engine.engine} {engine.engine_version}" if engine else f"backend kind {backend.get('kind', 'unknown')}",
        date=max((s.partition("written ")[2][:10] for s in recording.sources), default=""),
        how="fitted to recorded runs; see intervals, residuals and notes",
        inputs=inputs,
    )


def _recorded(recording: Recording, name: str, curves: CurveAcceptance) -> tuple[RecordedAcceptance, dict[str, str]]:
    """Texts of the full-block runs, replayed as they were.

    Raises:
        InputError: there are none.
    """
    depth = max_draft_len(recording.trials)
    rounds = rounds_of(recording.trials)
    whole = rounds[(rounds["fixed_len"] == depth + 1) & (rounds["draft_version"] == 0)] if len(rounds) else rounds
    if whole.empty:
        raise InputError(f"--acceptance recorded: no run of fixed verify_len {depth + 1}, the full block, was recorded")
    table = whole[["life", "domain", "position", "accepted"]].rename(columns={"life": "request"})
    text = table.to_csv(index=False, lineterminator="\n")
    found = sha256(text.encode()).hexdigest()
    file = f"{name}.{found[:12]}.csv"
    with beside({file: text}):
        return RecordedAcceptance(file=file, sha256=found, max_draft_len=depth, head=curves.head), {file: text}


@contextmanager
def beside(files: dict[str, str]) -> Iterator[None]:
    """These files are found as if they lay beside a profile."""
    with tempfile.TemporaryDirectory(prefix="adasim-") as scratch:
        for name, text in files.items():
            write_atomic(Path(scratch) / name, text)
        token = BASE.set(Path(scratch))
        try:
            yield
        finally:
            BASE.reset(token)


def write(made: Calibration, path: Path) -> None:
    """Write the profile and what lies beside it.

    Raises:
        InputError: a file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for name, text in made.files.items():
            write_atomic(path.parent / name, text)
        made.profile.write(path)
    except OSError as error:
        raise InputError(f"--out {path}: cannot be written: {error.strerror}") from error
    Profile.load(str(path.resolve()))  # what was written can be read
