"""Many possible worlds at once: cost and acceptance of a round as arrays, and what is believed of them beforehand.

The terms are those of :class:`~adasim.calibration.formula.FormulaCost` and :class:`~adasim.calibration.survival.Fading`.
Beliefs are wide: a factor of two to seven either way at one standard deviation. They decide what a table leaves open, and
nothing else; sizes of time are relative to the fastest round of the table.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from adasim.calibration.cost import LinearDraft, Overhead
from adasim.calibration.formula import FormulaCost
from adasim.calibration.survival import Fading, fading
from adasim.calibration.throughput_table import Row
from adasim.types import FloatArray


class Belief(NamedTuple):
    """A log-normal one: median, and standard deviation of the logarithm; acceptance: normal."""

    centre: float
    spread: float
    about: str


BELIEFS = {
    "base": Belief(0.6, 1.0, "time of a round whatever it does"),
    "request": Belief(1 / 150, 2.0, "time per request"),
    "token": Belief(1 / 300, 1.5, "time per verified token"),
    "sharpness": Belief(1.0, 1.0, "how sharp the knee between reading weights and computing is"),  # less 1
    "experts": Belief(0.5, 1.5, "time of reading all experts"),
    "share": Belief(0.03, 1.0, "share of the experts a token touches"),
    "speculative": Belief(0.1, 1.5, "time of a speculative round beside its drafts"),
    "draft": Belief(0.06, 1.0, "time of a draft pass"),  # one layer in some tens
    "draft_request": Belief(1.0, 1.0, "time of a draft pass per request"),  # relative to draft / base x request
    "context": Belief(3e-6, 2.0, "time per token of context"),
    "start": Belief(0.85, 0.8, "acceptance of the first draft"),  # logit: 0.7
    "slope": Belief(-0.3, 0.5, "change of acceptance along the chain"),
    "scatter": Belief(0.03, 0.5, "noise of tokens per second"),  # relative, model error included
    "tau_scatter": Belief(0.015, 0.7, "noise of accept lengths"),
}
NAMES = tuple(BELIEFS)
NORMAL = ("start", "slope")
NOISES = ("scatter", "tau_scatter")


@dataclass(frozen=True, slots=True)
class Cells:
    """Rows as arrays, [c]."""

    batch: FloatArray
    k: FloatArray
    passes: FloatArray
    context: FloatArray  # 0: unknown
    told_tau: FloatArray  # NaN: the model's

    @classmethod
    def of(cls, rows: list[Row], *, one_pass: bool, taus: list[float | None] | None = None) -> "Cells":
        """The rows, with a draft pass per draft, or one a round; ``taus``: told ones, the model's where None."""
        passes = [min(r.passes, 1) if one_pass else r.passes for r in rows]
        told = [r.told_tau for r in rows] if taus is None else taus
        columns = [(r.batch, r.k, p, r.context or 0.0, t) for r, p, t in zip(rows, passes, told, strict=True)]
        return cls(*np.array(columns, dtype=np.float64).reshape(len(rows), 5).T)


@dataclass(frozen=True, slots=True)
class Worlds:
    """Values of the terms, [n] each, of n possible worlds; ``ms``: the unit of time."""

    terms: dict[str, FloatArray]
    ms: float

    @classmethod
    def at(cls, z: FloatArray, ms: float) -> "Worlds":
        """The worlds so many standard deviations from what is believed, [n, terms]."""
        values = {}
        for name, deviations in zip(NAMES, z.T, strict=True):
            centre, spread, _ = BELIEFS[name]
            values[name] = centre + spread * deviations if name in NORMAL else centre * np.exp(spread * deviations)
        values["share"] = np.minimum(values["share"], 0.99)
        values["sharpness"] = np.minimum(1 + values["sharpness"], 60.0)
        values["draft_request"] = values["draft_request"] * values["draft"] / values["base"] * values["request"]
        return cls(values, ms)

    def tau(self, k: FloatArray) -> FloatArray:
        """Tokens per request and round of chains of k drafts, [n, c]."""
        longest = int(k.max(initial=1))
        survival = fading(self.terms["start"], self.terms["slope"], longest)
        tokens = 1 + np.concatenate([np.zeros((len(survival), 1)), np.cumsum(survival, axis=1)], axis=1)
        return tokens[:, k.astype(np.int64)]

    def verify_ms(self, cells: Cells) -> FloatArray:
        """The target's pass, [n, c]."""
        t = {name: values[:, None] for name, values in self.terms.items()}
        tokens = cells.batch * (cells.k + 1)
        weights = t["base"] + t["experts"] * (1 - (1 - t["share"]) ** tokens)
        p = t["sharpness"]
        # weights (1 + x^p)^(1/p): no power of a large number
        passing = weights * (1 + np.exp(np.minimum(p * np.log(t["token"] * tokens / weights), 700))) ** (1 / p)
        return self.ms * (passing + cells.batch * (t["request"] + t["context"] * cells.context))

    def round_ms(self, cells: Cells) -> FloatArray:
        """A round, [n, c]."""
        draft = self.terms["draft"][:, None] + self.terms["draft_request"][:, None] * cells.batch
        speculative = self.terms["speculative"][:, None] * (cells.k > 0)
        return self.verify_ms(cells) + self.ms * (cells.passes * draft + speculative)

    def tok_s(self, cells: Cells) -> FloatArray:
        """Output tokens per second of the batch, [n, c]; trees need their tau told."""
        told = ~np.isnan(cells.told_tau)
        tau = np.where(told, cells.told_tau, self.tau(np.where(told, 0, cells.k)))
        return 1e3 * cells.batch * tau / self.round_ms(cells)

    def cost(self, i: int, *, fitted_tokens: list[int], one_pass: bool, with_context: bool) -> FormulaCost:
        """One world's cost; without ``with_context`` good for the context of the table."""
        ms = {name: float(self.ms * self.terms[name][i]) for name in BELIEFS if name not in NORMAL}
        return FormulaCost(
            base_ms=ms["base"],
            per_request_ms=ms["request"],
            per_token_ms=ms["token"],
            experts_ms=ms["experts"],
            expert_share=float(self.terms["share"][i]),
            knee_sharpness=float(self.terms["sharpness"][i]),
            per_context_ms=ms["context"] if with_context else 0.0,
            draft=LinearDraft(base_ms=ms["draft"], per_request_ms=ms["draft_request"], autoregressive=not one_pass),
            overhead=Overhead(speculative_ms=ms["speculative"]),
            fitted_tokens=fitted_tokens,
            extrapolate=True,
        )

    def curve(self, i: int) -> Fading:
        """One world's acceptance."""
        return Fading(alpha=float(1 / (1 + np.exp(-self.terms["start"][i]))), slope=float(self.terms["slope"][i]))
