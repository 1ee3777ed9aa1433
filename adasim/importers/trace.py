"""Public arrival traces (Mooncake, Azure, Vidur), with the parsers scenarios use, and ShareGPT conversations.

ShareGPT holds texts, no times and no token counts: lengths are guessed at four characters a token, which is said.
"""

from collections.abc import Iterator
from typing import Any

from adasim.importers.fields import Malformed
from adasim.importers.head import Head
from adasim.importers.json_stream import JsonStream
from adasim.importers.sink import Sink
from adasim.importers.source import Source
from adasim.importers.tables import WorkloadRow
from adasim.traces import CSV_COLUMNS, TraceRow, check_row, csv_row, json_row

CHARACTERS = 4  # a token, in English text
ASSISTANTS = {"gpt", "assistant", "chatgpt", "model"}


def recognises_mooncake(head: Head) -> bool:
    """Objects with Mooncake's names."""
    return {"timestamp", "input_length", "output_length"} <= head.keys


def recognises_azure(head: Head) -> bool:
    """A table with Azure's columns."""
    return set(CSV_COLUMNS["azure"]) <= set(head.columns)


def recognises_vidur(head: Head) -> bool:
    """A table with Vidur's columns."""
    return set(CSV_COLUMNS["vidur"]) <= set(head.columns)


def recognises_sharegpt(head: Head) -> bool:
    """Objects, or a list of them, with conversations."""
    return "conversations" in head.keys or "conversation" in head.keys


def read_mooncake(source: Source, sink: Sink) -> None:
    """Fill the workload."""
    _fill(source, sink, ((n, lambda line=line: json_row(line)) for n, line in source.lines()))


def read_azure(source: Source, sink: Sink) -> None:
    """Fill the workload."""
    _fill(source, sink, ((n, lambda row=row: csv_row(row, "azure")) for n, row in source.records()))


def read_vidur(source: Source, sink: Sink) -> None:
    """Fill the workload."""
    _fill(source, sink, ((n, lambda row=row: csv_row(row, "vidur")) for n, row in source.records()))


def _fill(source: Source, sink: Sink, rows: Iterator[tuple[int, Any]]) -> None:
    first: float | None = None
    before: TraceRow | None = None
    request = 0
    for line, parse in rows:
        with source.guard(line):
            try:
                row: TraceRow = parse()
                check_row(row, before, skip_empty=True)
            except KeyError as error:
                raise Malformed(f"{error.args[0]!r} is missing") from error
            except (TypeError, ValueError, OverflowError) as error:
                raise Malformed(str(error)) from error
            if not (row.prompt_len and row.output_len):
                raise Malformed("no prompt or no output tokens")
            first, before = row.arrival_s if first is None else first, row
            sink.add(
                WorkloadRow(source.name, request, row.arrival_s - first, row.prompt_len, row.output_len, row.hash_ids)
            )
            request += 1


def read_sharegpt(source: Source, sink: Sink) -> None:
    """Fill the workload: a request for every answer, its prompt all that was said before."""
    request = 0
    for stream in source.documents():
        with source.guard(stream):
            for record in _conversations(stream):
                with source.guard(stream):
                    for prompt, output in _turns(record):
                        sink.add(WorkloadRow(source.name, request, None, prompt, output))
                        request += 1
    source.note(f"lengths are guessed from texts, {CHARACTERS} characters a token; there are no arrival times")


def _conversations(stream: JsonStream) -> Iterator[Any]:
    if stream.peek() == "[":
        for _ in stream.items():
            yield stream.value()
    else:
        yield stream.value()


def _turns(record: Any) -> list[tuple[int, int]]:
    """Prompt and output tokens of every answer."""
    said = record.get("conversations", record.get("conversation")) if isinstance(record, dict) else None
    if not isinstance(said, list):
        raise Malformed("conversations must be a list of turns")
    before, turns = 0, []
    for i, turn in enumerate(said):
        speaker, words = (
            (turn.get("from", turn.get("role")), turn.get("value", turn.get("content")))
            if isinstance(turn, dict)
            else (None, None)
        )
        if not isinstance(words, str) or not isinstance(speaker, str):
            raise Malformed(f"conversations[{i}] needs the texts from and value")
        tokens = -(-len(words) // CHARACTERS)
        if speaker in ASSISTANTS and before and tokens:
            turns.append((before, tokens))
        before += tokens
    return turns
