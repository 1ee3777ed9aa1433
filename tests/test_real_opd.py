"""On-policy distillation raises what serving accepts, and only looks where the target looked."""

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from torch import Tensor

torch = pytest.importorskip("torch")

from adasim.policies.fixed import Fixed  # noqa: E402
from adasim.real.checkpoint import Checkpoint  # noqa: E402
from adasim.real.collect import Collector  # noqa: E402
from adasim.real.draft import Drafter  # noqa: E402
from adasim.real.drafter import DrafterShape  # noqa: E402
from adasim.real.layers import Rope  # noqa: E402
from adasim.real.length_head import load_head, make_head  # noqa: E402
from adasim.real.losses import AnyLoss, ClippedReverseKl, ForwardKl  # noqa: E402
from adasim.real.opd import Opd, Positions  # noqa: E402
from adasim.real.rerun import Teacher  # noqa: E402
from adasim.real.samples import Round, Sample  # noqa: E402
from adasim.real.sampling import Sampling  # noqa: E402
from adasim.real.target import Target  # noqa: E402
from adasim.real.train_head import drafted_blocks  # noqa: E402
from adasim.real.train_opd import OpdTrainer, buckets, opd_batch  # noqa: E402
from adasim.real.weights import random_target  # noqa: E402
from tests.test_real_engine import ARCH, BLOCK, DRAFT, VOCAB, Run, prompts, serve  # noqa: E402

SHAPE = DrafterShape(DRAFT, (0, 1), ARCH.layers, BLOCK, mask_token=0)


@pytest.fixture(scope="module")
def target() -> Target:
    """Repeats its last token: text that a drafter can learn in a second."""
    return random_target(ARCH, seed=1, gain=0.02)


def fresh(head: bool = False, **weights: "Tensor") -> Checkpoint:
    torch.manual_seed(0)
    made = dict(make_head("released", DRAFT.hidden).state_dict()) if head else {}
    return Checkpoint(SHAPE, SHAPE.fresh(0) | weights, torch.arange(VOCAB), made)


def trainer(target: Target, opd: Opd, start: Checkpoint, teacher: Teacher | None = None) -> OpdTrainer:
    return OpdTrainer(opd, start, target.embedding, target.head_weight, teacher)


def collect(target: Target, verify_len: int, count: int, rejected: bool = False, share: float = 0.0) -> list[Sample]:
    samples: list[Sample] = []
    collector = Collector(samples.append, rejected=rejected)
    drafter = Drafter(SHAPE, SHAPE.fresh(0), target)
    serve(target, drafter, Fixed(verify_len=verify_len), prompts(count), collector=collector, full_verify_share=share)
    return samples


def tau(run: Run) -> float:
    requests = run.engine.recorder.records(run.engine.admission.lives).requests
    return float((requests["tokens"] - 1).sum() / requests["rounds"].sum())


@pytest.mark.parametrize(
    ("loss", "positions", "gain"),
    [
        (ForwardKl(), "text", 1.0),
        (ClippedReverseKl(), "text", 1.0),
        (ClippedReverseKl(alpha=0.0, clip="none"), "text", 0.5),
        (ClippedReverseKl(), "accepted", 0.3),
    ],
    ids=["forward", "opd", "reverse", "accepted"],
)  # fmt: skip
def test_training_on_served_requests_raises_tau_on_them(
    target: Target, loss: AnyLoss, positions: Positions, gain: float
) -> None:
    samples = collect(target, BLOCK, 24)
    learner = trainer(target, Opd(loss=loss, epochs=12, rate=3e-3, positions=positions), fresh())
    progress = learner.train(samples)
    assert progress.steps == 12 * 24 // 2
    assert progress.losses[-1] < progress.losses[0]
    first = serve(target, Drafter(SHAPE, SHAPE.fresh(0), target), Fixed(verify_len=BLOCK), prompts(24))
    second = serve(target, Drafter(SHAPE, learner.weights, target), Fixed(verify_len=BLOCK), prompts(24))
    assert second.texts == first.texts
    assert tau(second) > tau(first) + gain


def test_targets_behind_rejected_drafts_teach_the_wrong_thing(target: Target) -> None:
    """This target repeats its last token, so behind a rejected draft it asks for that draft again."""
    found = {}
    for positions in ("accepted", "all"):
        samples = collect(target, BLOCK, 24, rejected=positions == "all")
        learner = trainer(target, Opd(epochs=12, rate=3e-3, positions=positions), fresh())
        learner.train(samples)
        drafter = Drafter(SHAPE, learner.weights, target)
        found[positions] = tau(serve(target, drafter, Fixed(verify_len=BLOCK), prompts(24)))
    assert found["accepted"] > found["all"] + 0.2


def test_positions_stop_at_the_first_rejection_or_at_the_end(target: Target) -> None:
    (sample,) = collect(target, 4, 1)
    end = len(sample.lesson.text.tokens)
    beyond = (np.array([[7] * 8], np.uint32), np.full((1, 8), 0.1, np.float16))
    rounds = [Round(end - 12, 4, 2, 0), Round(end - 11, 4, 2, 0, rejected=beyond), Round(end - 3, 4, 0, 0)]
    sample = replace(sample, rounds=rounds)
    used = {}
    for positions in ("accepted", "all", "text"):
        batch = opd_batch(sample, BLOCK, positions, 8, random.Random(0))
        assert batch is not None
        assert batch.context.shape[1] == end - 3
        used[positions] = batch.use.sum(1).tolist()
        if positions == "all":
            assert (batch.ids[1, 3] == 7).all()  # the row behind the rejected draft, not the text's
    assert used == {"accepted": [3, 3, 1], "all": [3, 4, 1], "text": [BLOCK - 1, BLOCK - 1, 2]}


