"""Length heads: how much of a drafted block will be accepted, read off the drafter's hidden states.

Both published forms answer a_hat in 0..1; ``a_hat * B`` estimates L + 1, the anchor counted. Training never
reaches the drafter: hidden states are detached first.
"""

from collections.abc import Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adasim.real.opd import Label

Form = Literal["paper", "released"]


class PaperHead(nn.Module):
    """Per position Linear + SiLU to a narrower width, mean over positions, Linear, sigmoid (arXiv 2607.19223)."""

    def __init__(self, hidden: int, width: int = 128) -> None:
        super().__init__()
        self.narrow, self.out = nn.Linear(hidden, width), nn.Linear(width, 1)

    def forward(self, block: Tensor) -> Tensor:
        """Args: draft rows of blocks [n, B - 1, D]. Returns a_hat [n]."""
        out: Tensor = torch.sigmoid(self.out(F.silu(self.narrow(block)).mean(1)))[:, 0]
        return out


class ReleasedHead(nn.Module):
    """Mean and last position side by side, Linear, SiLU, a residual layer, Linear, sigmoid (the released code)."""

    def __init__(self, hidden: int, width: int = 256) -> None:
        super().__init__()
        self.narrow, self.mix, self.out = nn.Linear(2 * hidden, width), nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, block: Tensor) -> Tensor:
        """Args: draft rows of blocks [n, B - 1, D]. Returns a_hat [n]."""
        x = F.silu(self.narrow(torch.cat([block.mean(1), block[:, -1]], -1)))
        x = x + F.silu(self.mix(x))
        out: Tensor = torch.sigmoid(self.out(x))[:, 0]
        return out


def make_head(form: Form, hidden: int) -> PaperHead | ReleasedHead:
    """A fresh head of one of the published forms."""
    return PaperHead(hidden) if form == "paper" else ReleasedHead(hidden)


def load_head(weights: dict[str, Tensor]) -> PaperHead | ReleasedHead:
    """A head from its weights; the form shows in their names."""
    width, columns = weights["narrow.weight"].shape
    head = ReleasedHead(columns // 2, width) if "mix.weight" in weights else PaperHead(columns, width)
    head.load_state_dict({k: w.float() for k, w in weights.items()})
    return head.eval()


def label(kind: Label, run: Tensor, verify_lens: Tensor, block: int) -> Tensor:
    """Training target a* [n] in 0..1 for blocks whose drafts would be accepted for ``run`` = L tokens.

    "full" is (L + 1) / B from the whole block: unbiased, but every label costs a full verification. The others
    use what a block cut to ``verify_lens`` shows, and are right-censored: "accepted/verified" collapses,
    "emitted/verified" depends on where it starts, "accepted/predicted" (the paper's wording) comes out too long.
    """
    accepted = torch.minimum(run, verify_lens - 1)
    if kind == "full":
        return (run + 1) / block
    if kind == "accepted/verified":
        return accepted / (verify_lens - 1).clamp_min(1)
    if kind == "emitted/verified":
        return (accepted + 1) / verify_lens
    return accepted / verify_lens


def head_loss(head: nn.Module, block: Tensor, target: Tensor) -> Tensor:
    """Mean squared error against a* [n]; no gradient reaches what made ``block`` [n, B - 1, D]."""
    return F.mse_loss(head(block.detach().float()), target)


def fit_head(
    head: nn.Module,
    block: Tensor,
    target: Tensor,
    epochs: int = 4,
    batch: int = 256,
    rate: float = 5e-4,
    seed: int = 0,
) -> Iterator[float]:
    """Train a head in place on blocks [P, B - 1, D] and labels [P]; yields each epoch's mean loss."""
    optimiser = torch.optim.AdamW(head.parameters(), lr=rate)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        total = 0.0
        for rows in torch.randperm(len(block), generator=generator).split(batch):  # type: ignore[no-untyped-call]
            loss = head_loss(head, block[rows], target[rows])
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            total += float(loss.detach()) * len(rows)
        yield total / len(block)
