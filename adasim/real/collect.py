"""Gathers samples while requests are served.

Target distributions are kept as the top ``TOP`` tokens with their probabilities; the rest of the mass is not
spread over tokens (the "tail" is one minus their sum).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from adasim.real.features import TOP, Lesson, bits, top_tokens
from adasim.real.samples import Round, Sample
from adasim.real.shards import Text, token_type


@dataclass(slots=True)
class _Life:
    hidden: list[NDArray[np.uint16]] = field(default_factory=list)
    ids: list[NDArray[Any]] = field(default_factory=list)
    probs: list[NDArray[np.float16]] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    prefilled: int = 0  # prompt tokens, the first time


class Collector:
    """Follows every running request and gives ``sink`` one sample when it finishes; longer ones are cut.

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
        known = self._lives.get(index)
        if known is None:
            self._lives[index] = known = _Life(prefilled=len(tapped))
        have = sum(len(h) for h in known.hidden)
        self._add(known, tapped[have:], last_logits[None], blank=len(tapped) - have - 1)

    def round(self, index: int, step: Round, tapped: Tensor, logits: Tensor) -> None:
        """A verification: hidden states [verify_len, taps * D] and logits [verify_len, V], rejected rows last."""
        life, kept = self._lives[index], step.accepted + 1
        if self.rejected and len(logits) > kept:
            ids, probs = top_tokens(logits[kept:])
            step = step._replace(rejected=(ids.astype(np.uint32), probs))
        life.rounds.append(step)
        self._add(life, tapped[:kept], logits[:kept], blank=0)

    def finish(self, index: int, tokens: list[int], domain: int) -> None:
        """A request ended."""
        life = self._lives.pop(index)
        hidden, ids, probs = np.concatenate(life.hidden), np.concatenate(life.ids), np.concatenate(life.probs)
        end = min(len(tokens), self.max_tokens)
        spare = max(end - len(hidden), 0)  # the last token was never run
        text = Text(np.array(tokens[:end], ids.dtype), life.prefilled, domain, 0, index)
        lesson = Lesson(text, _fit(hidden, end, spare), _fit(ids, end, spare), _fit(probs, end, spare))
        self.sink(Sample(lesson, [r for r in life.rounds if r.start < end]))

    def _add(self, life: _Life, tapped: Tensor, logits: Tensor, blank: int) -> None:
        """``blank`` rows before the logits' have no label: they lie inside a prompt."""
        ids, probs = top_tokens(logits)
        life.hidden.append(bits(tapped))
        life.ids.append(np.concatenate([np.zeros((blank, TOP), token_type(logits.shape[-1])), ids]))
        life.probs.append(np.concatenate([np.zeros((blank, TOP), np.float16), probs]))


def _fit(values: NDArray[Any], end: int, spare: int) -> NDArray[Any]:
    return np.concatenate([values[:end], np.zeros((spare, values.shape[1]), values.dtype)])
