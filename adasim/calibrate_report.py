"""What a calibration found, for a person."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from adasim.calibrate import COST_PARTS, Calibration
from adasim.calibrate_figures import CAPTIONS, draw
from adasim.calibration.estimate.part import FittedPart
from adasim.calibration.head_quality import HeadQuality
from adasim.calibration.interval import Estimate
from adasim.calibration.pass_cost import PassCost
from adasim.errors import InputError
from adasim.page import Page, Story, Table, write_page
from adasim.tables import Design

METHOD = [
    "Times are medians of equal steps, or weigh outliers less (Huber): single pauses of the machine do not count.",
    "How much slower the machine was in one run or stretch of time than in another is told by passes that both made, and "
    "taken out before fitting; without such passes it is unknown, and said to be.",
    "The form of verification (a line in tokens, a knee, lines between measured token counts, a table) is the one with "
    "the least error on cells left out of its fit (five folds; cells count by the root of their passes); the simplest "
    "where several are within 5 %.",
    "Acceptance is counted among drafts that were verified behind accepted ones (Kaplan-Meier), of rounds whose length "
    "was not chosen by a look at their drafts. Spread, correlation and range maximise the likelihood of whole sequences "
    "of rounds; what answers a prompt alike counts as one sample.",
    "The length head is taken to report 1 + L with bias and noise, or, as a regression trained on L does, 1 + the mean "
    "of L given a noisy look at it: whichever makes its reports and what was then accepted likelier. Where neither form "
    "holds, its reports are taken as they were seen, and only their order for knowledge of L.",
    "A drafter's confidences are taken for the posterior of a look at L of their own. What was accepted behind sums of "
    "curves tells how good that look is; how the sums are spread, what the curves claim. A curve may know more than its "
    "sum.",
    "Intervals are 95 %: bootstrap over runs for times, over requests for the rest, widened by Student's t where there "
    "are few. They do not cover what no run showed: other machines, other prompts, ranges outside those stated.",
]


TITLE = "Calibration"


def in_the_way(folder: Path, *, overwrite: bool) -> list[str]:
    """Why a report must not be written there: its tables and figures would replace what the folder holds."""
    if not folder.is_dir():
        return [f"--report {folder}: is a file"] * folder.is_file()
    if not any(folder.iterdir()):
        return []
    page = folder / "report.md"
    if not page.is_file() or not page.read_text(encoding="utf-8", errors="replace").startswith(f"# {TITLE}:"):
        return [f"--report {folder}: is not empty and holds no report of adasim calibrate; use another folder"]
    return [f"--report {folder}: holds a report; use --overwrite or another folder"] * (not overwrite)


def write_report(made: Calibration, profile: Path, folder: Path) -> list[str]:
    """Write report.html, report.md, tables and figures; returns the answer.

    Raises:
        InputError: the folder cannot be written.
    """
    says = answer(made)
    mark = "measured" if made.profile.identity else "simulated"
    page = Page(
        answer=says,
        shown=_shown(made),
        tables=tables_of(made) | {n.replace(" ", "_"): t for p in made.parts.values() for n, t in p.points.items()},
        pictures=draw(made.parts, mark),
        captions=CAPTIONS,
        method=METHOD,
        about_error="Residuals are of the fit to what was recorded; adasim validate tells of runs that were not.",
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_page(page, _story(made, profile, mark), folder)
    except OSError as error:
        raise InputError(f"--report {folder}: cannot be written: {error.strerror}") from error
    return says


def answer(made: Calibration) -> list[str]:
    """The main numbers, a sentence a part."""
    parts, profile = made.parts, made.profile
    says = [_verification(parts["verify"], profile.cost)]
    costs = ", ".join(f"{n} ± {parts[n].error:.1%}" for n in COST_PARTS if parts[n].error == parts[n].error)
    says.append(f"Times are known to within: {costs}.")
    for name, at in profile.intervals.items():
        if name.startswith("acceptance.") and name.endswith(".tau"):
            says.append(f"tau of full blocks in {name.split('.')[1]}: {at.value:.2f} ({at.low:.2f} to {at.high:.2f}).")
    words = [("spread", ".2f"), ("correlation", ".2f"), ("range_tokens", ".1f")]
    told = [(n, profile.intervals[f"acceptance.{n}"], form) for n, form in words]
    says.append("Text: " + ", ".join(f"{n} {a.value:{f}} ({a.low:{f}} to {a.high:{f}})" for n, a, f in told) + ".")
    if profile.intervals["head.noise"].how != "not identified":
        says.append(_head(profile.acceptance.head, profile.intervals))
    if profile.acceptance.head.confidence:
        says.append(_confidence(profile.acceptance.head.confidence, profile.intervals))
    for domain, curve in profile.learning.items():
        says.append(f"Learning in {domain}: {curve.gain:+.0%} at the end, {curve.rounds:.0f} rounds to 1/e of the gap.")
    return says


def _head(head: HeadQuality, known: Mapping[str, Estimate]) -> str:
    noise, bias = known["head.noise"], known["head.bias"]
    if head.measured is not None:
        said = _by_domain("head.noise", head.measured, known)
        return (
            "Length head: its reports are taken as they were seen, for no formula holds; noise of its look at L, in "
            f"standard deviations of L: {', '.join(said)}."
        )
    form, unit = "1 + L", "tokens"
    if head.reports == "mean":
        form, unit = "1 + the mean of L given what it sees", "standard deviations of L"
    return (
        f"Length head: reports {form}; noise {noise.value:.2f} ({noise.low:.2f} to {noise.high:.2f}) {unit}, bias "
        f"{bias.value:+.2f} ({bias.low:+.2f} to {bias.high:+.2f}) tokens."
    )


def _confidence(domains: Iterable[str], known: Mapping[str, Estimate]) -> str:
    noise, claims, bias = (_by_domain(f"confidence.{n}", domains, known) for n in ("noise", "claims", "bias"))
    return (
        f"Confidences: noise of their look at L, in standard deviations of L: {', '.join(noise)}; noise that they claim: "
        f"{', '.join(claims)}; bias, tokens: {', '.join(bias)}."
    )


def _by_domain(name: str, domains: Iterable[str], known: Mapping[str, Estimate]) -> list[str]:
    at = ((d, known[f"{name}.{d}"]) for d in domains)
    return [f"{d} {a.value:.1f} ({a.low:.1f} to {a.high:.1f})" for d, a in at]


def _verification(part: FittedPart[Any], cost: object) -> str:
    knee = part.intervals["verify.knee_tokens"]
    form = "a formula" if isinstance(cost, PassCost) else "a table"
    where = f"its knee is at {knee.value:.0f} tokens ({knee.low:.0f} to {knee.high:.0f})" if knee.value else knee.how
    low, high = part.ranges["tokens"]
    off = f"off by {part.held_out:.1%} on held-out passes"
    return f"Verification is {form} over {low:.0f} to {high:.0f} tokens, {off}; {where}."


def tables_of(made: Calibration) -> dict[str, pd.DataFrame]:
    """Intervals and residuals."""
    intervals = pd.DataFrame([{"parameter": n, **e.model_dump()} for n, e in made.profile.intervals.items()])
    residuals = pd.DataFrame([r.model_dump() for r in made.profile.residuals])
    return {"intervals": intervals, "residuals": residuals}


def _shown(made: Calibration) -> list[Table]:
    profile = made.profile
    intervals = [[n, f"{e.value:.4g}", f"{e.low:.4g}", f"{e.high:.4g}", e.how] for n, e in profile.intervals.items()]
    residuals = [[r.part, r.region, f"{r.error:.1%}", f"{r.bias:+.1%}", str(r.count)] for r in profile.residuals]
    ranges = [[n, f"{low:g}", f"{high:g}"] for n, (low, high) in profile.fitted.items()]
    counts = [[n, str(c)] for n, c in profile.counts.items()]
    unsure = [[n, f"{v:.3g}"] for n, v in profile.uncertainty.model_dump(exclude_none=True).items()]
    return [
        Table("Parameters", ["parameter", "value", "low", "high", "how"], intervals),
        Table("Residuals", ["part", "region", "mean error", "median bias", "cells"], residuals, folded=True),
        Table("Ranges that were seen", ["input", "lowest", "highest"], ranges, "Outside them the fit extrapolates."),
        Table("What the fit rests on", ["what", "count"], counts),
        Table("Uncertainty of inputs", ["input", "size"], unsure, "What adasim sensitivity moves them by."),
    ]


def _story(made: Calibration, profile: Path, mark: str) -> Story:
    facts, recording = made.profile.provenance, made.recording
    engine = made.profile.identity
    known = [] if engine is None else [(k, str(v)) for k, v in engine.model_dump().items() if v is not None]
    labels = dict.fromkeys(f"{t.label}{' (acceptance by decree)' if t.forced else ''}" for t in recording.trials)
    return Story(
        name=made.profile.name,
        title=f"{TITLE}: {made.profile.name}",
        description=f"{profile.name}, fitted to recorded runs. {facts.model}; {facts.hardware}; {facts.engine}.",
        design=Design([], None),
        calibration=[("profile", profile.name), ("date", facts.date), *known],
        inputs=facts.inputs,
        assumptions=[],
        notes=made.profile.notes,
        seeds=len({t.seed for t in recording.trials}),
        trials=(len(recording.trials), len(recording.trials)),
        kind=mark,
        policies=list(labels),
    )
