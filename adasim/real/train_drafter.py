"""Offline training of a drafter on target-generated text: many anchors a sequence, soft and hard labels."""

import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from adasim.real.drafter import DrafterShape, Weights, block_hidden
from adasim.real.evaluate import Tau, evaluate
from adasim.real.features import TOP, Lesson, read_features
from adasim.real.layers import Rope
from adasim.real.optim import MixedOptimiser
from adasim.types import Component

RESERVED = 16  # of so many lessons one is kept for the length head


class DrafterTraining(Component):
    """Settings of offline training."""

    seed: int = 0
    rate: float = 2e-3
    warmup: int = 100
    muon: bool = True
    sequences: int = 8  # a micro-batch
    micro_batches: int = 4  # a step
    anchors: int = 32  # a sequence
    short_block: int = 6  # most steps train the first positions only, where acceptance is decided
    full_block_share: float = 0.15  # of steps that train the whole block
    position_decay: float = 4.0  # weight of position i is exp(-(i - 1) / decay)
    soft_share: float = 0.5  # rest: hard labels
    average: float = 0.999  # decay of the weight average that is evaluated and shipped
    evaluate_every: int = 200
    cool_from: int | None = None  # the rate falls linearly to 0 from this step ...
    cool_to: int | None = None  # ... to this one, where training ends

    def rate_at(self, step: int) -> float:
        """Learning rate of a step."""
        rate = self.rate * min(1.0, (step + 1) / self.warmup)
        if self.cool_from is None or self.cool_to is None or step < self.cool_from:
            return rate
        return rate * max(0.0, (self.cool_to - step) / (self.cool_to - self.cool_from))


class Batch(NamedTuple):
    """A micro-batch. M sequences, T context tokens, A anchors, B block, K labels a position."""

    context: Tensor  # [M, T, taps * D]
    anchors: Tensor  # [M, A] tokens
    starts: Tensor  # [M, A] positions
    labels: Tensor  # [M, A, B - 1, K] rows of the draft vocabulary
    shares: Tensor  # [M, A, B - 1, K] probability of each label, 0 where it has none
    weights: Tensor  # [M, A, B - 1] of each position; 0 beyond the end of the text


class HeadLoss(torch.autograd.Function):
    """Weighted cross-entropy against sparse target distributions through a frozen head, without keeping logits."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, shares: Tensor, weights: Tensor) -> Tensor:
        """Args: hidden [P, D]; head [V, D]; labels, shares [P, K]; weights [P]. Returns the weighted mean loss."""
        grad = torch.empty_like(hidden)
        total, norm = 0.0, float(weights.sum())
        for at in range(0, len(hidden), 1024):
            part = slice(at, at + 1024)
            logits = (hidden[part] @ head.T).float()
            mass = shares[part].sum(-1)
            logsum = logits.logsumexp(-1)
            hit = (logits.gather(1, labels[part]) * shares[part]).sum(-1)
            total += float(((logsum * mass - hit) * weights[part]).sum())
            scale = weights[part, None] / norm
            logits.sub_(logsum[:, None]).exp_().mul_(mass[:, None] * scale)
            logits.scatter_add_(1, labels[part], -shares[part] * scale)
            grad[part] = logits.to(hidden.dtype) @ head
        ctx.save_for_backward(grad)
        return hidden.new_tensor(total / norm, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Gradient for the hidden states only: the head is frozen."""
        (grad,) = ctx.saved_tensors
        return grad * upstream.to(grad.dtype), None, None, None, None


