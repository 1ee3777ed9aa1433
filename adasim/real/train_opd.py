"""Trains drafter and length head on what serving collected.

The target is known at the tokens of the served text as its top tokens and the mass of the rest, so losses
compare p and q over those tokens and one bucket for all others.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adasim.real.checkpoint import Checkpoint
from adasim.real.drafter import Weights, block_hidden
from adasim.real.layers import Rope
from adasim.real.length_head import head_loss, label, load_head
from adasim.real.opd import Opd, Positions
from adasim.real.optim import MixedOptimiser
from adasim.real.rerun import Teacher
from adasim.real.samples import Round, Sample

FLOOR = 1e-6  # probability of buckets that hold nothing


class OpdBatch(NamedTuple):
    """One request. N rounds, B block, K top tokens kept a position."""

    context: Tensor  # [1, T, taps * D]
    anchors: Tensor  # [1, N]
    starts: Tensor  # [1, N]
    ids: Tensor  # [N, B - 1, K] the target's top tokens
    probs: Tensor  # [N, B - 1, K] their probabilities
    use: Tensor  # [N, B - 1] whether a position is trained
    accepted: Tensor  # [N]
    verify_lens: Tensor  # [N]
    whole: Tensor  # [N] the full block was verified


@dataclass(frozen=True, slots=True)
class Progress:
    """What a training round did."""

    steps: int
    losses: list[float]  # of each epoch, mean over requests
    clipped: float  # share of entries or positions at the cap
    head_losses: list[float]  # of each epoch, mean over blocks that have a label; NaN without any
    head_labels: int  # blocks that had one, all epochs


def opd_batch(sample: Sample, block: int, positions: Positions, limit: int, rng: random.Random) -> OpdBatch | None:
    """Up to ``limit`` rounds of one request as a batch; None when it has none that can be trained."""
    lesson = sample.lesson
    end = len(lesson.text.tokens)
    rounds = [r for r in sample.rounds if r.start < end - 1]
    if not rounds:
        return None
    chosen = sorted(rng.sample(range(len(rounds)), min(limit, len(rounds))))
    rounds = [rounds[i] for i in chosen]
    starts = np.array([r.start for r in rounds])
    reach = np.array([r.accepted + 1 for r in rounds]) if positions != "text" else np.full(len(rounds), block)
    offsets = np.arange(1, block)
    at = starts[:, None] + offsets
    use = (at < end) & (offsets <= reach[:, None])
    before = np.minimum(at, end - 1) - 1  # entry t expects the token at t + 1
    ids, probs = lesson.top_ids[before].astype(np.int64), lesson.top_probs[before].astype(np.float32)
    if positions == "all":
        for i, r in enumerate(rounds):
            _add_rejected(r, ids[i], probs[i], use[i])
    return OpdBatch(
        lesson.hidden_tensor()[None, : int(starts.max())],
        torch.from_numpy(lesson.text.tokens[starts].astype(np.int64))[None],
        torch.from_numpy(starts)[None],
        torch.from_numpy(ids),
        torch.from_numpy(probs),
        torch.from_numpy(use),
        torch.tensor([r.accepted for r in rounds]),
        torch.tensor([r.verify_len for r in rounds]),
        torch.tensor([r.whole for r in rounds]),
    )


def _add_rejected(r: Round, ids: NDArray[Any], probs: NDArray[Any], use: NDArray[Any]) -> None:
    """Positions after the first rejection, as the target saw them behind the rejected drafts. All [B - 1, ...]."""
    if r.rejected is None:
        return
    first = r.accepted + 1  # of draft positions counted from 0: the one after the correction
    count = min(len(r.rejected[0]), len(ids) - first)
    part = slice(first, first + count)
    ids[part], probs[part], use[part] = r.rejected[0][:count], r.rejected[1][:count], True


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
    """Improves a drafter and its head from samples; the weights it holds are the trained ones, fp32.

    Args:
        start: the drafter to improve, and its head where it has one.
        embedding: the target's [V, D], frozen.
        head: rows of the target's head [V', D] for the tokens that may be drafted, frozen.
        teacher: labels more blocks for the length head; None = only rounds that were served.
        tick: called after every request, to show life.
    """

    def __init__(
        self, settings: Opd, start: Checkpoint, embedding: Tensor, head: Tensor,
        teacher: Teacher | None = None, tick: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.settings, self.embedding, self.head = settings, embedding, head
        self.teacher, self.tick = teacher, tick
        vocab = start.vocab if start.vocab is not None else torch.arange(len(head))
        self.vocab, self.shape = vocab.to(embedding.device), start.shape
        self.rows_of = torch.full((len(embedding),), -1, device=embedding.device)
        self.rows_of[self.vocab] = torch.arange(len(vocab), device=embedding.device)
        self.rope = Rope(start.shape.arch, 4096, embedding.dtype, embedding.device)
        self.rng = random.Random(settings.seed)
        self.restart(start)

    def restart(self, start: Checkpoint) -> None:
        """Go on from these weights, with a fresh optimiser."""
        device = self.embedding.device
        self.weights = {k: w.float().clone().to(device) for k, w in start.weights.items()}
        self.optimiser = MixedOptimiser(self.weights, muon=False)
        self.length_head = load_head(start.head).to(device).train() if start.head else None
        if self.length_head is not None:
            self.head_optimiser = torch.optim.AdamW(self.length_head.parameters(), lr=self.settings.head_rate)

    def checkpoint(self) -> Checkpoint:
        """The trained drafter and head."""
        head = {} if self.length_head is None else dict(self.length_head.state_dict())
        return Checkpoint(self.shape, self.weights, self.vocab if len(self.vocab) < len(self.embedding) else None, head)

    def train(self, samples: Sequence[Sample]) -> Progress:
        """``epochs`` passes over the samples. Raises FloatingPointError when a loss is not finite."""
        losses: list[float] = []
        clipped: list[float] = []
        head_losses: list[float] = []
        steps, labels = 0, 0
        for _ in range(self.settings.epochs):
            drafted: list[float] = []
            judged: list[float] = []
            order = self.rng.sample(list(samples), len(samples))
            for at in range(0, len(order), self.settings.accumulate):
                leaves = {k: w.to(self.embedding.dtype).requires_grad_() for k, w in self.weights.items()}
                before = len(drafted)
                for sample in order[at : at + self.settings.accumulate]:
                    self._learn(leaves, sample, drafted, clipped, judged)
                    self.tick()
                if len(drafted) == before:
                    continue
                grads = {k: w.grad / (len(drafted) - before) for k, w in leaves.items() if w.grad is not None}
                with torch.no_grad():
                    self.optimiser.step(grads, self.settings.rate)
                steps += 1
            losses.append(float(np.mean(drafted)) if drafted else 0.0)
            head_losses.append(float(np.mean(judged)) if judged else float("nan"))
            labels += len(judged)
        return Progress(steps, losses, float(np.mean(clipped)) if clipped else 0.0, head_losses, labels)

    def _learn(
        self, leaves: Weights, sample: Sample, losses: list[float], clipped: list[float], head_losses: list[float]
    ) -> None:
        """Add one request's gradient to the leaves; a step for the head where it has labels."""
        settings, block = self.settings, self.shape.block
        batch = opd_batch(sample, block, settings.positions, settings.blocks, self.rng)
        if batch is None:
            return
        device = self.embedding.device
        batch = OpdBatch(*(x.to(device) for x in batch))
        context = batch.context.to(self.embedding.dtype)
        hidden = block_hidden(
            self.shape, leaves, self.embedding, self.rope, context, batch.anchors, batch.starts, block
        )[0, :, 1:]  # fmt: skip
        q, p = buckets(hidden[batch.use] @ self.head.T, batch.ids[batch.use], batch.probs[batch.use], self.rows_of)
        loss = settings.loss(q, p)
        value = float(loss.value.detach())
        if not np.isfinite(value):
            raise FloatingPointError(f"OPD loss is {value} on request {sample.lesson.text.index}")
        loss.value.backward()  # type: ignore[no-untyped-call]
        losses.append(value)
        clipped.append(loss.clipped)
        if self.length_head is None:
            return
        rows = batch.whole if settings.head_label == "full" else batch.verify_lens > 1
        self._judge(
            hidden[rows], label(settings.head_label, batch.accepted[rows], batch.verify_lens[rows], block), head_losses
        )
        if self.teacher is not None:
            blocks = self.teacher.blocks(self.shape, leaves, self.rope, sample, settings.rerun_blocks)
            if blocks is not None:
                self._judge(blocks.hidden, (blocks.run + 1) / block, head_losses)

    def _judge(self, hidden: Tensor, target: Tensor, losses: list[float]) -> None:
        """One step of the length head on blocks [n, B - 1, D] with labels [n]."""
        if not len(hidden):
            return
        assert self.length_head is not None
        loss = head_loss(self.length_head, hidden, target.float())
        self.head_optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.head_optimiser.step()
        losses += [float(loss.detach())] * len(hidden)
