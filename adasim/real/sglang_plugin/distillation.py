"""On-policy distillation beside a running server: its trainer, and the one who gives it new drafters.

The server shows what verification showed (``tap``); the torch engine's trainer learns from it; the same ``Keeper``
decides which version is served. Serving never waits for any of that, but for the swap itself.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch

from adasim.errors import InputError
from adasim.real.checkpoint import Checkpoint, load_checkpoint
from adasim.real.keeper import Keeper
from adasim.real.opd import Opd
from adasim.real.opd_process import COMMAND, Folder
from adasim.real.sampling import Sampling
from adasim.real.sglang_plugin.link import Link, Served
from adasim.real.sglang_plugin.reload import Swapped, fitting, swap
from adasim.real.sglang_plugin.settings import ServedOpd
from adasim.real.trainer_process import TrainerProcess
from adasim.real.weights import load_rows, model_dir
from adasim.records import EventRecord

LOOK_S = 0.25  # between two polls


def _nothing(event: EventRecord) -> None:
    """Nobody listens."""


class Distillation:
    """One server's trainer. Enter it, then ``tend`` it.

    Args:
        link: the server, with ``opd`` in its settings.
        domains: names that requests may give (``settings.DOMAIN``); others are ``default``.
        sampling: how clients sample, for who replays the buffers.
        start: version 0; None = the checkpoint that the server was started with.
        command: what starts the trainer; the folder is appended.

    Attributes:
        began_s: when events begin to count their seconds, monotonic.
        events: what happened, in order.
        failed: why nothing is loaded any more; serving goes on.
    """

    opd: ServedOpd
    folder: Folder
    keeper: Keeper
    trainer: TrainerProcess | None = None  # once it was entered

    def __init__(
        self, link: Link, domains: Sequence[str] = (), sampling: Sampling | None = None, start: Path | None = None,
        command: Sequence[str] = COMMAND,
    ) -> None:  # fmt: skip
        self.link, self.start, self.command, self.failed = link, start, command, ""
        self.domains = ["default", *(d for d in domains if d != "default")]
        self.sampling = sampling or Sampling()
        self.events: list[EventRecord] = []
        self.began_s = time.monotonic()
        self._read, self._ranks, self._target = 0, 1, ""
        self._refused: tuple[int, str] | None = None  # the version that the server last refused, and why

    async def __aenter__(self) -> Self:
        """Serve version 0 and start the trainer.

        Raises:
            InputError: the server or its models cannot be used, or the folder is in use.
        """
        served = await self.link.served()
        if served.opd is None:
            raise InputError("the server shows a trainer nothing; start it with opd in its settings")
        self.opd, self._ranks = ServedOpd.model_validate(served.opd), served.ranks
        self.folder = Folder(Path(self.opd.folder).expanduser())
        start = await asyncio.to_thread(self._load, served)
        self.keeper = Keeper(self.opd, start, self.folder, self._note, keep=self.opd.keep is not None)
        self._target = await self.link.target_checksum()
        if wrong := await self.restore():
            raise InputError(wrong)
        await asyncio.to_thread(self._prepare, served, start)
        self.trainer = TrainerProcess([*self.command, str(self.folder.root)], self.folder, self.opd.hang_s)
        self.trainer.__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.trainer is not None:
            await asyncio.to_thread(self.trainer.__exit__, kind, error, trace)

    async def poll(self) -> None:
        """See how requests and trainer do; give the server a version, or take one back."""
        self._hear()
        reason = self.trainer.failure() if self.trainer is not None else None
        if reason:
            self._note("trainer_failed", self.keeper.current, 0.0, reason)
        while not self.failed and (move := await asyncio.to_thread(self.keeper.move)) is not None:
            swapped = await self._send(move.number, move.checkpoint)
            if problems := "; ".join(swapped.problems):
                if (move.number, problems) != self._refused:  # a rollback is tried again, and told once
                    self.keeper.refused(move, problems)
                self._refused = move.number, problems
                return
            self.keeper.moved(move, swapped.paused_s)
            self.events[-1] = self.events[-1]._replace(time_s=swapped.end_s - self.began_s)  # before the next round
            await self._check_target()

    async def tend(self, over: Callable[[], bool], heard: Callable[[EventRecord], None] = _nothing) -> None:
        """Poll until it is over. Args: heard: takes every event, once."""
        told = 0
        while not over():
            await self.poll()
            for event in self.events[told:]:
                heard(event)
            told = len(self.events)
            await asyncio.sleep(LOOK_S)

    async def restore(self) -> str:
        """Have version 0 served; why it is not, empty when it is."""
        swapped = await self._send(0, self.keeper.start)
        await self._check_target()
        return "; ".join(swapped.problems) or self.failed

    async def _send(self, number: int, checkpoint: Checkpoint) -> Swapped:
        """Give the server a version."""
        try:
            return await swap(self.link, checkpoint, str(number), self._ranks)
        except InputError as error:
            return Swapped([str(error)], 0.0, 0.0)

    async def _check_target(self) -> None:
        """Nothing that is sent may touch the target: should it ever, the operator must know, and nothing more is sent."""
        try:
            now = await self.link.target_checksum()
        except InputError as error:
            self._note("target_unchecked", self.keeper.current, 0.0, str(error))
            return
        if now != self._target:
            self.failed = f"the target's weights changed: checksum {self._target} became {now}; restart the server"
            self._note("target_changed", self.keeper.current, 0.0, f"ALARM: {self.failed}")

    def notes(self, dropped: int = 0) -> list[str]:
        """What a report must say; nothing before it was entered. Args: dropped: see ``Tap.state``."""
        if self.trainer is None:
            return []
        return self.keeper.notes(self.trainer.failed, dropped) + [f"ALARM: {self.failed}"] * bool(self.failed)

    def _load(self, served: Served) -> Checkpoint:
        """The drafter to begin with."""
        if self.folder.root.exists() and any(self.folder.root.iterdir()):
            raise InputError(f"opd.folder: {self.folder.root} is not empty; move it away, or name another one")
        return load_checkpoint(served.drafter) if self.start is None else fitting(self.start, served.drafter)

    def _prepare(self, served: Served, start: Checkpoint) -> None:
        """Write what the trainer needs; from then on the server writes, too."""
        target, dtype = model_dir(served.target), torch.float32 if served.dtype == "float32" else torch.bfloat16
        embedding, head = load_rows(target, dtype)
        opd = Opd.model_validate(self.opd.model_dump(exclude={"folder"}))  # the trainer's
        self.folder.prepare(opd, self.sampling, start, embedding, head, str(target), self.domains)

    def _hear(self) -> None:
        """What the server said of requests since the last look."""
        try:
            with self.folder.served.open("rb") as file:
                file.seek(self._read)
                lines = file.read().rpartition(b"\n")[0]
        except FileNotFoundError:
            return
        self._read += len(lines) + 1 if lines else 0
        for said in map(json.loads, lines.splitlines()):
            if "begun" in said:
                if said["version"] == self.keeper.current:
                    self.keeper.judge.see(np.array([said["begun"]]))
            else:
                domain = said["domain"]
                if domain not in self.domains:
                    self.domains.append(domain)
                self.keeper.finish(said["finished"], self.domains.index(domain), said["tau"])

    def _note(self, kind: str, version: int, seconds: float, detail: str) -> None:
        self.events.append(EventRecord(time.monotonic() - self.began_s, kind, version, seconds, detail))