def test_buckets_keep_all_mass() -> None:
    rows_of = torch.tensor([0, -1, 1, 2])  # token 1 cannot be drafted
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]]))
    q, p = buckets(logits, torch.tensor([[0, 1]]), torch.tensor([[0.6, 0.3]]), rows_of)
    np.testing.assert_allclose(q.exp()[0], [0.5, 1e-6, 0.5], atol=1e-5)
    np.testing.assert_allclose(p.exp()[0], [0.6, 1e-6, 0.4], atol=1e-5)


def test_a_loss_that_is_not_finite_stops_training(target: Target) -> None:
    bad = fresh(**{"norm.weight": torch.full((DRAFT.hidden,), float("nan"))})
    with pytest.raises(FloatingPointError, match="OPD loss is nan"):
        trainer(target, Opd(), bad).train(collect(target, 4, 2))


def test_the_head_learns_from_rounds_verified_whole_and_leaves_the_drafter_alone(target: Target) -> None:
    """A head alone in training (rate of the drafter too small to matter) approaches the mean accepted length."""
    samples = collect(target, 2, 24, share=0.3)
    start = fresh(head=True)
    learner = trainer(target, Opd(epochs=15, rate=1e-9, head_rate=1e-3), start)
    progress = learner.train(samples)
    usable = sum(r.whole and r.start < len(s.lesson.text.tokens) - 1 for s in samples for r in s.rounds)
    assert progress.head_labels == 15 * usable
    assert progress.head_losses[-1] < progress.head_losses[0]
    assert learner.length_head is not None
    with torch.no_grad():
        blocks = list(_blocks(target, samples))
        mean = float(BLOCK * learner.length_head(torch.cat([b.hidden for b in blocks]).float()).mean())
    assert mean == pytest.approx(float(torch.cat([b.run for b in blocks]).float().mean()) + 1, abs=0.2)
    for name, w in start.weights.items():
        torch.testing.assert_close(learner.weights[name], w, rtol=0, atol=1e-6)


def test_censored_labels_come_out_wrong(target: Target) -> None:
    """Blocks cut to 2 positions whose draft is never accepted: emitted/verified says half the block."""
    samples = collect(target, 2, 24)
    learner = trainer(target, Opd(epochs=15, rate=1e-9, head_rate=5e-3, head_label="emitted/verified"), fresh(head=True))
    learner.train(samples)
    assert learner.length_head is not None
    with torch.no_grad():
        hidden = torch.cat([b.hidden for b in _blocks(target, samples)])
        mean = float(BLOCK * learner.length_head(hidden.float()).mean())
    assert mean > 0.45 * BLOCK


def test_the_teacher_s_labels_are_those_of_the_text(target: Target) -> None:
    """Greedy text is its own answer key: running the target over drafts must find the same L."""
    samples = collect(target, BLOCK, 6)
    teacher = Teacher(target, torch.arange(VOCAB), Sampling(), seed=3)
    rope = Rope(DRAFT, 256, torch.float32, torch.device("cpu"))
    for sample in samples:
        blocks = teacher.blocks(SHAPE, SHAPE.fresh(0), rope, sample, 100)
        assert blocks is not None
        (expected,) = drafted_blocks(
            SHAPE, SHAPE.fresh(0), target.embedding, target.head_weight, torch.arange(VOCAB), [sample.lesson], 100
        )  # fmt: skip
        inside = torch.arange(len(expected.run)) < len(expected.run) - BLOCK  # the text does not end in the block
        assert blocks.run[inside].tolist() == expected.run[inside].tolist()
        torch.testing.assert_close(blocks.hidden, expected.hidden)


def test_the_teacher_labels_sampled_drafts_too(target: Target) -> None:
    samples = collect(target, BLOCK, 2)
    rope = Rope(DRAFT, 256, torch.float32, torch.device("cpu"))
    teacher = Teacher(target, torch.arange(VOCAB), Sampling(temperature=1.0))
    learner = trainer(target, Opd(teacher="rerun", head_rate=1e-3), fresh(head=True), teacher)
    progress = learner.train(samples)
    assert progress.head_labels == 2 * 2 * Opd().rerun_blocks
    blocks = teacher.blocks(SHAPE, SHAPE.fresh(0), rope, samples[0], 3)
    assert blocks is not None
    assert ((blocks.run >= 0) & (blocks.run < BLOCK)).all()


def test_a_checkpoint_goes_out_as_it_came_in(target: Target) -> None:
    start = fresh(head=True)
    out = trainer(target, Opd(), start).checkpoint()
    assert out.shape == start.shape
    assert set(out.head) == set(start.head)
    assert out.vocab is None  # every token may be drafted
    block = torch.randn(2, BLOCK - 1, DRAFT.hidden)
    torch.testing.assert_close(load_head(out.head)(block), load_head(start.head)(block))


def _blocks(target: Target, samples: list[Sample]):  # type: ignore[no-untyped-def]
    return drafted_blocks(
        SHAPE, SHAPE.fresh(0), target.embedding, target.head_weight, torch.arange(VOCAB), [s.lesson for s in samples], 20
    )  # fmt: skip
