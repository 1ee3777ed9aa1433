"""Many rounds at once: as far as nothing outside can change what happens.

Between two events a batch only decodes: nobody comes, nobody goes, and a policy whose answers can be said in numbers
(``Policy.rule``) needs not be asked. Such rounds are played by one compiled loop, priced one by one, and passed by one
timeout. Everything else is left to the engine, round by round: what it records is the same to the bit.

Requests are counted on before the time has passed, so no run may end inside a span. None does: what ends a run is an
event of that very instant, in which no span begins.
"""

from collections.abc import Generator
from typing import Any

import numpy as np
import simpy

from adasim.calibration.cost import CostModel
from adasim.calibration.luck import Luck
from adasim.kernels import kernels
from adasim.policies.base import LengthRule
from adasim.policies.driver import PolicyDriver
from adasim.serving.admission import Admission
from adasim.serving.recorder import Recorder
from adasim.types import constant

LONGEST = 1024  # rounds of one span
NO_LUCK = np.empty(0, dtype=np.int16), np.empty((1, 0), dtype=np.int64), np.empty(0)  # rounds without drafts need none


class Span:
    """Rounds of the same requests until one of them finishes, the next event is due, or memory gets short.

    Args:
        env: the SimPy clock.
        admission: queue, batch and memory.
        driver: the length policy.
        cost: seconds.
        luck: acceptance of every request at every position.
        recorder: takes down what happens.
    """

    def __init__(
        self,
        env: simpy.Environment,
        admission: Admission,
        driver: PolicyDriver,
        cost: CostModel,
        luck: Luck,
        recorder: Recorder,
    ) -> None:
        self.env, self.admission, self.driver = env, admission, driver
        self.cost, self.luck, self.recorder = cost, luck, recorder
        self._kernel, self._rounds = kernels().rounds, np.empty((LONGEST, 7), dtype=np.int64)
        self._round_s = 0.0  # of the latest round

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
        count, complete = self._play(rule, most)
        if not count:
            return False
        starts, steps, private = self._price(rule, count, event_s)
        if len(steps) < count:
            assert kept is not None
            admission.lives.table[batch.request], self.recorder.blocks[:] = kept
            count, complete = self._play(rule, len(steps))
        yield from self._pass(starts)
        admission.land_rounds(starts, private, complete, self.recorder)
        self.recorder.steps.extend(steps)
        return True

    def _play(self, rule: LengthRule, most: int) -> tuple[int, bool]:
        """Rounds, ``most`` at most, from the present state of the batch to ``self._rounds``, and whether one finished."""
        admission, ids = self.admission, self.admission.batch.request
        tables = self.luck.tables(heads=not rule.verify_len) if rule.draft_len else NO_LUCK
        head, pool = self.luck.head, admission.pool
        if tables is None or (not rule.verify_len and head.reports != "truth"):  # the kernel's heads report what they see
            return 0, False
        draft_len, verify_len, gamma, anchor, floor, least = rule
        while True:
            count, complete = self._kernel(
                admission.lives.table, ids, *tables, draft_len, verify_len, gamma, anchor, floor, least,
                head.bias, head.noise, pool.memory.block_tokens, pool.free, self.recorder.blocks, self._rounds[:most],
            )  # fmt: skip
            if count >= 0:
                return count, complete
            self.luck.draw(ids, heads=not rule.verify_len)

    def _price(self, rule: LengthRule, count: int, event_s: float) -> tuple[list[float], list[tuple[float, ...]], int]:
        """When each of the rounds before the next event starts, and the end; their step records; blocks held then."""
        admission, driver = self.admission, self.driver
        n, queued, used, private = len(admission.batch), len(admission.queue), admission.pool.used, 0
        drafts, positions = n * rule.draft_len, n * (rule.draft_len + 1) if rule.draft_len else 0
        lens = constant(n, rule.verify_len)
        eager = bool(rule.verify_len) and driver.is_eager(lens)
        ragged, reads, loaded = driver.caps.ragged, driver.reads_draft, driver.policy.loads_drafter
        step, end_s, version, first = self.cost.step, self.env.now, self.recorder.draft_version, len(self.recorder.steps)
        draft_len = rule.draft_len
        starts = [end_s]
        steps: list[tuple[float, ...]] = []
        for verified, longest, contexts, accepted, emitted, taken, left in self._rounds[:count].tolist():
            if end_s >= event_s:
                break
            start_s, context, tokens = end_s, contexts / n, verified if ragged else n * longest
            draft_s, verify_s, overhead_s, prefill_s = step(
                n, positions, tokens, context,
                longest_draft=draft_len, reads_head=reads, drafter_loaded=loaded, eager=eager,
                ragged=tokens < n * longest,
            )  # fmt: skip
            end_s = start_s + (draft_s + verify_s + overhead_s + prefill_s)
            starts.append(end_s)
            steps.append(
                (
                    first + len(steps), start_s, end_s, n, queued, 0, drafts, tokens, accepted, emitted, 0, draft_s,
                    verify_s, overhead_s, prefill_s, used + private + taken, context, 0, version,
                )
            )  # fmt: skip
            private += left
        self._round_s = starts[-1] - starts[-2]
        return starts, steps, private

    def _pass(self, starts: list[float]) -> Generator[simpy.Event, Any, None]:
        """Wait until exactly the last of ``starts``.

        now + (end - now) is the end only where the difference is exact, as it is once the clock is beyond half of it.
        """
        end_s = starts[-1]
        if self.env.now < end_s / 2:
            yield self.env.timeout(max(starts[-2], 0.75 * end_s) - self.env.now)
        yield self.env.timeout(end_s - self.env.now)
