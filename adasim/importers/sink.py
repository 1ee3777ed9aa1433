"""Where rows go: counted, held in memory, or written in row groups."""

import csv
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from adasim.importers.tables import (
    TABLES,
    AcceptanceRow,
    CostRow,
    RequestRow,
    Row,
    RunRow,
    StepRow,
    WorkloadRow,
    schema,
)

GROUP = 20_000  # rows of a Parquet row group
BIG = (RequestRow, StepRow, WorkloadRow)  # tables that grow with the file


class Sink:
    """Takes rows of every table.

    ``runs``, ``acceptance`` and ``costs`` are always held. Tables that grow with the file are written to ``folder`` as
    they come, held when ``hold``, and else only counted.
    """

    def __init__(self, folder: Path | None = None, *, hold: bool = False) -> None:
        self.folder, self.hold = folder, hold
        self.counts = dict.fromkeys(TABLES.values(), 0)
        self._held: dict[type, list[Any]] = {kind: [] for kind in TABLES}
        self._writers: dict[type, pq.ParquetWriter] = {}
        self._trace: io.TextIOWrapper | None = None

    @property
    def runs(self) -> list[RunRow]:
        """Runs so far."""
        return self._held[RunRow]

    @property
    def acceptance(self) -> list[AcceptanceRow]:
        """Survival so far."""
        return self._held[AcceptanceRow]

    @property
    def costs(self) -> list[CostRow]:
        """Cost points so far."""
        return self._held[CostRow]

    @property
    def requests(self) -> list[RequestRow]:
        """Requests so far, where they are held."""
        return self._held[RequestRow]

    @property
    def steps(self) -> list[StepRow]:
        """Log lines so far, where they are held."""
        return self._held[StepRow]

    @property
    def workload(self) -> list[WorkloadRow]:
        """Requests of traces so far, where they are held."""
        return self._held[WorkloadRow]

    def add(self, row: Row) -> None:
        """One more row."""
        kind = type(row)
        self.counts[TABLES[kind]] += 1
        if kind not in BIG or self.hold:
            self._held[kind].append(row)
        elif self.folder is not None:
            self._held[kind].append(row)
            if len(self._held[kind]) == GROUP:
                self._spill(kind)

    def extend(self, rows: Iterable[Row]) -> None:
        """More rows."""
        for row in rows:
            self.add(row)

    def close(self) -> None:
        """Write what is left, and the small tables."""
        if self.folder is None:
            return
        for big in BIG:
            if self._held[big]:
                self._spill(big)
        for writer in self._writers.values():
            writer.close()
        if self._trace is not None:
            self._trace.close()
        for kind in set(TABLES) - set(BIG):
            if self._held[kind]:
                with (self.folder / f"{TABLES[kind]}.csv").open("w", newline="", encoding="utf-8") as file:
                    lines = csv.writer(file, lineterminator="\n")
                    lines.writerow(schema(kind).names)
                    lines.writerows(self._held[kind])

    def _spill(self, kind: type) -> None:
        assert self.folder is not None
        rows = self._held[kind]
        if kind is WorkloadRow:
            self._write_trace(rows)
        else:
            columns = list(zip(*rows, strict=True))
            table = pa.table([pa.array(c, f.type) for c, f in zip(columns, schema(kind), strict=True)], schema(kind))
            if kind not in self._writers:
                path = self.folder / f"{TABLES[kind]}.parquet"
                self._writers[kind] = pq.ParquetWriter(path, schema(kind), compression="zstd")
            self._writers[kind].write_table(table)
        rows.clear()

    def _write_trace(self, rows: list[WorkloadRow]) -> None:
        """As Mooncake's JSON lines, which ``workload: {kind: trace}`` replays."""
        assert self.folder is not None
        if self._trace is None:
            self._trace = (self.folder / "workload.jsonl").open("w", encoding="utf-8", newline="\n")
        for row in rows:
            record: dict[str, Any] = {"timestamp": 1e3 * (row.arrival_s or 0.0)}
            record |= {"input_length": row.prompt_len, "output_length": row.output_len}
            if row.hash_ids:
                record["hash_ids"] = list(row.hash_ids)
            self._trace.write(json.dumps(record) + "\n")
