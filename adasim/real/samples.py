"""What serving shows the trainer: one sample a finished request, a bounded buffer of them, and their file."""

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from adasim.real.features import TOP, Lesson
from adasim.real.shards import Text


class Round(NamedTuple):
    """One round of one request.

    ``rejected`` are the target's top tokens after each rejected draft, conditioned on drafts that the text does not
    hold: ids and probabilities, each [verify_len - 1 - accepted, TOP]; None where they were not kept.
    """

    start: int  # the anchor's position
    verify_len: int
    accepted: int
    version: int  # of the drafter
    whole: bool = False  # the full block was verified, whatever the policy said
    rejected: tuple[NDArray[np.uint32], NDArray[np.float16]] | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One finished request, as the trainer gets it."""

    lesson: Lesson
    rounds: list[Round]

    @property
    def version(self) -> int:
        """Of the drafter that served its last round; 0 without rounds."""
        return self.rounds[-1].version if self.rounds else 0

    @property
    def tau(self) -> float | None:
        """Its tokens per round; None without rounds."""
        return 1 + sum(r.accepted for r in self.rounds) / len(self.rounds) if self.rounds else None


class ReplayBuffer:
    """The newest samples, at most ``capacity``. Full of samples not trained yet, it is handed over whole."""

    def __init__(self, capacity: int = 128) -> None:
        self.samples: deque[Sample] = deque(maxlen=capacity)
        self.fresh, self.dropped = 0, 0  # not handed over yet; pushed out before they were

    def add(self, sample: Sample) -> None:
        """The oldest sample goes when the buffer is full."""
        full = self.fresh == self.samples.maxlen
        self.dropped += full
        self.fresh += not full
        self.samples.append(sample)

    @property
    def full(self) -> bool:
        """Whether ``capacity`` samples wait to be trained."""
        return self.fresh == self.samples.maxlen

    def take(self) -> list[Sample]:
        """Hand over all samples."""
        taken = list(self.samples)
        self.samples.clear()
        self.fresh = 0
        return taken


def write_samples(path: Path, samples: list[Sample]) -> None:
    """Write samples as one file, atomically: readers see all of it or nothing."""
    lessons = [s.lesson for s in samples]
    rounds = [r for s in samples for r in s.rounds]
    kept = [r.rejected for r in rounds if r.rejected is not None]
    none = (np.zeros((0, TOP), np.uint32), np.zeros((0, TOP), np.float16))
    scratch = path.with_name(f".{path.name}")
    with scratch.open("wb") as stream:
        np.savez(
            stream,
            tokens=np.concatenate([x.text.tokens for x in lessons]),
            texts=np.array([(len(x.text.tokens), x.text.prompt_len, x.text.domain, x.text.index) for x in lessons]),
            hidden=np.concatenate([x.hidden for x in lessons]),
            ids=np.concatenate([x.top_ids for x in lessons]),
            probs=np.concatenate([x.top_probs for x in lessons]),
            counts=np.array([len(s.rounds) for s in samples]),
            rounds=np.array([_row(r) for r in rounds]).reshape(len(rounds), 6),
            rejected_ids=np.concatenate([none[0], *(k[0] for k in kept)]),
            rejected_probs=np.concatenate([none[1], *(k[1] for k in kept)]),
        )
    scratch.rename(path)


def read_samples(path: Path) -> list[Sample]:
    """Samples of one file."""
    with np.load(path) as file:
        data: dict[str, NDArray[Any]] = dict(file)
    samples, at, done, gone = [], 0, 0, 0
    for (length, prompt_len, domain, index), count in zip(data["texts"].tolist(), data["counts"].tolist(), strict=True):
        part = slice(at, at + length)
        text = Text(data["tokens"][part], prompt_len, domain, 0, index)
        rounds = []
        for start, verify_len, accepted, version, whole, kept in data["rounds"][done : done + count].tolist():
            beyond = slice(gone, gone + kept)
            rejected = (data["rejected_ids"][beyond], data["rejected_probs"][beyond]) if kept else None
            rounds.append(Round(start, verify_len, accepted, version, bool(whole), rejected))
            gone += kept
        samples.append(Sample(Lesson(text, data["hidden"][part], data["ids"][part], data["probs"][part]), rounds))
        at, done = at + length, done + count
    return samples


def _row(r: Round) -> tuple[int, ...]:
    return r.start, r.verify_len, r.accepted, r.version, int(r.whole), 0 if r.rejected is None else len(r.rejected[0])
