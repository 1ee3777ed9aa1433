"""Rows to fit, from whatever tells throughput: benchmarks at several loads, logs, scrapes, tables, imported folders."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from adasim.calibration.throughput_table import Row, batch_of, row_of
from adasim.errors import InputError
from adasim.importers.fields import Malformed
from adasim.importers.registry import import_files
from adasim.importers.sink import Sink
from adasim.importers.tables import TABLES, RunRow

ALIKE = 1.25  # contexts within this factor are one
RUNS = f"{TABLES[RunRow]}.csv"


class Throughputs(NamedTuple):
    """Rows of one set-up, and what must be known of them."""

    rows: list[Row]
    notes: list[str]
    model: str | None
    engine: str | None


def read_throughput(paths: Sequence[Path], only: str | None = None, concurrency: int | None = None) -> Throughputs:
    """The rows that files and folders hold; what cannot be fitted is left out and noted.

    Args:
        paths: files that ``adasim import`` reads, and folders that it wrote.
        only: keep speculative runs whose label, model or data set holds this, and plain runs of their models.
        concurrency: of runs that do not tell theirs.

    Raises:
        InputError: files that cannot be read, rows of several models, or nothing to fit.
    """
    folders = [p for p in paths if p.is_dir()]
    if bare := [f"{p}: no folder of adasim import: it holds no {RUNS}" for p in folders if not (p / RUNS).is_file()]:
        raise InputError(*bare)
    sink = Sink()
    found = import_files([p / RUNS if p in folders else p for p in paths], sink)
    noted: dict[str, list[str]] = {}
    for imported in found:
        for note in imported.source.notes:
            noted.setdefault(note, []).append(imported.source.path.name)
    kept: list[tuple[RunRow, Row]] = []
    left: dict[str, int] = {}
    for run in sink.runs:
        untold = concurrency is not None and batch_of(run) is None
        try:
            kept.append((run, row_of(run._replace(concurrency=concurrency) if untold else run)))
        except Malformed as error:
            left[str(error)] = left.get(str(error), 0) + 1
    says = [f"{n} of {len(sink.runs)} runs are left out: {why}" for why, n in left.items()]
    if only is not None:
        kept = _chosen(kept, only)
    if not kept:
        raise InputError("throughput: nothing to fit", *says)
    models = sorted({run.model for run, _ in kept if run.model})
    if len(models) > 1:
        raise InputError(f"throughput: rows of several models: {', '.join(models)}; choose with --set only=TEXT")
    rows, merged = _one_context([row for _, row in kept])
    engines = sorted({" ".join(filter(None, (run.engine, run.version))) for run, _ in kept if run.engine})
    notes = [f"{note} ({', '.join(names[:3])}{', ...' * (len(names) > 3)})" for note, names in noted.items()]
    says += [*merged, *_mixed(kept), *notes]
    return Throughputs(rows, says, models[0] if models else None, ", ".join(engines) or None)


def _chosen(kept: Sequence[tuple[RunRow, Row]], only: str) -> list[tuple[RunRow, Row]]:
    """Speculative rows of that name, and plain ones of their models."""
    named = {
        i for i, (r, row) in enumerate(kept) if row.k and only in " ".join(filter(None, (r.label, r.model, r.dataset)))
    }
    models = {kept[i][0].model for i in named}
    return [pair for i, pair in enumerate(kept) if i in named or (not pair[1].k and pair[0].model in models)]


def _one_context(rows: list[Row]) -> tuple[list[Row], list[str]]:
    """Rows whose contexts are alike, or not told, with their mean."""
    known = [r.context for r in rows if r.context and r.tok_s is not None]
    if not known or max(known) > ALIKE * min(known):
        return rows, []
    mean = sum(known) / len(known)
    says = [f"contexts of {min(known):.0f} to {max(known):.0f} tokens are taken for one"] * (max(known) > min(known))
    if any(r.context is None for r in rows if r.tok_s is not None):
        says.append(f"some runs do not tell their context: it is taken for the others', {mean:.0f} tokens")
    return [r._replace(context=mean) for r in rows], says


def _mixed(kept: Sequence[tuple[RunRow, Row]]) -> list[str]:
    """What looks as if rows were not of one set-up."""
    engines = {run.engine for run, _ in kept if run.engine}
    says = [f"doubtful - rows of several engines are fitted together: {', '.join(sorted(engines))}"] * (len(engines) > 1)
    labels: dict[tuple[object, ...], set[str]] = {}
    for run, row in kept:
        if row.k:
            what = " ".join(filter(None, (run.label, run.dataset)))
            labels.setdefault((row.batch, row.k, row.steps), set()).add(what)
    if several := next((names for names in labels.values() if len(names) > 1), None):
        shown = "; ".join(sorted(several)[:3])
        says.append(
            f"doubtful - rows with different labels are fitted together: {shown}; --set only=TEXT chooses among them"
        )
    return says
