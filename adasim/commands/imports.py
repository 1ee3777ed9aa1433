"""The command that reads files of other tools."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adasim.options import Json, Overwrite

if TYPE_CHECKING:
    from adasim.importers.registry import Imported
    from adasim.importers.sink import Sink

SHOWN = ("engine", "label", "k", "concurrency", "output_tok_s", "tau", "ttft_p50_ms", "tpot_p50_ms")
MAX_SHOWN = 40


def import_command(
    files: Annotated[
        list[Path], typer.Argument(help="Benchmark files, logs, scrapes, tables or traces; gzip or zstd too.")
    ],
    kind: Annotated[
        str | None, typer.Option("--as", metavar="KIND", help="Read all as KIND. Default: recognise each.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the tables. Default: only show what was found.")] = None,
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Leave bad lines out, and count them.")] = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Read what SGLang, vLLM, GuideLLM, AIPerf, Prometheus or people wrote, in one definition of each metric.

    Says what is suspicious about the measurements. Writes runs.csv, acceptance.csv, costs.csv, requests.parquet,
    steps.parquet, workload.jsonl (a trace to replay) as far as there is anything, and manifest.json.
    """
    from adasim.errors import InputError
    from adasim.importers.registry import import_files
    from adasim.importers.runs import manifest_of
    from adasim.importers.sink import Sink

    if out is None:
        sink = Sink()
        found = import_files(files, sink, kind=kind, keep_going=keep_going)
    else:
        if out.exists() and any(out.iterdir() if out.is_dir() else [out]) and not (overwrite and manifest_of(out)):
            raise InputError(f"--out {out}: holds something; give another folder, or --overwrite for an earlier import")
        out.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
        try:
            sink = Sink(beside)
            found = import_files(files, sink, kind=kind, keep_going=keep_going)
            sink.close()
            _finish(beside, out, found)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    _show(found, sink, out, as_json=as_json)


def _finish(beside: Path, out: Path, found: "list[Imported]") -> None:
    """Write the manifest, and put the folder in its place."""
    from adasim.files import to_json, write_atomic
    from adasim.importers.runs import MANIFEST

    write_atomic(beside / MANIFEST, to_json(manifest(found)))
    beside.chmod(0o755)
    if out.exists():
        old = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.old."))
        os.replace(out, old)
        shutil.rmtree(old)
    beside.replace(out)


def manifest(found: "list[Imported]") -> dict[str, Any]:
    """What was read, from where, and what must be known of it."""
    from adasim import __version__
    from adasim.importers.runs import WHAT

    return {
        "what": WHAT,
        "adasim": __version__,
        "files": [
            {
                "file": i.source.name,
                "sha256": i.source.sha256,
                "bytes": i.source.bytes,
                "kind": i.kind,
                "engines": [" ".join(e) for e in sorted(i.source.engines)],
                "rows": i.rows,
                "warnings": _notes(i),
                "skipped": i.source.skipped,
                "problems": i.source.problems,
            }
            for i in found
        ],
    }


def _notes(imported: "Imported") -> list[str]:
    return [n + (f" ({count} times)" if count > 1 else "") for n, count in imported.source.notes.items()]


def _show(found: "list[Imported]", sink: "Sink", out: Path | None, *, as_json: bool) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from adasim.files import to_json

    if as_json:
        tables: dict[str, list[Any]] = {"runs": sink.runs, "acceptance": sink.acceptance, "costs": sink.costs}
        listed = {name: [r._asdict() for r in table] for name, table in tables.items()}
        print(to_json({**manifest(found), "out": None if out is None else str(out), **listed}), end="")
        return
    console = Console(soft_wrap=True)
    files = Table("file", "kind", "rows", "skipped")
    for i in found:
        rows = ", ".join(f"{count} {name}" for name, count in i.rows.items())
        files.add_row(escape(i.source.name), i.kind, rows or "-", str(i.source.skipped or "-"))
    console.print(files)
    columns = [c for c in SHOWN if any(getattr(r, c) not in {None, ""} for r in sink.runs)]
    if columns:
        curves: dict[tuple[str, int], list[str]] = {}
        for a in sink.acceptance:
            curves.setdefault((a.file, a.run), []).append(f"{a.survival:.2f}")
        table = Table(*columns, *(["survival"] if curves else []))
        for row in sink.runs[:MAX_SHOWN]:
            curve = [" ".join(curves.get((row.file, row.run), ["-"]))] if curves else []
            table.add_row(*(escape(_cell(getattr(row, c))) for c in columns), *curve)
        console.print(table)
        if len(sink.runs) > MAX_SHOWN:
            console.print(f"... and {len(sink.runs) - MAX_SHOWN} more runs", highlight=False)
    for i in found:
        for note in _notes(i):
            console.print(f"! {i.source.name}: {note}", highlight=False, markup=False)
        for problem in i.source.problems:
            console.print(f"skipped: {problem}", highlight=False, markup=False)
    if out is not None:
        console.print(f"Tables: {out}", highlight=False, markup=False)


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
