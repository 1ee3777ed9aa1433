"""One file as importers see it: read line by line or as documents, with what is wrong with it noted."""

import csv
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa

from adasim.errors import InputError
from adasim.importers.fields import Malformed
from adasim.importers.json_stream import JsonStream
from adasim.importers.packed import Hashed, unpacked

MAX_PROBLEMS = 10
LONGEST_LINE = 1 << 26  # characters


class Source:
    """A file, what is noted about it, and how bad lines are dealt with.

    Attributes:
        name: as the user gave it; the ``file`` of every row.
        notes: what is suspicious, or had to be assumed; each once, with its count.
        skipped: bad lines left out (``keep_going``).
        problems: the first of them, each with its place.
    """

    def __init__(self, path: Path, *, keep_going: bool = False) -> None:
        self.path, self.name, self.keep_going = path, str(path), keep_going
        self.notes: dict[str, int] = {}
        self.engines: set[tuple[str, str]] = set()  # engine and version, where both are known
        self.problems: list[str] = []
        self.skipped = 0
        self.sha256 = ""
        self.bytes = 0

    def note(self, text: str) -> None:
        """Something the user must know of this file."""
        self.notes[text] = self.notes.get(text, 0) + 1

    def problem(self, line: int, what: str) -> None:
        """A line that cannot be used.

        Raises:
            InputError: it is the tenth, unless they are to be skipped.
        """
        self.skipped += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(f"{self.name}:{line}: {what}")
        if not self.keep_going and self.skipped == MAX_PROBLEMS:
            raise InputError(*self.problems)

    @contextmanager
    def guard(self, line: int | JsonStream) -> Iterator[None]:
        """What is malformed within is a problem of this line, or of the line a cursor has come to."""
        try:
            yield
        except Malformed as error:
            self.problem(line if isinstance(line, int) else line.line, str(error))

    @contextmanager
    def text(self) -> Iterator[TextIO]:
        """The unpacked text; afterwards size and hash of the file are known.

        Raises:
            InputError: unreadable.
        """
        try:
            with Hashed(self.path) as raw:
                file = unpacked(raw)
                yield file
                while file.read(1 << 18):  # an importer may stop early
                    pass
                while raw.read(1 << 18):
                    pass
                self.sha256, self.bytes = raw.hash.hexdigest(), raw.bytes
        except (OSError, EOFError, zlib.error, csv.Error, pa.ArrowException) as error:
            raise InputError(f"{self.name}: cannot be read: {error}") from error

    def finish(self) -> None:
        """After reading.

        Raises:
            InputError: bad lines that are not to be skipped.
        """
        if self.problems and not self.keep_going:
            raise InputError(*self.problems)

    def lines(self) -> Iterator[tuple[int, str]]:
        """Every line that is not empty, with its number."""
        with self.text() as file:
            number = 0
            while line := file.readline(LONGEST_LINE):
                number += 1
                if len(line) == LONGEST_LINE:
                    self.problem(number, f"longer than {LONGEST_LINE} characters")
                elif line.strip():
                    yield number, line

    def objects(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """The JSON object on every line, with the line's number."""
        for number, line in self.lines():
            try:
                record = parsed(line)
            except Malformed as error:
                self.problem(number, str(error))
            else:
                yield number, record

    def documents(self) -> Iterator[JsonStream]:
        """A cursor before every JSON document; the document is to be taken within ``guard``."""
        with self.text() as file:
            stream = JsonStream(file)
            while stream.peek():
                before = self.skipped
                yield stream
                if self.skipped > before:
                    stream.recover()

    def records(self) -> Iterator[tuple[int, dict[str, str]]]:
        """The rows of a CSV under its header, with their line numbers; lines that begin with # are left out."""
        number = 0

        def counted(file: TextIO) -> Iterator[str]:
            nonlocal number
            for line in file:
                number += 1
                if line.strip() and not line.startswith("#"):
                    yield line

        with self.text() as file:
            rows = csv.reader(counted(file))
            names = [n.strip() for n in next(rows, [])]
            for row in rows:
                if len(row) != len(names):
                    self.problem(number, f"{len(row)} fields, allowed: {len(names)}, as the header has")
                else:
                    yield number, {k: v.strip() for k, v in zip(names, row, strict=True)}


def parsed(line: str) -> dict[str, Any]:
    """The JSON object of a line.

    Raises:
        Malformed: it holds none.
    """
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"not JSON: {error}") from error
    if not isinstance(found, dict):
        raise Malformed(f"holds {type(found).__name__}, allowed: a JSON object")
    return found
