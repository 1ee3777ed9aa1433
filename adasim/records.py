"""What happened: the tables every backend writes and every report reads."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

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


class EventRecord(NamedTuple):
    """Something rare that a report must tell: a drafter was published, loaded, refused or rolled back."""

    time_s: float
    kind: str  # trained, reload, refused, rollback, trainer_failed
    draft_version: int
    seconds: float  # how long serving paused, or the trainer took
    detail: str


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

    def write(self, folder: Path) -> None:
        """One Parquet file a table, the same bytes for the same records."""
        for name in ("steps", "requests", "blocks", "gaps", "events"):
            getattr(self, name).to_parquet(folder / f"{name}.parquet", index=False, compression="zstd")


def frame(kind: type[NamedTuple], rows: Sequence[tuple[object, ...]]) -> "pd.DataFrame":
    """A table of records, typed even when empty."""
    import pandas as pd

    types: dict[object, Any] = {int: np.int64, float: np.float64, str: "str"}
    columns: list[Any] = list(zip(*rows, strict=True)) if rows else [()] * len(kind._fields)
    return pd.DataFrame(
        {
            name: pd.Series(column, dtype=types[kind.__annotations__[name]])
            for name, column in zip(kind._fields, columns, strict=True)
        }
    )
