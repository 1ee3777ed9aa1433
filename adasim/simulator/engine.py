"""One engine under one policy: continuous batching as a SimPy process, one timeout per step."""

from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import simpy

from adasim.calibration.acceptance import Luck
from adasim.calibration.cost import CostModel
from adasim.policies.driver import PolicyDriver
from adasim.records import StepRecord
from adasim.serving.admission import Admission
from adasim.serving.recorder import Recorder
from adasim.types import BatchView, DraftView, IntArray, StepOutcome, StepSeconds

Process = Generator[simpy.Event, Any, None]


class Engine:
    """Plays the steps of a serving engine.

    Args:
        env: the SimPy clock.
        admission: queue, batch and memory.
        driver: the length policy.
        cost: seconds.
        luck: acceptance of every request at every position.
        recorder: takes down what happens.
        chunk: prefill tokens mixed into a step; None = prefills are steps of their own.
        max_prefill_tokens: prompt tokens of such a step (one prompt always fits).
        on_finish: called with the index of every request that finishes.
    """

    def __init__(
        self,
        env: simpy.Environment,
        admission: Admission,
        driver: PolicyDriver,
        cost: CostModel,
        luck: Luck,
        recorder: Recorder,
        *,
        chunk: int | None,
        max_prefill_tokens: int,
        on_finish: Callable[[int], None],
    ) -> None:
        self.env, self.admission, self.driver, self.cost, self.luck = env, admission, driver, cost, luck
        self.recorder, self.on_finish = recorder, on_finish
        self.chunk, self.max_prefill_tokens = chunk, max_prefill_tokens
        self.batch, self.caps = admission.batch, driver.caps
        self._work = env.event()

    def submit(self, index: int) -> None:
        """A request arrives now."""
        self.admission.submit(index, self.env.now)
        self.recorder.last_arrival_s = self.env.now
        if not self._work.triggered:
            self._work.succeed()

    def run(self) -> Process:
        """Forever: admit, run one step."""
        while True:
            self.admission.admit(self.env.now)
            if not len(self.batch):
                self._work = self.env.event()
                yield self._work
            elif self.chunk is None and self.batch.prefill_left.any():
                yield from self._prefill_step(self.batch.whole_prompts(self.max_prefill_tokens))
            else:
                yield from self._round()

    def _prefill_step(self, prefill: IntArray) -> Process:
        start, queued, used = self.env.now, len(self.admission.queue), self.admission.pool.used
        seconds = self.cost.step(0, 0, 0, 0.0, prefill=int(prefill.sum()), prefill_context=self._prefill_context(prefill))
        yield self.env.timeout(seconds.total)
        self._record(start, queued, used, seconds, prefill)

    def _round(self) -> Process:
        """Draft, choose lengths, verify, accept; with a chunk of prefill where there is one."""
        batch, start = self.batch, self.env.now
        rows = np.flatnonzero(batch.prefill_left == 0)
        view = self._view(rows)
        draft_lens = self.driver.draft_lens(view) if len(rows) else rows
        kept = self.admission.reserve(rows, draft_lens)
        if not kept.all():  # memory was short: some went back to the queue
            draft_lens = draft_lens[kept]
            rows = np.flatnonzero(batch.prefill_left == 0)
            view = self._view(rows)
        prefill = self._chunk()
        if not len(rows):
            if prefill.any():
                yield from self._prefill_step(prefill)
            return

        at = batch.base[rows] + batch.done[rows]
        truth = self.luck.run[at]
        verify_lens = self.driver.verify_lens(view, self._draft_view(rows, at, draft_lens, truth))
        verified = int(verify_lens.sum()) if self.caps.ragged else len(rows) * int(verify_lens.max())
        seconds = self.cost.step(
            len(rows),
            int(draft_lens.sum() + (draft_lens > 0).sum()),
            verified,
            float(view.context_lens.mean()),
            longest_draft=int(draft_lens.max()),
            prefill=int(prefill.sum()),
            prefill_context=self._prefill_context(prefill),
            reads_head=self.driver.reads_draft,
            drafter_loaded=self.driver.policy.loads_drafter,
            eager=self.driver.is_eager(verify_lens),
        )
        queued, used = len(self.admission.queue), self.admission.pool.used
        yield self.env.timeout(seconds.total)

        accepted = np.minimum(truth, verify_lens - 1)
        emitted = np.minimum(accepted + 1, batch.want[rows] - batch.done[rows])
        ids = view.request_ids
        outcome = StepOutcome(view.step, ids, draft_lens, verify_lens, accepted, emitted, seconds.total, queued)
        self.driver.observe(outcome)
        self.admission.scheduler.observe(outcome)
        gaps_s = self.admission.land(rows, outcome, self.env.now)
        self.recorder.round(batch.domain[rows], verify_lens, accepted, gaps_s)
        self._record(start, queued, used, seconds, prefill, view, outcome, verified)

    def _record(
        self,
        start: float,
        queued: int,
        kv_blocks: int,
        seconds: StepSeconds,
        prefill: IntArray,
        view: BatchView | None = None,
        outcome: StepOutcome | None = None,
        verified: int = 0,
    ) -> None:
        """Write the step down, and let finished requests go."""
        first_tokens = 0
        if prefill.any():
            first_tokens, gaps_s = self.admission.land_prefill(prefill, self.env.now)
            self.recorder.gaps(gaps_s)
        self.recorder.steps.append(
            StepRecord(
                step=len(self.recorder.steps),
                start_s=start,
                end_s=self.env.now,
                decoding=0 if view is None else len(view),
                queued=queued,
                prefill_tokens=int(prefill.sum()),
                draft_tokens=0 if outcome is None else int(outcome.draft_lens.sum()),
                verify_tokens=verified,
                accepted=0 if outcome is None else int(outcome.accepted.sum()),
                emitted=0 if outcome is None else int(outcome.emitted.sum()),
                first_tokens=first_tokens,
                draft_s=seconds.draft,
                verify_s=seconds.verify,
                overhead_s=seconds.overhead,
                prefill_s=seconds.prefill,
                kv_blocks=kv_blocks,
                context=0.0 if view is None else float(view.context_lens.mean()),
                evicted=self.admission.evicted,
                draft_version=self.recorder.draft_version,
            )
        )
        self.admission.evicted = 0
        for index in self.admission.finish(self.env.now):
            self.on_finish(index)

    def _chunk(self) -> IntArray:
        """Prefill tokens of each row in a mixed step: ``chunk`` in all, in order."""
        left = self.batch.prefill_left
        return np.minimum(left, ((self.chunk or 0) - (np.cumsum(left) - left)).clip(0))

    def _prefill_context(self, prefill: IntArray) -> float:
        """Mean context that the prefill tokens attend to."""
        total = int(prefill.sum())
        if not total:
            return 0.0
        end = self.batch.context - self.batch.prefill_left + prefill
        return float((prefill * (end - prefill / 2)).sum() / total)

    def _view(self, rows: IntArray) -> BatchView:
        batch, queued = self.batch, len(self.admission.queue)
        step = len(self.recorder.steps)
        return BatchView(step, self.env.now, self.caps, batch.request[rows], batch.context[rows], queued)

    def _draft_view(self, rows: IntArray, at: IntArray, draft_lens: IntArray, truth: IntArray) -> DraftView:
        """Only what the policy asked for: nothing else can leak, nothing else is computed."""
        needs = self.driver.policy.needs
        return DraftView(
            draft_lens,
            survival=self.luck.survival(self.batch.domain[rows], at) if "survival" in needs else None,
            accept_len=1 + self.luck.signal[at] if "accept_len" in needs else None,
            truth=truth if "truth" in needs else None,
            margin=self.luck.margin(self.batch.domain[rows], at) if "margin" in needs else None,
        )
