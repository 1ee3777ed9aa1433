"""What every length policy answers."""

from abc import ABC, abstractmethod

from adasim.types import BatchView, Component, DraftView, EngineCaps, IntArray, StepOutcome, constant


class Policy(Component, ABC):
    """Decides, per request and round, how many tokens to draft and how many to verify.

    The same object runs in the simulator and in real engines. Engines never call it directly: a
    :class:`~adasim.policies.driver.PolicyDriver` does, and checks every answer.

    ``drafter`` names one of the engine's drafters to run with; null is the engine's own.
    """

    kind: str
    name: str | None = None
    drafter: str | None = None

    @property
    def label(self) -> str:
        """Name in reports: ``name``, or the kind with the fields that were set."""
        if self.name:
            return self.name
        fields = {f: getattr(self, f) for f in sorted(self.model_fields_set - {"kind", "name"})}
        inner = ", ".join(f"{f}={v}" for f, v in fields.items())
        return f"{self.kind}({inner})" if inner else self.kind

    @property
    def needs(self) -> frozenset[str]:
        """What the engine must provide: any of "survival", "accept_len", "margin", "cost", "truth".

        Checked at the start. A real engine looks again in every round, and computes no more than it asks for then.
        """
        return frozenset()

    @property
    def loads_drafter(self) -> bool:
        """Whether the engine has a drafter loaded: then even rounds without drafts may pay for it."""
        return True

    def start(self, caps: EngineCaps) -> None:
        """Forget everything; a new run begins.

        Raises:
            InputError: a field does not fit this engine.
        """

    def draft_lens(self, batch: BatchView) -> IntArray:
        """Draft tokens per request, [n], each 0..max_draft_len; 0 = no draft pass. Default: the full block."""
        return constant(len(batch), batch.caps.max_draft_len)

    @abstractmethod
    def verify_lens(self, batch: BatchView, draft: DraftView) -> IntArray:
        """Tokens to verify per request, [n], each 1..draft_len + 1, the anchor counted."""

    def observe(self, outcome: StepOutcome) -> None:
        """Feedback of one round, ``caps.lag_steps`` rounds late. May be empty."""
