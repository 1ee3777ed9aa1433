"""Drafter versions on disk: published whole or not at all, checked before anything is replaced.

A store holds ``v000001/``, ``v000002/`` ...; each is a checkpoint with ``manifest.json`` (version, SHA-256 of the
weights, what made it). A version that is truncated, of another shape, or not finite is refused with a reason.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from adasim.errors import InputError
from adasim.real.checkpoint import Checkpoint, load_checkpoint, misfits, save_checkpoint


class Version(NamedTuple):
    """A published drafter."""

    number: int
    checkpoint: Checkpoint
    manifest: dict[str, Any]


class Refused(NamedTuple):
    """A version that must not be used, and why."""

    number: int
    reason: str


class VersionStore:
    """Numbered drafter versions in a folder; one writer, any number of readers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def numbers(self) -> list[int]:
        """Published versions, the oldest first."""
        return sorted(int(p.name[1:]) for p in self.folder.glob("v[0-9]*") if p.is_dir())

    def publish(self, checkpoint: Checkpoint, facts: dict[str, Any]) -> int:
        """Write the next version; readers see all of it or nothing. Returns its number."""
        self.folder.mkdir(parents=True, exist_ok=True)
        number = max(self.numbers(), default=0) + 1
        scratch = Path(tempfile.mkdtemp(prefix=".new-", dir=self.folder))
        try:
            save_checkpoint(scratch, checkpoint)
            manifest = {"version": number, "sha256": _digest(scratch), **facts}
            (scratch / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
            scratch.rename(self.folder / f"v{number:06d}")
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        return number

    def load(self, number: int, used: Checkpoint) -> Version | Refused:
        """A version that can take the place of the one in use, or why it must not."""
        folder = self.folder / f"v{number:06d}"
        try:
            manifest = json.loads((folder / "manifest.json").read_text())
            if manifest["sha256"] != _digest(folder):
                return Refused(number, "the weights do not have the checksum of the manifest")
            checkpoint = load_checkpoint(folder)
        except InputError as error:
            return Refused(number, str(error))
        except Exception as error:  # a bad file may fail anywhere; serving must not
            return Refused(number, f"cannot be read: {error}")
        problems = misfits(checkpoint, used)
        if problems:
            return Refused(number, "; ".join(problems))
        return Version(number, checkpoint, manifest)

    def parent(self, number: int) -> int | None:
        """The version that this one was trained from; None = it does not say."""
        try:
            said = json.loads((self.folder / f"v{number:06d}" / "manifest.json").read_text()).get("parent")
        except (OSError, ValueError, AttributeError):  # ``load`` says what is wrong
            return None
        return said if isinstance(said, int) else None

    def newest(self, among: Sequence[int], used: Checkpoint) -> tuple[Version | None, list[Refused]]:
        """The newest usable version ``among`` these, the oldest first, and the newer ones that were refused."""
        refused: list[Refused] = []
        for number in reversed(among):
            found = self.load(number, used)
            if isinstance(found, Version):
                return found, refused
            refused.append(found)
        return None, refused

    def prune(self, below: int) -> None:
        """Delete versions older than ``below``."""
        for number in self.numbers():
            if number < below:
                shutil.rmtree(self.folder / f"v{number:06d}", ignore_errors=True)


def _digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
