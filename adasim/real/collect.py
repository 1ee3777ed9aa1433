"""What serving shows the trainer: of every finished request its tokens, the target's view of them, and its rounds.

Target distributions are kept as the top ``TOP`` tokens with their probabilities; the rest of the mass is not
spread over tokens (the "tail" is one minus their sum).
"""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from adasim.real.features import TOP, Lesson, bits, top_tokens
from adasim.real.shards import Text


class Round(NamedTuple):
    """One round of one request."""

    start: int  # the anchor's position
    verify_len: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One finished request, as the trainer gets it."""

    lesson: Lesson
    rounds: list[Round]
    version: int  # of the drafter that served its last round


@dataclass(slots=True)
class _Life:
    hidden: list[NDArray[np.uint16]] = field(default_factory=list)
    ids: list[NDArray[np.uint16]] = field(default_factory=list)
    probs: list[NDArray[np.float16]] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    prefilled: int = 0  # prompt tokens, the first time


class Collector:
    """Gathers samples in a bounded buffer; the oldest go when it is full, longer requests are cut."""

    def __init__(self, capacity: int = 128, max_tokens: int = 2048) -> None:
        self.samples: deque[Sample] = deque(maxlen=capacity)
        self.max_tokens, self.dropped = max_tokens, 0
        self._lives: dict[int, _Life] = {}

    def prefill(self, index: int, tapped: Tensor, last_logits: Tensor) -> None:
        """A prompt was run, after an eviction with its output so far: hidden [T, taps * D], last logits [V]."""
        known = self._lives.get(index)
        if known is None:
            self._lives[index] = known = _Life(prefilled=len(tapped))
        have = sum(len(h) for h in known.hidden)
        self._add(known, tapped[have:], last_logits[None], blank=len(tapped) - have - 1)

    def round(self, index: int, step: Round, tapped: Tensor, logits: Tensor) -> None:
        """The committed rows of a verification: hidden [accepted + 1, taps * D], logits [accepted + 1, V]."""
        life = self._lives[index]
        life.rounds.append(step)
        self._add(life, tapped, logits, blank=0)

    def finish(self, index: int, tokens: list[int], domain: int, version: int) -> None:
        """A request ended; its sample enters the buffer."""
        life = self._lives.pop(index)
        hidden, ids, probs = np.concatenate(life.hidden), np.concatenate(life.ids), np.concatenate(life.probs)
        end = min(len(tokens), self.max_tokens)
        spare = max(end - len(hidden), 0)  # the last token was never run
        text = Text(np.array(tokens[:end], np.uint16), life.prefilled, domain, 0, index)
        lesson = Lesson(text, _fit(hidden, end, spare), _fit(ids, end, spare), _fit(probs, end, spare))
        self.dropped += len(self.samples) == self.samples.maxlen
        self.samples.append(Sample(lesson, [r for r in life.rounds if r.start < end], version))

    def _add(self, life: _Life, tapped: Tensor, logits: Tensor, blank: int) -> None:
        """``blank`` rows before the logits' have no label: they lie inside a prompt."""
        ids, probs = top_tokens(logits)
        life.hidden.append(bits(tapped))
        life.ids.append(np.concatenate([np.zeros((blank, TOP), np.uint16), ids]))
        life.probs.append(np.concatenate([np.zeros((blank, TOP), np.float16), probs]))


def _fit(values: NDArray, end: int, spare: int) -> NDArray:  # type: ignore[type-arg]
    return np.concatenate([values[:end], np.zeros((spare, values.shape[1]), values.dtype)])
