"""What happened: the tables every backend writes and every report reads."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas as pd


class StepRecord(NamedTuple):
    """One engine step. Counts are over the batch."""

    step: int
    start_s: float
    end_s: float
    decoding: int  # requests that took part in a round
    queued: int  # requests waiting while it ran
    prefill_tokens: int
    draft_tokens: int  # drafts, anchors excluded
    verify_tokens: int  # tokens in the verification pass, anchors and padding included
    accepted: int  # drafts accepted
    emitted: int  # tokens given to users by the round, clipped at the requests' ends
    first_tokens: int  # tokens given by prefills
    draft_s: float
    verify_s: float
    overhead_s: float
    prefill_s: float
    kv_blocks: int  # in use while it ran, reservations and prefix cache included
    context: float  # mean context of the decoding requests, tokens
    evicted: int  # requests sent back to the queue
    draft_version: int = 0  # of the drafter; 0 = as loaded


class RequestRecord(NamedTuple):
    """One request. Times are NaN where it did not get that far."""

    request: int
    domain: str
    status: str  # finished, running, waiting or dropped when the run ended
    prompt_len: int
    output_len: int  # tokens asked for
    arrival_s: float
    admitted_s: float  # first admission
    first_token_s: float
    finish_s: float
    tokens: int  # output tokens given
    rounds: int  # rounds it took part in
    draft_tokens: int
    verify_tokens: int  # padding not counted
    accepted: int
    evictions: int
    cached_tokens: int  # prompt tokens found in the prefix cache at first admission
    draft_version: int = 0  # of its last round


class BlockRecord(NamedTuple):
    """How often a verified block of this length had this many drafts accepted: enough for survival estimates."""

    domain: str
    verify_len: int
    accepted: int
    blocks: int
    draft_version: int = 0


class GapRecord(NamedTuple):
    """Inter-token latencies as users see them: time between two chunks of one request, one chunk a round."""

    step: int
    gap_s: float
    chunks: int


class RoundRecord(NamedTuple):
    """One request in one round: what calibration needs beyond the counts of ``BlockRecord``."""

    step: int
    request: int
    domain: str
    position: int  # output tokens given before it
    context: int  # tokens known before it, the anchor counted
    draft_len: int
    verify_len: int
    accepted: int
    accept_len: float  # what the length head reported, tokens with the anchor counted; NaN: nobody asked
    whole: bool  # drawn by chance to be drafted and verified in full, whatever the policy said
    draft_version: int
    confidence: float = nan  # drafts that confidences said would be accepted, of those made; NaN: nobody asked


class VersionRecord(NamedTuple):
    """One simulated drafter version in one domain; 0 = as loaded. Times are NaN where it did not get that far."""

    version: int
    parent: int  # version that training began from
    outcome: str  # training, ready, in use, replaced, rolled back, or discarded (its parent was rolled back)
    began_s: float
    ready_s: float
    loaded_s: float  # first load
    samples: int  # requests it was trained on
    fresh: int  # of them never trained on before
    tokens: int  # tokens it was trained on, once an epoch
    gpus: int  # of the trainer alone; 0 = it shares the engine's
    gpu_s: float  # GPU-seconds its training took
    taken_s: float  # of them taken from steps of the engine, whose overhead they are
    domain: str
    share: float  # of its training
    tau: float  # of full blocks in this domain, true to the model
    head_bias: float  # tokens that its length head reports too much


class PrefillRecord(NamedTuple):
    """One prompt in a pool of prefill engines."""

    request: int
    engine: int
    start_s: float  # of the prefill it was part of
    end_s: float
    landed_s: float  # its KV cache has been sent: the first token


class EventRecord(NamedTuple):
    """Something rare that a report must tell: a drafter was published, loaded, refused or rolled back, tau moved."""

    time_s: float
    kind: str  # trained, reload, refused, rollback, trainer_failed; watch (from then on), alarm; drift (of the mix)
    draft_version: int
    seconds: float  # how long serving paused, or the trainer took
    detail: str
    domain: str = ""  # "" = all
    finished: int = 0  # requests finished before it, where counted


TABLES: dict[str, type[NamedTuple]] = {
    "steps": StepRecord,
    "requests": RequestRecord,
    "blocks": BlockRecord,
    "gaps": GapRecord,
    "events": EventRecord,
}
OPTIONAL: dict[str, type[NamedTuple]] = {"versions": VersionRecord, "prefills": PrefillRecord, "rounds": RoundRecord}


@dataclass(slots=True)
class Records:
    """All tables of one run, and when its source of requests ran dry."""

    steps: "pd.DataFrame"  # StepRecord columns
    requests: "pd.DataFrame"  # RequestRecord columns
    blocks: "pd.DataFrame"  # BlockRecord columns
    gaps: "pd.DataFrame"  # GapRecord columns
    events: "pd.DataFrame"  # EventRecord columns
    last_arrival_s: float
    notes: list[str] = field(default_factory=list)  # what a report must say: extrapolations, estimates
    versions: "pd.DataFrame | None" = None  # VersionRecord columns, where the drafter learns
    prefills: "pd.DataFrame | None" = None  # PrefillRecord columns, where prefill is disaggregated
    rounds: "pd.DataFrame | None" = None  # RoundRecord columns, where rounds are recorded

    def write(self, folder: Path) -> None:
        """One Parquet file a table, the same bytes for the same records."""
        for name in TABLES | OPTIONAL:
            table = getattr(self, name)
            if table is not None:
                table.to_parquet(folder / f"{name}.parquet", index=False, compression="zstd")


class CutShort(Exception):
    """A run ended before its end: what was lost, and the records of what was not.

    ``again``: another try may succeed.
    """

    def __init__(self, records: Records, lost: str, *, again: bool) -> None:
        super().__init__(lost)
        self.records, self.again = records, again


def frame(kind: type[NamedTuple], rows: Sequence[tuple[object, ...]]) -> "pd.DataFrame":
    """A table of records, typed even when empty."""
    return table(kind, list(zip(*rows, strict=True)) if rows else [()] * len(kind._fields))


def table(kind: type[NamedTuple], columns: Iterable[Sequence[object] | NDArray[Any]]) -> "pd.DataFrame":
    """The same from one column per field of ``kind``."""
    import pandas as pd

    types: dict[object, Any] = {int: np.int64, float: np.float64, bool: np.bool_}
    arrays: dict[str, Any] = {}
    for name, column in zip(kind._fields, columns, strict=True):
        of = kind.__annotations__[name]
        arrays[name] = pd.Series(column, dtype="str") if of is str else np.asarray(column, dtype=types[of])
    return pd.DataFrame(arrays)
