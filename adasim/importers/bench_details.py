"""Per-request lists of SGLang's and vLLM's benchmark clients: seconds, in the order of sending.

Both keep the time between two chunks as a request's ITL. SGLang's own endpoint divides a chunk's gap among its tokens,
all equal: there equal neighbours are put together again; tokens of the first chunk have none. What is held is 80 bytes a
request.
"""

from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np

from adasim.importers.checks import times, warm_up
from adasim.importers.fields import Malformed, numbers
from adasim.importers.json_stream import JsonStream
from adasim.importers.quantiles import Quantiles
from adasim.importers.source import Source
from adasim.importers.tables import RequestRow

SPREADS = {"sglang", "sglang-native"}  # backends whose ITL is per token
READ = ("input_lens", "output_lens", "ttfts", "start_times")
UNREAD = {"generated_texts", "rps_change_events", "latencies", "queue_times"}
GAPS = ("itl_sum", "chunks", "itl_p50", "itl_max")


class Details:
    """The lists of one run, without its texts; requests without gaps have NaN there."""

    def __init__(self) -> None:
        self._columns: dict[str, array[float]] = {}
        self._itl = Quantiles()
        self._finished = 0
        self._odd = False  # spread ITLs that are more than one a token

    def __bool__(self) -> bool:
        return {"output_lens", "ttfts"} <= self._columns.keys()

    def take(self, name: str, stream: JsonStream, *, spread: bool) -> bool:
        """Read a member if it is one of the lists; ``spread``: gaps were divided among tokens."""
        if name in READ:
            self._columns[name] = array("d", (numbers([stream.value()], name)[0] for _ in stream.items()))
        elif name == "errors":
            self._columns[name] = array("d", (bool(stream.value()) for _ in stream.items()))
        elif name == "itls":
            self._columns |= {n: array("d") for n in GAPS}
            for i in stream.items():
                self._take_gaps(i, np.array(numbers(stream.value(), f"itls[{i}]")), spread)
        elif name in UNREAD:
            stream.skip()
        else:
            return False
        return True

    def requests(self, source: Source, run: int, line: int) -> Iterator[RequestRow]:
        """One row a request.

        Raises:
            Malformed: lists of different lengths.
        """
        lengths = {n: len(c) for n, c in self._columns.items() if len(c)}
        if len(set(lengths.values())) > 1:
            raise Malformed("lists of different lengths: " + ", ".join(f"{n} {c}" for n, c in lengths.items()))
        if self._odd:
            source.note("some ITLs are more than one a token: they are taken for gaps between chunks")
        for i in range(len(self._columns["ttfts"])):
            with source.guard(line):
                yield self._request(source, run, i)

    def summary(self, source: Source, concurrency: float | None) -> dict[str, Any]:
        """Columns of a run, once its requests were taken; a missing warm-up is noted."""
        warm_up(source, [t for t in self._columns["ttfts"] if t > 0], concurrency)
        found: dict[str, Any] = {"requests": self._finished, "failed": len(self._columns["ttfts"]) - self._finished}
        if "chunks" in self._columns:
            gaps = {"mean": self._itl.mean, "p50": self._itl.at(50), "p99": self._itl.at(99)}
            found |= {f"itl_{q}_ms": None if v is None else 1e3 * v for q, v in gaps.items()}
        return found

    def _take_gaps(self, i: int, gaps: "np.ndarray[Any, np.dtype[np.float64]]", spread: bool) -> None:
        lens = self._columns.get("output_lens", array("d"))
        total = float(gaps.sum())
        if spread and len(gaps):
            if i < len(lens) and len(gaps) <= lens[i] - 1:
                gaps = np.add.reduceat(gaps, np.flatnonzero(np.diff(gaps, prepend=-1.0)))
            else:
                self._odd = True
        self._itl.extend(gaps)
        middle, largest = (float(np.median(gaps)), float(gaps.max())) if len(gaps) else (np.nan, np.nan)
        for name, value in zip(GAPS, (total, len(gaps) + 1, middle, largest), strict=True):
            self._columns[name].append(value)

    def _request(self, source: Source, run: int, i: int) -> RequestRow:
        at = {n: c[i] for n, c in self._columns.items() if len(c)}
        length = int(at["output_lens"])
        prompt = int(at["input_lens"]) if "input_lens" in at else None
        if at.get("errors", not at["ttfts"]):
            return RequestRow(source.name, run, i, "failed", prompt, length, at.get("start_times"))
        self._finished += 1
        row = RequestRow(source.name, run, i, "finished", prompt, length, at.get("start_times"), at["ttfts"])
        if "chunks" not in at:
            return row
        return times(
            row._replace(
                tpot_s=at["itl_sum"] / (length - 1) if length > 1 else None,
                e2e_s=at["ttfts"] + at["itl_sum"],
                itl_p50_s=None if np.isnan(at["itl_p50"]) else at["itl_p50"],
                itl_max_s=None if np.isnan(at["itl_max"]) else at["itl_max"],
                chunks=int(at["chunks"]),
            )
        )


def read_document(stream: JsonStream) -> tuple[dict[str, Any], Details]:
    """A benchmark's document: its plain members, and its lists."""
    record: dict[str, Any] = {}
    details = Details()
    for name in stream.members():
        if not details.take(name, stream, spread=record.get("backend") in SPREADS):
            record[name] = stream.value()
    return record, details
