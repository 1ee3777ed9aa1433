"""Who asks for what, and when."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Discriminator, Field, PrivateAttr, Tag, model_validator

from adasim.errors import InputError
from adasim.lengths import AnyLength, FixedLength
from adasim.traces import TraceFormat, TraceRow, read_trace
from adasim.types import Component, FloatArray, IntArray, Request

Weight = Annotated[float, Field(ge=0)]
Mix = dict[str, Weight]


class DriftPoint(Component):
    """The domain mix from ``at`` on: a request number in closed loops, seconds in open ones."""

    at: float = Field(ge=0)
    mix: Mix = Field(min_length=1)


class Drift(Component):
    """A domain mix that changes: jumps at its points (``step``), moves linearly between them (``ramp``), or
    swings between the first two in a cosine of ``period`` (``periodic``).
    """

    kind: Literal["step", "ramp", "periodic"]
    points: list[DriftPoint] = Field(min_length=2)
    period: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _complete(self) -> Self:
        at = [p.at for p in self.points]
        if at != sorted(set(at)):
            raise ValueError("the points' at must rise")
        if (self.period is not None) != (self.kind == "periodic"):
            raise ValueError("period belongs to periodic drift, and only to it")
        if self.kind == "periodic" and len(self.points) != 2:
            raise ValueError("periodic drift swings between exactly two points")
        return self

    def weights(self, progress: FloatArray, domains: list[str]) -> FloatArray:
        """Domain probabilities [n, domains] at ``progress`` [n] (request numbers or seconds)."""
        mixes = np.array([normalised(p.mix, domains) for p in self.points])
        at = np.array([p.at for p in self.points])
        if self.kind == "periodic":
            assert self.period is not None
            share = (1 - np.cos(2 * np.pi * (progress - at[0]) / self.period)) / 2
            share = np.where(progress < at[0], 0.0, share)[:, None]
            return (1 - share) * mixes[0] + share * mixes[1]
        if self.kind == "step":
            return mixes[np.searchsorted(at, progress, side="right").clip(1) - 1]
        return np.stack([np.interp(progress, at, mixes[:, d]) for d in range(len(domains))], axis=1)


def normalised(mix: Mix, domains: list[str]) -> list[float]:
    """Probabilities in the order of ``domains``."""
    total = sum(mix.values())
    return [mix.get(d, 0.0) / total for d in domains]


def _mix_or_drift(value: object) -> str:
    """Which of the two a value is meant to be."""
    return "drift" if isinstance(value, Drift) or (isinstance(value, dict) and "kind" in value) else "mix"


AnyMix = Annotated[Annotated[Mix, Tag("mix")] | Annotated[Drift, Tag("drift")], Discriminator(_mix_or_drift)]


_latest: "deque[tuple[int, Workload, Sequence[Request]]]" = deque(maxlen=1)  # seed, whose, requests


class Workload(Component, ABC):
    """Requests with domains, lengths and arrival times; the same ones for every policy."""

    kind: str
    domains: AnyMix = Field(default={"default": 1.0})

    @model_validator(mode="after")
    def _mixes(self) -> Self:
        mixes = [p.mix for p in self.domains.points] if isinstance(self.domains, Drift) else [self.domains]
        if not all(sum(m.values()) > 0 for m in mixes):
            raise ValueError("domains: the weights of a mix must not all be 0")
        return self

    @property
    def clients(self) -> int | None:
        """Clients of a closed loop; None when requests arrive on their own."""
        return None

    @property
    def domain_names(self) -> list[str]:
        """All domains, sorted; ``Request.domain`` indexes them."""
        if isinstance(self.domains, Drift):
            return sorted({d for p in self.domains.points for d in p.mix})
        return sorted(self.domains)

    @property
    @abstractmethod
    def count(self) -> int:
        """Requests of one run."""

    @abstractmethod
    def generate(self, seed: int) -> list[Request]:
        """The requests of one run, in order of arrival."""

    def requests_of(self, seed: int) -> Sequence[Request]:
        """The same, the latest kept: a plan and every policy's run ask for them again. Not to be changed."""
        if not _latest or _latest[0][:2] != (seed, self):
            _latest.append((seed, self, self.generate(seed)))
        return _latest[0][2]

    def _domains(self, rng: np.random.Generator, progress: FloatArray) -> IntArray:
        names = self.domain_names
        if isinstance(self.domains, Drift):
            weights = self.domains.weights(progress, names)
        else:
            weights = np.tile(normalised(self.domains, names), (len(progress), 1))
        draws = rng.random(len(progress))
        return (draws[:, None] > np.cumsum(weights, axis=1)[:, :-1]).sum(axis=1)


