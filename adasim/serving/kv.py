"""KV memory in blocks, with an optional prefix cache."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Self

from pydantic import Field, model_validator

from adasim.errors import InputError
from adasim.traces import HASH_BLOCK
from adasim.types import Component, Request


class KvMemory(Component):
    """Size of the KV memory and whether prompts share prefixes.

    Attributes:
        blocks: KV blocks on the device; None = without limit.
        block_tokens: tokens per block.
        prefix_cache: share full 512-token prompt blocks that carry the same hash id.
    """

    blocks: int | None = Field(default=None, ge=1)
    block_tokens: int = Field(default=16, ge=1, le=65536)
    prefix_cache: bool = False

    @model_validator(mode="after")
    def _whole_blocks(self) -> Self:
        if self.prefix_cache and HASH_BLOCK % self.block_tokens:
            raise ValueError(f"prefix_cache needs block_tokens that divide {HASH_BLOCK}, not {self.block_tokens}")
        return self

    def check(self, requests: Sequence[Request], block: int) -> None:
        """Refuse a request that the whole memory cannot hold together with a full block of ``block`` positions.

        Raises:
            InputError: the first such request.
        """
        if self.blocks is None:
            return
        for r in requests:
            tokens = r.prompt_len + r.output_len + block
            if self.blocks_for(tokens) > self.blocks:
                raise InputError(
                    f"workload: request {r.id} needs {tokens} tokens of KV memory (prompt {r.prompt_len}, output "
                    f"{r.output_len}, block {block}); backend.kv holds {self.blocks * self.block_tokens}"
                )

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` tokens."""
        return -(-tokens // self.block_tokens)


class KvPool:
    """Who holds which blocks. Invariant: private + cached + free = total.

    Cached prefix blocks are shared and reference-counted; unreferenced ones stay until memory is short, the
    least recently used going first.
    """

    def __init__(self, memory: KvMemory) -> None:
        self.memory = memory
        self.total = memory.blocks if memory.blocks is not None else 1 << 60
        self.private = 0
        self.hash_blocks = HASH_BLOCK // memory.block_tokens
        self._users: dict[int, int] = {}  # hash id -> running requests that use it (> 0)
        self._idle: OrderedDict[int, None] = OrderedDict()  # unreferenced, the oldest first

    @property
    def used(self) -> int:
        """Blocks in use, cached ones included."""
        return self.private + self.hash_blocks * (len(self._users) + len(self._idle))

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return self.total - self.used

    @property
    def available(self) -> int:
        """Blocks that are free or only cached for later."""
        return self.total - self.private - self.hash_blocks * len(self._users)

    def hits(self, hash_ids: Sequence[int]) -> int:
        """How many leading hash ids are cached now."""
        for i, h in enumerate(hash_ids):
            if h not in self._users and h not in self._idle:
                return i
        return len(hash_ids)

    def idle_hits(self, hash_ids: Sequence[int]) -> int:
        """Of the leading cached ids, those no running request uses: sharing one takes it from ``available``."""
        return sum(h in self._idle for h in hash_ids[: self.hits(hash_ids)])

    def share(self, hash_ids: Sequence[int]) -> None:
        """Use these blocks together with others; ids that are not cached yet enter the cache."""
        for h in hash_ids:
            self._idle.pop(h, None)
            self._users[h] = self._users.get(h, 0) + 1
        self._make_room()

    def unshare(self, hash_ids: Sequence[int]) -> None:
        """Stop using these blocks; they stay cached while memory allows."""
        for h in reversed(hash_ids):  # the end of a prefix is the first to go when memory is short
            self._users[h] -= 1
            if not self._users[h]:
                del self._users[h]
                self._idle[h] = None

    def take(self, blocks: int) -> None:
        """Hold ``blocks`` more private blocks (negative: give back), dropping idle cached ones as needed."""
        self.private += blocks
        if blocks > 0:
            self._make_room()

    def _make_room(self) -> None:
        free = self.free
        while free < 0 and self._idle:
            self._idle.popitem(last=False)
            free = self.free
        assert free >= 0, "KV memory overflow: more was admitted or reserved than is available"
