"""Drafter, length head and checkpoint: fast equals eager, training learns, nothing leaks."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from adasim.errors import InputError  # noqa: E402
from adasim.real.checkpoint import Checkpoint, load_checkpoint, save_checkpoint  # noqa: E402
from adasim.real.draft import Drafter  # noqa: E402
from adasim.real.drafter import DrafterShape, block_hidden  # noqa: E402
from adasim.real.evaluate import evaluate, runs  # noqa: E402
from adasim.real.features import Lesson, read_features, score, write_features  # noqa: E402
from adasim.real.kv import Span  # noqa: E402
from adasim.real.layers import Arch  # noqa: E402
from adasim.real.length_head import fit_head, head_loss, label, load_head, make_head  # noqa: E402
from adasim.real.optim import orthogonalise  # noqa: E402
from adasim.real.shards import Text, read_shard, write_shard  # noqa: E402
from adasim.real.target import Target  # noqa: E402
from adasim.real.train_drafter import DrafterTrainer, DrafterTraining, HeadLoss, LessonBook  # noqa: E402
from adasim.real.weights import random_target  # noqa: E402

VOCAB, BLOCK = 48, 6
ARCH = Arch(layers=3, hidden=32, heads=4, kv_heads=2, head_dim=8, intermediate=64, vocab=VOCAB, max_context=256)
DRAFT = replace(ARCH, layers=2, qk_norm=True)
SHAPE = DrafterShape(DRAFT, (0, 2), ARCH.layers, BLOCK, mask_token=0)


@pytest.fixture(scope="module")
def target() -> Target:
    return random_target(ARCH, seed=1)


def greedy_texts(target: Target, count: int, length: int = 40) -> list[Text]:
    rng = np.random.default_rng(0)
    texts = []
    for index in range(count):
        kv, tokens = target.cache(1, 64), rng.integers(1, VOCAB, 4).tolist()
        fresh = tokens
        while len(tokens) < length:
            hidden, _ = target.forward(torch.tensor(fresh), [Span(0, len(tokens) - len(fresh), len(fresh))], kv)
            fresh = [int(target.logits(hidden[-1:]).argmax())]
            tokens = tokens + fresh
        texts.append(Text(np.array(tokens, np.uint16), 4, index % 3, 0, index))
    return texts


def test_fast_drafting_equals_the_eager_form(target: Target) -> None:
    """Blocks of two requests, drafted with cached context, against one full recomputation each."""
    weights = SHAPE.fresh(0)
    drafter = Drafter(SHAPE, weights, target)
    tokens = [torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(n)) for n in (9, 14)]
    kv, draft_kv = target.cache(2, 64), drafter.cache(2, 64)
    taps = []
    for slot, ids in enumerate(tokens):
        first = len(ids) // 2  # in two parts, as prefill and a round would
        for start, end in ((0, first), (first, len(ids) - 1)):
            span = [Span(slot, start, end - start)]
            _, tapped = target.forward(ids[start:end], span, kv, SHAPE.taps)
            assert tapped is not None
            drafter.absorb(tapped, span, draft_kv)
            taps.append(tapped)
    spans = [Span(slot, len(ids) - 1, BLOCK) for slot, ids in enumerate(tokens)]
    fast = drafter.draft([int(ids[-1]) for ids in tokens], spans, draft_kv).hidden_SD
    again = drafter.draft([int(ids[-1]) for ids in tokens], spans, draft_kv).hidden_SD
    torch.testing.assert_close(fast, again, rtol=0, atol=0)  # the block's own rows do not disturb the context
    for slot, ids in enumerate(tokens):
        context = torch.cat(taps[2 * slot : 2 * slot + 2])[None]
        start = torch.tensor([[len(ids) - 1]])
        eager = block_hidden(SHAPE, weights, target.embedding, target.rope, context, ids[-1:][None], start, BLOCK)
        torch.testing.assert_close(fast[slot * BLOCK : (slot + 1) * BLOCK], eager[0, 0], rtol=1e-4, atol=1e-5)


def test_head_loss_equals_dense_cross_entropy_in_value_and_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 16, generator=generator, requires_grad=True)
    head = torch.randn(20, 16, generator=generator)
    labels = torch.randint(0, 20, (7, 3), generator=generator)
    shares = torch.rand(7, 3, generator=generator)
    weights = torch.rand(7, generator=generator)
    fast = HeadLoss.apply(hidden, head, labels, shares, weights)  # type: ignore[no-untyped-call]
    (grad,) = torch.autograd.grad(fast, hidden)
    dense = torch.zeros(7, 20).scatter_add_(1, labels, shares)
    slow = -((dense * torch.log_softmax(hidden @ head.T, -1)).sum(-1) * weights).sum() / weights.sum()
    torch.testing.assert_close(fast, slow)
    torch.testing.assert_close(grad, torch.autograd.grad(slow, hidden)[0], rtol=1e-4, atol=1e-6)


def test_training_learns_resumes_and_is_measured(target: Target, tmp_path: Path) -> None:
    texts = greedy_texts(target, 24)
    shard = tmp_path / "shard-00000.npz"
    write_shard(shard, texts)
    assert [t.tokens.tolist() for t in read_shard(shard)] == [t.tokens.tolist() for t in texts]
    write_features(target, SHAPE.taps, shard, tmp_path)
    lessons = read_features(shard, tmp_path)
    settings = DrafterTraining(
        rate=4e-3, warmup=5, sequences=8, micro_batches=1, anchors=16, short_block=4, average=0.9, evaluate_every=40
    )  # fmt: skip

    def trainer() -> DrafterTrainer:
        book = LessonBook(tmp_path, tmp_path)
        vocab = torch.arange(VOCAB)
        return DrafterTrainer(
            settings, SHAPE, target.embedding, target.head_weight, vocab, book, lessons, tmp_path / "run"
        )  # fmt: skip

    before = trainer().measure()
    first = list(trainer().run(40))
    resumed = trainer()
    assert resumed.step == 40
    second = list(resumed.run(80))
    assert second[-1]["loss"] < first[-1]["loss"]
    after = resumed.measure()
    assert all(after[d].tau > before[d].tau + 0.2 for d in after)


def test_evaluation_walks_as_speculation_would(target: Target) -> None:
    """tau from stored text = tokens / rounds of greedy speculation, walked by hand from the runs."""
    lessons = list(score(target, SHAPE.taps, greedy_texts(target, 3)))
    weights = {k: w.to(torch.bfloat16) for k, w in SHAPE.fresh(3).items()}
    embedding, vocab = target.embedding.to(torch.bfloat16), torch.arange(VOCAB)
    head = target.head_weight.to(torch.bfloat16)
    found = evaluate(SHAPE, weights, embedding, head, vocab, lessons)
    for lesson, tau in zip(lessons, found.values(), strict=True):
        length = runs(SHAPE, weights, embedding, head, vocab, lesson)
        answer, at, rounds = len(lesson.text.tokens) - lesson.text.prompt_len - 1, 0, 0
        while at < answer:
            at, rounds = at + int(length[at]) + 1, rounds + 1
        assert tau.tau == pytest.approx(answer / rounds, abs=1e-4)


def test_checkpoint_round_trip_and_its_errors(tmp_path: Path) -> None:
    head = make_head("released", DRAFT.hidden)
    weights = {k: w.to(torch.bfloat16) for k, w in SHAPE.fresh(0).items()}
    vocab = torch.tensor([1, 5, 7])
    save_checkpoint(tmp_path, Checkpoint(SHAPE, weights, vocab, dict(head.state_dict())))
    found = load_checkpoint(tmp_path)
    assert found.shape == SHAPE
    assert found.vocab is not None
    assert found.vocab.tolist() == [1, 5, 7]
    assert all(torch.equal(found.weights[k], w) for k, w in weights.items())
    assert set(found.head) == set(head.state_dict())

    weights["norm.weight"] = torch.full((DRAFT.hidden,), float("nan"))
    weights["fc.weight"] = torch.zeros(3, 3)
    del weights["hidden_norm.weight"]
    save_checkpoint(tmp_path, Checkpoint(SHAPE, weights))
    with pytest.raises(InputError) as caught:
        load_checkpoint(tmp_path)
    assert len(caught.value.problems) == 3
    assert "'fc.weight' has shape [3, 3], expected [32, 64]" in str(caught.value)


@pytest.mark.parametrize("form", ["paper", "released"])
def test_head_training_reaches_no_drafter_and_learns(form: str) -> None:
    torch.manual_seed(0)
    weights = {k: w.requires_grad_() for k, w in SHAPE.fresh(0).items()}
    rope = random_target(ARCH).rope
    context, anchors, starts = torch.randn(1, 8, 64), torch.tensor([[3]]), torch.tensor([[8]])
    hidden = block_hidden(SHAPE, weights, torch.randn(VOCAB, 32), rope, context, anchors, starts, BLOCK)[0]
    assert hidden.requires_grad
    head = make_head(form, DRAFT.hidden)  # type: ignore[arg-type]
    head_loss(head, hidden[:, 1:], torch.tensor([0.5])).backward()  # type: ignore[no-untyped-call]
    assert all(w.grad is None for w in weights.values())
    assert all(p.grad is not None for p in head.parameters())

    blocks = torch.randn(512, BLOCK - 1, DRAFT.hidden)
    target = torch.sigmoid(blocks.mean(1)[:, 0] * 3)
    losses = list(fit_head(head, blocks, target, epochs=30, rate=3e-3))
    assert losses[-1] < 0.5 * losses[0]
    again = load_head(dict(head.state_dict()))
    torch.testing.assert_close(again(blocks), head(blocks))


def test_labels() -> None:
    run, verified = torch.tensor([5, 1]), torch.tensor([4, 4])
    assert label("full", run, verified, 16).tolist() == [6 / 16, 2 / 16]
    assert label("accepted/verified", run, verified, 16).tolist() == pytest.approx([1.0, 1 / 3])
    assert label("emitted/verified", run, verified, 16).tolist() == [1.0, 0.5]
    assert label("accepted/predicted", run, verified, 16).tolist() == [0.75, 0.25]


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    values = torch.linalg.svdvals(orthogonalise(torch.randn(24, 60)).float())
    assert 0.5 < float(values.min()) <= float(values.max()) < 1.4


def test_lessons_see_the_past_only(target: Target) -> None:
    """Changing a token changes no hidden state before it."""
    text = greedy_texts(target, 1)[0]
    changed = text.tokens.copy()
    changed[20] = (changed[20] + 1) % VOCAB
    a, b = score(target, SHAPE.taps, [text, Text(changed, text.prompt_len, 0, 0, 0)])
    assert isinstance(a, Lesson)
    assert (a.hidden[:20] == b.hidden[:20]).all()
    assert (a.hidden[20:] != b.hidden[20:]).any()
