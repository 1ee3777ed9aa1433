"""Token shards: stored sequences, one after the other in a compressed file.

``tokens`` (uint16, uint32 where the vocabulary needs it), and for each sequence its end, prompt length, domain, source
and prompt index.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


def token_type(vocab: int) -> type[np.uint16 | np.uint32]:
    """The narrower of two integer types that holds every token id."""
    return np.uint16 if vocab <= 1 << 16 else np.uint32


@dataclass(frozen=True, slots=True)
class Text:
    """One finished sequence: prompt (template included) and the target's greedy answer, its EOS included."""

    tokens: NDArray[np.uint16 | np.uint32]
    prompt_len: int
    domain: int
    source: int
    index: int


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
