"""On-policy distillation raises what serving accepts, and only looks where the target looked."""

import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from adasim.policies.fixed import Fixed  # noqa: E402
from adasim.real.collect import Collector, Round  # noqa: E402
from adasim.real.draft import Drafter  # noqa: E402
from adasim.real.drafter import DrafterShape  # noqa: E402
from adasim.real.losses import AnyLoss, ClippedReverseKl, ForwardKl  # noqa: E402
from adasim.real.opd import Opd, OpdTrainer, buckets, opd_batch  # noqa: E402
from adasim.real.target import Target  # noqa: E402
from adasim.real.weights import random_target  # noqa: E402
from tests.test_real_engine import ARCH, BLOCK, DRAFT, VOCAB, Run, prompts, serve  # noqa: E402


@pytest.fixture(scope="module")
def target() -> Target:
    return random_target(ARCH, seed=1)


def tau(run: Run) -> float:
    requests = run.engine.recorder.records(run.engine.admission.lives).requests
    return float((requests["tokens"] - 1).sum() / requests["rounds"].sum())


@pytest.mark.parametrize(
    "loss",
    [ForwardKl(), ClippedReverseKl(), ClippedReverseKl(alpha=0.0, clip="none")],
    ids=["forward", "opd", "reverse"],
)  # fmt: skip
def test_training_on_served_requests_raises_tau_on_them(target: Target, loss: AnyLoss) -> None:
    shape, vocab = DrafterShape(DRAFT, (0, 1), ARCH.layers, BLOCK, mask_token=0), torch.arange(VOCAB)
    weights, collector = shape.fresh(0), Collector(capacity=40)
    first = serve(target, Drafter(shape, weights, target), Fixed(verify_len=BLOCK), prompts(24), collector=collector)
    trainer = OpdTrainer(
        Opd(loss=loss, epochs=20, rate=6e-3, positions="text"), shape, weights, target.embedding,
        target.head_weight, vocab,
    )  # fmt: skip
    progress = trainer.train(list(collector.samples))
    assert progress.steps == 20 * 24 // 2
    assert progress.losses[-1] < progress.losses[0]
    second = serve(target, Drafter(shape, trainer.weights, target), Fixed(verify_len=BLOCK), prompts(24))
    assert second.texts == first.texts
    assert tau(second) > tau(first) + 0.1


def test_positions_stop_at_the_first_rejection_or_at_the_end(target: Target) -> None:
    shape = DrafterShape(DRAFT, (0, 1), ARCH.layers, BLOCK, mask_token=0)
    collector = Collector()
    serve(target, Drafter(shape, shape.fresh(0), target), Fixed(verify_len=4), prompts(1), collector=collector)
    (sample,) = collector.samples
    end = len(sample.lesson.text.tokens)
    rounds = [Round(end - 12, 4, 2), Round(end - 3, 4, 0)]
    sample.rounds[:] = rounds
    accepted = opd_batch(sample, BLOCK, "accepted", 8, random.Random(0))
    whole = opd_batch(sample, BLOCK, "text", 8, random.Random(0))
    assert accepted is not None
    assert whole is not None
    assert accepted.use.sum(1).tolist() == [3, 1]
    assert whole.use.sum(1).tolist() == [BLOCK - 1, 2]
    assert whole.context.shape[1] == end - 3


def test_buckets_keep_all_mass() -> None:
    rows_of = torch.tensor([0, -1, 1, 2])  # token 1 cannot be drafted
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]]))
    q, p = buckets(logits, torch.tensor([[0, 1]]), torch.tensor([[0.6, 0.3]]), rows_of)
    np.testing.assert_allclose(q.exp()[0], [0.5, 1e-6, 0.5], atol=1e-5)
    np.testing.assert_allclose(p.exp()[0], [0.6, 1e-6, 0.4], atol=1e-5)


def test_a_loss_that_is_not_finite_stops_training(target: Target) -> None:
    shape = DrafterShape(DRAFT, (0, 1), ARCH.layers, BLOCK, mask_token=0)
    collector = Collector()
    serve(target, Drafter(shape, shape.fresh(0), target), Fixed(verify_len=4), prompts(2), collector=collector)
    bad = shape.fresh(0) | {"norm.weight": torch.full((DRAFT.hidden,), float("nan"))}
    trainer = OpdTrainer(Opd(), shape, bad, target.embedding, target.head_weight, torch.arange(VOCAB))
    with pytest.raises(FloatingPointError, match="OPD loss is nan"):
        trainer.train(list(collector.samples))
