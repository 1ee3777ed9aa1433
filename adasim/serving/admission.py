"""Who waits, who runs, and who holds which KV memory."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import nan

import numpy as np
from numpy.typing import NDArray

from adasim.errors import PolicyError
from adasim.policies.scheduler import Scheduler
from adasim.serving.batch import Batch
from adasim.serving.kv import KvMemory, KvPool
from adasim.traces import HASH_BLOCK
from adasim.types import EngineCaps, FloatArray, IntArray, QueueView, Request, RunningView, StepOutcome


@dataclass(slots=True)
class Life:
    """What becomes of one request. Its counters are written when it leaves the batch."""

    request: Request
    status: str = "dropped"  # until it arrives
    arrival_s: float = nan
    admitted_s: float = nan
    first_token_s: float = nan
    emitted_s: float = nan  # last chunk
    finish_s: float = nan
    tokens: int = 0
    rounds: int = 0
    drafts: int = 0
    verified: int = 0
    accepted: int = 0
    evictions: int = 0
    cached: int = 0
    draft_version: int = 0  # of its last round
    shared: list[int] = field(default_factory=list)  # hash ids it uses while running


class Admission:
    """Moves requests between queue and batch, and accounts for their memory.

    Args:
        requests: all requests of the run, by index.
        bases: where each request's luck starts, [requests].
        scheduler: decides; this class checks and carries out.
        memory: size and form of the KV memory.
        caps: the engine's limits.
        predicted_lens: guessed output tokens of each request, [requests]; None = nobody guesses.

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
    ) -> None:
        self.lives = [Life(r) for r in requests]
        self.bases, self.scheduler, self.caps = bases, scheduler, caps
        self.predicted_lens = predicted_lens
        self.pool, self.batch = KvPool(memory), Batch()
        self.queue: deque[int] = deque()
        self.evicted = 0
        scheduler.check(caps)
        scheduler.start(caps)

    def submit(self, index: int, now_s: float) -> None:
        """A request arrives."""
        life = self.lives[index]
        life.arrival_s, life.status = now_s, "waiting"
        self.queue.append(index)

    def admit(self, now_s: float) -> None:
        """Let the scheduler move waiting requests into the batch.

        Raises:
            PolicyError: it chose an illegal request, or nobody although nobody runs.
        """
        places = self.caps.max_running_requests - len(self.batch)
        if not self.queue or places <= 0:
            return
        shown = len(self.queue) if self.scheduler.sees_whole_queue else min(places, len(self.queue))
        waiting = [self.queue[i] for i in range(shown)]
        lives = [self.lives[i] for i in waiting]
        view = QueueView(
            np.array(waiting, dtype=np.int64),
            np.array([x.arrival_s for x in lives]),
            np.array([x.request.prompt_len for x in lives], dtype=np.int64),
            np.array([self._blocks_to_admit(x) for x in lives], dtype=np.int64),
            now_s,
            self._predicted(waiting),
        )
        running = RunningView(self.batch.request, self.batch.context, self.batch.held)
        chosen = self.scheduler.admit(view, running, self.pool.available, self.caps).tolist()
        if len(chosen) > places or len(set(chosen)) < len(chosen) or not set(chosen) <= set(waiting):
            raise PolicyError(f"{self.scheduler.kind}.admit: {chosen}; allowed: up to {places} of {waiting}")
        for index in chosen:
            if self._blocks_to_admit(self.lives[index]) > self.pool.available:
                break  # an earlier one took cached blocks this one counted on
            self.queue.remove(index)
            self._start(index, now_s)
        if not len(self.batch):
            raise PolicyError(f"{self.scheduler.kind}.admit: nobody of {waiting}, although nobody runs")

    def reserve(self, rows: IntArray, draft_lens: IntArray) -> NDArray[np.bool_]:
        """Hold k + 1 KV slots for each of ``rows``, sending requests back to the queue while they do not fit.

        Args:
            rows: batch rows that will decode, [n].
            draft_lens: their draft tokens k, [n].

        Returns:
            Which of ``rows`` are still there, [n]. Others may have gone too: find rows anew.
        """
        kept = np.ones(len(rows), dtype=bool)
        while len(rows):
            batch = self.batch
            wanted = self._blocks(batch.context[rows] + draft_lens[kept]) - batch.shared[rows]
            more = int((wanted - batch.held[rows]).clip(0).sum())
            short = more - self.pool.available
            if short <= 0:
                batch.held[rows] = np.maximum(wanted, batch.held[rows])
                self.pool.take(more)
                break
            view = RunningView(batch.request, batch.context, batch.held)
            gone = np.isin(batch.request, self.scheduler.evict(view, short))
            if not gone.any():
                raise PolicyError(f"{self.scheduler.kind}.evict: nobody, but {short} KV blocks are missing")
            kept[kept] = ~gone[rows]
            stays = ~gone
            rows = (np.cumsum(stays) - 1)[rows[stays[rows]]]
            self._evict(gone)
        return kept

    def land_prefill(self, prefill: IntArray, now_s: float) -> tuple[int, FloatArray]:
        """A step computed ``prefill`` prompt tokens of each row [n]; complete prompts give their next token.

        Returns how many did, and the time since the last chunk of those that were evicted before.
        """
        batch = self.batch
        batch.prefill_left -= prefill
        complete = np.flatnonzero((prefill > 0) & (batch.prefill_left == 0))
        for index in batch.request[complete].tolist():
            life = self.lives[index]
            life.first_token_s = now_s if np.isnan(life.first_token_s) else life.first_token_s
        self.cache_prompts(complete)
        returned = complete[batch.done[complete] > 0]  # their users have waited since
        gaps_s = now_s - batch.emitted_s[returned]
        batch.done[complete] += 1
        batch.emitted_s[complete] = now_s
        return len(complete), gaps_s

    def land(self, rows: IntArray, outcome: StepOutcome, now_s: float) -> FloatArray:
        """A round of ``rows`` ended: count it and give spare slots back. Returns the time since each last chunk, [n]."""
        batch = self.batch
        batch.done[rows] += outcome.emitted
        batch.rounds[rows] += 1
        batch.drafts[rows] += outcome.draft_lens
        batch.verified[rows] += outcome.verify_lens
        batch.accepted[rows] += outcome.accepted
        gaps_s = now_s - batch.emitted_s[rows]
        batch.emitted_s[rows] = now_s
        self.release_spare(rows)
        return gaps_s

    def release_spare(self, rows: IntArray) -> None:
        """Give back the slots of rejected drafts. The newest token, the next anchor, has no KV yet."""
        batch = self.batch
        spare = batch.held[rows] - (self._blocks(batch.context[rows] - 1) - batch.shared[rows])
        batch.held[rows] -= spare
        self.pool.take(-int(spare.sum()))

    def cache_prompts(self, rows: IntArray) -> None:
        """Computed prompt blocks of ``rows`` enter the prefix cache."""
        batch = self.batch
        for row in rows.tolist():
            life = self.lives[int(batch.request[row])]
            computed = list(self._hash_ids(life)[len(life.shared) :])
            blocks = len(computed) * self.pool.hash_blocks
            self.pool.take(-blocks)
            self.pool.share(computed)
            life.shared += computed
            batch.held[row] -= blocks
            batch.shared[row] += blocks

    def finish(self, now_s: float) -> list[int]:
        """Requests that have all their tokens leave; their indices."""
        batch = self.batch
        gone = (batch.done >= batch.want) & (batch.prefill_left == 0)
        if not gone.any():
            return []
        finished: list[int] = batch.request[gone].tolist()
        for index in finished:
            self.lives[index].finish_s, self.lives[index].status = now_s, "finished"
        self._leave(gone)
        return finished

    def save(self) -> None:
        """Write the counters of all running requests into their lives."""
        self._save(np.arange(len(self.batch)))

    def _save(self, rows: IntArray) -> None:
        batch = self.batch
        for row in rows.tolist():
            life = self.lives[int(batch.request[row])]
            life.tokens, life.rounds = int(batch.done[row]), int(batch.rounds[row])
            life.drafts, life.verified = int(batch.drafts[row]), int(batch.verified[row])
            life.accepted, life.emitted_s = int(batch.accepted[row]), float(batch.emitted_s[row])

    def _predicted(self, waiting: list[int]) -> FloatArray | None:
        """Guessed output tokens still to come, at least one each."""
        if self.predicted_lens is None:
            return None
        given = np.array([self.lives[i].tokens for i in waiting])
        return np.maximum(self.predicted_lens[waiting] - given, 1.0)

    def _blocks(self, tokens: IntArray) -> IntArray:
        return -(-tokens // self.pool.memory.block_tokens)

    def _hash_ids(self, life: Life) -> tuple[int, ...]:
        return life.request.hash_ids if self.pool.memory.prefix_cache else ()

    def _blocks_to_admit(self, life: Life) -> int:
        """Blocks taken from ``available``: its tokens and one full block of drafts, less what is shared."""
        tokens = life.request.prompt_len + life.tokens + self.caps.block
        ids = self._hash_ids(life)
        shared = self.pool.hits(ids) - self.pool.idle_hits(ids)
        return self.pool.memory.blocks_for(tokens) - self.pool.hash_blocks * shared

    def _start(self, index: int, now_s: float) -> None:
        life = self.lives[index]
        ids = self._hash_ids(life)
        life.shared = list(ids[: self.pool.hits(ids)])
        self.pool.share(life.shared)
        tokens = life.request.prompt_len + life.tokens
        cached = min(len(life.shared) * HASH_BLOCK, tokens - 1)  # the last token is always computed
        shared = len(life.shared) * self.pool.hash_blocks
        held = self.pool.memory.blocks_for(tokens) - shared
        self.pool.take(held)
        if life.status == "waiting" and np.isnan(life.admitted_s):
            life.cached, life.admitted_s = cached, now_s
        life.status = "running"
        self.batch.add(
            emitted_s=life.emitted_s,
            request=index,
            domain=life.request.domain,
            base=int(self.bases[index]),
            prompt=life.request.prompt_len,
            want=life.request.output_len,
            done=life.tokens,
            prefill_left=tokens - cached,
            held=held,
            shared=shared,
            rounds=life.rounds,
            drafts=life.drafts,
            verified=life.verified,
            accepted=life.accepted,
        )

    def _evict(self, gone: NDArray[np.bool_]) -> None:
        """Back to the head of the queue; their KV is computed anew when they return."""
        evicted = self.batch.request[gone].tolist()
        self._leave(gone)
        for index in evicted[::-1]:
            self.lives[index].evictions += 1
            self.lives[index].status = "waiting"
            self.queue.appendleft(index)
        self.evicted += len(evicted)

    def _leave(self, gone: NDArray[np.bool_]) -> None:
        self._save(np.flatnonzero(gone))
        self.pool.take(-int(self.batch.held[gone].sum()))
        for index in self.batch.request[gone].tolist():
            self.pool.unshare(self.lives[index].shared)
            self.lives[index].shared = []
        self.batch.keep(~gone)
