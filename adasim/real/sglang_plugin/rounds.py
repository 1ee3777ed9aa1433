"""The last rounds of a server, kept to be read from outside while it serves."""

from collections import deque
from typing import Any, NamedTuple


class Round(NamedTuple):
    """What one round did. Lists go request by request; draft tokens exclude the anchor, verify lengths count it.

    Seconds are those of the server's monotonic clock. ``draft_s`` ends when the host knows what the policy needs of the
    drafts, ``verify_s`` when the host knows what was accepted: with overlapped scheduling that is after the next round
    has begun, so the pace of rounds is the difference of their ``end_s``.
    """

    step: int
    start_s: float
    end_s: float
    draft_s: float
    verify_s: float
    queued: int
    requests: list[int]
    context_lens: list[int]
    draft_lens: list[int]
    verify_lens: list[int]
    accepted: list[int]
    accept_lens: list[float] | None  # what the length head said, the anchor counted; None = it was not asked
    draft_version: int  # the drafter's, where its name is a number; else 0
    whole: list[bool]  # whose block was verified whole for the trainer's sake, whatever the policy said


class RoundLog:
    """A ring of the last ``size`` rounds, and the names that SGLang gave their requests."""

    def __init__(self, size: int) -> None:
        self._rounds: deque[tuple[Round, list[str]]] = deque(maxlen=size)

    def append(self, record: Round, names: list[str]) -> None:
        """One more; the oldest leaves when the ring is full."""
        self._rounds.append((record, names))

    def dump(self) -> dict[str, Any]:
        """Everything kept, as plain lists: ``fields`` once, ``rounds`` row by row, ``requests`` number -> name.

        A reader that polls tells by ``step``, which has no gaps, whether it missed rounds.
        """
        names = {str(i): name for r, names in self._rounds for i, name in zip(r.requests, names, strict=True)}
        return {"fields": list(Round._fields), "rounds": [list(r) for r, _ in self._rounds], "requests": names}
