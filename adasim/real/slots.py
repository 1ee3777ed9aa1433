"""Where each running request's keys and values lie."""

from collections.abc import Callable

from adasim.real.kv import KVCache


class Slots:
    """Slots of running requests: 0..n-1 without holes when a step begins, so that equal spans lie side by side."""

    def __init__(self, *caches: KVCache | None) -> None:
        self.caches = [kv for kv in caches if kv is not None]
        self._of: dict[int, int] = {}

    def __getitem__(self, index: int) -> int:
        return self._of[index]

    def settle(self, running: list[int], cached: Callable[[int], int]) -> None:
        """Close up the slots of requests that left, and give new requests the next ones.

        Args: running: request indices; cached: tokens of a request that its slot holds.
        """
        present = set(running)
        for gone in [i for i in self._of if i not in present]:
            slot = self._of.pop(gone)
            if slot == len(self._of):
                continue
            last = next(i for i, s in self._of.items() if s == len(self._of))
            for kv in self.caches:
                kv.move(len(self._of), slot, cached(last))
            self._of[last] = slot
        for index in running:
            self._of.setdefault(index, len(self._of))
