"""Samples survive the way to the trainer unchanged, and the buffer stays bounded."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from adasim.real.features import TOP, Lesson
from adasim.real.samples import ReplayBuffer, Round, Sample, read_samples, write_samples
from adasim.real.shards import Text, token_type


def sample(index: int, rounds: list[Round], domain: int = 0, vocab: int = 100_000) -> Sample:
    rng = np.random.default_rng(index)
    length = 10 + index
    kind = token_type(vocab)
    return Sample(
        Lesson(
            Text(rng.integers(0, vocab, length).astype(kind), 4, domain, 0, index),
            rng.integers(0, 1 << 16, (length, 6)).astype(np.uint16),
            rng.integers(0, vocab, (length, TOP)).astype(kind),
            rng.random((length, TOP)).astype(np.float16),
        ),
        rounds,
    )


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    """Tokens beyond 65,535 included."""
    beyond = (np.full((2, TOP), 99_999, np.uint32), np.full((2, TOP), 0.5, np.float16))
    samples = [
        sample(0, [Round(3, 4, 1, 0, rejected=beyond), Round(5, 4, 3, 1, whole=True)]),
        sample(1, []),
        sample(2, [Round(3, 1, 0, 2)], domain=2),
    ]
    write_samples(tmp_path / "000001.npz", samples)
    found = read_samples(tmp_path / "000001.npz")
    assert [p.name for p in tmp_path.iterdir()] == ["000001.npz"]
    for a, b in zip(samples, found, strict=True):
        assert (a.lesson.text.tokens == b.lesson.text.tokens).all()
        assert (a.lesson.hidden == b.lesson.hidden).all()
        assert (a.lesson.top_ids == b.lesson.top_ids).all()
        assert (a.lesson.top_probs == b.lesson.top_probs).all()
        assert (a.lesson.text.prompt_len, a.lesson.text.domain, a.lesson.text.index) == (
            b.lesson.text.prompt_len, b.lesson.text.domain, b.lesson.text.index,
        )  # fmt: skip
        assert [r[:5] for r in a.rounds] == [r[:5] for r in b.rounds]
        assert a.version == b.version
    rejected = found[0].rounds[0].rejected
    assert rejected is not None
    assert (rejected[0] == beyond[0]).all()
    assert (rejected[1] == beyond[1]).all()
    assert found[0].rounds[1].rejected is None


def test_the_buffer_is_bounded_counts_what_it_drops_and_is_handed_over_once() -> None:
    buffer = ReplayBuffer(3)
    for i in range(5):
        assert buffer.full == (i >= 3)
        buffer.add(sample(i, []))
    assert buffer.dropped == 2
    assert [s.lesson.text.index for s in buffer.take()] == [2, 3, 4]
    assert not buffer.full
    assert buffer.take() == []
