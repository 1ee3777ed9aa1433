"""Between SGLang's worker and a policy: the same PolicyDriver as in the simulator and the torch engine.

A round passes three times: ``draft_lens``, ``verify_lens``, and, when the host knows it, ``accepted``. With overlapped
scheduling the third call of a round comes after the first two of the next: feedback is one round late, as it is there.
Its moments come from ``timed``; without them, those of the three calls are taken.
"""

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from adasim.policies.base import Policy
from adasim.policies.driver import PolicyDriver
from adasim.real.sglang_plugin.rounds import Prefill, Round, RoundLog
from adasim.types import BatchView, DraftView, EngineCaps, IntArray, RoundCost, StepOutcome


class Clock(Protocol):
    """Tells the seconds of moments that may not be known yet; see ``marks.Marks``."""

    def known(self, mark: Any) -> bool:
        """Whether they can be told."""
        ...

    def seconds(self, mark: Any) -> float:
        """Those of a moment that is known."""
        ...


class Moments(NamedTuple):
    """Of a step: its begin, when blocks were drafted, when their verification began, its end; a clock to read them by."""

    begin: Any
    drafted: Any
    verifying: Any
    end: Any
    clock: Clock


@dataclass(slots=True)
class _Open:
    """A round whose acceptance is not known yet."""

    driver: PolicyDriver
    names: list[str]
    view: BatchView
    draft: DraftView
    verify_lens: IntArray
    drafted_s: float
    kv_tokens: int
    version: int
    whole: NDArray[np.bool_]
    accepted: IntArray | None = None
    now_s: float = 0.0
    moments: Moments | None = None


@dataclass(slots=True)
class _OpenPrefill:
    """A step over prompts that the device may not have finished."""

    record: Prefill
    names: list[str]
    moments: Moments


