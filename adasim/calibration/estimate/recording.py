"""Recorded runs as estimators see them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from adasim.identity import EngineIdentity
from adasim.records import Records
from adasim.types import HEAD_OUTPUTS, Component, IntArray

# How a policy's verify lengths came about: the same for all rounds; from what earlier rounds accepted or the load;
# from a look at the very drafts they cut (longer where more will be accepted: what is cut tells of what was cut off).
Choice = Literal["fixed", "adaptive", "informed"]
BY_CHANCE = 0.01  # probability that two texts of a recording look the same, from which on they do not count as one


@dataclass(frozen=True, slots=True)
class RecordedTrial:
    """One recorded run.

    Attributes:
        key: of the trial, its folder's name.
        policy: the length policy, as configured.
        label: its name in the scenario.
        choice: how it came to its verify lengths.
        point: swept fields of the scenario.
        seed: of the workload.
        workload: as configured, the point applied.
        backend: as configured, the point applied.
        forced: acceptance was by decree: times count, acceptance means nothing.
        records: what happened.
        window: the measured part, seconds.
        identity: of the engine; None = simulated.
        began_s: when, seconds of the wall clock; None = unknown.
    """

    key: str
    policy: Component
    label: str
    choice: Choice
    point: dict[str, Any]
    seed: int
    workload: dict[str, Any]
    backend: dict[str, Any]
    forced: bool
    records: Records
    window: tuple[float, float]
    identity: EngineIdentity | None
    began_s: float | None = None

    @property
    def reads_head(self) -> bool:
        """Whether its rounds that draft, or some of a probe's, pay for a length or confidence head."""
        return bool(_heads(getattr(self.policy, "needs", ())))

    def reads(self, rounds: int) -> list[str]:
        """What each of the first rounds asked of heads beside drafts, names joined by commas; "" = nothing."""
        played = getattr(self.policy, "played", None)
        if played is not None:  # a probe, whose rounds differ
            return [_heads(shape.reads) for shape in played(rounds)]
        return [_heads(getattr(self.policy, "needs", ()))] * rounds

    @property
    def drafter_loaded(self) -> bool:
        """Whether plain rounds pay for a drafter that has to follow."""
        loaded = bool(getattr(self.policy, "loads_drafter", True))
        return loaded and (self.backend.get("kind") != "torch" or self.backend.get("drafter") is not None)


def _heads(names: Iterable[str]) -> str:
    """Of what a policy needs, that which a length or confidence head has to compute."""
    return ",".join(sorted(HEAD_OUTPUTS.intersection(names)))


@dataclass(frozen=True, slots=True)
class Recording:
    """Recorded runs of one engine.

    Attributes:
        identity: of the engine; None = simulated.
        scenario: as in the first folder's manifest.
        trials: in the order in which they were planned.
        sources: what each folder holds, a line each.
        notes: what a report must say of them.
    """

    identity: EngineIdentity | None
    scenario: dict[str, Any]
    trials: list[RecordedTrial]
    sources: list[str]
    notes: list[str] = field(default_factory=list)


def natural(trials: Sequence[RecordedTrial]) -> list[RecordedTrial]:
    """Those whose acceptance was not by decree."""
    return [t for t in trials if not t.forced]


def rounds_of(trials: Sequence[RecordedTrial], choices: Sequence[Choice] = ("fixed",)) -> pd.DataFrame:
    """Rounds that were chosen so, and those drawn blind to be verified in full; all natural trials together.

    Columns as in :class:`~adasim.records.RoundRecord` and ``trial`` (index), ``life`` (a number per request of a trial),
    ``text`` (one number per text, see :func:`numbered`: what answers the same prompt alike is no second sample),
    ``fixed_len`` (verify_len of every round of that trial, 0 where it varies) and ``answer`` (the request's tokens).
    Ordered by life and step.
    """
    parts = []
    for i, trial in enumerate(trials):
        rounds = trial.records.rounds
        if trial.forced or rounds is None or rounds.empty:
            continue
        kept = rounds if trial.choice in choices else rounds[rounds["whole"]]
        kept = kept[kept["draft_len"] > 0]
        if kept.empty:
            continue
        lengths = kept["verify_len"].unique()
        always = int(lengths[0]) if len(lengths) == 1 and trial.choice == "fixed" else 0
        answer = kept["request"].map(trial.records.requests.set_index("request")["tokens"])
        parts.append(kept.assign(trial=i, seed=trial.seed, fixed_len=always, answer=answer))
    if not parts:
        return pd.DataFrame()
    table = numbered(pd.concat(parts, ignore_index=True))
    return table.sort_values(["life", "step"], kind="stable", ignore_index=True)


