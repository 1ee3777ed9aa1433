"""One engine under one policy: continuous batching as a SimPy process, one timeout per step or span of rounds."""

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import numpy as np
import simpy

from adasim.calibration.cost import CostModel
from adasim.calibration.luck import Luck
from adasim.kernels import kernels
from adasim.policies.driver import PolicyDriver
from adasim.serving.admission import Admission
from adasim.serving.batch import Prefill
from adasim.serving.ranks import Ranks
from adasim.serving.recorder import Recorder
from adasim.simulator.span import Span
from adasim.types import BatchView, DraftView, FloatArray, IntArray, StepOutcome, StepSeconds, constant

if TYPE_CHECKING:
    from adasim.simulator.lock_step import LockStep
    from adasim.simulator.prefill_pool import PrefillPool
    from adasim.simulator.source import Source
    from adasim.simulator.trainer import Trainer

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
        source: sends requests, and is told who finishes.
        trainer: changes the drafter between steps; None = it stays as loaded.
        lock_step: prices the steps of several attention ranks; None = there is one.
        pool: prefills elsewhere; None = this engine does.
    """

    def __init__(
        self,
        env: simpy.Environment,
        admission: Admission | Ranks,
        driver: PolicyDriver,
        cost: CostModel,
        luck: Luck,
        recorder: Recorder,
        *,
        chunk: int | None,
        max_prefill_tokens: int,
        source: "Source",
        trainer: "Trainer | None" = None,
        lock_step: "LockStep | None" = None,
        pool: "PrefillPool | None" = None,
    ) -> None:
        self.env, self.admission, self.driver, self.cost, self.luck = env, admission, driver, cost, luck
        self.recorder, self.source, self.trainer = recorder, source, trainer
        self.lock_step, self.pool = lock_step, pool
        self.chunk, self.max_prefill_tokens = chunk, max_prefill_tokens
        self.batch, self.caps = admission.batch, driver.caps
        self._work, self._kernels = env.event(), kernels()
        self._sees = driver.needs & {"survival", "accept_len", "margin", "truth"}
        self._signals = trainer is not None or bool(self._sees - {"truth"})  # somebody wants to know what heads see
        self._listens = driver.listens or admission.listens
        self._span: Span | None = None  # what rounds do under a trainer, a pool or several ranks, it does not
        watched = self._listens or trainer is not None or recorder.rounds is not None
        if driver.ruled and not (watched or pool is not None or isinstance(admission, Ranks)):
            prompts = max_prefill_tokens if chunk is None else None
            self._span = Span(env, admission, driver, cost, luck, recorder, source, prompts)

    def submit(self, index: int) -> None:
        """A request arrives now."""
        self.admission.submit(index, self.env.now)
        self.recorder.last_arrival_s = self.env.now
        self._wake()

    def join(self, index: int, *, first: bool = False) -> None:
        """A request comes with its KV computed; ``first``: before the others."""
        self.admission.join(index, first=first)
        self._wake()

    def _wake(self) -> None:
        if not self._work.triggered:
            self._work.succeed()

    def run(self) -> Process:
        """Forever: admit, run one step."""
        while True:
            if self.trainer is not None:
                yield from self.trainer.reload()
                self.recorder.draft_version = self.trainer.in_use.number
            self.admission.admit(self.env.now)
            if not len(self.batch.request):
                yield from self._wait()
            elif self.chunk is None and len(self.batch.prefilling):
                yield from self._prefill_step(self.batch.whole_prompts(self.max_prefill_tokens))
            elif self._span is None or not (yield from self._span.play()):
                yield from self._round()
            else:
                self._let_go()

    def _wait(self) -> Process:
        """Nobody is here: until somebody comes."""
        self._work = self.env.event()
        if self.trainer is not None:
            self.trainer.idle()
        yield self._work
        if self.trainer is not None:
            self.trainer.busy()

    def _prefill_step(self, prefill: Prefill) -> Process:
        start, queued, used = self.env.now, len(self.admission.queue), self.admission.pool.used
        cost = self.cost if self.lock_step is None else self.lock_step.prefill()
        seconds = cost.step(0, 0, 0, 0.0, prefill=prefill.total, prefill_context=prefill.context)
        if self.trainer is not None:
            seconds = self.trainer.share(seconds)
        yield self.env.timeout(seconds.total)
        self._record(start, queued, used, seconds, prefill)

    def _round(self) -> Process:
        """Draft, choose lengths, verify, accept; with a chunk of prefill where there is one."""
        admission, batch, start = self.admission, self.batch, self.env.now
        view = self._view()
        draft_lens = self.driver.draft_lens(view) if len(view.request_ids) else view.request_ids
        labels = self.trainer.labels if self.trainer is not None and self.trainer.shows_whole else None
        if labels is not None:
            draft_lens = labels.draw_whole(draft_lens)
        kept = admission.reserve(view.request_ids, draft_lens)
        if admission.evicted:  # memory was short: some went back to the queue
            draft_lens, view = draft_lens[kept], self._view()
            if labels is not None:
                labels.keep(kept)
        prefill = batch.chunk(self.chunk) if self.chunk is not None and len(batch.prefilling) else None
        ids = view.request_ids
        n = len(ids)
        if not n:
            if prefill is not None:
                yield from self._prefill_step(prefill)
            return

        run, signal, draft = self._draft(ids, draft_lens)
        verify_lens = self.driver.verify_lens(view, draft)
        if labels is not None:
            verify_lens = labels.whole_blocks(verify_lens)
        totals = self._kernels.totals(draft_lens, verify_lens, view.context_lens)
        drafts, drafting, longest_draft, verified, longest, context = totals
        verified = verified if self.caps.ragged else n * longest
        cost = self.cost if self.lock_step is None else self.lock_step.round(view, draft_lens, verify_lens)
        seconds = cost.step(
            n,
            drafts + drafting,
            verified,
            context,
            longest_draft=longest_draft,
            prefill=0 if prefill is None else prefill.total,
            prefill_context=0.0 if prefill is None else prefill.context,
            reads_head=self.driver.reads_draft,
            drafter_loaded=self.driver.policy.loads_drafter,
            eager=self.driver.is_eager(verify_lens),
            ragged=verified < n * longest,
        )
        if self.trainer is not None:
            assert signal is not None
            seconds = self.trainer.share(seconds)
            self.trainer.observe(ids, admission.lives.domain[ids], run, 1 + signal, verify_lens)
        queued, used = len(admission.queue), admission.pool.used
        yield self.env.timeout(seconds.total)

        if self.recorder.rounds is not None:
            whole = labels.whole if labels is not None else None
            self.recorder.rounds.add(
                view.step, ids, admission.lives, draft_lens, verify_lens, run, draft.accept_len, whole,
                self.recorder.draft_version, draft.confidence,
            )  # fmt: skip
        accepted, emitted = admission.land(ids, draft_lens, verify_lens, run, self.env.now, self.recorder)
        if self._listens:
            self._tell(
                StepOutcome(
                    view.step, ids, draft_lens, verify_lens, admission.accepted[:n].copy(), admission.emitted[:n].copy(),
                    seconds.total, queued,
                )
            )  # fmt: skip
        self._record(start, queued, used, seconds, prefill, n, drafts, verified, accepted, emitted, context)

    def _tell(self, outcome: StepOutcome) -> None:
        self.driver.observe(outcome)
        self.admission.observe(outcome)

    def _record(
        self,
        start: float,
        queued: int,
        kv_blocks: int,
        seconds: StepSeconds,
        prefill: Prefill | None,
        decoding: int = 0,
        drafts: int = 0,
        verified: int = 0,
        accepted: int = 0,
        emitted: int = 0,
        context: float = 0.0,
    ) -> None:
        """Write the step down, and let finished requests go."""
        now, admission, steps = self.env.now, self.admission, self.recorder.steps
        prefill_tokens = first_tokens = 0
        if prefill is not None:
            prefill_tokens = prefill.total
            first_tokens, gaps_s = admission.land_prefill(prefill, now)
            if len(gaps_s):
                self.recorder.gaps(gaps_s)
        elif self.pool is not None:
            prefill_tokens, first_tokens = self.pool.landed()
        steps.append(
            (
                len(steps), start, now, decoding, queued, prefill_tokens, drafts, verified, accepted, emitted,
                first_tokens, *seconds, kv_blocks, context, admission.evicted, self.recorder.draft_version,
            )
        )  # fmt: skip
        admission.evicted = 0
        self._let_go()

    def _let_go(self) -> None:
        """Finished requests leave."""
        for index in self.admission.finish(self.env.now):
            self.source.on_finish(index)

    def _view(self) -> BatchView:
        admission, ids = self.admission, self.batch.decoding
        context_lens = admission.lives.context[ids]
        return BatchView(len(self.recorder.steps), self.env.now, self.caps, ids, context_lens, len(admission.queue))

    def _draft(self, ids: IntArray, draft_lens: IntArray) -> tuple[IntArray, FloatArray | None, DraftView]:
        """L of every request, what heads see of it, and what the policy may see.

        Only what was asked for is computed: nothing else can leak.
        """
        sees = self._sees
        if not sees and not self._signals and not np.count_nonzero(draft_lens):
            return constant(len(ids), 0), None, DraftView(draft_lens)
        lives, luck = self.admission.lives, self.luck
        at, run = luck.look_up(lives.table, ids)
        draft = DraftView(draft_lens, truth=run if "truth" in sees else None)
        if not self._signals:
            return run, None, draft
        signal, domains = luck.signal(ids, at, run), lives.domain[ids]
        if "accept_len" in sees:
            draft.accept_len = luck.report(domains, signal)
        if "survival" in sees or "margin" in sees:
            survival = luck.survival(domains, luck.confident(ids, at, run, signal))
            draft.survival = survival if "survival" in sees else None
            draft.margin = luck.margin(survival) if "margin" in sees else None
        return run, signal, draft
