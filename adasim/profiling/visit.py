"""One run of a profile: a batch of requests that begin with the same context, and play known rounds."""

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from adasim.identity import EngineIdentity
from adasim.plan import Trial
from adasim.policies.probe import Probe, Shape
from adasim.serving.kv import KvMemory
from adasim.types import EngineCaps, Request
from adasim.workload import Workload

ACCEPTED = 1  # drafts by decree, where so many are verified: all requests of a batch stay in step
Kind = Literal["probe", "plain", "prefill", "reference"]


class Measurable(Protocol):
    """An engine that can be profiled; its runs are made through scenarios, like any other."""

    @property
    def max_running_requests(self) -> int:
        """Places of the batch."""
        ...

    @property
    def max_prefill_tokens(self) -> int:
        """Prompt tokens of one prefill step."""
        ...

    @property
    def kv(self) -> KvMemory:
        """Memory of contexts."""
        ...

    def caps(self) -> EngineCaps:
        """The engine's limits and what it provides."""
        ...

    def identity(self) -> EngineIdentity:
        """Where its numbers come from."""
        ...

    def served_requests(self, workload: Workload, seed: int) -> list[Request]:
        """A workload's requests with the prompt lengths they will have."""
        ...

    def forced_fields(self, accepted: int, *, prefill: bool) -> dict[str, Any]:
        """Fields of its configuration for runs that measure costs.

        Args:
            accepted: drafts that every block accepts, as far as it is verified.
            prefill: compute prompts; false: contexts may be made up, if that is cheaper.
        """
        ...


@dataclass(frozen=True, slots=True)
class Visit:
    """A run to make, any number of times.

    Attributes:
        kind: ``probe`` plays ``shapes``, ``plain`` decodes without a drafter, ``prefill`` computes prompts and ends,
            ``reference`` decodes plainly for the sake of the machine's speed.
        batch: requests that run together.
        context: tokens of each when rounds begin; prompt tokens.
        shapes: rounds of one pass.
        passes: how often each shape is played; batches one after the other of a prefill.
        tier: 0 = a profile is too thin without it, 1 = the scenario's own points, 2 = finer.
    """

    kind: Kind
    batch: int
    context: int
    shapes: tuple[Shape, ...]
    passes: int
    tier: int = 0

    @property
    def label(self) -> str:
        """Its policy's name in records."""
        if self.kind != "probe":
            return self.kind
        return f"probe {','.join(str(n) for n in sorted({s.verify_len for s in self.shapes}))}"

    @property
    def place(self) -> str:
        """For a person."""
        return f"{self.label}, batch {self.batch}, context {self.context}"

    @property
    def rounds(self) -> int:
        """Rounds it plays; the probe's first shape once more than the others."""
        return 0 if self.kind == "prefill" else len(self.shapes) * self.passes + (self.kind == "probe")

    @property
    def output_len(self) -> int:
        """Tokens each request gives: the prefill's one, then each round's."""
        if self.kind == "prefill":
            return 1
        given = [1 + min(ACCEPTED, s.verify_len - 1) for s in self.shapes]
        return 1 + self.passes * sum(given) + (given[0] if self.kind == "probe" else 0)

    @property
    def work(self) -> float:
        """Roughly how long it takes, in rounds of one token; only ratios between similar visits are used."""
        if self.kind == "prefill":
            return self.passes * (1 + self.batch * self.context / 16)
        tokens = sum(s.draft_len + s.verify_len for s in self.shapes) * self.passes * self.batch
        return self.rounds + tokens / 16

    def trial(self, base: Trial, engine: Measurable, domain: str, repeat: int) -> Trial:
        """The run as a trial of the scenario that ``base`` is one of; all requests are of one ``domain``."""
        config = {k: v for k, v in base.config.items() if k in {"name", "title"}}
        waves = self.passes if self.kind == "prefill" else 1
        config["workload"] = {
            "kind": "closed",
            "concurrency": self.batch,
            "requests": self.batch * waves,
            "prompt_len": {"kind": "fixed", "tokens": self.context},
            "output_len": {"kind": "fixed", "tokens": self.output_len},
            "domains": {domain: 1.0},
        }
        config["backend"] = base.config["backend"] | engine.forced_fields(ACCEPTED, prefill=self.kind == "prefill")
        config["policies"] = [self._policy(repeat)]
        config["measure"] = {"warmup_requests": 0, "until_last_arrival": False}
        point = {"workload.concurrency": self.batch, "workload.prompt_len.tokens": self.context}
        return Trial(self.label, dict(point), repeat, config, base.base, base.digests)

    def _policy(self, repeat: int) -> dict[str, Any]:
        if not self.drafter:
            return {"kind": "off", "name": self.label}
        return self.probe(repeat).model_dump(mode="json")

    @property
    def drafter(self) -> bool:
        """Whether one is loaded."""
        return self.kind in {"probe", "prefill"}

    def probe(self, repeat: int) -> Probe:
        """The policy of a repeat that loads the drafter."""
        return Probe(name=self.label, shapes=list(self.shapes), seed=repeat)
