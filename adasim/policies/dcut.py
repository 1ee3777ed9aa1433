"""D-Cut: one verification budget for the batch, spent where survival is highest."""

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from adasim.errors import InputError
from adasim.policies.base import Policy
from adasim.policies.budget import drafted_only, spend
from adasim.types import BatchView, DraftView, EngineCaps, FloatArray, IntArray

Ratio = Annotated[float, Field(gt=0, le=1)]


class DCut(Policy):
    """Keep the global top of all (request, position) prefixes by survival (arXiv 2607.14647).

    The budget is ``ratio * n * B`` tokens, anchors counted and always kept. ``keep_ratio`` is one number, a
    table {batch size: ratio} (linear between its sizes, flat outside), or ``auto``: the ratio out of ``ratios``
    with the most expected tokens per second, (n + sum of kept survival) / cost(round). Ties keep the smaller
    budget. D-Cut's own choices are 1/4, 1/2, 3/4 and 1.
    """

    kind: Literal["dcut"] = "dcut"
    keep_ratio: Ratio | dict[Annotated[int, Field(ge=1)], Ratio] | Literal["auto"] = "auto"
    ratios: list[Ratio] = Field(default=[0.25, 0.5, 0.75, 1.0], min_length=1)

    @property
    def needs(self) -> frozenset[str]:
        """A survival curve; a cost model when it chooses the ratio itself."""
        return frozenset({"survival", "cost"} if self.keep_ratio == "auto" else {"survival"})

    def start(self, caps: EngineCaps) -> None:
        """Refuse options that would be ignored."""
        if self.keep_ratio != "auto" and "ratios" in self.model_fields_set:
            raise InputError(f'{self.label}: ratios has no effect unless keep_ratio is "auto"')
        if isinstance(self.keep_ratio, dict) and not self.keep_ratio:
            raise InputError(f"{self.label}: keep_ratio is an empty table")

    def verify_lens(self, batch: BatchView, draft: DraftView) -> IntArray:
        """The anchor and the kept drafts of each request, [n]."""
        assert draft.survival is not None
        n, drafts, block = len(batch), int(draft.draft_lens.sum()), batch.caps.block
        survival = drafted_only(draft.survival, draft.draft_lens)
        budgets = [min(max(round(r * n * block) - n, 0), drafts) for r in self._ratios(n)]
        if len(budgets) == 1:
            return spend(survival, budgets[0])
        best_first = np.sort(survival, axis=None)[::-1]
        keep = self._best(batch, draft, budgets, best_first)
        return spend(survival, keep, float(best_first[keep - 1]) if keep else None)

    def _ratios(self, n: int) -> list[float]:
        if self.keep_ratio == "auto":
            return sorted(self.ratios)
        if isinstance(self.keep_ratio, dict):
            sizes = sorted(self.keep_ratio)
            return [float(np.interp(n, sizes, [self.keep_ratio[s] for s in sizes]))]
        return [self.keep_ratio]

    def _best(self, batch: BatchView, draft: DraftView, budgets: list[int], best_first: FloatArray) -> int:
        """The budget with the most expected tokens per second."""
        assert batch.caps.cost is not None
        n, round_s = len(batch), batch.caps.cost.round_s
        context = int(batch.context_lens.sum()) / n
        positions = int(draft.draft_lens.sum()) + int(np.count_nonzero(draft.draft_lens))
        expected = np.cumsum(best_first[: max(budgets)])
        tokens = [n + float(expected[b - 1]) if b else float(n) for b in budgets]
        rates = [t / round_s(n, positions, n + b, context) for b, t in zip(budgets, tokens, strict=True)]
        return budgets[rates.index(max(rates))]
