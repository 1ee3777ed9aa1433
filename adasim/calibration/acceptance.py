"""Acceptance models: where the luck of a text comes from."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from hashlib import sha256
from itertools import repeat
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, PrivateAttr, model_validator

from adasim.calibration.head_quality import HeadQuality
from adasim.calibration.luck import COMMON, TOKENS, Luck, RequestRng
from adasim.calibration.survival import AnyCurve, harden, hardening_power
from adasim.calibration.text import grade, hardness, solve_thresholds
from adasim.errors import InputError
from adasim.files import Columns, find, read_columns
from adasim.kernels.form import Int16Array
from adasim.types import Component, FloatArray, IntArray, Request

NO_NOISE: FloatArray = np.empty(0)
Factor = Annotated[float, Field(gt=0)]


class AcceptanceModel(Component, ABC):
    """Gives every output position of every request its L, whatever the policy.

    Luck is keyed by (seed, request id, output token index): two policies that meet at the same position of
    the same request see the same L.
    """

    kind: str
    head: HeadQuality = HeadQuality()

    @property
    @abstractmethod
    def domains(self) -> list[str]:
        """Those it knows, sorted."""

    @abstractmethod
    def check(self, domains: Sequence[str], max_draft_len: int) -> None:
        """Refuse what cannot be answered.

        Raises:
            InputError: a domain or a draft length the model does not cover.
        """

    def check_requests(self, requests: Sequence[Request]) -> None:
        """Refuse requests outside the model's range.

        Raises:
            InputError: the first such request.
        """

    @abstractmethod
    def luck(self, requests: Sequence[Request], domains: Sequence[str], seed: int, max_draft_len: int) -> Luck:
        """Luck of ``requests``, whose ``domain`` indexes ``domains``."""


class CurveAcceptance(AcceptanceModel):
    """Acceptance by domain from survival curves, over correlated text (see ``calibration.text``).

    ``tau_by_context`` and ``tau_by_temperature`` scale tau, linearly between their points; outside them is
    an error. The curves hold where the factor is 1.
    """

    kind: Literal["curves"] = "curves"
    curves: dict[str, AnyCurve] = Field(min_length=1)
    spread: float = Field(default=0.0, ge=0, lt=1)
    correlation: float = Field(default=0.0, ge=0, lt=1)
    range_tokens: float = Field(default=3.0, gt=0, le=1000)
    temperature: float = Field(default=0.0, ge=0)
    tau_by_temperature: dict[float, Factor] | None = Field(default=None, min_length=1)
    tau_by_context: dict[int, Factor] | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        if self.spread + self.correlation >= 1:
            raise ValueError("spread + correlation must stay below 1: each token has luck of its own")
        if self.temperature and self.tau_by_temperature is None:
            raise ValueError("temperature has no effect without tau_by_temperature")
        if self.tau_by_temperature is not None:
            _factor(self.tau_by_temperature, self.temperature, "temperature")
        return self

    @property
    def domains(self) -> list[str]:
        """Those with a curve."""
        return sorted(self.curves)

    def check(self, domains: Sequence[str], max_draft_len: int) -> None:
        """Every domain needs a curve that reaches ``max_draft_len``."""
        unknown = sorted(set(domains) - set(self.curves))
        if unknown:
            raise InputError(
                f"acceptance: no curve for domain {', '.join(unknown)}; there are {', '.join(sorted(self.curves))}"
            )
        self.head.check(domains)
        for name in domains:
            curve = self.survival(name, max_draft_len)
            for factor in (self.tau_by_context or {}).values():
                hardening_power(curve, factor)

    def check_requests(self, requests: Sequence[Request]) -> None:
        """Contexts must lie within ``tau_by_context``."""
        if self.tau_by_context is None:
            return
        low, high = min(self.tau_by_context), max(self.tau_by_context)
        for r in requests:
            last = r.prompt_len + r.output_len
            if r.prompt_len < low or last > high:
                raise InputError(
                    f"acceptance.tau_by_context: request {r.id} has context {r.prompt_len}..{last}; covered {low}..{high}"
                )

    def survival(self, domain: str, max_draft_len: int) -> FloatArray:
        """The curve of a domain at the model's temperature, [max_draft_len]."""
        curve = self.curves[domain].survival(max_draft_len)
        curve = np.maximum(curve, 1e-12)  # a zero would leave the thresholds beyond it undefined
        if self.tau_by_temperature is None:
            return curve
        return harden(curve, _factor(self.tau_by_temperature, self.temperature, "temperature"))

    def luck(self, requests: Sequence[Request], domains: Sequence[str], seed: int, max_draft_len: int) -> Luck:
        """See :meth:`AcceptanceModel.luck`."""
        curves = [self.survival(d, max_draft_len) for d in domains]
        return _TextLuck(requests, seed, domains, curves, self)

    def thresholds(self, curve: FloatArray) -> FloatArray:
        """Acceptance thresholds by distance, [K], of a survival curve on this model's text."""
        return solve_thresholds(curve, self.spread, self.correlation, self.range_tokens)


