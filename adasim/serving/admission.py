"""Who waits, who runs, and who holds which KV memory."""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from math import isnan

import numpy as np
from numpy.typing import NDArray

from adasim.errors import PolicyError
from adasim.kernels import kernels
from adasim.policies.scheduler import Scheduler
from adasim.serving.batch import Batch, Prefill
from adasim.serving.kv import KvMemory, KvPool
from adasim.serving.lives import FINISHED, RUNNING, WAITING, Lives
from adasim.serving.recorder import Recorder
from adasim.traces import HASH_BLOCK
from adasim.types import EngineCaps, FloatArray, IntArray, QueueView, Request, RunningView, StepOutcome


class Admission:
    """Moves requests between queue and batch, and accounts for their memory.

    Args:
        requests: all requests of the run, by index.
        bases: where each request's luck starts, [requests].
        scheduler: decides; this class checks and carries out.
        memory: size and form of the KV memory.
        caps: the engine's limits.
        predicted_lens: guessed output tokens of each request, [requests]; None = nobody guesses.
        lives: of all requests, where several admissions share them; None = made here.
        prefilled: requests come with their KV computed elsewhere (``join``), and those that lose their memory go to this
            function, who keeps their KV; None = prompts and evicted requests are computed here.

    Raises:
        InputError: the scheduler needs what the engine does not provide.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        bases: IntArray,
        scheduler: Scheduler,
        memory: KvMemory,
        caps: EngineCaps,
        predicted_lens: FloatArray | None = None,
        *,
        lives: Lives | None = None,
        prefilled: Callable[[IntArray], None] | None = None,
    ) -> None:
        self.requests, self.lives = requests, Lives(requests, bases) if lives is None else lives
        self._prefilled = prefilled
        self.scheduler, self.caps, self.predicted_lens = scheduler, caps, predicted_lens
        self.pool, self.batch = KvPool(memory), Batch(self.lives)
        self.queue: deque[int] = deque()
        self.evicted = 0
        self._complete = False  # somebody has all tokens
        self._shared: dict[int, list[int]] = {}  # hash ids that running requests use
        self._kernels, self._block_tokens, self._caches = kernels(), memory.block_tokens, memory.prefix_cache
        most = min(caps.max_running_requests, len(requests))
        self._all, self._gaps_s = np.ones(most, dtype=bool), np.empty(most)
        self.accepted, self.emitted = np.empty((2, most), dtype=np.int64)  # of the latest round
        scheduler.check(caps)
        scheduler.start(caps)

    def submit(self, index: int, now_s: float) -> None:
        """A request arrives."""
        self.lives.arrival_s[index], self.lives.status[index] = now_s, WAITING
        self.queue.append(index)

    def join(self, index: int, *, first: bool = False) -> None:
        """A request comes with its KV computed; ``first``: before the others."""
        self.lives.status[index] = WAITING
        (self.queue.appendleft if first else self.queue.append)(index)

    @property
    def listens(self) -> bool:
        """Whether the scheduler wants to know how rounds went."""
        return type(self.scheduler).observe is not Scheduler.observe

    def observe(self, outcome: StepOutcome) -> None:
        """Tell the scheduler how a round went."""
        self.scheduler.observe(outcome)

    def admit(self, now_s: float) -> None:
        """Let the scheduler move waiting requests into the batch.

        Raises:
            PolicyError: it chose an illegal request, or nobody although nobody runs.
        """
        if not self.queue:
            return
        places = self.caps.max_running_requests - len(self.batch.request)
        if places <= 0:
            return
        waiting = list(self.queue if self.scheduler.sees_whole_queue else islice(self.queue, places))
        ids, lives, pool = np.array(waiting, dtype=np.int64), self.lives, self.pool
        view = QueueView(
            ids, lives.arrival_s[ids], lives.prompt[ids], self._blocks_to_admit(ids), now_s, self._predicted(ids)
        )
        running = RunningView(self.batch.request, self.batch.context, self.batch.held)
        chosen = self.scheduler.admit(view, running, pool.available, self.caps)
        names = chosen.tolist()
        needed = view.blocks
        if len(names) > places or names != waiting[: len(names)]:  # others than the first
            if len(names) > places or len(set(names)) < len(names) or not set(names) <= set(waiting):
                raise PolicyError(f"{self.scheduler.kind}.admit: {names}; allowed: up to {places} of {waiting}")
            needed = self._blocks_to_admit(chosen)
        for i, (index, blocks) in enumerate(zip(names, needed.tolist(), strict=False)):
            now_needed = int(self._blocks_to_admit(chosen[i : i + 1])[0]) if self._caches else blocks
            if now_needed > pool.available:
                chosen = chosen[:i]  # an earlier one took cached blocks this one counted on
                break
            self.queue.remove(index)
            self._start(index, now_s)
        self.batch.add(chosen)
        if not len(self.batch.request):
            raise PolicyError(f"{self.scheduler.kind}.admit: nobody of {waiting}, although nobody runs")

    def reserve(self, ids: IntArray, draft_lens: IntArray) -> NDArray[np.bool_]:
        """Hold k + 1 KV slots for each request, sending requests back to the queue while they do not fit.

        Args:
            ids: requests that will decode, [n].
            draft_lens: their draft tokens k, [n].

        Returns:
            Which of ``ids`` are still there, [n]; ``evicted`` tells whether anybody went, others included.
        """
        kept, pool, batch = self._all[: len(ids)], self.pool, self.batch
        while True:
            more = self._kernels.reserve(self.lives.table, ids, draft_lens, self._block_tokens, pool.available)
            if more >= 0:
                if more:
                    pool.take(more)
                return kept
            view = RunningView(batch.request, batch.context, batch.held)
            gone = np.isin(batch.request, self.scheduler.evict(view, -more))
            if not gone.any():
                raise PolicyError(f"{self.scheduler.kind}.evict: nobody, but {-more} KV blocks are missing")
            left = np.isin(ids, batch.request[~gone])
            kept = kept.copy()
            kept[kept] = left
            ids, draft_lens = ids[left], draft_lens[left]
            self._evict(gone)

    def land_prefill(self, prefill: Prefill, now_s: float) -> tuple[int, FloatArray]:
        """A step computed prompt tokens; complete prompts give their next token.

        Returns how many did, and the time since the last chunk of those that were evicted before.
        """
        lives, ids = self.lives, prefill.ids
        ready, again, complete = self._kernels.land_prefill(
            lives.table, ids, prefill.tokens, now_s, lives.first_token_s, lives.emitted_s, self._gaps_s
        )
        self._complete |= complete
        if ready:
            self.cache_prompts(ids)
            self.batch.prefilled()
        return ready, self._gaps_s[:again]

    def land(
        self,
        ids: IntArray,
        draft_lens: IntArray,
        verify_lens: IntArray,
        run: IntArray,
        now_s: float,
        recorder: Recorder,
    ) -> tuple[int, int]:
        """A round ended: count it, write down its blocks and gaps, and give the slots of rejected drafts back.

        Args:
            ids: requests that took part, [n].
            draft_lens: drafts of each, [n].
            verify_lens: tokens verified of each, the anchor counted, [n].
            run: drafts the target agrees with from the anchor on, verified or not, [n].
            now_s: the time.
            recorder: takes the round down.

        Returns:
            Drafts accepted and tokens emitted; by request in ``accepted`` and ``emitted`` [:n] until the next round.
        """
        all_accepted, all_emitted, spare, complete = self._kernels.land(
            self.lives.table, ids, draft_lens, verify_lens, run, now_s, self._block_tokens, self.lives.emitted_s,
            recorder.blocks, self.accepted, self.emitted, self._gaps_s,
        )  # fmt: skip
        recorder.gaps(self._gaps_s[: len(ids)])
        self.pool.private -= spare
        self._complete |= complete
        return all_accepted, all_emitted

    def land_rounds(
        self, starts: Sequence[float], running: IntArray, private: int, complete: bool, recorder: Recorder
    ) -> None:
        """Steps that were played at once ended, the first and the last of them rounds: hold the blocks they took.

        Args:
            starts: when each began, and the last ended, [steps + 1].
            running: who took part in the last round, [n].
            private: KV blocks that requests hold more than before.
            complete: whether a request has all its tokens.
            recorder: takes the gaps of the first round down; its steps do not hold it yet.
        """
        ids, emitted_s = self.batch.request, self.lives.emitted_s
        np.subtract(starts[1], emitted_s[ids], out=self._gaps_s[: len(ids)])
        recorder.gaps(self._gaps_s[: len(ids)])
        emitted_s[running] = starts[-1]
        self.pool.private += private
        self._complete |= complete

    def exchange(
        self, running: IntArray, left: IntArray, arrived: range, left_s: FloatArray, first_token_s: FloatArray
    ) -> None:
        """During steps that were played at once requests finished; as many arrived, and the first who waited entered.

        Args:
            running: who runs now, with their prompts computed, [n].
            left: who finished, [m].
            arrived: who arrived when each of them finished; empty: nobody came any more.
            left_s: when that was, [m].
            first_token_s: of those who entered, [m].
        """
        lives = self.lives
        if arrived:
            lives.arrival_s[arrived.start : arrived.stop] = left_s
            lives.status[arrived.start : arrived.stop] = WAITING
            self.queue.extend(arrived)
            entered = [self.queue.popleft() for _ in arrived]
            lives.admitted_s[entered], lives.first_token_s[entered] = left_s, first_token_s
            lives.status[entered] = RUNNING
        lives.finish_s[left], lives.status[left] = left_s, FINISHED  # last: some entered just before
        self.batch.exchange(running)

    def cache_prompts(self, ids: IntArray) -> None:
        """Blocks of complete prompts enter the prefix cache."""
        if not self._caches:
            return
        for index in ids[self.lives.prefill_left[ids] == 0].tolist():
            shared = self._shared[index]
            computed = list(self.requests[index].hash_ids[len(shared) :])
            blocks = len(computed) * self.pool.hash_blocks
            self.pool.take(-blocks)
            self.pool.share(computed)
            shared += computed
            self.lives.held[index] -= blocks
            self.lives.shared[index] += blocks

    def finish(self, now_s: float) -> list[int]:
        """Requests that have all their tokens leave; their indices."""
        if not self._complete:
            return []
        self._complete = False
        lives, ids = self.lives, np.empty(len(self.batch.request), dtype=np.int64)
        left = self._kernels.finished(lives.table, self.batch.request, ids)
        finished = ids[left:]
        lives.finish_s[finished] = now_s
        lives.status[finished] = FINISHED
        self._leave(finished, ids[:left])
        return finished.tolist()

    def _blocks_to_admit(self, ids: IntArray) -> IntArray:
        """Blocks each takes from ``available``: its tokens and one full block of drafts, less what is shared, [m]."""
        blocks = (self.lives.context[ids] + (self.caps.block + self._block_tokens - 1)) // self._block_tokens
        if self._caches:
            hashes = [self.requests[i].hash_ids for i in ids.tolist()]
            shared = [self.pool.hits(h) - self.pool.idle_hits(h) for h in hashes]
            blocks -= self.pool.hash_blocks * np.array(shared, dtype=np.int64)
        return blocks

    def _predicted(self, ids: IntArray) -> FloatArray | None:
        """Guessed output tokens still to come, at least one each, [m]."""
        if self.predicted_lens is None:
            return None
        return np.maximum(self.predicted_lens[ids] - self.lives.done[ids], 1.0)

    def _start(self, index: int, now_s: float) -> None:
        """Take memory for a request that is about to enter the batch."""
        lives, pool, cached, shared = self.lives, self.pool, 0, 0
        tokens = int(lives.context[index])
        if self._caches:
            hashes = self.requests[index].hash_ids
            found = self._shared[index] = list(hashes[: pool.hits(hashes)])
            pool.share(found)
            cached = min(len(found) * HASH_BLOCK, tokens - 1)  # the last token is always computed
            shared = len(found) * pool.hash_blocks
        held = -(-tokens // self._block_tokens) - shared
        pool.take(held)
        if isnan(lives.admitted_s[index]):
            lives.cached[index], lives.admitted_s[index] = cached, now_s
        lives.status[index] = RUNNING
        lives.prefill_left[index] = tokens - cached if self._prefilled is None else 0
        lives.held[index], lives.shared[index] = held, shared

    def _evict(self, gone: NDArray[np.bool_]) -> None:
        """Back to the head of the queue; their KV is computed anew when they return."""
        evicted = self.batch.request[gone]
        self._leave(evicted, self.batch.request[~gone])
        self.lives.evictions[evicted] += 1
        self.lives.status[evicted] = WAITING
        if self._prefilled is None:
            self.queue.extendleft(evicted[::-1].tolist())
        else:
            self._prefilled(evicted)
        self.evicted += len(evicted)

    def _leave(self, leaving: IntArray, stay: IntArray) -> None:
        self.pool.take(-sum(self.lives.held[leaving].tolist()))
        if self._caches:
            for index in leaving.tolist():
                self.pool.unshare(self._shared.pop(index))
        self.batch.keep(stay)
