"""What both kernel modules hold, and the columns of the table they work on."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from adasim.types import FloatArray, IntArray

Int16Array = NDArray[np.int16]

COLUMNS = (
    "domain", "prompt", "output", "want", "base", "status", "done", "context", "prefill_left", "held", "shared",
    "rounds", "drafts", "verified", "accepted", "evictions", "cached", "draft_version",
)  # fmt: skip
DOMAIN, _, _, WANT, BASE, _, DONE, CONTEXT, LEFT, HELD, SHARED, ROUNDS, DRAFTS, VERIFIED, ACCEPTED, _, _, _ = range(
    len(COLUMNS)
)


class Kernels(Protocol):
    """``lives`` [requests, COLUMNS] tells of all requests (see ``serving.lives``), ``ids`` [n] are those concerned.

    The arrays that results go to come last.
    """

    def first_outside(self, lengths: IntArray, lower: int, most: IntArray) -> int:
        """Index of the first of ``lengths`` [n] outside ``lower``..``lower + most`` [n]; -1 = none."""
        ...

    def reserve(self, lives: IntArray, ids: IntArray, draft_lens: IntArray, block_tokens: int, available: int) -> int:
        """Hold KV blocks for each context and its drafts [n]. Returns the blocks taken; -m: m are missing, none taken."""
        ...

    def look_up(
        self, lives: IntArray, ids: IntArray, grades: Int16Array, limits: IntArray, at: IntArray, run: IntArray
    ) -> bool:
        """L of each request from where it is now; see ``calibration.luck.Luck``.

        Args:
            lives: all requests.
            ids: those asked for, [n].
            grades: of every token; negative where it is not drawn yet.
            limits: highest grade that is accepted, by domain and distance from the anchor, [domains, K].
            at: where the anchors are in ``grades``, [n].
            run: L, [n].

        Returns:
            Whether all of it was drawn.
        """
        ...

    def signal(
        self, at: IntArray, run: IntArray, noise: FloatArray, bias: float, scale: float, signal: FloatArray
    ) -> bool:
        """run + bias + scale x noise at ``at``, to ``signal`` [n]; False: some noise is not drawn yet (NaN)."""
        ...

    def totals(
        self, draft_lens: IntArray, verify_lens: IntArray, context_lens: IntArray
    ) -> tuple[int, int, int, int, int, float]:
        """Draft tokens, requests that draft, longest draft, verified tokens, longest verification, mean context."""
        ...

    def land(
        self, lives: IntArray, ids: IntArray, draft_lens: IntArray, verify_lens: IntArray, run: IntArray, now_s: float,
        block_tokens: int, emitted_s: FloatArray, blocks: IntArray, accepted: IntArray, emitted: IntArray,
        gaps_s: FloatArray,
    ) -> tuple[int, int, int, bool]:  # fmt: skip
        """Accept ``min(run, verify_len - 1)`` drafts, emit one token more, count both and give spare KV blocks back.

        Args:
            lives: all requests.
            ids: those of the round, [n].
            draft_lens: of each, [n].
            verify_lens: of each, the anchor counted, [n].
            run: drafts the target agrees with, [n].
            now_s: the time.
            block_tokens: tokens of a KV block.
            emitted_s: time of each request's last chunk, [requests].
            blocks: how often a verified block of this domain and length had so many accepted, [domains, B + 1, B].
            accepted: drafts, [>= n].
            emitted: tokens, [>= n].
            gaps_s: since each last chunk, [>= n].

        Returns:
            Drafts accepted, tokens emitted, KV blocks given back, and whether a request has all its tokens.
        """
        ...

    def rounds(
        self, lives: IntArray, ids: IntArray, grades: Int16Array, limits: IntArray, noise: FloatArray,
        draft_len: int, verify_len: int, gamma: float, anchor: int, floor: bool, least: int, bias: float, scale: float,
        block_tokens: int, free: int, first: int, spare: int, fewest: int, block: int, prefill_limit: int,
        blocks: IntArray, left: IntArray, out: IntArray,
    ) -> tuple[int, int, bool]:  # fmt: skip
        """Rounds until somebody who has all its tokens cannot leave, memory gets short, or ``out`` is full.

        Each does what ``reserve``, ``look_up``, ``signal``, the policy and ``land`` do for one round. Between two of them
        those who have all their tokens leave; as many enter, first come, first served, and steps compute their prompts;
        or, if nobody may, the others go on. The first step and the last are rounds.

        Args:
            lives: all requests.
            ids: those that decode, [n]; in the end those of the last round come first.
            grades: see ``look_up``.
            limits: see ``look_up``.
            noise: see ``signal``; read only where the head decides.
            draft_len: drafts of each request.
            verify_len: tokens verified of each, the anchor counted; 0 = as the length head says, by the next four; see
                ``policies.base.LengthRule``.
            gamma: factor of what it says.
            anchor: what gamma does not scale, tokens.
            floor: round down, not to the nearest.
            least: tokens that are verified at least.
            bias: see ``signal``.
            scale: see ``signal``.
            block_tokens: tokens of a KV block.
            free: KV blocks that nobody holds.
            first: the request that enters first; the others follow it.
            spare: how many may enter.
            fewest: requests that may be left when nobody enters.
            block: tokens for which a request must find memory to enter, beside its context.
            prefill_limit: prompt tokens of one step; one prompt always fits.
            blocks: see ``land``.
            left: of each that left: its index, the step before, the step that prefilled the one who came, [any, 3].
            out: of each round: tokens verified, longest verification, context of all requests before it, drafts accepted,
                tokens emitted, KV blocks taken for it, what is left of them until the next step, requests. Of each step
                that prefills: prompt tokens, 0, the sum of the prompts' squares, 0, first tokens, 0, 0, 0. [steps, 8].

        Returns:
            How many steps, how many requests left, and whether more have all their tokens; -1 steps: some luck is not
            drawn yet, nothing was done.
        """
        ...

    def prefill(
        self, lives: IntArray, ids: IntArray, limit: int, whole: bool, tokens: IntArray
    ) -> tuple[int, int, float]:
        """Prompt tokens of the first requests of ``ids`` [n], ``limit`` in all; ``whole``: whole prompts, at least one.

        Returns how many requests get some, how many tokens, and the mean context these attend to. Their tokens go to
        the beginning of ``tokens`` [n].
        """
        ...

    def land_prefill(
        self, lives: IntArray, ids: IntArray, tokens: IntArray, now_s: float, first_token_s: FloatArray,
        emitted_s: FloatArray, gaps_s: FloatArray,
    ) -> tuple[int, int, bool]:  # fmt: skip
        """``tokens`` [m] of each of ``ids`` are computed: complete prompts give a token.

        Returns how many did, how many of them had given some before, and whether a request has all its tokens. The time
        since their last chunk goes to the beginning of ``gaps_s`` [>= m].
        """
        ...

    def distinct(self, values: FloatArray, found: FloatArray, counts: IntArray) -> int:
        """Different values in rising order and how often each occurs, to the arrays [>= n]. Returns how many."""
        ...

    def grade(
        self, values: FloatArray, counts: IntArray, domains: IntArray, levels: FloatArray, starts: IntArray,
        grades: Int16Array,
    ) -> None:  # fmt: skip
        """How many levels of its domain each value exceeds.

        Args:
            values: of several requests, one after the other.
            counts: values of each, [m].
            domains: of each, [m].
            levels: by domain, rising; infinite ones come last, [domains, K].
            starts: where each request's grades begin, [m].
            grades: of all requests.
        """
        ...

    def finished(self, lives: IntArray, ids: IntArray, sorted_ids: IntArray) -> int:
        """Who of ``ids`` [n] has all its tokens and nothing to prefill: them last in ``sorted_ids`` [n], in order.

        Returns how many are left, who come first, in order.
        """
        ...

    def carry(self, ids: IntArray, curves: FloatArray, request_ids: IntArray, carried: FloatArray) -> None:
        """``curves`` [m, K] of ``ids`` [m] for ``request_ids`` [n], to ``carried`` [n, K]; else their mean."""
        ...

    def early_budget(self, requests: int, rising: FloatArray, seconds: FloatArray) -> int:
        """The first number m of drafts with which more tokens per second are expected than with m + 1.

        Tokens of m drafts are ``requests`` + the sum of the m largest survivals.

        Args:
            requests: n.
            rising: survival of all drafts, sorted; -1 where nothing was drafted, [n K].
            seconds: of rounds with m drafts, [n K + 1].
        """
        ...

    def spend(self, survival: FloatArray, budget: int, least: float, lengths: IntArray) -> None:
        """1 + how many of each row are among the ``budget`` largest of ``survival`` [n, K], to ``lengths`` [n].

        ``least`` is the smallest of those; among equals the first in row order wins.
        """
        ...

    def curves(
        self,
        domains: IntArray,
        signal: FloatArray,
        posterior: FloatArray,
        first: float,
        per_token: int,
        curves: FloatArray,
    ) -> None:
        """Rows of ``posterior`` [domains, bins, K] that go with each ``signal`` [n], to ``curves`` [n, K].

        Args:
            domains: of each request, [n].
            signal: what its head sees, [n].
            posterior: by domain and bin of signal.
            first: signal of the first bin.
            per_token: bins per token.
            curves: the rows.
        """
        ...

    def normals(self, key: int, streams: IntArray, starts: IntArray, counts: IntArray, draws: FloatArray) -> None:
        """Standard normal numbers as numpy draws them from ``Philox(key=[key, stream])``, of several streams.

        The first ``counts`` [m] numbers of ``streams`` [m] go to ``draws``, each from ``starts`` [m] on.
        """
        ...

    def autoregression(self, draws: FloatArray, phi: float, scale: float, before: float) -> FloatArray:
        """x_i = phi x_{i-1} + scale draws_i, starting after ``before``, [n]."""
        ...
