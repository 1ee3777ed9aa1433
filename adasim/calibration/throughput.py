"""Cost and acceptance fitted to end-to-end throughput: a table of tokens per second over batch and draft length.

A steady batch of n requests gives n x tau / round seconds tokens per second. The round's milliseconds are linear in
the terms of :class:`~adasim.calibration.formula.FormulaCost`, none below 0, once the share of experts a token touches and
the chance alpha of a draft are known; these two are searched for outside. Throughput alone tells alpha from cost
only through their different dependence on batch and length: where tau was measured, give it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
from scipy.optimize import minimize, nnls
from scipy.special import expit, logit

from adasim.calibration.cost import LinearDraft
from adasim.calibration.formula import FormulaCost
from adasim.calibration.survival import Geometric, tau
from adasim.errors import InputError
from adasim.types import FloatArray

Term = Literal["base", "request", "token", "experts", "draft", "draft_request"]
TERMS: tuple[Term, ...] = ("base", "request", "token", "experts", "draft")  # for chains token = request + draft_request


class ThroughputCell(NamedTuple):
    """One cell of a sweep: a batch that decodes steadily."""

    batch: int
    verify_len: int  # tokens verified per request, the anchor counted; 1 = plain decoding
    tok_s: float  # output tokens per second of the batch
    tau: float | None = None  # measured; null = alpha is to explain it

    @property
    def tokens(self) -> int:
        """Tokens of a verification pass."""
        return self.batch * self.verify_len

    @property
    def draft_len(self) -> int:
        """Drafts of a request, the passes of an autoregressive drafter."""
        return self.verify_len - 1


@dataclass(frozen=True, slots=True)
class ThroughputFit:
    """What was fitted, and how well."""

    cost: FormulaCost
    alpha: float | None  # chance of every draft; null: all cells told their tau
    rms: float  # relative error of the fitted cells, root mean square

    def tok_s(self, cell: ThroughputCell) -> float:
        """Predicted output tokens per second at a cell's batch and length (and tau, where it tells)."""
        positions = cell.tokens if cell.draft_len else 0
        step = self.cost.step(cell.batch, positions, cell.tokens, 0.0, longest_draft=cell.draft_len)
        return cell.batch * _tau(cell, self.alpha) / step.total


def fit_throughput(
    cells: Sequence[ThroughputCell],
    *,
    terms: Sequence[Term] = TERMS,
    expert_share: float | None = None,
    autoregressive: bool = True,
    extrapolate: bool = False,
) -> ThroughputFit:
    """Least squares over the relative error of the round's time.

    Args:
        cells: measured.
        terms: what a round may cost: ``draft`` and ``draft_request`` per draft pass (autoregressive) or per round that
            drafts (not). Leave out what the cells cannot tell apart.
        expert_share: share of the experts one token touches; null = to be fitted.
        autoregressive: draft passes grow with the draft length.
        extrapolate: let the formula go on beyond the tokens of these cells.

    Raises:
        InputError: fewer cells than unknowns, or cells that cannot tell the terms apart.
    """
    needs_alpha = any(c.draft_len and c.tau is None for c in cells)
    needs_share = "experts" in terms and expert_share is None
    unknowns = len(terms) + needs_alpha + needs_share
    if len(cells) < unknowns:
        raise InputError(f"throughput: {len(cells)} cells cannot fix {unknowns} unknowns; measure more or drop terms")

    def solve(alpha: float, share: float) -> tuple[FloatArray, float]:
        round_ms = np.array([1e3 * c.batch * _tau(c, alpha) / c.tok_s for c in cells])
        design = np.stack([_columns(c, share, autoregressive, terms) for c in cells]) / round_ms[:, None]
        found, residual = nnls(design, np.ones(len(cells)))
        return found, float(residual)

    alphas = np.linspace(0.3, 0.95, 14) if needs_alpha else np.array([0.5])
    shares = np.geomspace(0.004, 0.4, 14) if needs_share else np.array([expert_share or 1.0])
    start = min(((a, s) for a in alphas for s in shares), key=lambda p: solve(*p)[1])
    best = start
    if needs_alpha or needs_share:
        best = _refine(lambda a, s: solve(a, s)[1], start, needs_alpha, needs_share)
    units = np.stack([_columns(c, best[1], autoregressive, terms) for c in cells])
    if np.linalg.matrix_rank(units / np.maximum(units.max(axis=0), 1e-9)) < len(terms):
        raise InputError(f"throughput: these cells cannot tell {', '.join(terms)} apart; vary more or drop terms")
    found, residual = solve(*best)
    ms = dict.fromkeys(get_args(Term), 0.0) | dict(zip(terms, found.tolist(), strict=True))
    tokens = [c.tokens for c in cells]
    cost = FormulaCost(
        base_ms=ms["base"],
        per_request_ms=ms["request"],
        per_token_ms=ms["token"],
        experts_ms=ms["experts"],
        expert_share=best[1],
        draft=LinearDraft(base_ms=ms["draft"], per_request_ms=ms["draft_request"], autoregressive=autoregressive),
        fitted_tokens=[min(tokens), max(tokens)],
        extrapolate=extrapolate,
    )
    return ThroughputFit(cost, best[0] if needs_alpha else None, residual / len(cells) ** 0.5)


