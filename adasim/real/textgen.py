"""Target-generated text for drafter training: greedy answers to many prompts, stored as token shards.

A shard holds sequences one after the other: ``tokens`` uint16, and for each sequence its end, prompt length,
domain, source and prompt index. Generation resumes at the prompts no shard holds.
"""

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from adasim.real.kv import Span
from adasim.real.prompts import DOMAINS, SOURCES, Prompt, prompt
from adasim.real.target import Target

PROPOSAL_TOKENS = 160


@dataclass(frozen=True, slots=True)
class Text:
    """One finished sequence: prompt (template included) and the target's greedy answer, its EOS included."""

    tokens: NDArray[np.uint16]
    prompt_len: int
    domain: int
    source: int
    index: int


@dataclass(slots=True)
class _Row:
    index: int
    prompt: Prompt
    tokens: list[int]
    prompt_len: int  # 0 while the target still makes up the prompt
    limit: int = 0
    fresh: list[int] = field(default_factory=list)  # tokens to run next


class TextGenerator:
    """Answers prompts greedily in ``rows`` slots kept full."""

    def __init__(self, target: Target, tokenizer: Any, rows: int, max_new: int, max_prompt: int = 320) -> None:
        self.target, self.tokenizer, self.max_new, self.max_prompt = target, tokenizer, max_new, max_prompt
        self.kv = target.cache(rows, max_prompt + max_new + PROPOSAL_TOKENS)
        self.rng = torch.Generator().manual_seed(0)
        self.eos = int(tokenizer.eos_token_id)
        before, self.after = _chat_frame(tokenizer)
        self.before = before

    def answers(self, prompts: Iterator[tuple[int, Prompt]]) -> Iterator[Text]:
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
                    yield _text(row)
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
        self.target.forward(ids, [Span(slot, 0, len(ids))], self.kv)

    def _step(self, running: list[_Row]) -> None:
        tokens = torch.tensor([row.tokens[-1] for row in running])
        spans = [Span(slot, len(row.tokens) - 1, 1) for slot, row in enumerate(running)]
        hidden, _ = self.target.forward(tokens, spans, self.kv)
        logits = self.target.logits(hidden)
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


def _text(row: _Row) -> Text:
    return Text(
        np.array(row.tokens, np.uint16),
        row.prompt_len,
        DOMAINS.index(row.prompt.domain),
        SOURCES.index(row.prompt.source),
        row.index,
    )


def write_shard(path: Path, texts: Sequence[Text]) -> None:
    """Write sequences as one compressed shard, atomically."""
    scratch = path.with_suffix(".tmp.npz")
    np.savez_compressed(
        scratch,
        tokens=np.concatenate([t.tokens for t in texts]),
        ends=np.cumsum([len(t.tokens) for t in texts]).astype(np.uint32),
        prompt_lens=np.array([t.prompt_len for t in texts], np.uint16),
        domains=np.array([t.domain for t in texts], np.uint8),
        sources=np.array([t.source for t in texts], np.uint8),
        indices=np.array([t.index for t in texts], np.uint32),
    )
    scratch.rename(path)


def read_shard(path: Path) -> list[Text]:
    """Sequences of one shard."""
    with np.load(path) as data:
        starts = np.concatenate([[0], data["ends"][:-1]])
        tokens = data["tokens"]
        columns = zip(
            starts,
            data["ends"],
            data["prompt_lens"],
            data["domains"],
            data["sources"],
            data["indices"],
            strict=True,
        )
        return [Text(tokens[a:b], int(p), int(d), int(s), int(i)) for a, b, p, d, s, i in columns]


def read_rows(folder: Path, first: int, last: int) -> dict[str, list[str]]:
    """Prompts of rows first..last-1 of ``{domain}_200.jsonl`` in a folder."""
    rows: dict[str, list[str]] = {}
    for domain in DOMAINS:
        lines = (folder / f"{domain}_200.jsonl").read_text().splitlines()
        rows[domain] = [json.loads(line)["prompt"] for line in lines[first:last]]
    return rows


def generate(
    target: Target, tokenizer: Any, rows: Mapping[str, Sequence[str]], out: Path, count: int,
    batch: int = 64, max_new: int = 256, shard_size: int = 256,
) -> Iterator[str]:  # fmt: skip
    """Answer prompts 0..count-1 into shards under ``out``; yields a progress line a shard. Resumes."""
    out.mkdir(parents=True, exist_ok=True)
    done = {t.index for path in out.glob("shard-*.npz") for t in read_shard(path)}
    todo = ((i, prompt(i, rows)) for i in range(count) if i not in done)
    shard = len(list(out.glob("shard-*.npz")))
    start, new_tokens = monotonic(), 0
    texts: list[Text] = []
    generator = TextGenerator(target, tokenizer, batch, max_new)

    def flush() -> str:
        write_shard(out / f"shard-{shard:05d}.npz", texts)
        rate = new_tokens / (monotonic() - start)
        return f"shard {shard}: {len(texts)} texts, {new_tokens} new tokens in this run, {rate:.0f} tokens/s"

    for text in generator.answers(todo):
        texts.append(text)
        new_tokens += len(text.tokens) - text.prompt_len
        if len(texts) == shard_size:
            yield flush()
            shard, texts = shard + 1, []
    if texts:
        yield flush()