class Text:
    """How hard the output tokens of every request are, whatever the drafter.

    Args:
        model: its correlation, and how context hardens it.
        curves: survival by domain, each [K].
        seed: of the run.
    """

    def __init__(self, model: CurveAcceptance, curves: Sequence[FloatArray], seed: int) -> None:
        self._shape = (model.spread, model.correlation, model.range_tokens)
        table = model.tau_by_context
        self._powers = [_PowerByContext(table, c) if table else None for c in curves]
        self._correlated = bool(model.spread or model.correlation)
        self._own, self._common = RequestRng(seed, TOKENS), RequestRng(seed, COMMON)

    def hardness(self, request: Request, length: int) -> FloatArray:
        """Of the request's output tokens, [length]; those after its end, which drafts may reach, counted.

        A longer request begins with the same values: each stream is read from its start.
        """
        return self.of([request], np.array([length]))

    def of(self, requests: Sequence[Request], lengths: IntArray) -> FloatArray:
        """The same of several requests, one after the other: ``lengths`` [m] tokens of each, [their sum]."""
        g = _normals(self._own, requests, lengths)
        if not self._correlated and not any(self._powers):
            return g
        own = _parts(g, lengths)
        common: Iterable[FloatArray | None] = repeat(None)
        if self._correlated:
            common = _parts(_normals(self._common, requests, lengths + 2), lengths + 2)
        for request, draws, shared in zip(requests, own, common, strict=False):
            mine, power = hardness(draws, shared, *self._shape), self._powers[request.domain]
            draws[:] = mine if power is None else power.apply(mine, request)
        return g


def _normals(rng: RequestRng, requests: Sequence[Request], counts: IntArray) -> FloatArray:
    draws = np.empty(int(counts.sum()))
    rng.normals(requests, counts, draws, np.cumsum(counts) - counts)
    return draws


def _parts(values: FloatArray, counts: IntArray) -> list[FloatArray]:
    """Views of what belongs to each request."""
    return np.split(values, np.cumsum(counts)[:-1])


class _TextLuck(Luck):
    """L from hardness: drafts are accepted while they are below the thresholds."""

    def __init__(
        self, requests: Sequence[Request], seed: int, domains: Sequence[str], curves: list[FloatArray],
        model: CurveAcceptance,
    ) -> None:  # fmt: skip
        super().__init__(requests, seed, model.head, domains, curves)
        self._model, self._tokens = model, Text(model, curves, seed)

    @cached_property
    def _thresholds(self) -> list[FloatArray]:
        return [self._model.thresholds(c) for c in self.curves]

    @cached_property
    def _levels(self) -> FloatArray:
        """Different thresholds, rising, [domains, K]; infinite beyond the last, which nothing exceeds."""
        levels = np.full((len(self.curves), self.curves[0].size), np.inf)
        for row, thresholds in zip(levels, self._thresholds, strict=True):
            different = np.unique(thresholds)  # a geometric curve has one
            row[: len(different)] = different
        return levels

    @cached_property
    def _limits(self) -> IntArray:
        """Grade of every threshold, [domains, K]."""
        return np.stack([grade(t, row) for t, row in zip(self._thresholds, self._levels, strict=True)]).astype(np.int64)

    def text(self, request: Request) -> IntArray:
        """The grade of every token: how many different thresholds its hardness exceeds."""
        g = self._tokens.hardness(request, request.output_len + self.beyond)
        return grade(g, self._levels[request.domain]).astype(np.int64)

    def _draw(self, ids: IntArray) -> None:
        requests, counts = [self.requests[i] for i in ids.tolist()], self._counts[ids] + self.beyond
        domains = np.array([r.domain for r in requests], dtype=np.int64)
        g = self._tokens.of(requests, counts)
        self._kernels.grade(g, counts, domains, self._levels, self.base[ids], self._text)

    def tables(self, *, heads: bool) -> tuple[Int16Array, IntArray, FloatArray]:
        """See :meth:`Luck.tables`."""
        return self._text, self._limits, self._noise if heads else NO_NOISE

    def _read(self, lives: IntArray, ids: IntArray, at: IntArray, run: IntArray) -> bool:
        return self._kernels.look_up(lives, ids, self._text, self._limits, at, run)


class _PowerByContext:
    """Hardens text as its context grows: conditional acceptance c becomes c^power, power from tau's factor."""

    def __init__(self, table: dict[int, float], curve: FloatArray) -> None:
        self.contexts = sorted(table)
        self.powers = [hardening_power(curve, table[c]) for c in self.contexts]

    def apply(self, g: FloatArray, request: Request) -> FloatArray:
        """The hardness of a request's output tokens, given that before its context counts."""
        from scipy.special import ndtr, ndtri  # slow to import, not always needed

        power = np.interp(request.prompt_len + np.arange(len(g)), self.contexts, self.powers)
        # P(g' <= q) = P(g <= q)^power, with u = Phi(g): u' = u^(1/power)
        u = ndtr(g) ** (1 / power)
        return ndtri(u)


