"""The beginning of a file, as recognisers look at it: by content, never by name."""

from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Any

from adasim.importers.fields import Malformed
from adasim.importers.json_stream import JsonStream
from adasim.importers.packed import head

SEEN = 1 << 18  # characters of JSON that are looked at for keys


class Head:
    """What the first megabyte shows."""

    def __init__(self, path: Path) -> None:
        self.text = head(path)

    @cached_property
    def keys(self) -> frozenset[str]:
        """Keys of the first JSON object, as far as it can be seen; of a list's first item, where a list is at the top."""
        return frozenset(self.first)

    @cached_property
    def first(self) -> dict[str, Any]:
        """That object; members that are cut off are None."""
        found: dict[str, Any] = {}
        stream = JsonStream(StringIO(self.text[:SEEN]))
        try:
            if stream.peek() == "[":
                next(stream.items(), None)
            for key in stream.members() if stream.peek() == "{" else ():
                found[key] = None
                found[key] = stream.value()
        except Malformed:
            pass
        return found

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """The header, where the file is a table of commas."""
        lines = (line for line in self.text.splitlines() if line.strip() and not line.startswith("#"))
        first = next(lines, "")
        return () if first.lstrip().startswith(("{", "[")) else tuple(c.strip().strip('"') for c in first.split(","))