class Synthetic(Workload):
    """Requests whose lengths are drawn from distributions; 256 of them by default."""

    requests: int | None = Field(default=None, ge=1)
    prompt_len: AnyLength = FixedLength(tokens=512)
    output_len: AnyLength = FixedLength(tokens=256)

    def generate(self, seed: int) -> list[Request]:
        """Lengths, domains and arrivals come from streams of their own, so changing one keeps the others."""
        n = self.count
        arrive, prompt, output, domain = (np.random.default_rng([seed, stream]) for stream in range(4))
        times = self._arrivals(arrive, n)
        progress = np.arange(n, dtype=float) if self.clients is not None else times
        return [
            Request(i, d, p, o, t)
            for i, (d, p, o, t) in enumerate(
                zip(
                    self._domains(domain, progress).tolist(),
                    self.prompt_len.draw(prompt, n).tolist(),
                    self.output_len.draw(output, n).tolist(),
                    times.tolist(),
                    strict=True,
                )
            )
        ]

    @property
    def count(self) -> int:
        """See :attr:`Workload.count`."""
        return self.requests or 256

    @abstractmethod
    def _arrivals(self, rng: np.random.Generator, n: int) -> FloatArray:
        """Arrival times, seconds, [n]."""


class Closed(Synthetic):
    """``concurrency`` clients; each sends its next request when its last has finished.

    ``requests`` in all, or ``requests_per_client`` each on average. ``drain: false`` ends the run when the last
    request has been sent, so that the batch never thins out.
    """

    kind: Literal["closed"] = "closed"
    concurrency: int = Field(ge=1)
    requests_per_client: int | None = Field(default=None, ge=1)
    drain: bool = True

    @model_validator(mode="after")
    def _one_count(self) -> Self:
        if self.requests is not None and self.requests_per_client is not None:
            raise ValueError("give requests or requests_per_client, not both")
        return self

    @property
    def clients(self) -> int | None:
        """``concurrency``."""
        return self.concurrency

    @property
    def count(self) -> int:
        """See :attr:`Workload.count`."""
        if self.requests_per_client is not None:
            return self.requests_per_client * self.concurrency
        return super().count

    def _arrivals(self, rng: np.random.Generator, n: int) -> FloatArray:
        return np.zeros(n)


class Poisson(Synthetic):
    """Independent arrivals at ``rate_rps`` requests per second."""

    kind: Literal["poisson"] = "poisson"
    rate_rps: float = Field(gt=0)

    def _arrivals(self, rng: np.random.Generator, n: int) -> FloatArray:
        return np.cumsum(rng.exponential(1 / self.rate_rps, n))


class Bursty(Synthetic):
    """Gamma-distributed gaps with mean 1 / rate_rps and coefficient of variation ``cv`` (1 = Poisson)."""

    kind: Literal["bursty"] = "bursty"
    rate_rps: float = Field(gt=0)
    cv: float = Field(default=3.0, gt=0)

    def _arrivals(self, rng: np.random.Generator, n: int) -> FloatArray:
        shape = 1 / self.cv**2
        return np.cumsum(rng.gamma(shape, 1 / (shape * self.rate_rps), n))


class Trace(Workload):
    """Replays a public trace: Azure CSV, Mooncake JSONL or Vidur CSV, recognised by its form.

    ``speed`` > 1 compresses time; ``limit`` takes the first requests; ``skip_empty`` leaves out requests
    without a prompt or output token, which are an error otherwise.
    """

    kind: Literal["trace"] = "trace"
    path: str
    format: TraceFormat | None = None
    limit: int | None = Field(default=None, ge=1)
    speed: float = Field(default=1.0, gt=0)
    skip_empty: bool = False
    _rows: list[TraceRow] = PrivateAttr(default_factory=list)

    @model_validator(mode="after")
    def _read(self) -> Self:
        self._rows = read_trace(self.path, self.format, self.limit, skip_empty=self.skip_empty)
        if not self._rows:
            raise InputError(f"{self.path}: holds no request")
        return self

    @property
    def count(self) -> int:
        """See :attr:`Workload.count`."""
        return len(self._rows)

    def generate(self, seed: int) -> list[Request]:
        """The trace's requests; only their domains depend on the seed."""
        times = np.array([r.arrival_s for r in self._rows]) / self.speed
        domains = self._domains(np.random.default_rng([seed, 3]), times)
        return [
            Request(i, int(d), r.prompt_len, r.output_len, float(t), r.hash_ids)
            for i, (r, d, t) in enumerate(zip(self._rows, domains, times, strict=True))
        ]


AnyWorkload = Annotated[Closed | Poisson | Bursty | Trace, Field(discriminator="kind")]