def _factor(table: dict[float, float], at: float, what: str) -> float:
    points = sorted(table)
    if not points[0] <= at <= points[-1]:
        raise InputError(f"acceptance.tau_by_{what}: {at} is outside {points[0]}..{points[-1]}")
    return float(np.interp(at, points, [table[p] for p in points]))


class RecordedAcceptance(AcceptanceModel):
    """Replays L from full-block rounds of a real run: CSV or Parquet columns request, domain, position, accepted.

    Position counts output tokens before the round; a simulated request takes a recorded one of its domain,
    chosen by (seed, request id). Inside a recorded run of length L from t, position t + j has L - j (at
    least: the drafter may do better from nearer by). A longer output wraps around. ``max_draft_len`` says how many
    drafts the recorded blocks had; an engine that drafts fewer sees the runs cut to its block. ``sha256``, where given,
    is that of the file.
    """

    kind: Literal["recorded"] = "recorded"
    file: str
    sha256: str | None = None
    max_draft_len: int = Field(default=15, ge=1)
    _rows: dict[str, list[IntArray]] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _read(self) -> Self:
        path = find(self.file, "file")
        if self.sha256 is not None and (found := sha256(path.read_bytes()).hexdigest()) != self.sha256:
            raise InputError(f"{path}: was changed since it was written (SHA-256 {found:.12}, not {self.sha256:.12})")
        self._rows = _recorded_runs(path)
        return self

    @property
    def domains(self) -> list[str]:
        """Those of the recorded requests."""
        return sorted(self._rows)

    def check(self, domains: Sequence[str], max_draft_len: int) -> None:
        """Every domain needs recorded requests, of blocks at least as long as the engine's."""
        unknown = sorted(set(domains) - set(self._rows))
        if unknown:
            raise InputError(
                f"{self.file}: no recorded request of domain {', '.join(unknown)}; "
                f"there are {', '.join(sorted(self._rows))}"
            )
        self.head.check(domains)
        longest = max(int(r.max()) for rows in self._rows.values() for r in rows)
        if longest > self.max_draft_len:
            raise InputError(f"{self.file}: a run of {longest}, but acceptance.max_draft_len says {self.max_draft_len}")
        if self.max_draft_len < max_draft_len:
            raise InputError(
                f"{self.file}: recorded with {self.max_draft_len} drafts a block, the engine drafts {max_draft_len}"
            )

    def luck(self, requests: Sequence[Request], domains: Sequence[str], seed: int, max_draft_len: int) -> Luck:
        """See :meth:`AcceptanceModel.luck`."""
        rows = [self._rows[d] for d in domains]
        pooled = [np.concatenate(r) for r in rows]
        curves = [np.array([(p >= k).mean() for k in range(1, max_draft_len + 1)]) for p in pooled]
        return _RecordedLuck(requests, seed, self.head, domains, [np.maximum(c, 1e-12) for c in curves], rows)


class _RecordedLuck(Luck):
    """L as it was recorded."""

    def __init__(
        self,
        requests: Sequence[Request],
        seed: int,
        head: HeadQuality,
        domains: Sequence[str],
        curves: list[FloatArray],
        rows: list[list[IntArray]],
    ) -> None:
        super().__init__(requests, seed, head, domains, curves)
        self._rows, self._choice = rows, RequestRng(seed, TOKENS)

    def text(self, request: Request) -> IntArray:
        """L at every position."""
        rows = self._rows[request.domain]
        recorded = rows[int(self._choice(request.id).integers(len(rows)))]
        return np.resize(recorded, request.output_len + self.beyond).clip(max=self.beyond - 1)


def _recorded_runs(path: Path) -> dict[str, list[IntArray]]:
    """L(t) of every recorded request by domain."""
    table = read_columns(
        path, Columns(required=("request", "domain", "position", "accepted"), whole=("position", "accepted"))
    )
    rows: dict[str, list[IntArray]] = {}
    for (domain, _), found in table.groupby(["domain", "request"], sort=True):
        rounds = found.sort_values("position")
        position, accepted = rounds["position"].to_numpy(), rounds["accepted"].to_numpy()
        if np.any(np.diff(position) != accepted[:-1] + 1):
            at = int(np.argmax(np.diff(position) != accepted[:-1] + 1))
            raise InputError(
                f"{path}: request {rounds['request'].iloc[0]}: the round at position {position[at]} accepted "
                f"{accepted[at]}, so the next must be at {position[at] + accepted[at] + 1}, "
                f"not {position[at + 1]} (full blocks only)"
            )
        text = np.concatenate([np.arange(a, -1, -1) for a in accepted]).astype(np.int64)
        text = np.concatenate([np.repeat(text[:1], position[0]), text])  # before the first round: as at it
        rows.setdefault(str(domain), []).append(text)
    return rows


AnyAcceptance = Annotated[CurveAcceptance | RecordedAcceptance, Field(discriminator="kind")]
