"""Between SGLang's worker and a policy: the same PolicyDriver as in the simulator and the torch engine.

A round passes three times: ``draft_lens``, ``verify_lens``, and, when the host knows it, ``accepted``. With overlapped
scheduling the third call of a round comes after the first two of the next: feedback is one round late, as it is there.
"""

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from adasim.policies.base import Policy
from adasim.policies.driver import PolicyDriver
from adasim.real.sglang_plugin.rounds import Round, RoundLog
from adasim.types import BatchView, DraftView, EngineCaps, IntArray, StepOutcome


@dataclass(slots=True)
class _Open:
    """A round whose acceptance is not known yet."""

    driver: PolicyDriver
    names: list[str]
    view: BatchView
    draft: DraftView
    verify_lens: IntArray
    drafted_s: float
    version: int
    whole: NDArray[np.bool_]


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
        self.queued = 0  # requests that wait, as far as the scheduler said
        self.version = 0  # of the drafter
        self.full_verify_share = 0.0  # of a round's requests, to show a trainer whole blocks
        self.whole = np.zeros(0, dtype=bool)  # which of the round's requests do
        self._rng = random.Random(0)
        self._numbers: dict[str, int] = {}
        self._next_number = self._step = 0
        self._open: deque[_Open] = deque()
        self._view: BatchView | None = None
        self._names: list[str] = []
        self.use(policy)

    def use(self, policy: Policy) -> None:
        """Decide by this policy from the next round on.

        Raises:
            InputError: the engine lacks something it needs; the old one stays.
        """
        self.driver = PolicyDriver(policy, self.caps)

    def draft_lens(self, names: Sequence[str], context_lens: Sequence[int]) -> IntArray:
        """A round begins. Args: SGLang's request ids and tokens known so far of each. Returns draft tokens [n]."""
        self._names = list(names)
        for name in names:
            if name not in self._numbers:
                self._numbers[name], self._next_number = self._next_number, self._next_number + 1
        ids = np.array([self._numbers[name] for name in names], dtype=np.int64)
        contexts = np.array(context_lens, dtype=np.int64)
        self._view = BatchView(self._step, self.clock(), self.caps, ids, contexts, self.queued)
        self._step += 1
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
        self._open.append(
            _Open(self.driver, self._names, self._view, draft, lengths, drafted_s, self.version, self.whole)
        )
        return lengths

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
        estimates = done.draft.accept_len
        self.log.append(
            Round(
                view.step, view.now_s, now, done.drafted_s - view.now_s, now - done.drafted_s, view.queue_depth,
                view.request_ids.tolist(), view.context_lens.tolist(), done.draft.draft_lens.tolist(),
                done.verify_lens.tolist(), accepted.tolist(), None if estimates is None else estimates.tolist(),
                done.version, done.whole.tolist(),
            ),
            done.names,
        )  # fmt: skip

    def forget(self, name: str) -> None:
        """A request has finished."""
        self._numbers.pop(name, None)
