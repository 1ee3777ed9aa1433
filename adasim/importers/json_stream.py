"""JSON read piece by piece: documents one after another, their members and items, none held longer than asked for."""

import json
import re
from collections.abc import Iterator
from typing import Any, TextIO

from adasim.importers.fields import Malformed

CHUNK = 1 << 18
LONGEST = 1 << 26  # characters of one value that is read whole
SPACE = re.compile(r"[\s\x1e\ufeff]*")
DECODER = json.JSONDecoder()


class JsonStream:
    """A cursor over JSON text. Whoever is given a member or an item takes it with ``value``, ``members``, ``items`` or
    ``skip`` before asking for the next.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._text = ""
        self._at = 0
        self._ended = False
        self._lines_before = 1  # of the text that was dropped

    @property
    def line(self) -> int:
        """Number of the line the cursor is on."""
        return self._lines_before + self._text.count("\n", 0, self._at)

    def peek(self) -> str:
        """The next character that is no space; empty at the end."""
        while True:
            found = SPACE.match(self._text, self._at)
            self._at = found.end() if found else self._at
            if self._at < len(self._text) or not self._more(CHUNK):
                return self._text[self._at : self._at + 1]

    def members(self) -> Iterator[str]:
        """Keys of an object, one after another."""
        self._expect("{")
        while self.peek() != "}":
            key = self.value()
            if not isinstance(key, str):
                raise Malformed(f"the key {key!r} must be a text")
            self._expect(":")
            yield key
            if self.peek() != "}":
                self._expect(",")
        self._at += 1

    def items(self) -> Iterator[int]:
        """Indices of a list, one after another."""
        self._expect("[")
        index = 0
        while self.peek() != "]":
            yield index
            index += 1
            if self.peek() != "]":
                self._expect(",")
        self._at += 1

    def value(self) -> Any:
        """The next value, whole.

        Raises:
            Malformed: not JSON, or longer than ``LONGEST`` characters.
        """
        self.peek()
        while True:
            try:
                found, end = DECODER.raw_decode(self._text, self._at)
            except (json.JSONDecodeError, RecursionError) as error:
                if isinstance(error, RecursionError):
                    raise Malformed("is nested too deeply") from error
                cut = error.msg.startswith("Unterminated") or error.pos >= len(self._text) - 16
                if not cut or self._ended or len(self._text) - self._at > LONGEST:
                    raise Malformed(f"not JSON: {error.msg} (column {self._column(error.pos)})") from error
            else:
                if end < len(self._text) - 3 or self._ended:  # a number may go on: 1 | e-3
                    self._at = end
                    return found
            self._more(max(CHUNK, len(self._text) - self._at))

    def skip(self) -> None:
        """Pass over the next value without holding it."""
        first = self.peek()
        if first == "[":
            for _ in self.items():
                self.skip()
        elif first == "{":
            for _ in self.members():
                self.skip()
        else:
            self.value()

    def recover(self) -> None:
        """Go to the next line, after something malformed."""
        while (end := self._text.find("\n", self._at)) < 0:
            self._at = len(self._text)
            if not self._more(CHUNK):
                return
        self._at = end + 1

    def _expect(self, character: str) -> None:
        if (found := self.peek()) != character:
            raise Malformed(f"not JSON: {found or 'the end'} where {character} must be (column {self._column(self._at)})")
        self._at += 1

    def _column(self, at: int) -> int:
        return at - self._text.rfind("\n", 0, at)

    def _more(self, characters: int) -> bool:
        """Read on; what lies behind the cursor is dropped."""
        if self._ended:
            return False
        self._lines_before += self._text.count("\n", 0, self._at)
        read = self._file.read(characters)
        self._text, self._at = self._text[self._at :] + read, 0
        self._ended = len(read) < 1
        return not self._ended
