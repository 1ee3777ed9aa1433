"""Where measured numbers come from: engine, model and machine. Importing it loads no torch."""

import platform
from functools import lru_cache
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Literal

from pydantic import JsonValue

from adasim.errors import InputError
from adasim.types import Component


class EngineIdentity(Component):
    """What must be the same for two measurements to be comparable.

    Attributes:
        engine: who served, like ``torch`` or ``sglang``.
        engine_version: of that library.
        adasim: version whose engine it is; null = another's engine, or not said, which is no difference.
        hardware: the processor's or GPU's name.
        device: what the model ran on.
        dtype: of weights and activations.
        threads: CPU threads of one engine.
        target: the target model, as the scenario names it.
        target_sha256: of its configuration and weights (random weights: of their shape).
        drafter: the drafter, as the scenario names it; null = none was loaded.
        drafter_sha256: of its configuration and weights, the length head included.
        python: its version; the last number is no difference.
        resolved: what a server made of its arguments; null = it was not running, which is no difference.
    """

    engine: str
    engine_version: str
    adasim: str | None = None
    hardware: str
    device: Literal["cpu", "cuda"]
    dtype: str
    threads: int
    target: str
    target_sha256: str
    drafter: str | None = None
    drafter_sha256: str | None = None
    python: str
    resolved: dict[str, JsonValue] | None = None

    def differs(self, other: "EngineIdentity") -> list[str]:
        """A line for every field that is not the same, this one's value first.

        A name alone is no difference: the same weights may lie in another folder.
        """
        mine, theirs = _flat(self), _flat(other)
        same = {name for name in ("target", "drafter") if mine[f"{name}_sha256"] == theirs[f"{name}_sha256"]}
        same |= {"adasim"} if self.adasim is None or other.adasim is None else set()
        same |= {"python"} if _minor(self.python) == _minor(other.python) else set()
        known = mine.keys() & theirs.keys() if self.resolved is None or other.resolved is None else mine | theirs
        return [
            f"{name}: {_short(mine.get(name))}, not {_short(theirs.get(name))}"
            for name in mine | theirs
            if name in known and mine.get(name) != theirs.get(name) and name not in same
        ]


def _flat(identity: EngineIdentity) -> dict[str, object]:
    """Field by field; what was resolved, name by name."""
    fields = identity.model_dump(exclude={"resolved"})
    return fields | {f"resolved.{name}": value for name, value in (identity.resolved or {}).items()}


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def processor() -> str:
    """The CPU's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), "") or platform.processor() or platform.machine()


def fingerprint(folder: Path) -> str:
    """SHA-256 over a model folder's configuration and weights, whatever the folder is called.

    Raises:
        InputError: it holds no config.json or no weights.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not (folder / "config.json").is_file() or not files:
        raise InputError(f"{folder}: must hold config.json and *.safetensors")
    found = sha256()
    for path in (folder / "config.json", *files):
        status = path.stat()
        found.update(f"{path.name} {_file_sha256(path.resolve(), status.st_size, status.st_mtime_ns)}\n".encode())
    return found.hexdigest()


@lru_cache(maxsize=64)
def _file_sha256(path: Path, size: int, changed_ns: int) -> str:
    """Size and time only tell a changed file from one that was read before."""
    with path.open("rb") as stream:
        return file_digest(stream, "sha256").hexdigest()


def _short(value: object) -> str:
    """A value for a person: hashes cut to what tells them apart."""
    return value[:12] if isinstance(value, str) and len(value) == 64 else str(value)
