"""Files on disk as text: hashed while they are read, unpacked if they are packed."""

import gzip
import hashlib
import io
import zlib
from pathlib import Path
from typing import Any, TextIO, cast

import pyarrow as pa

from adasim.errors import InputError

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


class Hashed(io.RawIOBase):
    """A binary file that is hashed while it is read."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self.hash = hashlib.sha256()
        self.bytes = 0

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: Any) -> int:
        """The next bytes, counted and hashed."""
        read = self._file.readinto(buffer)
        self.hash.update(memoryview(buffer)[:read])
        self.bytes += read
        return read

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


def unpacked(raw: io.RawIOBase) -> TextIO:
    """Text of a file, plain, gzip or zstd, told by its first bytes. Bytes that are no UTF-8 become replacement marks."""
    file = io.BufferedReader(raw, 1 << 18)
    start = file.peek(4)[:4]
    binary: Any = file
    if start.startswith(GZIP):
        binary = gzip.GzipFile(fileobj=file)
    elif start == ZSTD:
        binary = io.BufferedReader(cast(io.RawIOBase, pa.CompressedInputStream(file, "zstd")), 1 << 18)
    return io.TextIOWrapper(binary, encoding="utf-8-sig", errors="replace", newline="")


def head(path: Path, characters: int = 1 << 20) -> str:
    """The beginning of a file's text.

    Raises:
        InputError: unreadable, or no text.
    """
    try:
        with Hashed(path) as raw:
            start = unpacked(raw).read(characters)
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    if not start.strip():
        raise InputError(f"{path}: is empty")
    if "\0" in start:
        raise InputError(f"{path}: is no text, gzip or zstd file")
    return start
