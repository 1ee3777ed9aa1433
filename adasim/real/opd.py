"""On-policy distillation: a drafter learns from what the target showed while serving.

The target is known at the tokens of the served text as its top tokens and the mass of the rest, so losses
compare p and q over those tokens and one bucket for all others.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from adasim.real.collect import Sample
from adasim.real.drafter import DrafterShape, Weights, block_hidden
from adasim.real.layers import Rope
from adasim.real.losses import AnyLoss, ClippedReverseKl
from adasim.real.optim import MixedOptimiser
from adasim.types import Component

FLOOR = 1e-6  # probability of buckets that hold nothing


class Opd(Component):
    """Settings of one training round over a full buffer.

    Attributes:
        positions: of each round's block that are trained. "accepted" = 1..L+1, where the target saw exactly the
            context the drafter assumed; "text" = the whole block along the text that followed.
        blocks: rounds of a request in one batch at most, drawn at random.
    """

    loss: AnyLoss = ClippedReverseKl()
    positions: Literal["accepted", "text"] = "accepted"
    epochs: int = Field(default=2, ge=1)
    accumulate: int = Field(default=2, ge=1)  # requests an optimiser step
    rate: float = Field(default=3e-4, gt=0)
    blocks: int = Field(default=64, ge=1)
    seed: int = 0


class OpdBatch(NamedTuple):
    """One request. N rounds, B block, K top tokens kept a position."""

    context: Tensor  # [1, T, taps * D]
    anchors: Tensor  # [1, N]
    starts: Tensor  # [1, N]
    ids: Tensor  # [N, B - 1, K] the target's top tokens
    probs: Tensor  # [N, B - 1, K] their probabilities
    use: Tensor  # [N, B - 1] whether a position is trained


@dataclass(frozen=True, slots=True)
class Progress:
    """What a training round did."""

    steps: int
    losses: list[float]  # of each epoch, mean over requests
    clipped: float  # share of entries or positions at the cap


def opd_batch(sample: Sample, block: int, positions: str, limit: int, rng: random.Random) -> OpdBatch | None:
    """The rounds of one request as a batch; None when it has none that can be trained."""
    lesson = sample.lesson
    end = len(lesson.text.tokens)
    rounds = [r for r in sample.rounds if r.start < end - 1]
    if not rounds:
        return None
    rounds = sorted(rng.sample(rounds, min(limit, len(rounds))))
    starts = np.array([r.start for r in rounds])
    reach = np.array([r.accepted + 1 for r in rounds]) if positions == "accepted" else np.full(len(rounds), block)
    offsets = np.arange(1, block)
    at = starts[:, None] + offsets
    use = (at < end) & (offsets <= reach[:, None])
    before = np.minimum(at, end - 1) - 1  # entry t expects the token at t + 1
    return OpdBatch(
        lesson.hidden_tensor()[None, : int(starts.max())],
        torch.from_numpy(lesson.text.tokens[starts].astype(np.int64))[None],
        torch.from_numpy(starts)[None],
        torch.from_numpy(lesson.top_ids[before].astype(np.int64)),
        torch.from_numpy(lesson.top_probs[before].astype(np.float32)),
        torch.from_numpy(use),
    )


def buckets(logits: Tensor, ids: Tensor, probs: Tensor, rows_of: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of q and p over the target's top tokens and the rest, each [P, K + 1].

    Args: draft logits [P, V']; ids, probs [P, K]; rows_of [vocab]: row of the draft vocabulary, -1 outside.
    Tokens that cannot be drafted belong to the rest.
    """
    rows = rows_of[ids]
    known = rows >= 0
    q = torch.softmax(logits.float(), -1).gather(-1, rows.clamp_min(0)) * known
    p = probs * known
    q = torch.cat([q, 1 - q.sum(-1, keepdim=True)], -1).clamp_min(FLOOR)
    p = torch.cat([p, 1 - p.sum(-1, keepdim=True)], -1).clamp_min(FLOOR)
    return q.log(), p.log()


class OpdTrainer:
    """Improves a drafter from samples; the weights it holds are the trained ones, fp32."""

    def __init__(
        self, settings: Opd, shape: DrafterShape, weights: Weights, embedding: Tensor, head: Tensor, vocab: Tensor
    ) -> None:
        """Args: embedding [V, D] and head rows [V', D] of the target, frozen; vocab [V'] sorted token ids."""
        self.settings, self.shape, self.embedding, self.head = settings, shape, embedding, head
        self.weights = {k: w.float().clone() for k, w in weights.items()}
        self.rows_of = torch.full((len(embedding),), -1).scatter_(0, vocab, torch.arange(len(vocab)))
        self.rope = Rope(shape.arch, 4096, embedding.dtype, embedding.device)
        self.optimiser = MixedOptimiser(self.weights, muon=False)
        self.rng = random.Random(settings.seed)

    def train(self, samples: Sequence[Sample]) -> Progress:
        """One pass of ``epochs`` over the samples. Raises FloatingPointError when a loss is not finite."""
        losses, clipped, steps = [], [], 0
        for _ in range(self.settings.epochs):
            total, count = 0.0, 0
            order = self.rng.sample(list(samples), len(samples))
            for at in range(0, len(order), self.settings.accumulate):
                leaves = {k: w.to(self.embedding.dtype).requires_grad_() for k, w in self.weights.items()}
                values = [v for s in order[at : at + self.settings.accumulate] if (v := self._backward(leaves, s))]
                if not values:
                    continue
                grads = {k: w.grad / len(values) for k, w in leaves.items() if w.grad is not None}
                with torch.no_grad():
                    self.optimiser.step(grads, self.settings.rate)
                steps += 1
                total, count = total + sum(v[0] for v in values), count + len(values)
                clipped += [v[1] for v in values]
            losses.append(total / max(count, 1))
        return Progress(steps, losses, float(np.mean(clipped)) if clipped else 0.0)

    def _backward(self, leaves: Weights, sample: Sample) -> tuple[float, float] | None:
        batch = opd_batch(sample, self.shape.block, self.settings.positions, self.settings.blocks, self.rng)
        if batch is None:
            return None
        context = batch.context.to(self.embedding.dtype)
        hidden = block_hidden(
            self.shape, leaves, self.embedding, self.rope, context, batch.anchors, batch.starts, self.shape.block
        )[0, :, 1:][batch.use]
        q, p = buckets(hidden @ self.head.T, batch.ids[batch.use], batch.probs[batch.use], self.rows_of)
        loss = self.settings.loss(q, p)
        value = float(loss.value.detach())
        if not np.isfinite(value):
            raise FloatingPointError(f"OPD loss is {value} on request {sample.lesson.text.index}")
        loss.value.backward()  # type: ignore[no-untyped-call]
        return value, loss.clipped
