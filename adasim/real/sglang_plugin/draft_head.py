"""From the drafter's hidden states to draft tokens: the target's head, cut to the draft vocabulary, sharded or not."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Gather = Callable[[Tensor], Tensor]  # [rows, c] of this rank -> [rows, ranks * c], ranks in order


class Drafted(NamedTuple):
    """Of packed draft rows: the likeliest token, and how sure the drafter is of it."""

    tokens: Tensor  # [rows]
    confidence: Tensor  # [rows] its probability over the draft vocabulary
    lead: Tensor  # [rows] nats between it and the second


class DraftHead:
    """Greedy drafting by a head of which this rank holds some rows.

    Args:
        weight: this rank's rows [v, D] of the head, of tokens ``first``, ``first + 1``, ...
        first: token id of the first row.
        vocab: sorted token ids that may be drafted; None = all.
        gather: joins the columns of all ranks; None = this rank holds every row.
    """

    def __init__(self, weight: Tensor, first: int = 0, vocab: Tensor | None = None, gather: Gather | None = None) -> None:
        if vocab is None:
            self.weight, self.ids = weight, torch.arange(first, first + len(weight), device=weight.device)
        else:
            here = vocab[(vocab >= first) & (vocab < first + len(weight))].to(weight.device)
            self.weight, self.ids = weight[here - first], here
        self.gather = gather

    def __call__(self, hidden: Tensor) -> Drafted:
        """Args: hidden states of draft rows [rows, D]."""
        logits = hidden.to(self.weight.dtype) @ self.weight.T
        count = min(2, logits.shape[1])
        values, columns = logits.topk(count, -1) if count else (logits, logits.long())
        ids = self.ids[columns]
        if count < 2:  # a rank with hardly any draft token
            values = torch.nn.functional.pad(values, (0, 2 - count), value=float("-inf"))
            ids = torch.nn.functional.pad(ids, (0, 2 - count))
        mass = logits.float().logsumexp(-1, keepdim=True)
        if self.gather is not None:
            values, ids, mass = self.gather(values.contiguous()), self.gather(ids.contiguous()), self.gather(mass)
            values, order = values.topk(2, -1)
            ids = ids.gather(1, order)
            mass = mass.logsumexp(-1, keepdim=True)
        best = values[:, 0].float()
        return Drafted(ids[:, 0], torch.exp(best - mass[:, 0]), values[:, 0] - values[:, 1])
