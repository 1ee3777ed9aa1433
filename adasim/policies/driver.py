"""The only caller of policies: three hooks, every answer checked."""

from collections import deque

import numpy as np

from adasim.errors import PolicyError
from adasim.policies.base import Policy
from adasim.policies.needs import check_needs
from adasim.types import BatchView, DraftView, EngineCaps, IntArray, StepOutcome


class PolicyDriver:
    """Stands between an engine and a policy: validates, delays feedback, applies the engine's limits.

    Args:
        policy: the policy; ``start`` is called here.
        caps: the engine's limits and what it provides.

    Raises:
        InputError: the engine lacks something the policy needs, or a field does not fit the engine.
    """

    def __init__(self, policy: Policy, caps: EngineCaps) -> None:
        check_needs(policy.label, policy.needs, caps)
        policy.start(caps)
        self.policy, self.caps = policy, caps
        self.reads_draft = bool(policy.needs & {"survival", "accept_len"})
        self._late: deque[StepOutcome] = deque()

    def draft_lens(self, batch: BatchView) -> IntArray:
        """Hook 1, before drafting: legal draft lengths [n], 0..max_draft_len."""
        lengths = self.policy.draft_lens(batch)
        upper = np.full(len(batch), self.caps.max_draft_len, dtype=np.int64)
        self._check("draft_lens", batch, lengths, 0, upper)
        return lengths

    def verify_lens(self, batch: BatchView, draft: DraftView) -> IntArray:
        """Hook 2, after drafting: legal verify lengths [n], 1..draft_len + 1, as the engine will run them."""
        lengths = self.policy.verify_lens(batch, draft)
        self._check("verify_lens", batch, lengths, 1, draft.draft_lens + 1)
        return self.legalise(lengths, draft.draft_lens)

    def legalise(self, lengths: IntArray, draft_lens: IntArray) -> IntArray:
        """Rectangular engines verify everybody as long as the longest, where drafts exist.

        With captured lengths, the next one up is run where everybody has drafts enough for it; otherwise the
        round stays as it is and is eager (see ``is_eager``).
        """
        if self.caps.ragged or not len(lengths):
            return lengths
        longest = int(lengths.max())
        fits = [c for c in self.caps.captured_lens if longest <= c <= draft_lens.min() + 1]
        return np.minimum(min(fits, default=longest), draft_lens + 1)

    def is_eager(self, lengths: IntArray) -> bool:
        """No graph was captured for a round with these verify lengths [n], as ``legalise`` gave them."""
        captured = self.caps.captured_lens
        return bool(captured) and (int(lengths.min()) != int(lengths.max()) or int(lengths[0]) not in captured)

    def observe(self, outcome: StepOutcome) -> None:
        """Hook 3, after the round: feedback reaches the policy ``lag_steps`` rounds later."""
        self._late.append(outcome)
        if len(self._late) > self.caps.lag_steps:
            self.policy.observe(self._late.popleft())

    def _check(self, hook: str, batch: BatchView, lengths: IntArray, lower: int, upper: IntArray) -> None:
        where = f"{self.policy.label}.{hook}"
        if not isinstance(lengths, np.ndarray) or lengths.dtype.kind != "i" or lengths.shape != upper.shape:
            raise PolicyError(f"{where}: step {batch.step} got {lengths!r}, expected {len(upper)} integers")
        bad = (lengths < lower) | (lengths > upper)
        if bad.any():
            i = int(bad.argmax())
            raise PolicyError(
                f"{where}: request {batch.request_ids[i]} at step {batch.step} got {lengths[i]}, "
                f"allowed {lower}..{upper[i]}"
            )
