"""Many rounds at once: as far as nothing outside can change what happens.

Between two events a batch only decodes, and a policy whose answers can be said in numbers (``Policy.rule``) needs not be
asked. In a closed loop first come, first served, those who finish are replaced by those who come next, whose prompts are
then computed. Such steps are played by one compiled loop, priced one by one, and passed by one timeout. Everything else
is left to the engine, round by round: what it records is the same to the bit.

Requests are counted on before the time has passed, so no run may end inside a span. None does: what ends a run is an
event of that very instant, in which no span begins, or the last request, which a span neither sends nor lets go.
"""

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import numpy as np
import simpy

from adasim.calibration.cost import CostModel
from adasim.calibration.luck import Luck
from adasim.kernels import kernels
from adasim.policies.base import LengthRule
from adasim.policies.driver import PolicyDriver
from adasim.policies.scheduler import Fcfs
from adasim.serving.admission import Admission
from adasim.serving.recorder import Recorder
from adasim.types import FloatArray, IntArray, constant

if TYPE_CHECKING:
    from adasim.simulator.source import Source

LONGEST = 1024  # steps of one span
NO_LUCK = np.empty(0, dtype=np.int16), np.empty((1, 0), dtype=np.int64), np.empty(0)  # rounds without drafts need none


class Span:
    """Rounds until a request that finishes is not replaced, the next event is due, or memory gets short.

    Args:
        env: the SimPy clock.
        admission: queue, batch and memory.
        driver: the length policy.
        cost: seconds.
        luck: acceptance of every request at every position.
        recorder: takes down what happens.
        source: sends requests.
        max_prefill_tokens: prompt tokens of a step that prefills (one prompt always fits); None = prefill is mixed into
            rounds.
    """

    def __init__(
        self,
        env: simpy.Environment,
        admission: Admission,
        driver: PolicyDriver,
        cost: CostModel,
        luck: Luck,
        recorder: Recorder,
        source: "Source",
        max_prefill_tokens: int | None,
    ) -> None:
        self.env, self.admission, self.driver = env, admission, driver
        self.cost, self.luck, self.recorder, self.source = cost, luck, recorder, source
        self._kernel, self._steps = kernels().rounds, np.empty((LONGEST, 8), dtype=np.int64)
        self._left = np.empty((LONGEST, 3), dtype=np.int64)  # requests that left
        self._round_s = 0.0  # of the latest round
        self._max_prefill_tokens = max_prefill_tokens or 0
        whole_prompts = max_prefill_tokens is not None and not admission.pool.memory.prefix_cache
        self._exchanges = whole_prompts and type(admission.scheduler) is Fcfs

    def play(self) -> Generator[simpy.Event, Any, bool]:
        """Play what can be played now; False: nothing can, the engine has to."""
        admission, batch, start_s, event_s = self.admission, self.admission.batch, self.env.now, self.env.peek()
        n, queued = len(batch.request), len(admission.queue)
        may_enter = queued and n < self.driver.caps.max_running_requests
        if start_s >= event_s or may_enter or admission.evicted or len(batch.prefilling):
            return False
        rule = self.driver.rule(n, queued)
        if rule is None:
            return False
        # an event will come: go no further than the rounds that are likely to start before it, and be ready to go back
        kept, most = None, LONGEST
        if event_s < np.inf:
            kept = admission.lives.table[batch.request], self.recorder.blocks.copy()
            most = min(most, 1 + int((event_s - start_s) / self._round_s)) if self._round_s else 1
        spare, fewest = self._may_change(rule, n, queued) if self._exchanges and kept is None else (0, n)
        ids = batch.request.copy()
        count, moved, complete = self._play(rule, ids, most, spare, fewest)
        if not count:
            return False
        starts, steps, gaps, private = self._price(rule, count, event_s)
        if len(steps) < count:
            assert kept is not None
            admission.lives.table[batch.request], self.recorder.blocks[:] = kept
            count, moved, complete = self._play(rule, ids, len(steps), 0, n)
        yield from self._pass(starts)
        running = ids[: self._steps[count - 1, 7]]
        admission.land_rounds(starts, running, private, complete, self.recorder)
        if moved:
            self._exchange(running, moved, np.array(starts[1:]))
        self.recorder.counted_gaps(gaps)
        self.recorder.steps.extend(steps)
        return True

    def _may_change(self, rule: LengthRule, running: int, queued: int) -> tuple[int, int]:
        """How many may enter in the places of others; to how few the batch may shrink when nobody is left to come."""
        ahead = self.source.ahead
        if ahead is not None:
            return min(ahead, LONGEST), running
        fewest = running
        while fewest > 1 and not queued and self.driver.rule(fewest - 1, 0) == rule:
            fewest -= 1
        return 0, fewest

    def _play(self, rule: LengthRule, ids: IntArray, most: int, spare: int, fewest: int) -> tuple[int, int, bool]:
        """Steps, ``most`` at most, from the present state of the batch to ``self._steps``; see ``Kernels.rounds``."""
        admission = self.admission
        tables = self.luck.tables(heads=not rule.verify_len) if rule.draft_len else NO_LUCK
        head, pool, queue = self.luck.head, admission.pool, admission.queue
        if tables is None or (not rule.verify_len and head.reports != "truth"):  # the kernel's heads report what they see
            return 0, 0, False
        draft_len, verify_len, gamma, anchor, floor, least = rule
        first = queue[0] if queue else self.source.sent
        while True:
            count, moved, complete = self._kernel(
                admission.lives.table, ids, *tables, draft_len, verify_len, gamma, anchor, floor, least,
                head.bias, head.noise, pool.memory.block_tokens, pool.free, first, spare, fewest, self.driver.caps.block,
                self._max_prefill_tokens, self.recorder.blocks, self._left, self._steps[:most],
            )  # fmt: skip
            if count >= 0:
                return count, moved, complete
            self.luck.draw(ids, heads=not rule.verify_len)

    def _price(
        self, rule: LengthRule, count: int, event_s: float
    ) -> tuple[list[float], list[tuple[float, ...]], list[tuple[int, float, int]], int]:
        """Steps before the next event: when they start, and the end; records; gaps after the first; blocks held."""
        admission, driver = self.admission, self.driver
        queued, used, private = len(admission.queue), admission.pool.used, 0
        draft_len, lens = rule.draft_len, constant(1, rule.verify_len)
        eager = bool(rule.verify_len) and driver.is_eager(lens)
        ragged, reads, loaded = driver.caps.ragged, driver.reads_draft, driver.policy.loads_drafter
        step, version, number = self.cost.step, self.recorder.draft_version, len(self.recorder.steps)
        end_s = round_end_s = self.env.now
        starts = [end_s]
        steps: list[tuple[float, ...]] = []
        gaps: list[tuple[int, float, int]] = []
        began: list[tuple[float, int]] = []  # since the last round: when prompts were computed, and how many
        for verified, longest, contexts, accepted, given, taken, left, n in self._steps[:count].tolist():
            if end_s >= event_s:
                break
            start_s = end_s
            if n:
                context, tokens, drafts = contexts / n, verified if ragged else n * longest, n * draft_len
                emitted, prompts, first = given, 0, 0
                draft_s, verify_s, overhead_s, prefill_s = step(
                    n, drafts + n if drafts else 0, tokens, context,
                    longest_draft=draft_len, reads_head=reads, drafter_loaded=loaded, eager=eager,
                    ragged=tokens < n * longest,
                )  # fmt: skip
            else:
                context, tokens, drafts = 0.0, 0, 0
                emitted, prompts, first = 0, verified, given
                draft_s, verify_s, overhead_s, prefill_s = step(
                    0, 0, 0, 0.0, prefill=prompts, prefill_context=contexts / 2 / prompts
                )
            end_s = start_s + (draft_s + verify_s + overhead_s + prefill_s)
            steps.append(
                (
                    number, start_s, end_s, n, queued, prompts, drafts, tokens, accepted, emitted, first, draft_s,
                    verify_s, overhead_s, prefill_s, used + private + taken, context, 0, version,
                )
            )  # fmt: skip
            if not n:
                began.append((end_s, first))
            elif began:
                gaps += _gaps(number, end_s, n, round_end_s, began)
                began, round_end_s = [], end_s
            else:
                gaps.append((number, end_s - round_end_s, n))
                round_end_s = end_s
            starts.append(end_s)
            private += left
            number += 1
        self._round_s = starts[-1] - starts[-2]
        return starts, steps, gaps[1:], private  # in the first, each waited a time of its own

    def _exchange(self, running: IntArray, moved: int, ends_s: FloatArray) -> None:
        """``moved`` requests finished in steps, of which each ended at ``ends_s``, and others came, if any were left."""
        left, steps, prefills = self._left[:moved].T
        left_s, arrived = ends_s[steps], self.source.send_after(left)
        self.admission.exchange(running, left, arrived, left_s, ends_s[prefills] if arrived else left_s)
        if arrived:
            self.recorder.last_arrival_s = float(left_s[-1])

    def _pass(self, starts: list[float]) -> Generator[simpy.Event, Any, None]:
        """Wait until exactly the last of ``starts``.

        now + (end - now) is the end only where the difference is exact, as it is once the clock is beyond half of it.
        """
        end_s = starts[-1]
        if self.env.now < end_s / 2:
            yield self.env.timeout(max(starts[-2], 0.75 * end_s) - self.env.now)
        yield self.env.timeout(end_s - self.env.now)


def _gaps(
    step: int, now_s: float, n: int, round_end_s: float, began: list[tuple[float, int]]
) -> list[tuple[int, float, int]]:
    """Step, time since the latest tokens, rising, and how many of ``n`` requests waited so long.

    ``began``: when some of them got their first tokens after the last round, and how many did.
    """
    waits: dict[float, int] = {}
    stayed = round_end_s, n - sum(chunks for _, chunks in began)
    for then_s, chunks in [*reversed(began), stayed]:
        waits[now_s - then_s] = waits.get(now_s - then_s, 0) + chunks
    return [(step, wait_s, chunks) for wait_s, chunks in waits.items() if chunks]
