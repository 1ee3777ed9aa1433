"""The torch engine: continuous batching with one packed forward over the sum of verify lengths.

Who waits, who runs and who holds KV blocks is decided by the same ``Admission`` and Scheduler as in the
simulator; lengths by the same PolicyDriver. This file adds tensors, tokens and real time.
"""

import random
from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adasim.policies.driver import PolicyDriver
from adasim.real.collect import Collector
from adasim.real.draft import Drafter
from adasim.real.kv import Span
from adasim.real.length_head import PaperHead, ReleasedHead
from adasim.real.proposal import Proposal, propose
from adasim.real.samples import Round
from adasim.real.sampling import Forced, Sampling
from adasim.real.slots import Slots
from adasim.real.target import Target
from adasim.real.verify import Verdict, accept_greedy, accept_sampled
from adasim.records import StepRecord
from adasim.serving.admission import Admission
from adasim.serving.recorder import Recorder
from adasim.types import BatchView, DraftView, IntArray, StepOutcome, StepSeconds

UNLIMITED = 1 << 40  # tokens of one step


class Engine:
    """Serves requests.

    Args:
        target: the model that decides every token.
        drafter: proposes; None = plain decoding only.
        head: length head; None = the engine provides no ``accept_len``.
        admission: queue, batch and memory; its requests' prompt lengths are those of ``prompts``.
        prompts: prompt tokens by request index.
        eos: tokens that end a request; empty = only its output length does.
        max_len: tokens a KV slot holds, a full block of drafts beyond the longest request included.
        max_prefill_tokens: prompt tokens of one prefill step (one prompt always fits).
        forced: accept by decree instead of by comparison.
        collector: takes what the trainer needs of every finished request.
        full_verify_share: requests of a round whose whole block is drafted and verified whatever the policy says.
        clock: seconds.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        head: PaperHead | ReleasedHead | None,
        driver: PolicyDriver,
        admission: Admission,
        recorder: Recorder,
        prompts: Sequence[list[int]],
        *,
        eos: frozenset[int],
        max_len: int,
        sampling: Sampling,
        seed: int = 0,
        max_prefill_tokens: int = 4096,
        forced: Forced | None = None,
        collector: Collector | None = None,
        full_verify_share: float = 0.0,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.target, self.drafter, self.head, self.driver = target, drafter, head, driver
        self.collector, self.full_verify_share = collector, full_verify_share
        self.admission, self.batch, self.recorder, self.clock = admission, admission.batch, recorder, clock
        self.tokens = [list(p) for p in prompts]  # of every request, output included
        self.eos, self.sampling, self.forced, self.max_prefill_tokens = eos, sampling, forced, max_prefill_tokens
        self.filler = next(token for token in range(len(eos) + 1) if token not in eos)  # what decrees give as a token
        slots = min(driver.caps.max_running_requests, len(prompts))
        self.kv = target.cache(slots, max_len)
        self.draft_kv = drafter.cache(slots, max_len) if drafter else None
        self.taps = drafter.shape.taps if drafter else ()
        self.slots = Slots(self.kv, self.draft_kv)
        self.generator = torch.Generator(target.device).manual_seed(seed)
        self.rng = random.Random(seed)

    def step(self) -> list[int]:
        """Admit, then run one prefill or one round. Returns the requests that finished."""
        self.admission.admit(self.clock())
        self.slots.settle(self.batch.request.tolist(), lambda index: len(self.tokens[index]) - 1)
        if len(self.batch.prefilling):
            self._prefill()
        elif len(self.batch):
            self._round()
        steps = self.recorder.steps  # a request ends with its last step, not when it is noticed
        finished = self.admission.finish(float(steps[-1]["end_s"]) if steps else self.clock())
        if self.collector is not None:
            for index in finished:
                domain = int(self.admission.lives.domain[index])
                self.collector.finish(index, self.tokens[index], domain)
        return finished

    def reload(self, drafter: Drafter, head: PaperHead | ReleasedHead | None, version: int) -> None:
        """Use another drafter of the same shape from the next round on.

        Running requests go on; the context their draft layers keep was made by the old version, so they draft a
        little worse until they end, never wrongly.
        """
        self.drafter, self.head, self.recorder.draft_version = drafter, head, version

    def _prefill(self) -> None:
        """Whole prompts, the longest-waiting first, give their first token each."""
        start, queued, used, batch = self.clock(), len(self.admission.queue), self.admission.pool.used, self.batch
        given = self.forced is not None and not self.forced.prefill
        prefill = batch.whole_prompts(UNLIMITED if given else self.max_prefill_tokens)
        ids = prefill.ids.tolist()
        spans = [Span(self.slots[i], 0, len(self.tokens[i])) for i in ids]
        chosen = self._give(spans) if given else self._compute(ids, spans)
        for index, token in zip(ids, chosen, strict=True):
            self._append(index, [token])
        now = self.clock()
        first, gaps_s = self.admission.land_prefill(prefill, now)
        self.recorder.gaps(gaps_s)
        seconds = StepSeconds(overhead=now - start) if given else StepSeconds(prefill=now - start)
        self._record(start, now, queued, used, seconds, prefill=0 if given else prefill.total, first=first)

    def _compute(self, ids: list[int], spans: list[Span]) -> list[int]:
        """One forward over whole prompts; returns the first token of each."""
        packed = self._tensor([t for i in ids for t in self.tokens[i]])
        hidden, tapped = self.target.forward(packed, spans, self.kv, self.taps)
        ends = torch.tensor([s.length for s in spans]).cumsum(0) - 1
        logits = self.target.logits(hidden[ends.to(hidden.device)])
        if tapped is not None:
            self._absorb(tapped, spans)
            if self.collector is not None:
                for i, index in enumerate(ids):
                    end = int(ends[i]) + 1
                    self.collector.prefill(index, tapped[end - spans[i].length : end], logits[i])
        if self.sampling.greedy:
            chosen = logits.argmax(-1)
        else:
            chosen = torch.multinomial(self.sampling.probabilities(logits), 1, generator=self.generator)[:, 0]
        first: list[int] = chosen.tolist()
        return first

    def _give(self, spans: list[Span]) -> list[int]:
        """Prompts by decree: arbitrary context, and an arbitrary first token each."""
        for kv in self.slots.caches:
            kv.fill(spans)
        return [self.filler] * len(spans)

    def _round(self) -> None:
        """Draft, choose lengths, verify, accept."""
        start, batch = self.clock(), self.batch
        rows = np.array(sorted(range(len(batch)), key=lambda r: self.slots[int(batch.request[r])]))
        view = self._view(rows)
        draft_lens = self._draft_lens(view)
        whole = self._whole_blocks(draft_lens)
        draft_lens = np.where(whole, self.driver.caps.max_draft_len, draft_lens)
        kept = self.admission.reserve(view.request_ids, draft_lens)
        if not kept.all():  # memory was short: some went back to the queue
            ids, draft_lens, whole = view.request_ids[kept], draft_lens[kept], whole[kept]
            rows = np.array([int(np.flatnonzero(batch.request == i)[0]) for i in ids])
            view = self._view(rows)
        ids = view.request_ids.tolist()
        drafting = self.clock()
        proposal = self._propose(ids, draft_lens)
        drafted = self.clock()
        draft = self._draft_view(proposal, draft_lens)
        verify_lens = self.driver.verify_lens(view, draft)
        verify_lens = np.where(whole, draft_lens + 1, verify_lens)
        deciding = self.clock()
        verdicts = self._verify(ids, proposal, verify_lens, whole.tolist())
        verified = self.clock()

        for i, (row, index, verdict) in enumerate(zip(rows.tolist(), ids, verdicts, strict=True)):
            new = [*proposal.tokens[i][: verdict.accepted], verdict.token]
            self._append(index, new[: int(batch.want[row] - batch.done[row])])
        run = np.array([v.accepted for v in verdicts], dtype=np.int64)
        now, queued, used = self.clock(), len(self.admission.queue), self.admission.pool.used
        if self.recorder.rounds is not None:
            self.recorder.rounds.add(
                view.step, view.request_ids, self.admission.lives, draft_lens, verify_lens, run, draft.accept_len,
                whole, self.recorder.draft_version, draft.confidence,
            )  # fmt: skip
        self.admission.land(view.request_ids, draft_lens, verify_lens, run, now, self.recorder)
        self.admission.lives.draft_version[view.request_ids] = self.recorder.draft_version
        outcome = StepOutcome(
            view.step, view.request_ids, draft_lens, verify_lens, run, self.admission.emitted[: len(ids)].copy(),
            now - start, queued,
        )  # fmt: skip
        self.driver.observe(outcome)
        self.admission.scheduler.observe(outcome)
        draft_s, verify_s = drafted - drafting, verified - deciding
        seconds = StepSeconds(draft_s, verify_s, now - start - draft_s - verify_s)
        self._record(start, now, queued, used, seconds, view=view, outcome=outcome)

    def _propose(self, ids: list[int], draft_lens: IntArray) -> Proposal:
        if self.drafter is None or self.draft_kv is None:
            return Proposal([[] for _ in ids], None, [], None, None)
        anchors = [self.tokens[i][-1] for i in ids]
        spans = [
            Span(self.slots[i], len(self.tokens[i]) - 1, k + 1 if k else 0)
            for i, k in zip(ids, draft_lens.tolist(), strict=True)
        ]
        needs = self.driver.policy.needs
        head = self.head if "accept_len" in needs else None
        return propose(
            self.drafter, self.draft_kv, anchors, spans, self.sampling, self.generator, head,
            survival="survival" in needs, margin="margin" in needs,
        )  # fmt: skip

    def _verify(self, ids: list[int], proposal: Proposal, verify_lens: IntArray, whole: list[bool]) -> list[Verdict]:
        """One packed forward over anchors and the drafts to verify; keeps what was accepted."""
        drafts = [tokens[: v - 1] for tokens, v in zip(proposal.tokens, verify_lens.tolist(), strict=True)]
        spans = [Span(self.slots[i], len(self.tokens[i]) - 1, len(d) + 1) for i, d in zip(ids, drafts, strict=True)]
        packed = [t for i, d in zip(ids, drafts, strict=True) for t in (self.tokens[i][-1], *d)]
        hidden, tapped = self.target.forward(self._tensor(packed), spans, self.kv, self.taps)
        logits = self.target.logits(hidden)
        if self.sampling.greedy:
            verdicts = accept_greedy(logits.argmax(-1).tolist(), drafts)
        else:
            p, vocab = self.sampling.probabilities(logits), self.drafter.vocab if self.drafter else None
            verdicts = accept_sampled(p, proposal.q, drafts, self.generator, vocab)
        if self.forced is not None:  # after the comparison, whose time is part of a round's
            verdicts = self._by_decree(drafts)
        if tapped is not None:
            keep = [Span(s.slot, s.start, v.accepted + 1) for s, v in zip(spans, verdicts, strict=True)]
            starts = np.cumsum([0, *(s.length for s in spans[:-1])])
            rows = [np.arange(a, a + k.length) for a, k in zip(starts, keep, strict=True)]
            self._absorb(tapped[torch.from_numpy(np.concatenate(rows)).to(tapped.device)], keep)
            if self.collector is not None:
                for index, span, verdict, first, full in zip(ids, spans, verdicts, starts, whole, strict=True):
                    step = Round(span.start, span.length, verdict.accepted, self.recorder.draft_version, full)
                    part = slice(int(first), int(first) + span.length)
                    self.collector.round(index, step, tapped[part], logits[part])
        return verdicts

    def _by_decree(self, drafts: list[list[int]]) -> list[Verdict]:
        """So many drafts accepted as was said beforehand; the token after them is arbitrary."""
        assert self.forced is not None
        return [Verdict(self.forced.run(len(tokens), self.rng), self.filler) for tokens in drafts]

    def _absorb(self, tapped: Tensor, spans: list[Span]) -> None:
        """Give the drafter the hidden states of committed tokens."""
        assert self.drafter is not None
        assert self.draft_kv is not None
        self.drafter.absorb(tapped, spans, self.draft_kv)

    def _append(self, index: int, new: list[int]) -> int:
        """Give tokens to a request, up to its first EOS. Returns how many."""
        end = next((count for count, token in enumerate(new, 1) if token in self.eos), None)
        if end is not None:
            new = new[:end]
            self.admission.lives.want[index] = self.admission.lives.done[index] + end
        self.tokens[index] += new
        return len(new)

    def _draft_lens(self, view: BatchView) -> IntArray:
        lengths = self.driver.draft_lens(view)
        return lengths if self.drafter is not None else np.zeros_like(lengths)

    def _whole_blocks(self, draft_lens: IntArray) -> NDArray[np.bool_]:
        """Which requests of a round show the trainer a whole block: drawn anew each round, blind to any token."""
        if self.collector is None or self.full_verify_share == 0:
            return np.zeros(len(draft_lens), dtype=bool)
        drawn = np.array([self.rng.random() for _ in draft_lens])
        return (draft_lens > 0) & (drawn < self.full_verify_share)

    def _view(self, rows: IntArray) -> BatchView:
        batch, step = self.batch, len(self.recorder.steps)
        queued = len(self.admission.queue)
        return BatchView(step, self.clock(), self.driver.caps, batch.request[rows], batch.context[rows], queued)

    def _draft_view(self, proposal: Proposal, draft_lens: IntArray) -> DraftView:
        return DraftView(draft_lens, survival=proposal.survival, accept_len=proposal.accept_len, margin=proposal.margin)

    def _tensor(self, tokens: list[int]) -> Tensor:
        return torch.tensor(tokens, device=self.target.device)

    def _record(
        self, start: float, now: float, queued: int, kv_blocks: int, seconds: StepSeconds, prefill: int = 0,
        first: int = 0, view: BatchView | None = None, outcome: StepOutcome | None = None,
    ) -> None:  # fmt: skip
        def total(name: str) -> int:
            return 0 if outcome is None else int(getattr(outcome, name).sum())

        self.recorder.steps.append(
            StepRecord(
                step=len(self.recorder.steps),
                start_s=start,
                end_s=now,
                decoding=0 if view is None else len(view),
                queued=queued,
                prefill_tokens=prefill,
                draft_tokens=total("draft_lens"),
                verify_tokens=total("verify_lens"),
                accepted=total("accepted"),
                emitted=total("emitted"),
                first_tokens=first,
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
