"""The last steps of a server, kept to be read from outside while it serves."""

from collections import deque
from typing import Any, NamedTuple


class Round(NamedTuple):
    """What one round did. Lists go request by request; draft tokens exclude the anchor, verify lengths count it.

    Seconds are those of the server's monotonic clock, of the device where that is a GPU: ``start_s`` before drafting,
    ``end_s`` when the drafter has taken the accepted tokens in. What is neither ``draft_s`` nor ``verify_s`` went into
    deciding.
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
    kv_tokens: int = 0  # held by all requests before it
    draft_version: int = 0  # the drafter's, where its name is a number; else 0
    whole: list[bool] | None = None  # whose block was verified whole for the trainer's sake, whatever the policy said
    confidences: list[float] | None = None  # drafts that they said would be accepted, of those made; None = nobody asked


class Prefill(NamedTuple):
    """What one step over prompts did. Long prompts take several, chunk by chunk."""

    step: int
    start_s: float
    end_s: float
    queued: int
    requests: list[int]
    tokens: list[int]  # computed of each
    context_lens: list[int]  # known of each in the end
    kv_tokens: int = 0
    draft_version: int = 0


Entry = Round | Prefill


class RoundLog:
    """A ring of the last ``size`` steps, and the names that SGLang gave their requests."""

    def __init__(self, size: int) -> None:
        self._entries: deque[tuple[Entry, list[str]]] = deque(maxlen=size)

    def append(self, record: Entry, names: list[str]) -> None:
        """One more; the oldest leaves when the ring is full."""
        self._entries.append((record, names))

    def forget(self, step: int) -> None:
        """Steps before this one were read."""
        while self._entries and self._entries[0][0].step < step:
            self._entries.popleft()

    def dump(self) -> dict[str, Any]:
        """Everything kept, as plain lists: ``fields`` once, ``rounds`` row by row, ``requests`` number -> name.

        A reader that polls tells by ``step``, which rounds and ``prefills`` share without gaps, whether it missed any.
        """
        names = {str(i): name for r, names in self._entries for i, name in zip(r.requests, names, strict=True)}
        return {
            "fields": list(Round._fields),
            "rounds": [list(r) for r, _ in self._entries if isinstance(r, Round)],
            "prefill_fields": list(Prefill._fields),
            "prefills": [list(r) for r, _ in self._entries if isinstance(r, Prefill)],
            "requests": names,
        }
