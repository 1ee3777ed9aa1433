"""Target-generated text for drafter training: greedy answers to many prompts, and the target's view of them.

Hidden states and top tokens are kept as they pass by. Generation resumes at the prompts no shard holds.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from adasim.real.features import TOP, Lesson, bits, save_features, top_tokens
from adasim.real.kv import Span
from adasim.real.prompts import DOMAINS, SOURCES, Prompt, prompt
from adasim.real.shards import Text, read_shard, write_shard
from adasim.real.target import Target

PROPOSAL_TOKENS = 160


@dataclass(slots=True)
class _Row:
    index: int
    prompt: Prompt
    tokens: list[int]
    prompt_len: int  # 0 while the target still makes up the prompt
    limit: int
    hidden: list[NDArray[np.uint16]] = field(default_factory=list)  # of tokens run so far
    tops: list[tuple[NDArray[np.uint16 | np.uint32], NDArray[np.float16]]] = field(
        default_factory=list
    )  # of the last ones

    def lesson(self) -> Lesson:
        """What was seen; the last token was never run, so its entries are zero."""
        length, width = len(self.tokens), self.hidden[0].shape[-1]
        hidden = np.zeros((length, width), np.uint16)
        hidden[:-1] = np.concatenate(self.hidden)
        kind = self.tops[0][0].dtype if self.tops else np.dtype(np.uint16)
        ids, probs = np.zeros((length, TOP), kind), np.zeros((length, TOP), np.float16)
        first = length - 1 - len(self.tops)
        ids[first:-1] = [t[0] for t in self.tops]
        probs[first:-1] = [t[1] for t in self.tops]
        domain, source = DOMAINS.index(self.prompt.domain), SOURCES.index(self.prompt.source)
        text = Text(np.array(self.tokens, kind), self.prompt_len, domain, source, self.index)
        return Lesson(text, hidden, ids, probs)


class TextGenerator:
    """Answers prompts greedily in ``rows`` slots kept full."""

    def __init__(
        self,
        target: Target,
        tokenizer: Any,
        taps: Sequence[int],
        rows: int = 64,
        max_new: int = 256,
        max_prompt: int = 320,
    ) -> None:
        self.target, self.tokenizer, self.taps = target, tokenizer, tuple(taps)
        self.max_new, self.max_prompt = max_new, max_prompt
        self.kv = target.cache(rows, max_prompt + max_new + PROPOSAL_TOKENS)
        self.rng = torch.Generator().manual_seed(0)
        self.eos = int(tokenizer.eos_token_id)
        self.before, self.after = _chat_frame(tokenizer)

    def answers(self, prompts: Iterator[tuple[int, Prompt]]) -> Iterator[Lesson]:
        """Yield sequences as they finish, in no fixed order; ends when the prompts do."""
        running: list[_Row] = []
        waiting: deque[_Row] = deque()
        while True:
            while len(running) < self.kv.slots:
                row = waiting.popleft() if waiting else self._next(prompts)
                if row is None:
                    break
                self._prefill(row, len(running))
                running.append(row)
            if not running:
                return
            self._step(running)
            slot = 0
            while slot < len(running):
                row = running[slot]
                if not self._ended(row):
                    slot += 1
                    continue
                if row.prompt_len:
                    yield row.lesson()
                elif answer := self._proposed(row):
                    waiting.append(answer)
                last = running.pop()
                if last is not row:
                    running[slot] = last
                    self.kv.move(len(running), slot, len(last.tokens) - 1)

    def _next(self, prompts: Iterator[tuple[int, Prompt]]) -> _Row | None:
        for index, item in prompts:
            if item.source == "proposed":
                ids = self.before + self.tokenizer.encode(item.text, add_special_tokens=False)
                return _Row(index, item, ids, 0, len(ids) + PROPOSAL_TOKENS)
            row = self._answer(index, item, self.tokenizer.encode(item.text, add_special_tokens=False))
            if row is not None:
                return row
        return None

    def _answer(self, index: int, item: Prompt, user: list[int]) -> _Row | None:
        ids = self.before + user + self.after
        if len(ids) > self.max_prompt:
            return None
        return _Row(index, item, ids, len(ids), len(ids) + self.max_new)

    def _proposed(self, row: _Row) -> _Row | None:
        user = row.tokens[len(self.before) :]
        if user[-1] != self.eos or len(user) < 4:
            return None  # never finished, or said nothing
        return self._answer(row.index, row.prompt, user[:-1])

    def _ended(self, row: _Row) -> bool:
        return row.tokens[-1] == self.eos or len(row.tokens) >= row.limit

    def _prefill(self, row: _Row, slot: int) -> None:
        ids = torch.tensor(row.tokens[:-1])
        _, tapped = self.target.forward(ids, [Span(slot, 0, len(ids))], self.kv, self.taps)
        row.hidden.append(bits(_made(tapped)))

    def _step(self, running: list[_Row]) -> None:
        tokens = torch.tensor([row.tokens[-1] for row in running])
        spans = [Span(slot, len(row.tokens) - 1, 1) for slot, row in enumerate(running)]
        hidden, tapped = self.target.forward(tokens, spans, self.kv, self.taps)
        logits = self.target.logits(hidden)
        states, (ids, top_probs) = bits(_made(tapped)), top_tokens(logits)
        for i, row in enumerate(running):
            row.hidden.append(states[i : i + 1].copy())
            row.tops.append((ids[i], top_probs[i]))
        chosen = logits.argmax(-1)
        proposing = [i for i, row in enumerate(running) if not row.prompt_len]
        if proposing:
            probs = torch.softmax(logits[proposing].float(), -1)
            chosen[proposing] = torch.multinomial(probs, 1, generator=self.rng)[:, 0]
        for row, token in zip(running, chosen.tolist(), strict=True):
            row.tokens.append(token)


def _chat_frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Template tokens before and after the user's words."""
    marker = "adasim-user-words"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": marker}], tokenize=False, add_generation_prompt=True
    )
    before, after = text.split(marker)
    return (tokenizer.encode(before, add_special_tokens=False), tokenizer.encode(after, add_special_tokens=False))


def _made(tapped: torch.Tensor | None) -> torch.Tensor:
    assert tapped is not None, "taps were asked for"
    return tapped


def generate(
    generator: TextGenerator,
    rows: Mapping[str, Sequence[str]],
    work: Path,
    indices: range,
    shard_size: int = 256,
) -> Iterator[str]:
    """Answer the prompts of ``indices`` into ``work/{text,features}``; a progress line a shard. Resumes."""
    out = work / "text"
    out.mkdir(parents=True, exist_ok=True)
    done = {t.index for path in out.glob("shard-*[0-9].npz") for t in read_shard(path)}
    todo = ((i, prompt(i, rows)) for i in indices if i not in done)
    start, new_tokens = monotonic(), 0
    lessons: list[Lesson] = []

    def flush() -> str:
        number = len(list(out.glob(f"shard-{indices.start}-*[0-9].npz")))
        shard = out / f"shard-{indices.start}-{number:05d}.npz"
        save_features(lessons, shard, work / "features")
        write_shard(shard, [x.text for x in lessons])
        rate = new_tokens / (monotonic() - start)
        return f"{shard.name}: {len(lessons)} texts, {new_tokens} new tokens in this run, {rate:.0f} tokens/s"

    for lesson in generator.answers(todo):
        lessons.append(lesson)
        new_tokens += len(lesson.text.tokens) - lesson.text.prompt_len
        if len(lessons) == shard_size:
            yield flush()
            lessons = []
    if lessons:
        yield flush()