class LessonBook:
    """Every scored lesson on disk, those that appear during training included.

    One in ``RESERVED`` is kept from the drafter: the length head must learn how the drafter does on text it has not
    seen, or it promises too much.
    """

    def __init__(self, shards: Path, features: Path) -> None:
        self.shards, self.features = shards, features
        self.lessons: list[Lesson] = []
        self.reserved: list[Lesson] = []
        self._seen: set[str] = set()
        self.refresh()

    def refresh(self) -> None:
        """Read shards that were scored since."""
        for shard in sorted(self.shards.glob("shard-*.npz")):
            if shard.stem not in self._seen and (self.features / f"{shard.stem}.probs.npy").exists():
                self._seen.add(shard.stem)
                for x in read_features(shard, self.features):
                    if len(x.text.tokens) - x.text.prompt_len > 8:
                        (self.lessons if x.text.index % RESERVED else self.reserved).append(x)

    def draw(self, count: int, groups: int, rng: random.Random) -> list[list[Lesson]]:
        """Groups of lessons of similar length, groups in random order."""
        pool = sorted(rng.choices(self.lessons, k=count * groups), key=lambda x: len(x.text.tokens))
        cut = [pool[i * count : (i + 1) * count] for i in range(groups)]
        rng.shuffle(cut)
        return cut


def make_batch(
    lessons: Sequence[Lesson],
    rows_of: Tensor,
    anchors: int,
    block: int,
    soft: float,
    decay: float,
    rng: random.Random,
) -> Batch:
    """Anchors drawn at random from each lesson's answer.

    Args: rows_of [vocab]: row of the draft vocabulary, -1 for tokens outside.
    """
    m = len(lessons)
    starts = torch.tensor([_anchor_positions(x, anchors, rng) for x in lessons])
    longest = int(starts.max())
    width = lessons[0].hidden.shape[1]
    context = torch.zeros(m, longest, width, dtype=torch.bfloat16)
    tokens = torch.zeros(m, anchors, block, dtype=torch.int64)
    tops = torch.zeros(m, anchors, block - 1, TOP, dtype=torch.int64)
    probs = torch.zeros(m, anchors, block - 1, TOP)
    inside = torch.zeros(m, anchors, block - 1, dtype=torch.bool)
    for i, x in enumerate(lessons):
        used = int(starts[i].max())
        context[i, :used] = torch.from_numpy(np.array(x.hidden[:used])).view(torch.bfloat16)
        at = starts[i].numpy()[:, None] + np.arange(block)
        end = len(x.text.tokens)
        safe = np.minimum(at, end - 1)
        tokens[i] = torch.from_numpy(x.text.tokens[safe].astype(np.int64))
        before = safe[:, :-1]  # entry t expects the token at t + 1
        tops[i] = torch.from_numpy(x.top_ids[before].astype(np.int64))
        probs[i] = torch.from_numpy(x.top_probs[before].astype(np.float32))
        inside[i] = torch.from_numpy(at[:, 1:] < end)
    labels = rows_of[torch.cat([tokens[:, :, 1:, None], tops], -1)]
    known = labels >= 0
    soft_mass = probs * known[..., 1:]
    soft_mass = soft * soft_mass / soft_mass.sum(-1, keepdim=True).clamp_min(1e-6)
    shares = torch.cat([(1 - soft) * known[..., :1], soft_mass], -1)
    weights = torch.exp(-torch.arange(block - 1) / decay) * inside
    return Batch(context, tokens[:, :, 0], starts, labels.clamp_min(0), shares, weights)


def _anchor_positions(lesson: Lesson, count: int, rng: random.Random) -> list[int]:
    allowed = range(lesson.text.prompt_len, len(lesson.text.tokens) - 1)
    return rng.sample(allowed, count) if len(allowed) >= count else rng.choices(allowed, k=count)


