"""Distillation losses: how far a drafter q is from its target p at each position.

The eager, readable forms; all take logits over the same vocabulary and average over positions. Neither clip
makes a divergence: per-entry clipping caps only terms where q > p, so alone it pushes right tokens down; the
hard label pays that back. ``clipped`` in the result says how often a cap was active.
"""

from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import Field

from adasim.types import Component

if TYPE_CHECKING:
    from torch import Tensor


class Loss(NamedTuple):
    """A loss and what its cap did."""

    value: "Tensor"  # scalar
    clipped: float  # share of entries (or positions) at the cap


class ForwardKl(Component):
    """KL(p || q), as online speculative decoding (OSD) trains."""

    kind: Literal["forward_kl"] = "forward_kl"

    def __call__(self, q_logits: "Tensor", p_logits: "Tensor") -> Loss:
        """Args: both [P, V]; no gradient reaches p."""
        import torch
        import torch.nn.functional as F

        p = torch.softmax(p_logits.detach(), -1)
        value = F.kl_div(torch.log_softmax(q_logits, -1), p, reduction="batchmean")
        return Loss(value, 0.0)


class ClippedReverseKl(Component):
    """alpha * CE(argmax p) + (1 - alpha) * clipped KL(q || p), AdaFlash's OPD loss (arXiv 2607.19223).

    ``clip``: "entry" caps each vocabulary term at ``delta`` (the paper), "position" caps a position's sum
    divided by the number of positions (the released code; binds only above delta * n nats), "none" neither.
    """

    kind: Literal["clipped_reverse_kl"] = "clipped_reverse_kl"
    alpha: float = Field(default=0.8, ge=0, le=1)
    delta: float = Field(default=0.01, gt=0)
    clip: Literal["entry", "position", "none"] = "entry"

    def __call__(self, q_logits: "Tensor", p_logits: "Tensor") -> Loss:
        """Args: both [P, V]; no gradient reaches p."""
        import torch
        import torch.nn.functional as F

        log_q, log_p = torch.log_softmax(q_logits, -1), torch.log_softmax(p_logits.detach(), -1)
        terms = log_q.exp() * (log_q - log_p)
        if self.clip == "entry":
            over = terms > self.delta
            reverse = terms.clamp_max(self.delta).sum(-1).mean()
        elif self.clip == "position":
            shares = terms.sum(-1) / len(terms)
            over = shares > self.delta
            reverse = shares.clamp_max(self.delta).sum()
        else:
            over = torch.zeros(1, dtype=torch.bool)
            reverse = terms.sum(-1).mean()
        hard = F.nll_loss(log_q, log_p.argmax(-1))
        return Loss(self.alpha * hard + (1 - self.alpha) * reverse, float(over.float().mean()))


AnyLoss = Annotated[ForwardKl | ClippedReverseKl, Field(discriminator="kind")]
