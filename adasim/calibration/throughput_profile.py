"""A profile from a throughput table: what it fixes, and in words what it cannot."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from adasim.calibration.acceptance import CurveAcceptance
from adasim.calibration.adjust import Uncertainty
from adasim.calibration.cost import LinearDraft
from adasim.calibration.draft_model import DraftModel
from adasim.calibration.from_throughput import Posterior, fit_throughput_table
from adasim.calibration.profile import Profile, Provenance
from adasim.calibration.survival import Tree
from adasim.calibration.throughput_files import read_throughput
from adasim.calibration.throughput_table import Row
from adasim.calibration.world import BELIEFS, Cells
from adasim.errors import InputError
from adasim.statistics import Interval
from adasim.types import FloatArray

NOISE = 1.02  # speed-ups beyond tau by more than this are not noise
SHOWN = {
    "base": "base {} ms",
    "experts": "all experts {} ms",
    "share": "share of them that a token touches {}",
    "token": "per verified token {} ms",
    "request": "per request {} ms",
    "context": "per token of context {} ms",
    "speculative": "per speculative round {} ms",
    "draft": "per draft pass {} ms",
    "start": "first draft accepted with probability {}",
    "slope": "its logit changes by {} x ln of the draft's place",
}


ABOUT = ("source", "hardware", "model", "engine", "date")  # of a profile's provenance


def fitted_profile(
    paths: Sequence[Path],
    name: str,
    *,
    about: Mapping[str, str] | None = None,
    only: str | None = None,
    concurrency: int | None = None,
    one_pass: bool = False,
) -> tuple[Profile, Posterior]:
    """Cost and acceptance that explain tokens per second, as a profile, and the other worlds that explain them.

    Args:
        paths: files and folders, see :func:`~adasim.calibration.throughput_files.read_throughput`.
        name: of the profile.
        about: ``ABOUT`` of the measurement, where the files do not tell.
        only: fit runs whose label, model or data set holds this.
        concurrency: of runs that do not tell theirs.
        one_pass: the drafter fills its block in one pass, whatever the length.

    Raises:
        InputError: what is wrong with the files, or that they say nothing about speculation or about time.
    """
    found = read_throughput(paths, only, concurrency)
    if all(r.tok_s is None for r in found.rows):
        raise InputError("throughput: no row holds tokens per second at a concurrency: accept lengths alone give no cost")
    posterior = fit_throughput_table(found.rows, one_pass=one_pass)
    told = {"source": ", ".join(p.name for p in paths), "model": found.model, "engine": found.engine} | dict(about or {})
    provenance = Provenance.model_validate(
        {n: told.get(n) or "not stated" for n in ABOUT}
        | {
            "how": "fitted to end-to-end throughput alone",
            "inputs": [_measured(found.rows), *fitted(posterior)],
            "assumptions": found.notes + doubts(found.rows) + untold(posterior),
        }
    )
    return as_profile(posterior, name, provenance), posterior


def as_profile(posterior: Posterior, name: str, provenance: Provenance) -> Profile:
    """The most probable world; of a table with tokens per second."""
    tokens = [r.tokens for r in posterior.rows if r.tok_s is not None]
    worlds = posterior.worlds
    cost = worlds.cost(
        0,
        fitted_tokens=[min(tokens), max(tokens)],
        one_pass=posterior.one_pass,
        with_context=posterior.with_context,
    )
    return Profile(
        name=name,
        provenance=provenance,
        cost=cost,
        acceptance=CurveAcceptance(curves={"default": worlds.curve(0)}),
        drafters={_tree_name(r): _drafter(r, cost.draft) for r in posterior.rows if r.tree},
        uncertainty=uncertainty(posterior),
    )


def as_yaml(profile: Profile) -> str:
    """The profile as a file that :meth:`Profile.load` reads."""
    content: dict[str, Any] = profile.model_dump(mode="json", exclude_none=True)
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120)


def fitted(posterior: Posterior) -> list[str]:
    """What was fitted, with its 95 % limits, a line each."""
    told = [n for n in SHOWN if n not in posterior.left_open and (n != "context" or posterior.with_context)]
    says = [SHOWN[n].format(_number(posterior.term(n))) for n in told]
    tokens = max(r.tokens for r in posterior.rows if r.tok_s is not None)
    knee = posterior.knee_tokens
    if knee.low <= tokens and "token" in told:
        says.append(f"computing takes as long as reading weights at {_number(knee)} tokens a pass")
    return [*says, f"the rows are met within {posterior.rms:.1%} rms"]


def untold(posterior: Posterior) -> list[str]:
    """What the table cannot tell, and where answers are extrapolations."""
    rows = posterior.rows
    timed = [r for r in rows if r.tok_s is not None]
    chains = [r for r in rows if r.k and not r.tree]
    says = []
    if posterior.left_open:
        about = "; ".join(BELIEFS[n].about for n in posterior.left_open)
        says.append(f"the table does not tell, so that it is as believed beforehand - {about}")
    if any(r.tau is None for r in chains):
        says.append(
            "where no accept length was measured, throughput alone tells acceptance from cost only by how it changes "
            "with batch and length; the product is known better than its parts"
        )
    batches, lengths = sorted({r.batch for r in timed}), sorted({r.k for r in chains})
    if len(batches) == 1:
        says.append(f"measured at batch {batches[0]} alone: other batches are extrapolated")
    elif batches:
        says.append(f"measured at batch {batches[0]} to {batches[-1]}; what lies outside is extrapolated")
    if not any(not r.k for r in timed):
        says.append("plain decoding was not measured: whether speculation pays is an extrapolation to 0 drafts")
    if lengths:
        says.append(f"measured with {', '.join(map(str, lengths))} drafts; more than {lengths[-1]} are extrapolated")
    contexts = sorted({r.context for r in timed if r.context is not None})
    if len(contexts) > 1:
        says.append(f"measured at contexts of {contexts[0]:g} to {contexts[-1]:g} tokens")
    else:
        says.append(
            f"good for {f'a context of {contexts[0]:g} tokens' if contexts else 'the contexts it was measured at'}"
        )
    says.append("a batch decodes steadily; prefill, queueing and the tail of the benchmark are inside the fitted times")
    return says


def doubts(rows: Sequence[Row]) -> list[str]:
    """What looks as if rows did not come from one set-up."""
    plain = {(r.batch, r.context): r.tok_s for r in rows if not r.k and r.tok_s is not None}
    says = []
    for r in rows:
        base = plain.get((r.batch, r.context))
        if base is None or r.tok_s is None or r.tau is None or r.tok_s <= NOISE * r.tau * base:
            continue
        says.append(
            f"doubtful - {r.k} drafts at batch {r.batch} are {r.tok_s / base:.2f} times as fast as plain decoding, with "
            f"only {r.tau:.2f} tokens a round: the plain row comes from a slower set-up"
        )
    return says


def uncertainty(posterior: Posterior) -> Uncertainty:
    """Half of the 95 % limits of the parts of a round at the middle of the table, each alone (they move together)."""
    timed = [r for r in posterior.rows if r.tok_s is not None and r.k] or [r for r in posterior.rows if r.k]
    middle = sorted(timed, key=lambda r: r.tokens)[len(timed) // 2]
    cells = Cells.of([middle], one_pass=posterior.one_pass)
    worlds, t = posterior.worlds, posterior.worlds.terms
    draft = t["draft"] + t["draft_request"] * middle.batch
    tau = worlds.tau(np.array([float(middle.k)]))[:, 0]
    parts = {"verify": worlds.verify_ms(cells)[:, 0], "draft": draft, "overhead": t["speculative"]}
    if not middle.tree:
        parts["acceptance"] = tau
    return Uncertainty.model_validate({name: _share(values) for name, values in parts.items()})


def _share(values: FloatArray) -> float:
    low, high = np.quantile(values[1:], [0.025, 0.975]).tolist()
    return round(min((high - low) / 2 / float(values[0]), 0.95), 3)


def _measured(rows: Sequence[Row]) -> str:
    timed = [r for r in rows if r.tok_s is not None]
    plain, accepted = sum(not r.k for r in timed), sum(r.tau is not None for r in rows)
    return f"{len(timed)} rows of tokens per second, {plain} of them plain decoding, and {accepted} accept lengths"


def _number(interval: Interval) -> str:
    return f"{interval.estimate:.3g} ({interval.low:.3g} to {interval.high:.3g})"


def _tree_name(row: Row) -> str:
    return f"{row.steps}x{row.top_k} of {row.k + 1}"


def _drafter(row: Row, draft: LinearDraft) -> DraftModel:
    assert row.steps is not None  # what a tree needs was checked when it was read
    assert row.tau is not None
    tree = Tree(steps=row.steps, top_k=row.top_k, tokens=row.k + 1, tau=row.tau)
    passes = {"passes": row.steps} if draft.autoregressive else {}
    return DraftModel(
        max_draft_len=row.k,
        acceptance=CurveAcceptance(curves={"default": tree}),
        draft=draft.model_copy(update=passes),
    )
