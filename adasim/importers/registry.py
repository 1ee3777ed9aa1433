"""Which importer reads a file, and reading files with it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from adasim.errors import InputError
from adasim.importers import (
    aiperf,
    cost,
    guidellm,
    prometheus,
    runs,
    sglang_bench,
    sglang_log,
    sglang_meta,
    sps,
    throughput,
    trace,
    vllm_bench,
    vllm_log,
)
from adasim.importers.head import Head
from adasim.importers.sink import Sink
from adasim.importers.source import Source


class Importer(NamedTuple):
    """One format. ``read`` takes one file, ``read_all`` all files of its kind together."""

    kind: str
    shows: str  # what a file of this kind is known by
    recognises: Callable[[Head], bool]
    read: Callable[[Source, Sink], None] | None = None
    read_all: Callable[[Sequence[Source], Sink], None] | None = None


IMPORTERS = (
    Importer(
        "sglang-bench", "JSON with backend, dataset_name and server_info", sglang_bench.recognises, sglang_bench.read
    ),
    Importer("sglang-meta", "JSON responses with meta_info", sglang_meta.recognises, sglang_meta.read),
    Importer("sglang-log", "lines 'Decode batch. #running-req: ...'", sglang_log.recognises, sglang_log.read),
    Importer("vllm-bench", "JSON with model_id and num_prompts", vllm_bench.recognises, vllm_bench.read),
    Importer(
        "vllm-log", "lines 'Avg generation throughput' or 'SpecDecoding metrics'", vllm_log.recognises, vllm_log.read
    ),
    Importer("guidellm", "JSON with benchmarks and their metrics", guidellm.recognises, guidellm.read),
    Importer("aiperf", "JSON lines with metadata.request_start_ns and metrics", aiperf.recognises, aiperf.read),
    Importer("prometheus", "samples vllm:... or sglang:...", prometheus.recognises, read_all=prometheus.read),
    Importer("runs", "runs.csv of adasim import", runs.recognises, runs.read),
    Importer("throughput", "CSV of batch or k with tok_s or accept_length", throughput.recognises, throughput.read),
    Importer("cost", "CSV of batch or tokens with ms", cost.recognises, cost.read),
    Importer("sps", "JSON with m_probes and theta_seconds, or sample_steps_per_sec", sps.recognises, sps.read),
    Importer("mooncake", "JSON lines with timestamp, input_length", trace.recognises_mooncake, trace.read_mooncake),
    Importer("azure", "CSV TIMESTAMP,ContextTokens,GeneratedTokens", trace.recognises_azure, trace.read_azure),
    Importer("vidur", "CSV arrived_at,num_prefill_tokens,num_decode_tokens", trace.recognises_vidur, trace.read_vidur),
    Importer("sharegpt", "JSON with conversations", trace.recognises_sharegpt, trace.read_sharegpt),
)
KINDS = {i.kind: i for i in IMPORTERS}


class Imported(NamedTuple):
    """One file, read."""

    source: Source
    kind: str
    rows: dict[str, int]  # by table


def recognise(path: Path) -> Importer:
    """The importer of a file, by its content.

    Raises:
        InputError: none or several know it; says what was tried.
    """
    head = Head(path)
    known = [i for i in IMPORTERS if i.recognises(head)]
    if len(known) == 1:
        return known[0]
    if known:
        raise InputError(f"{path}: could be {' or '.join(i.kind for i in known)}; say which with --as")
    tried = "\n".join(f"  {i.kind}: {i.shows}" for i in IMPORTERS)
    raise InputError(f"{path}: begins like none of the known formats; --as KIND forces one of\n{tried}")


def import_files(
    paths: Sequence[Path], sink: Sink, *, kind: str | None = None, keep_going: bool = False
) -> list[Imported]:
    """Read files into the tables of ``sink``.

    Args:
        paths: files, plain, gzip or zstd; scrapes of Prometheus in order of time.
        sink: takes the rows; the caller closes it.
        kind: read all of them as this one; None = recognise each.
        keep_going: leave bad lines out and count them.

    Raises:
        InputError: a file is missing, unknown, or has bad lines that are not to be left out; all such files are named.
    """
    problems: list[str] = []
    found: list[Imported] = []
    for importer, group in _groups(_choose(paths, kind)):
        try:
            found += _read(importer, [Source(p, keep_going=keep_going) for p in group], sink)
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(*problems)
    _compare(found)
    return found


def _choose(paths: Sequence[Path], kind: str | None) -> list[tuple[Path, Importer]]:
    """An importer for every file."""
    if kind is not None and kind not in KINDS:
        raise InputError(f"--as {kind}: unknown; allowed: {', '.join(KINDS)}")
    problems: list[str] = []
    chosen: list[tuple[Path, Importer]] = []
    for path in paths:
        try:
            if not path.is_file():
                raise InputError(f"{path}: no such file")
            chosen.append((path, KINDS[kind] if kind else recognise(path)))
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(*problems)
    return chosen


def _read(importer: Importer, sources: list[Source], sink: Sink) -> list[Imported]:
    """Read one file, or all of a kind that is read together; the last one carries the rows."""
    before = dict(sink.counts)
    if importer.read_all is not None:
        importer.read_all(sources, sink)
    elif importer.read is not None:
        importer.read(sources[0], sink)
    for source in sources:
        source.finish()
    rows = {n: c - before[n] for n, c in sink.counts.items() if c > before[n]}
    if not rows:
        sources[-1].note(f"nothing of kind {importer.kind} was found in it")
    return [Imported(s, importer.kind, rows if s is sources[-1] else {}) for s in sources]


def _groups(chosen: Sequence[tuple[Path, Importer]]) -> list[tuple[Importer, list[Path]]]:
    """Files one by one, or all of a kind that is read together, in the order of the first."""
    groups: list[tuple[Importer, list[Path]]] = []
    for path, importer in chosen:
        same = next((g for i, g in groups if i is importer and i.read_all is not None), None)
        if same is None:
            groups.append((importer, [path]))
        else:
            same.append(path)
    return groups


def _compare(found: Sequence[Imported]) -> None:
    """Note engine versions that differ, within a file or among files."""
    versions: dict[str, set[str]] = {}
    for engine, version in {e for i in found for e in i.source.engines}:
        versions.setdefault(engine, set()).add(version)
    for engine, differing in versions.items():
        if len(differing) > 1:
            for imported in found:
                if any(e == engine for e, _ in imported.source.engines):
                    imported.source.note(f"versions of {engine} differ: {', '.join(sorted(differing))}")