class Decider:
    """Decides lengths and keeps the rounds.

    Args:
        policy: decides; may be replaced between rounds.
        caps: the engine's limits.
        log: takes every finished round.
        clock: seconds.

    Raises:
        InputError: the engine lacks something the policy needs.
    """

    def __init__(
        self, policy: Policy, caps: EngineCaps, log: RoundLog, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.caps, self.log, self.clock = caps, log, clock
        self.queued = self.kv_tokens = 0  # requests that wait, and tokens held, as far as the scheduler said
        self.version = 0  # of the drafter
        self.full_verify_share = 0.0  # of a round's requests, to show a trainer whole blocks
        self.whole = np.zeros(0, dtype=bool)  # which of the round's requests do
        self._rng = random.Random(0)
        self.emitted = 0  # tokens of all rounds; prompts give one each, which does not count
        self._numbers: dict[str, int] = {}
        self._next_number = self.step = 0  # the next step's number
        self._open: deque[_Open] = deque()
        self._unread: deque[_Open | _OpenPrefill] = deque()  # steps that are not in the log yet, in order
        self._view: BatchView | None = None
        self._names: list[str] = []
        self.use(policy)

    def use(self, policy: Policy) -> None:
        """Decide by this policy from the next round on.

        Raises:
            InputError: the engine lacks something it needs; the old one stays.
        """
        self.driver = PolicyDriver(policy, self.caps)

    def believe(self, cost: RoundCost | None) -> None:
        """What policies know of time from the next ``use`` on; None = nothing."""
        provides = self.caps.provides - {"cost"} | ({"cost"} if cost is not None else set())
        self.caps = replace(self.caps, cost=cost, provides=frozenset(provides))

    def draft_lens(self, names: Sequence[str], context_lens: Sequence[int]) -> IntArray:
        """A round begins. Args: SGLang's request ids and tokens known so far of each. Returns draft tokens [n]."""
        self._names = list(names)
        ids = np.array(self._known(names), dtype=np.int64)
        contexts = np.array(context_lens, dtype=np.int64)
        self._view = BatchView(self.step, self.clock(), self.caps, ids, contexts, self.queued)
        self.step += 1
        lengths = self.driver.draft_lens(self._view)
        drawn = np.array([self.full_verify_share > 0 and self._rng.random() < self.full_verify_share for _ in names])
        self.whole = drawn & (lengths > 0)  # anew each round, blind to any token
        return np.where(self.whole, self.caps.max_draft_len, lengths)

    def verify_lens(self, draft: DraftView) -> IntArray:
        """Tokens to verify of each request [n], the anchor counted."""
        assert self._view is not None
        drafted_s = self.clock()
        lengths = self.driver.verify_lens(self._view, draft)
        lengths = np.where(self.whole, draft.draft_lens + 1, lengths)
        opened = _Open(
            self.driver, self._names, self._view, draft, lengths, drafted_s, self.kv_tokens, self.version, self.whole
        )
        self._open.append(opened)
        self._unread.append(opened)
        return lengths

    def timed(self, moments: Moments) -> None:
        """Of the round that was opened last."""
        self._open[-1].moments = moments

    def prefilled(self, names: Sequence[str], tokens: Sequence[int], contexts: Sequence[int], moments: Moments) -> None:
        """A step over prompts. Args: SGLang's request ids, tokens computed of each, and known of each in the end."""
        ids = self._known(names)
        known = list(tokens), list(contexts)
        record = Prefill(self.step, 0.0, 0.0, self.queued, ids, *known, self.kv_tokens, self.version)
        self._unread.append(_OpenPrefill(record, list(names), moments))
        self.step += 1
        self.settle()

    def accepted(self, run: Sequence[int]) -> None:
        """Drafts accepted in the oldest round still open, request by request.

        Raises:
            RuntimeError: the engine reports another number of requests than that round had.
        """
        done = self._open.popleft()
        if len(run) != len(done.view):
            raise RuntimeError(f"round {done.view.step} had {len(done.view)} requests; the engine reports {len(run)}")
        now, view, accepted = self.clock(), done.view, np.array(run, dtype=np.int64)
        done.driver.observe(
            StepOutcome(
                view.step, view.request_ids, done.draft.draft_lens, done.verify_lens, accepted, accepted + 1,
                now - view.now_s, view.queue_depth,
            )
        )  # fmt: skip
        done.accepted, done.now_s = accepted, now
        self.emitted += int(accepted.sum()) + len(run)
        self.settle()

    def settle(self) -> None:
        """Write down the steps of which everything is known."""
        while self._unread:
            step = self._unread[0]
            at = step.moments
            if at is not None and not at.clock.known(at.end):
                return
            if isinstance(step, _OpenPrefill):
                of = step.moments
                start_s, end_s = of.clock.seconds(of.begin), of.clock.seconds(of.end)
                self.log.append(step.record._replace(start_s=start_s, end_s=end_s), step.names)
            elif step.accepted is None:
                return
            else:
                self.log.append(_round(step, step.accepted), step.names)
            self._unread.popleft()

    def forget(self, name: str) -> None:
        """A request has finished."""
        self._numbers.pop(name, None)

    def _known(self, names: Sequence[str]) -> list[int]:
        """Numbers of SGLang's request ids."""
        for name in names:
            if name not in self._numbers:
                self._numbers[name], self._next_number = self._next_number, self._next_number + 1
        return [self._numbers[name] for name in names]


def _round(done: _Open, accepted: IntArray) -> Round:
    """The record of a round."""
    view, at = done.view, done.moments
    estimates, confidences = done.draft.accept_len, done.draft.confidence
    if at is None:
        start_s, drafted_s, verifying_s, end_s = view.now_s, done.drafted_s, done.drafted_s, done.now_s
    else:
        start_s, drafted_s, verifying_s, end_s = (at.clock.seconds(m) for m in at[:4])
    return Round(
        view.step, start_s, end_s, drafted_s - start_s, end_s - verifying_s, view.queue_depth,
        view.request_ids.tolist(), view.context_lens.tolist(), done.draft.draft_lens.tolist(),
        done.verify_lens.tolist(), accepted.tolist(), None if estimates is None else estimates.tolist(), done.kv_tokens,
        done.version, done.whole.tolist(), None if confidences is None else confidences.tolist(),
    )  # fmt: skip