class DrafterTrainer:
    """Trains one drafter in a folder that holds its state and log; a new object there resumes."""

    def __init__(
        self, settings: DrafterTraining, shape: DrafterShape, embedding: Tensor, head: Tensor, vocab: Tensor,
        book: LessonBook, held_out: Sequence[Lesson], folder: Path,
    ) -> None:  # fmt: skip
        """Args: embedding [V, D] and head [V, D] of the target; vocab: token ids the drafter may draft, sorted."""
        self.settings, self.shape, self.book, self.held_out, self.folder = settings, shape, book, held_out, folder
        self.embedding, self.vocab = embedding.to(torch.bfloat16), vocab
        self.head = head[vocab].to(torch.bfloat16)
        self.rows_of = torch.full((len(embedding),), -1).scatter_(0, vocab, torch.arange(len(vocab)))
        self.rope = Rope(shape.arch, 4096, torch.bfloat16, torch.device("cpu"))
        self.step, self.positions, self.seconds = 0, 0, 0.0
        self.master = shape.fresh(settings.seed)
        self.average = {k: w.clone() for k, w in self.master.items()}
        self.optimiser = MixedOptimiser(self.master, settings.muon)
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "state.pt").exists():
            self._resume()

    def run(self, steps: int) -> Iterator[dict[str, Any]]:
        """Train up to step number ``steps``; yields a log entry at each evaluation, after saving the state."""
        rng = random.Random(f"{self.settings.seed}/{self.step}")
        loss, since, started = 0.0, 0, time.monotonic()
        while self.step < steps:
            loss += self._step(rng)
            since += 1
            if self.step % self.settings.evaluate_every == 0 or self.step == steps:
                self.seconds += time.monotonic() - started
                entry = {"step": self.step, "positions": self.positions, "train_s": round(self.seconds),
                         "loss": round(loss / since, 4), "lessons": len(self.book.lessons),
                         "held_out": {k: v._asdict() for k, v in self.measure().items()}}  # fmt: skip
                self.save()
                with (self.folder / "log.jsonl").open("a") as stream:
                    stream.write(json.dumps(entry) + "\n")
                yield entry
                self.book.refresh()
                loss, since, started = 0.0, 0, time.monotonic()

    def measure(self) -> dict[str, Tau]:
        """tau by domain of the averaged weights on held-out text."""
        weights = {k: w.to(torch.bfloat16) for k, w in self.average.items()}
        return evaluate(self.shape, weights, self.embedding, self.head, self.vocab, self.held_out)

    def _step(self, rng: random.Random) -> float:
        s = self.settings
        block = self.shape.block if rng.random() < s.full_block_share else s.short_block
        anchors = max(1, s.anchors * s.short_block // block)
        leaves = {k: w.to(torch.bfloat16).requires_grad_() for k, w in self.master.items()}
        total = 0.0
        for lessons in self.book.draw(s.sequences, s.micro_batches, rng):
            batch = make_batch(lessons, self.rows_of, anchors, block, s.soft_share, s.position_decay, rng)
            loss = self.loss(leaves, batch) / s.micro_batches
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
            self.positions += int((batch.weights > 0).sum())
        grads = {k: w.grad for k, w in leaves.items() if w.grad is not None}
        with torch.no_grad():
            self.optimiser.step(grads, s.rate_at(self.step))
            decay = min(s.average, (self.step + 1) / (self.step + 10))
            for k, w in self.average.items():
                w.lerp_(self.master[k], 1 - decay)
        self.step += 1
        return total

    def loss(self, weights: Weights, batch: Batch) -> Tensor:
        """Loss of a micro-batch, position weights normalised."""
        block = batch.labels.shape[2] + 1
        hidden = block_hidden(
            self.shape, weights, self.embedding, self.rope, batch.context, batch.anchors, batch.starts, block
        )
        flat = hidden[:, :, 1:].reshape(-1, hidden.shape[-1])
        loss: Tensor = HeadLoss.apply(  # type: ignore[no-untyped-call]
            flat, self.head, batch.labels.flatten(0, 2), batch.shares.flatten(0, 2), batch.weights.flatten()
        )
        return loss

    def save(self) -> None:
        """Write the whole state, atomically."""
        state = {"step": self.step, "positions": self.positions, "seconds": self.seconds, "master": self.master,
                 "average": self.average, "optimiser": self.optimiser.state(), "vocab": self.vocab}  # fmt: skip
        torch.save(state, self.folder / "state.tmp")
        (self.folder / "state.tmp").rename(self.folder / "state.pt")

    def _resume(self) -> None:
        state = torch.load(self.folder / "state.pt", weights_only=True)
        self.step, self.positions, self.seconds = state["step"], state["positions"], state["seconds"]
        for name, w in self.master.items():
            w.copy_(state["master"][name])
            self.average[name].copy_(state["average"][name])
        self.optimiser.load(state["optimiser"])
