"""From nothing to a shipped drafter, in steps that can be stopped and taken up again: text, train, ship."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adasim.errors import InputError
from adasim.real.checkpoint import Checkpoint, save_checkpoint
from adasim.real.drafter import DrafterShape, Weights
from adasim.real.features import Lesson, read_features, save_features, write_features
from adasim.real.length_head import Form, fit_head, make_head
from adasim.real.prompts import DOMAINS, Prompt
from adasim.real.shards import read_shard, write_shard
from adasim.real.target import Target
from adasim.real.textgen import TextGenerator, generate
from adasim.real.texts import read_prompts
from adasim.real.train_drafter import DrafterTrainer, DrafterTraining, LessonBook
from adasim.real.train_head import drafted_blocks
from adasim.real.weights import SMOLLM2, load_target, load_tokenizer

TRAIN_ROWS, TEST_ROWS = (0, 150), (150, 200)
DRAFT_VOCAB = 8192


def draft_shape(target: Target, layers: int = 3, block: int = 16, mask_token: int = 0) -> DrafterShape:
    """The default drafter for a target: its own layer form with QK norm, five taps spread over its depth."""
    depth = target.arch.layers
    taps = tuple(min(1 + i * ((depth - 2) // 4), depth - 3) for i in range(5))  # 1, 9, 17, 25, 33 of 36
    return DrafterShape(replace(target.arch, layers=layers, qk_norm=True, tied=True), taps, depth, block, mask_token)


def make_text(work: Path, data: Path, indices: range, name: str = SMOLLM2, rows: int = 64) -> Iterator[str]:
    """Held-out text once, then training text with its features, shard by shard, under ``work``; resumes.

    Args: data: folder of ``<domain>*.jsonl``; rows 0-149 are varied for training, 150-199 held out.
    indices: training prompts to answer; processes side by side take ranges of their own.
    """
    target, tokenizer = load_target(name), load_tokenizer(name)
    taps, held_out = draft_shape(target).taps, work / "heldout" / "shard-00000.npz"
    if not held_out.exists():
        held_out.parent.mkdir(parents=True, exist_ok=True)
        texts = read_prompts(str(data), TEST_ROWS)
        prompts = [Prompt(d, "rows", text) for d in DOMAINS for text in texts[d]]
        answers = TextGenerator(target, tokenizer, taps, rows, max_prompt=512).answers(iter(enumerate(prompts)))
        lessons = sorted(answers, key=lambda x: x.text.index)
        save_features(lessons, held_out, held_out.parent)
        write_shard(held_out, [x.text for x in lessons])
        yield "held-out text done"
    for shard in sorted((work / "text").glob("shard-*[0-9].npz")):
        write_features(target, taps, shard, work / "features")
    generator = TextGenerator(target, tokenizer, taps, rows)
    yield from generate(generator, read_prompts(str(data), TRAIN_ROWS), work, indices)


def draft_vocab(work: Path, size: int, keep: int = DRAFT_VOCAB) -> Tensor:
    """Token ids the drafter may draft, sorted: the most frequent in answers so far, then the lowest ids."""
    counts = np.zeros(size, np.int64)
    for shard in sorted((work / "text").glob("shard-*[0-9].npz")):
        for text in read_shard(shard):
            np.add.at(counts, text.tokens[text.prompt_len :], 1)
    return torch.from_numpy(np.sort(np.lexsort((np.arange(size), -counts))[:keep]))


def make_trainer(
    work: Path, folder: Path, settings: DrafterTraining, layers: int = 3, held_out: int = 10, name: str = SMOLLM2
) -> DrafterTrainer:
    """A trainer in ``folder``, resumed if it holds a state. ``held_out``: texts a domain in each evaluation."""
    target = load_target(name)
    book = LessonBook(work / "text", work / "features")
    if not book.lessons:
        raise InputError(f"{work}: no scored text yet; run make_text first")
    return DrafterTrainer(
        settings,
        draft_shape(target, layers),
        target.embedding,
        target.head_weight,
        draft_vocab(work, target.arch.vocab),
        book,
        held_out_lessons(work, held_out),
        folder,
    )


def held_out_lessons(work: Path, each: int) -> list[Lesson]:
    """The first ``each`` held-out lessons of every domain."""
    lessons = read_features(work / "heldout" / "shard-00000.npz", work / "heldout")
    return [x for d in range(len(DOMAINS)) for x in [y for y in lessons if y.text.domain == d][:each]]


def ship(
    trainer: DrafterTrainer, out: Path, form: Form = "released", texts: int = 1500, name: str = SMOLLM2
) -> dict[str, Any]:
    """Fit the length head, write the checkpoint into ``out``, and return what a model card needs."""
    weights = {k: w.to(torch.bfloat16) for k, w in trainer.average.items()}
    train = _stack(trainer, weights, trainer.book.reserved[-texts:], 64)
    test = _stack(trainer, weights, trainer.held_out, 64)
    block = trainer.shape.block
    torch.manual_seed(0)
    head = make_head(form, trainer.shape.arch.hidden)
    losses = list(fit_head(head, train[0], (train[1] + 1) / block))
    save_checkpoint(out, Checkpoint(trainer.shape, weights, trainer.vocab, dict(head.state_dict())))
    with torch.inference_mode():
        predicted = block * head(test[0].float())
    truth = (test[1] + 1).float()
    lessons = trainer.book.lessons
    return {
        "target": name,
        "layers": trainer.shape.arch.layers,
        "block": block,
        "taps": list(trainer.shape.taps),
        "vocab": len(trainer.vocab),
        "lessons": len(lessons),
        "answer_tokens": sum(len(x.text.tokens) - x.text.prompt_len for x in lessons),
        "step": trainer.step,
        "positions": trainer.positions,
        "train_s": round(trainer.seconds),
        "held_out": {d: t._asdict() for d, t in trainer.measure().items()},
        "head": {
            "form": form,
            "train_mse": losses[-1],
            "held_out_rmse_tokens": float((predicted - truth).square().mean().sqrt()),
            "held_out_std_tokens": float(truth.std()),
            "held_out_mean_predicted": float(predicted.mean()),
            "held_out_mean_true": float(truth.mean()),
        },
        "sha256": hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest(),
    }


def _stack(trainer: DrafterTrainer, weights: Weights, lessons: Sequence[Lesson], anchors: int) -> tuple[Tensor, Tensor]:
    """Draft rows [P, B - 1, D] and L [P] of blocks drafted along lessons."""
    t = trainer
    blocks = list(drafted_blocks(t.shape, weights, t.embedding, t.head, t.vocab, lessons, anchors))
    return torch.cat([b.hidden for b in blocks]), torch.cat([b.run for b in blocks])
