"""Gathers samples while requests are served.

Target distributions are kept as the top ``TOP`` tokens with their probabilities; the rest of the mass is not
spread over tokens (the "tail" is one minus their sum).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from adasim.real.features import TOP, Lesson, bits, top_tokens
from adasim.real.samples import Round, Sample
from adasim.real.shards import Text


class Shown(NamedTuple):
    """What the target showed of a request's tokens, T of them; labels of the last R alone."""

    hidden: NDArray[np.uint16]  # [T, taps * D] bfloat16 bits
    ids: NDArray[Any]  # [R, TOP]
    probs: NDArray[np.float16]  # [R, TOP]

    def part(self, rows: slice) -> "Shown":
        """Some of the rows, where all are labelled."""
        return Shown(self.hidden[rows], self.ids[rows], self.probs[rows])


@dataclass(slots=True)
class _Life:
    first: int  # the first token whose hidden state is known
    prompt_len: int
    hidden: list[NDArray[np.uint16]] = field(default_factory=list)
    ids: list[NDArray[Any]] = field(default_factory=list)
    probs: list[NDArray[np.float16]] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    shown: int = 0  # tokens whose hidden states were known, kept or not


class Collector:
    """Follows every running request and gives ``sink`` one sample when it finishes; longer ones are cut.

    A sample begins where hidden states do. Positions count from there: turning all of them alike changes nothing for the
    drafter, whose attention sees differences of positions only.

    Args:
        sink: takes the samples.
        max_tokens: prompt and output of one sample.
        rejected: keep what the target said after rejected drafts, too.
    """

    def __init__(self, sink: Callable[[Sample], None], max_tokens: int = 2048, *, rejected: bool = False) -> None:
        self.sink, self.max_tokens, self.rejected = sink, max_tokens, rejected
        self._lives: dict[int, _Life] = {}

    def prefill(self, index: int, tapped: Tensor, last_logits: Tensor) -> None:
        """A prompt was run, after an eviction with its output so far: hidden [T, taps * D], last logits [V]."""
        self.prefilled(index, Shown(bits(tapped), *top_tokens(last_logits[None])), 0, len(tapped))

    def prefilled(self, index: int, shown: Shown, first: int, prompt_len: int) -> None:
        """A part of a prompt was run; labels are those after its last token.

        Args: first: where the part begins: what lies before was run earlier, or is known to a prefix cache only;
        prompt_len: of the whole prompt.
        """
        life = self._lives.get(index)
        if life is None:
            self._lives[index] = life = _Life(first, prompt_len)
        have = life.first + life.shown
        if first > have:  # others ran what is missing: begin anew behind it
            self._lives[index] = life = _Life(first, life.prompt_len)
            have = first
        new = shown.hidden[have - first :]
        if len(new):
            self._add(life, shown._replace(hidden=new))

    def round(self, index: int, step: Round, tapped: Tensor, logits: Tensor) -> None:
        """A verification: hidden states [verify_len, taps * D] and logits [verify_len, V], rejected rows last."""
        rows = slice(None) if self.rejected else slice(step.accepted + 1)
        self.verified(index, step, Shown(bits(tapped[rows]), *top_tokens(logits[rows])))

    def verified(self, index: int, step: Round, shown: Shown) -> None:
        """A verification; accepted rows first."""
        life, kept = self._lives[index], step.accepted + 1
        if self.rejected and len(shown.ids) > kept:
            step = step._replace(rejected=(shown.ids[kept:].astype(np.uint32), shown.probs[kept:]))
        life.rounds.append(step)
        self._add(life, shown.part(slice(kept)))

    def finish(self, index: int, tokens: list[int], domain: int) -> None:
        """A request ended. Args: tokens: prompt and output."""
        life = self._lives.pop(index)
        hidden, ids, probs = np.concatenate(life.hidden), np.concatenate(life.ids), np.concatenate(life.probs)
        first, end = life.first, min(len(tokens) - life.first, self.max_tokens)
        spare = max(end - len(hidden), 0)  # the last token was never run
        text = Text(np.array(tokens[first : first + end], ids.dtype), max(life.prompt_len - first, 1), domain, 0, index)
        lesson = Lesson(text, _fit(hidden, end, spare), _fit(ids, end, spare), _fit(probs, end, spare))
        rounds = [r._replace(start=r.start - first) for r in life.rounds]
        self.sink(Sample(lesson, [r for r in rounds if r.start < end - 1]))

    def forget(self, index: int) -> None:
        """A request is gone, and shows nothing."""
        self._lives.pop(index, None)

    def _add(self, life: _Life, shown: Shown) -> None:
        """Rows before the labelled ones lie inside a prompt; what no sample can hold is let go at once."""
        full = life.shown >= self.max_tokens
        life.shown += len(shown.hidden)
        if full:
            return
        blank = len(shown.hidden) - len(shown.ids)
        life.hidden.append(shown.hidden)
        life.ids.append(np.concatenate([np.zeros((blank, TOP), shown.ids.dtype), shown.ids]))
        life.probs.append(np.concatenate([np.zeros((blank, TOP), np.float16), shown.probs]))


def _fit(values: NDArray[Any], end: int, spare: int) -> NDArray[Any]:
    return np.concatenate([values[:end], np.zeros((spare, values.shape[1]), values.dtype)])
