"""The only caller of policies: three hooks, every answer checked."""

from collections import deque

import numpy as np

from adasim.errors import InputError, PolicyError
from adasim.kernels import kernels
from adasim.policies.base import LengthRule, Policy
from adasim.policies.needs import check_needs
from adasim.types import HEAD_OUTPUTS, BatchView, DraftView, EngineCaps, IntArray, StepOutcome, constant


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
        if policy.drafter is not None and policy.drafter not in caps.drafters:
            known = ", ".join(sorted(caps.drafters)) or "only its own"
            raise InputError(f"{policy.label}: drafter {policy.drafter}; the engine has {known}")
        policy.start(caps)
        self.policy, self.caps = policy, caps
        self.needs = policy.needs
        self.listens = type(policy).observe is not Policy.observe
        self.ruled = _ruled(type(policy)) and not self.listens  # it may have a ``rule``
        self._rules: dict[tuple[int, int], LengthRule | None] = {}  # by running and queued requests
        self._late: deque[StepOutcome] = deque()
        self._passed: dict[str, tuple[IntArray, IntArray]] = {}
        self._first_outside = kernels().first_outside

    @property
    def reads_draft(self) -> bool:
        """Whether the round at hand asks a length or confidence head; a probe's rounds differ."""
        return bool(self.policy.needs & HEAD_OUTPUTS)

    def draft_lens(self, batch: BatchView) -> IntArray:
        """Hook 1, before drafting: legal draft lengths [n], 0..max_draft_len."""
        lengths = self.policy.draft_lens(batch)
        return self._checked("draft_lens", batch, lengths, 0, constant(len(batch.request_ids), self.caps.max_draft_len))

    def verify_lens(self, batch: BatchView, draft: DraftView) -> IntArray:
        """Hook 2, after drafting: legal verify lengths [n], 1..draft_len + 1, as the engine will run them."""
        lengths = self.policy.verify_lens(batch, draft)
        lengths = self._checked("verify_lens", batch, lengths, 1, draft.draft_lens)
        return lengths if self.caps.ragged else self.legalise(lengths, draft.draft_lens)

    def rule(self, running: int, queued: int) -> LengthRule | None:
        """What hooks 1 and 2 will answer as long as so many run and wait, as the engine will run it; None = ask them."""
        if not self.ruled:
            return None
        if (running, queued) not in self._rules:
            self._rules[running, queued] = self._legal(self.policy.rule(running, queued))
        return self._rules[running, queued]

    def _legal(self, rule: LengthRule | None) -> LengthRule | None:
        if rule is None or self.caps.ragged:
            return rule
        if not rule.verify_len:
            return None
        drafts, lengths = constant(1, rule.draft_len), constant(1, rule.verify_len)
        return rule._replace(verify_len=int(self.legalise(lengths, drafts)[0]))

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
        if not self.listens:
            return
        self._late.append(outcome)
        if len(self._late) > self.caps.lag_steps:
            self.policy.observe(self._late.popleft())

    def _checked(self, hook: str, batch: BatchView, lengths: IntArray, lower: int, most: IntArray) -> IntArray:
        """``lengths``, each within ``lower``..``lower + most``."""
        passed = self._passed.get(hook)
        if passed is not None and passed[0] is lengths and passed[1] is most:
            return lengths
        if not isinstance(lengths, np.ndarray) or lengths.dtype.kind != "i" or lengths.shape != most.shape:
            where = f"{self.policy.label}.{hook}"
            raise PolicyError(f"{where}: step {batch.step} got {lengths!r}, expected {len(most)} integers")
        lengths = np.ascontiguousarray(lengths, dtype=np.int64)
        i = self._first_outside(lengths, lower, most)
        if i >= 0:
            raise PolicyError(
                f"{self.policy.label}.{hook}: request {batch.request_ids[i]} at step {batch.step} got {lengths[i]}, "
                f"allowed {lower}..{lower + most[i]}"
            )
        if not (lengths.flags.writeable or most.flags.writeable):
            self._passed[hook] = lengths, most  # constants: they need no second look
        return lengths


def _ruled(policy: type[Policy]) -> bool:
    """Whether there is a rule as new as the hooks: none of them was defined by a class derived from the rule's.

    A hook that is exchanged on the class or on an object, as tests may, is not seen: derive a class instead.
    """
    where = {name: next(c for c in policy.__mro__ if name in vars(c)) for name in ("rule", "draft_lens", "verify_lens")}
    return where["rule"] is not Policy and all(issubclass(where["rule"], owner) for owner in where.values())