def _refine(
    miss: Callable[[float, float], float], start: tuple[float, float], move_alpha: bool, move_share: bool
) -> tuple[float, float]:
    """The minimum near ``start``, each number kept within 0..1."""
    moves = np.array([move_alpha, move_share])
    origin = logit(np.array(start).clip(1e-6, 1 - 1e-6))

    def place(x: FloatArray) -> tuple[float, float]:
        at = origin.copy()
        at[moves] = x
        a, s = expit(at.clip(-12, 12)).tolist()
        return (a if move_alpha else start[0]), (s if move_share else start[1])

    options = {"xatol": 1e-6, "fatol": 1e-12, "maxiter": 2000}
    found = minimize(lambda x: miss(*place(x)), origin[moves], method="Nelder-Mead", options=options)  # type: ignore[call-overload]
    return place(found.x)


def _tau(cell: ThroughputCell, alpha: float | None) -> float:
    if cell.tau is not None or not cell.draft_len:
        return cell.tau or 1.0
    assert alpha is not None
    return tau(Geometric(alpha=alpha).survival(cell.draft_len))


def _columns(cell: ThroughputCell, share: float, autoregressive: bool, terms: Sequence[Term]) -> FloatArray:
    """Units of each term in one round of this cell."""
    passes = cell.draft_len if autoregressive else min(cell.draft_len, 1)
    units: dict[Term, float] = {
        "base": 1.0,
        "request": cell.batch,
        "token": cell.tokens,
        "experts": 1 - (1 - share) ** cell.tokens,
        "draft": passes,
        "draft_request": passes * cell.batch,
    }
    return np.array([units[t] for t in terms])


class Quadratic:
    """The null model of a sweep: log tok/s as a quadratic in draft length and log2 batch, least squares.

    Raises:
        InputError: fewer than six cells, or cells on too few lengths or batches.
    """

    def __init__(self, cells: Sequence[ThroughputCell]) -> None:
        design = np.stack([self._terms(c) for c in cells]) if cells else np.empty((0, 6))
        if np.linalg.matrix_rank(design) < 6:
            raise InputError("quadratic: needs six cells over at least three draft lengths and three batches")
        self._weights = np.linalg.lstsq(design, np.log([c.tok_s for c in cells]), rcond=None)[0]

    def tok_s(self, cell: ThroughputCell) -> float:
        """Predicted output tokens per second."""
        return float(np.exp(self._terms(cell) @ self._weights))

    @staticmethod
    def _terms(cell: ThroughputCell) -> FloatArray:
        k, b = float(cell.draft_len), np.log2(cell.batch)
        return np.array([1.0, k, k * k, b, b * b, k * b])
