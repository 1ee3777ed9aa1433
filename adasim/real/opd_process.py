"""The trainer's process: ``python -m adasim.real.opd_process FOLDER``, started by ``distiller``.

Serving and trainer share nothing but a folder, so that neither can harm the other:

    settings.json frozen.safetensors base/   written once by serving: what to train, from what
    buffers/000001.npz                       samples to train on; the newest counts, others are skipped
    base_version                             written by serving after a rollback: train on from this version
    versions/v000001/                        written by the trainer, whole or not at all
    alive                                    touched by the trainer while it lives
    trainer.log                              what it prints

It ends when its standard input does, that is, with the process that started it.
"""

import json
import os
import select
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adasim.errors import InputError
from adasim.files import write_atomic
from adasim.real.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from adasim.real.opd import Opd
from adasim.real.rerun import Teacher
from adasim.real.samples import Sample, read_samples, write_samples
from adasim.real.sampling import Sampling
from adasim.real.train_opd import OpdTrainer
from adasim.real.versions import Version, VersionStore
from adasim.real.weights import load_target

COMMAND = (sys.executable, "-m", "adasim.real.opd_process")
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Folder:
    """Names inside the folder."""

    root: Path

    @property
    def buffers(self) -> Path:
        """Samples to train on."""
        return self.root / "buffers"

    @property
    def versions(self) -> VersionStore:
        """What was trained."""
        return VersionStore(self.root / "versions")

    @property
    def alive(self) -> Path:
        """Touched while the trainer lives."""
        return self.root / "alive"

    @property
    def base_version(self) -> Path:
        """The version to train on from."""
        return self.root / "base_version"

    @property
    def log(self) -> Path:
        """What the trainer prints."""
        return self.root / "trainer.log"

    @property
    def served(self) -> Path:
        """What a server in another process says of requests that begin and end: one JSON object a line."""
        return self.root / "served.jsonl"

    @property
    def settings(self) -> Path:
        """Written last: once it is there, the folder is ready."""
        return self.root / "settings.json"

    def prepare(
        self, opd: Opd, sampling: Sampling, start: Checkpoint, embedding: Tensor, head: Tensor, name: str,
        domains: Sequence[str],
    ) -> None:  # fmt: skip
        """Write what a trainer needs before it starts.

        Args: start: the drafter to improve; embedding and head: the target's, each [V, D]; name: the target's.
        """
        from safetensors.torch import save_file

        self.buffers.mkdir(parents=True)
        rows = head if start.vocab is None else head[start.vocab.to(head.device)]
        frozen = {"embedding": embedding.cpu().contiguous(), "head": rows.cpu().clone().contiguous()}
        save_file(frozen, self.root / "frozen.safetensors")
        save_checkpoint(self.root / "base", start)
        said = {"opd": opd.model_dump(), "sampling": sampling.model_dump(), "target": name, "domains": list(domains)}
        write_atomic(self.settings, json.dumps(said, indent=1))

    def trained(self, sent: int) -> bool:
        """Whether the trainer has done the first ``sent`` buffers."""
        return sent == 0 or any(n >= sent for n in self.versions.numbers())

    def send(self, number: int, samples: list[Sample], *, keep: bool) -> None:
        """Hand a buffer over; those before it have been trained and go, unless they are to be kept."""
        write_samples(self.buffers / f"{number:06d}.npz", samples)
        for path in [] if keep else self.buffers.glob("[0-9]*.npz"):
            if int(path.stem) < number:
                path.unlink()


def serve_training(folder: Folder) -> None:
    """Train on each buffer that appears, and publish the result, until standard input ends."""
    from safetensors.torch import load_file

    def tick() -> None:
        folder.alive.touch()
        if _ended():
            raise SystemExit(0)

    said = json.loads(folder.settings.read_text())
    opd = Opd.model_validate(said["opd"])
    if opd.cores is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, opd.cores)
    torch.set_num_threads(opd.threads)
    device = torch.device(opd.device)
    base = load_checkpoint(folder.root / "base")
    frozen = load_file(folder.root / "frozen.safetensors", device=str(device))
    teacher = make_teacher(said, opd, base, frozen["embedding"].dtype, device)
    trainer = OpdTrainer(opd, base, frozen["embedding"], frozen["head"], teacher, tick)
    done, current = 0, 0
    while True:
        tick()
        waiting = [int(p.stem) for p in folder.buffers.glob("[0-9]*.npz") if int(p.stem) > done]
        if not waiting:
            time.sleep(POLL_S)
            continue
        done = max(waiting)
        if folder.base_version.exists():
            current = int(folder.base_version.read_text())
            folder.base_version.unlink()
            trainer.restart(_version(folder, current, base))
        current = _train(folder, trainer, done, current)


def _train(folder: Folder, trainer: OpdTrainer, buffer: int, parent: int) -> int:
    """One training round on one buffer; the number of the version it gave."""
    samples = read_samples(folder.buffers / f"{buffer:06d}.npz")
    start, cpu = time.monotonic(), time.process_time()
    progress = trainer.train(samples)
    facts: dict[str, Any] = {
        "parent": parent,
        "buffer": buffer,
        "samples": len(samples),
        "train_s": time.monotonic() - start,
        "cpu_s": time.process_time() - cpu,
        **asdict(progress),
    }
    number = folder.versions.publish(trainer.checkpoint(), facts)
    print(f"version {number}: {json.dumps(facts)}", flush=True)
    return number


def _version(folder: Folder, number: int, base: Checkpoint) -> Checkpoint:
    if number == 0:
        return base
    found = folder.versions.load(number, base)
    if not isinstance(found, Version):
        raise InputError(f"version {number}: {found.reason}")
    return found.checkpoint


def make_teacher(
    said: dict[str, Any], opd: Opd, base: Checkpoint, dtype: torch.dtype, device: torch.device
) -> Teacher | None:
    """What labels more blocks, where it is asked for and there is a head to learn. Args: said: ``settings.json``."""
    if opd.teacher == "none" or not base.head:
        return None
    target = load_target(said["target"], dtype, device)
    vocab = torch.arange(target.arch.vocab) if base.vocab is None else base.vocab
    return Teacher(target, vocab, Sampling.model_validate(said["sampling"]), opd.seed)


def _ended() -> bool:
    """Whether the process that started this one has closed our standard input."""
    readable, _, _ = select.select([sys.stdin], [], [], 0)
    return bool(readable) and not os.read(sys.stdin.fileno(), 1)


def roll_back(folder: Folder, version: int) -> None:
    """Let the next training round start from this version."""
    write_atomic(folder.base_version, str(version))


if __name__ == "__main__":
    serve_training(Folder(Path(sys.argv[1])))
