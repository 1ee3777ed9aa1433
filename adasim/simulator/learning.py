"""Online distillation as a scenario describes it."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Self

from pydantic import Field, model_validator

from adasim.calibration.acceptance import AcceptanceModel, CurveAcceptance
from adasim.calibration.labels import HeadLearning
from adasim.calibration.learning import ClippedReverseKl, LearningCurve, NamedLoss, mix_of, passes_worth, round_worth
from adasim.calibration.rollback import Rollback
from adasim.calibration.survival import tau
from adasim.errors import InputError
from adasim.types import Component, FloatArray

PUBLISHED_GPUS = 2  # of the trainer
PUBLISHED_SAMPLES = 128  # of the round that learning curves count


class Learning(Component):
    """On-policy distillation (OPD) of the drafter and its head while serving.

    Finished requests enter a bounded buffer; when enough of them are new, the trainer passes over all of it and
    publishes a version, which the engine loads between two steps. Sizes and epochs are AdaFlash's (arXiv 2607.19223);
    the time per token is assumed: re-scoring with an 8B target (2 FLOPs a parameter) and training a 1B drafter on four
    block positions a token (6 FLOPs a parameter and position) take about 100 microseconds at 0.4 PFLOP/s.

    Attributes:
        loss: "frozen", "forward_kl", "reverse_kl", "clipped_reverse_kl", "adaflash", "adaflash_code", or a loss's fields.
        curve: how every domain learns and forgets; ``curves`` replaces it for some domains.
        buffer: finished requests that training sees, the newest.
        refresh: how many of them must be new to start a round; null = all.
        max_tokens: a longer request is cut.
        reuse: what another pass over a sample is worth in terms of the one before (assumed).
        gpus: the trainer's own GPUs, used perfectly; null = AdaFlash's 2, or none with ``shared``.
        shared: share of the serving GPU that training takes while both want it (all of it when serving is idle).
        token_us: training time per token and epoch on one GPU.
        setup_s: GPU-seconds of a round whatever its size.
        reload_ms: the engine stands still to load a version.
        recompute_us: longer, per token of the running requests' contexts, whose draft keys the new version makes anew.
        in_flight: requests that run while a version is loaded use it ("new") or go on as before ("old": their draft
            keys are those of the old version).
        rollback: null = never.
        faults: version -> factor on its tau in every domain: spoilt on purpose, to see what follows.
    """

    loss: NamedLoss = ClippedReverseKl()
    curve: LearningCurve = LearningCurve()
    curves: dict[str, LearningCurve] = Field(default_factory=dict)
    head: HeadLearning = HeadLearning()
    buffer: int = Field(default=128, ge=1)
    refresh: int | None = Field(default=None, ge=1)
    max_tokens: int = Field(default=2048, ge=1)
    epochs: int = Field(default=2, ge=1)
    reuse: float = Field(default=0.5, ge=0, le=1)
    gpus: int | None = Field(default=None, ge=1)
    shared: float | None = Field(default=None, gt=0, lt=1)
    token_us: float = Field(default=100.0, gt=0)
    setup_s: float = Field(default=1.0, ge=0)
    reload_ms: float = Field(default=100.0, ge=0)
    recompute_us: float = Field(default=0.0, ge=0)
    in_flight: Literal["new", "old"] = "new"
    rollback: Rollback | None = None
    faults: dict[int, float] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        if self.refresh is not None and self.refresh > self.buffer:
            raise ValueError(f"refresh {self.refresh} exceeds the buffer of {self.buffer}")
        if self.shared is not None and self.gpus is not None:
            raise ValueError("gpus has no effect with shared: training runs on the serving GPU")
        if self.in_flight == "old" and self.recompute_us:
            raise ValueError("recompute_us has no effect with in_flight old: their draft keys are not made anew")
        if not all(v >= 1 and f > 0 for v, f in self.faults.items()):
            raise ValueError("faults: versions start at 1, factors are above 0")
        return self

    @property
    def trains(self) -> bool:
        """Whether there is a trainer at all."""
        return self.loss.kind != "frozen"

    @property
    def trainer_gpus(self) -> int:
        """GPUs beside the serving one."""
        return (self.gpus or PUBLISHED_GPUS) if self.trains and self.shared is None else 0

    def curve_of(self, domain: str) -> LearningCurve:
        """The learning curve of a domain."""
        return self.curves.get(domain, self.curve)

    def check(self, acceptance: AcceptanceModel, domains: Sequence[str], max_draft_len: int) -> None:
        """Refuse what the acceptance model cannot follow.

        Raises:
            InputError: all problems.
        """
        if not isinstance(acceptance, CurveAcceptance):
            raise InputError(
                f"backend.learning needs acceptance of kind curves, not {acceptance.kind}: runs cannot change"
            )
        problems = [
            "backend.learning: acceptance.head.reports must be truth: what a regression of a changing L reports is not "
            "modelled"
        ] * (acceptance.head.reports != "truth")
        problems += [
            "backend.learning: acceptance.head.confidence must be null: what confidences say of a changing L is not "
            "modelled"
        ] * (acceptance.head.confidence is not None)
        problems += [
            f"backend.learning.curves: no domain {d}; there are {', '.join(domains)}"
            for d in sorted(set(self.curves) - set(domains))
        ]
        for domain in domains:
            survival = acceptance.survival(domain, max_draft_len)
            limits = 1 + float((survival == 1).sum()), max_draft_len + 1.0
            for spoilt in (1.0, *self.faults.values()):
                try:
                    self.curve_of(domain).check(domain, tau(survival), limits, self.loss.reach, spoilt)
                except InputError as error:
                    problems += error.problems
        if problems:
            raise InputError(*problems)

    @property
    def notes(self) -> list[str]:
        """What a report must say."""
        if not self.trains:
            return []
        return [
            "online distillation: asymptotes follow published tau; how fast a drafter learns and forgets, how its head "
            "follows, and how long training takes are assumptions of the scenario, not measurements"
        ]

    def work_s(self, tokens: int) -> float:
        """GPU-seconds of a round over ``tokens`` tokens."""
        return self.setup_s + 1e-6 * self.token_us * self.epochs * tokens


@dataclass(slots=True)
class Sample:
    """A finished request as the trainer sees it. Label sums are over its rounds, tokens."""

    domain: int
    tokens: int
    labels: float
    reports: float  # what the head said, less its level then
    rounds: int  # labelled ones
    passes: int = 0  # over it so far


class Lesson(NamedTuple):
    """What one round over the buffer teaches."""

    rounds: float  # in published rounds
    share: FloatArray  # of each domain
    samples: int
    fresh: int
    tokens: int


@dataclass(slots=True)
class Buffer:
    """The newest finished requests, the oldest leaving first. Invariant: added = held + left."""

    capacity: int
    samples: deque[Sample] = field(default_factory=deque)
    added: int = 0
    left: int = 0
    unseen: int = 0  # left without ever being trained on
    fresh: int = 0  # held, never trained on

    def add(self, sample: Sample) -> None:
        """A request finished."""
        self.samples.append(sample)
        self.added, self.fresh = self.added + 1, self.fresh + 1
        if len(self.samples) > self.capacity:
            old = self.samples.popleft()
            self.left += 1
            if not old.passes:
                self.unseen, self.fresh = self.unseen + 1, self.fresh - 1

    def teach(self, epochs: int, reuse: float, domains: int) -> Lesson:
        """Pass ``epochs`` times over all samples."""
        worth = passes_worth([s.passes for s in self.samples], epochs, reuse)
        lesson = Lesson(
            round_worth(worth, PUBLISHED_SAMPLES, reuse),
            mix_of(worth, [s.domain for s in self.samples], domains),
            len(self.samples),
            self.fresh,
            sum(s.tokens for s in self.samples),
        )
        for sample in self.samples:
            sample.passes += epochs
        self.fresh = 0
        return lesson
