"""What a policy knows about time: seconds of a round, asked for once and kept."""

import numpy as np

from adasim.types import BatchView, EngineCaps, FloatArray

CONTEXT_TOKENS = 512  # contexts this close count as one


class StepTimes:
    """Tables of round seconds, filled as batch sizes and contexts come up.

    Engines profile their rounds at start-up in the same way: at some sizes, linear in between, at captured graph
    sizes exactly (vLLM PR 47808). DSpark's table is additive, bias + alpha(n) + theta(tokens); this one keeps how the two
    interact. A table holds for a batch size and contexts of about 512 tokens; it is made at the context at which it is
    first needed.

    Args:
        caps: the engine; its cost model answers.
    """

    def __init__(self, caps: EngineCaps) -> None:
        assert caps.cost is not None
        self._cost, self._caps = caps.cost, caps
        self._by_tokens: dict[tuple[int, int], FloatArray] = {}
        self._by_drafts: dict[tuple[int, int, bool], FloatArray] = {}

    def by_tokens(self, batch: BatchView) -> FloatArray:
        """Seconds of rounds that draft full blocks and verify n, n + 1, ... n B tokens of n requests, [n (B - 1) + 1]."""
        n = len(batch.request_ids)
        context = int(batch.context_lens.sum()) / n
        key = n, int(context) // CONTEXT_TOKENS
        if key not in self._by_tokens:
            block = self._caps.block
            graphs = [c + more for c in self._caps.captured_tokens for more in (0, 1) if n <= c + more <= n * block]
            probes = sorted({*range(n, n * block + 1, n), *graphs})
            seconds = [self._cost.round_s(n, n * block, tokens, context) for tokens in probes]
            self._by_tokens[key] = np.interp(np.arange(n, n * block + 1), probes, seconds)
        return self._by_tokens[key]

    def by_drafts(self, batch: BatchView, draft_block: bool) -> FloatArray:
        """Seconds of rounds in which all verify k = 0, 1, ... drafts, [max_draft_len + 1].

        ``draft_block``: the drafter fills the full block unless k is 0.
        """
        n = len(batch.request_ids)
        context = int(batch.context_lens.sum()) / n
        key = n, int(context) // CONTEXT_TOKENS, draft_block
        if key not in self._by_drafts:
            lengths = range(self._caps.block)
            drafted = [n * (self._caps.block if draft_block else k + 1) if k else 0 for k in lengths]
            seconds = [self._cost.round_s(n, d, n * (k + 1), context) for k, d in zip(lengths, drafted, strict=True)]
            self._by_drafts[key] = np.array(seconds)
        return self._by_drafts[key]