def rounds_with(trials: Sequence[RecordedTrial], column: Literal["accept_len", "confidence"]) -> pd.DataFrame:
    """Rounds of natural trials that drafted and asked heads for ``column``.

    Columns as in :class:`~adasim.records.RoundRecord`, ``trial``, ``seed``, ``life`` and ``text`` (see :func:`numbered`),
    and ``share``, how much a round counts: one over the trials that its text is in.
    """
    parts = []
    for i, trial in enumerate(natural(trials)):
        rounds = trial.records.rounds
        if rounds is not None and len(rounds):
            # those that verified nothing count too: leaving them out would choose by the report
            parts.append(rounds[rounds[column].notna() & (rounds["draft_len"] > 0)].assign(trial=i, seed=trial.seed))
    if not any(map(len, parts)):
        return pd.DataFrame(columns=["text"])
    rounds = numbered(pd.concat(parts, ignore_index=True))
    return rounds.assign(share=1 / rounds.groupby("text")["trial"].transform("nunique"))


def at_most(rounds: pd.DataFrame, most: int, seed: int) -> pd.DataFrame:
    """The rounds of texts drawn by chance, ``most`` of them; all, where there are no more."""
    if len(rounds) <= most:
        return rounds
    texts = np.random.default_rng(seed).permutation(rounds["text"].unique())
    total = rounds.groupby("text").size().reindex(texts).cumsum()
    return rounds[rounds["text"].isin(total.index[total <= most])]


def max_draft_len(trials: Sequence[RecordedTrial]) -> int:
    """Drafts of the engine's full block: as configured, else the longest that was drafted."""
    longest = 0
    for trial in trials:
        configured = trial.backend.get("max_draft_len")
        if isinstance(configured, int):
            longest = max(longest, configured)
        rounds = trial.records.rounds
        if rounds is not None and len(rounds):
            longest = max(longest, int(rounds["draft_len"].max()))
        steps = trial.records.steps
        drafting = steps[steps["draft_tokens"] > 0]
        if len(drafting):
            longest = max(longest, int(np.ceil((drafting["draft_tokens"] / drafting["decoding"]).max())))
    return longest


def numbered(rounds: pd.DataFrame) -> pd.DataFrame:
    """The same with ``life`` and ``text``; see :func:`rounds_of`. Needs trial, seed and the columns of ``RoundRecord``.

    Requests of one seed answer the same prompts. Where prompts come from a list, those of other seeds do too, and greedy
    decoding answers them alike: lives of equal prompts whose rounds were all the same are one text, unless so many of
    their sequences could be equal by chance.
    """
    life = rounds.groupby(["trial", "request"], sort=False).ngroup()
    text = rounds.groupby(["seed", "domain", "request"], sort=False).ngroup()
    return rounds.assign(life=life, text=_joined(text, _alike(rounds, life, text)))


def _alike(rounds: pd.DataFrame, life: "pd.Series[int]", text: "pd.Series[int]") -> "pd.Series[int]":
    """A number of every round: that of its life's rounds, where no life has them by chance; else the life's own."""
    accepted = rounds.groupby(["domain", "verify_len", "accepted"])["step"].transform("size")
    among = rounds.groupby(["domain", "verify_len"])["step"].transform("size")
    logs = pd.Series(np.log((accepted / among).to_numpy()), rounds.index)
    unlikely = logs.groupby(life).sum()  # log P of a life's rounds, were they independent
    columns = ["context", "position", "verify_len", "accepted", "draft_version"]
    hashes = pd.Series(pd.util.hash_pandas_object(rounds[["domain", *columns]], index=False).to_numpy(), rounds.index)
    order = rounds.groupby(life).cumcount().to_numpy(dtype=np.uint64)
    with np.errstate(over="ignore"):
        whole = (hashes * (2 * order + 1)).groupby(life).sum()
    rivals = text.groupby([rounds["domain"], rounds["context"] - rounds["position"]]).transform("nunique")
    chance = unlikely + np.log(rivals.groupby(life).first())  # that some other prompt of that length gives the same
    whole = whole.where(chance < np.log(BY_CHANCE), pd.Series(whole.index.to_numpy(dtype=np.uint64), whole.index))
    return life.map(whole)


def _joined(first: "pd.Series[int]", second: "pd.Series[int]") -> IntArray:
    """Numbers of what hangs together by either label, [rows]."""
    a, b = pd.factorize(first)[0], pd.factorize(second)[0]
    size = a.max() + 1 if len(a) else 0
    edges = coo_array((np.ones(len(a)), (a, size + b)), shape=(size + b.max() + 1,) * 2) if len(a) else coo_array((0, 0))
    _, component = connected_components(edges, directed=False)
    return np.asarray(pd.factorize(component[a])[0], dtype=np.int64)
