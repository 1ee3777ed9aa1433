"""The trainer's process as serving sees it: started, watched, ended. It may die or hang; serving only takes notice."""

import subprocess
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from adasim.real.opd_process import Folder

END_S = 3.0  # a trainer that is asked to end gets so long


class TrainerProcess:
    """Runs while its context is open.

    Args:
        command: what starts it.
        folder: where it shows life.
        hang_s: without a sign of life for so long it is stopped.
    """

    def __init__(self, command: Sequence[str], folder: Folder, hang_s: float) -> None:
        self.command, self.folder, self.hang_s = list(command), folder, hang_s
        self.process: subprocess.Popen[bytes] | None = None
        self.failed = ""  # why it is gone
        self._alive_s, self._mtime = time.monotonic(), 0.0

    def __enter__(self) -> Self:
        with self.folder.log.open("wb") as log:
            self.process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=log, stderr=log)
        self._alive_s = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process is None or self.process.stdin is None:
            return
        self.process.stdin.close()
        try:
            self.process.wait(0.0 if self.failed else END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def failure(self) -> str | None:
        """Why it has died or was stopped since the last look; None = nothing new."""
        if self.failed or self.process is None:
            return None
        code, now = self.process.poll(), time.monotonic()
        alive = self.folder.alive.stat().st_mtime if self.folder.alive.exists() else 0.0
        if alive != self._mtime:
            self._mtime, self._alive_s = alive, now
        if code is not None:
            lines = self.folder.log.read_text(errors="replace").strip().splitlines()
            self.failed = f"exit code {code}: {lines[-1] if lines else 'it said nothing'}"
        elif now - self._alive_s > self.hang_s:
            self.process.kill()
            self.failed = f"no sign of life for {self.hang_s:g} s, killed"
        return self.failed or None
