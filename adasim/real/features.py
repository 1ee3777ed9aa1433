"""What a drafter learns from: the target's hidden states and top tokens along stored text, one file a shard.

Files are derived from token shards and big (about 6 kB a token for SmolLM2), so they live in a cache folder.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adasim.real.kv import Span
from adasim.real.shards import Text, read_shard, token_type
from adasim.real.target import Target

TOP = 8  # target tokens kept a position


@dataclass(frozen=True, slots=True)
class Lesson:
    """One sequence with the target's view of it; entry t of the labels is what the target expects at t + 1."""

    text: Text
    hidden: NDArray[np.uint16]  # [T, taps * D] bfloat16 bits
    top_ids: NDArray[np.uint16 | np.uint32]  # [T, TOP] best first; zero inside the prompt
    top_probs: NDArray[np.float16]  # [T, TOP]

    def hidden_tensor(self) -> Tensor:
        """Hidden states as bfloat16 [T, taps * D]."""
        return torch.from_numpy(np.array(self.hidden)).view(torch.bfloat16)


def score(target: Target, taps: Sequence[int], texts: Sequence[Text]) -> Iterator[Lesson]:
    """Run the target over stored texts. Entry t sees tokens 0..t only."""
    kv = target.cache(1, max(len(t.tokens) for t in texts))
    for text in texts:
        tokens = torch.from_numpy(text.tokens.astype(np.int64)).to(target.device)
        hidden, tapped = target.forward(tokens, [Span(0, 0, len(tokens))], kv, taps)
        assert tapped is not None
        first = text.prompt_len - 1
        logits = target.logits(hidden[first:])
        ids, probs = top_tokens(logits)
        top_ids, top_probs = np.zeros((len(tokens), TOP), ids.dtype), np.zeros((len(tokens), TOP), probs.dtype)
        top_ids[first:], top_probs[first:] = ids, probs
        yield Lesson(text, bits(tapped), top_ids, top_probs)


def top_tokens(logits: Tensor) -> tuple[NDArray[np.uint16 | np.uint32], NDArray[np.float16]]:
    """The likeliest tokens and their probabilities, each [rows, TOP]."""
    ids, probs = likeliest(logits)
    return ids.cpu().numpy().astype(token_type(logits.shape[-1])), probs.cpu().numpy().astype(np.float16)


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """As ``top_tokens``, left on the device."""
    best, ids = logits.topk(TOP)
    return ids, torch.exp(best.float() - logits.float().logsumexp(-1, keepdim=True))


def bits(hidden: Tensor) -> NDArray[np.uint16]:
    """Hidden states as bfloat16 bits."""
    return hidden.to(torch.bfloat16).cpu().view(torch.uint16).numpy()


def write_features(target: Target, taps: Sequence[int], shard: Path, out: Path) -> None:
    """Score one token shard into ``out``; skips a shard already scored."""
    if not _files(shard, out)[-1].exists():
        save_features(list(score(target, taps, read_shard(shard))), shard, out)


def save_features(lessons: Sequence[Lesson], shard: Path, out: Path) -> None:
    """Write ``out/<name>.{hidden,ids,probs}.npy`` for the lessons of one token shard, in its order."""
    out.mkdir(parents=True, exist_ok=True)
    parts: tuple[list[NDArray[Any]], ...] = (
        [x.hidden for x in lessons],
        [x.top_ids for x in lessons],
        [x.top_probs for x in lessons],
    )
    for file, arrays in zip(_files(shard, out), parts, strict=True):
        scratch = file.with_suffix(".tmp")
        with scratch.open("wb") as stream:
            np.save(stream, np.concatenate(arrays))
        scratch.rename(file)


def read_features(shard: Path, out: Path) -> list[Lesson]:
    """Lessons of one scored shard, memory-mapped."""
    hidden, ids, probs = (np.load(f, mmap_mode="r") for f in _files(shard, out))
    lessons, at = [], 0
    for text in read_shard(shard):
        end = at + len(text.tokens)
        lessons.append(Lesson(text, hidden[at:end], ids[at:end], probs[at:end]))
        at = end
    return lessons


def _files(shard: Path, out: Path) -> list[Path]:
    return [out / f"{shard.stem}.{part}.npy" for part in ("hidden", "ids", "probs")]
