"""Takes turns with other servers of one machine: between two steps a server waits while its client holds it.

Both sides meet at a file. The client makes it; the server, once it would begin a step, leaves another beside it that says
how far it is, and waits until the first is gone.
"""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from adasim.files import write_atomic
from adasim.real.turns import Stopwatch

VARIABLE = "ADASIM_TURN"  # environment variable of a server: the file that holds it; unset = nobody can
POLL_S = 0.001


class Turn:
    """The server's side.

    Args:
        path: the file that holds it; None = nobody can.

    Attributes:
        clock: seconds, without those that it was held: what policies may go by.
        held: from when to when it waited, seconds of the monotonic clock.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path, self.clock = path, Stopwatch(time.monotonic)
        self.held: list[tuple[float, float]] = []

    @classmethod
    def of_environment(cls) -> "Turn":
        """As the one who started the server wants it."""
        given = os.environ.get(VARIABLE)
        return cls(Path(given) if given else None)

    def wait(self, emitted: int) -> None:
        """Before every step, as long as the client wants and lives. Args: emitted: tokens so far."""
        if self._path is None or not self._path.exists():
            return
        self.clock.stop()
        began_s, answer = time.monotonic(), _answer(self._path)
        write_atomic(answer, str(emitted))
        while _held(self._path):
            time.sleep(POLL_S)
        answer.unlink(missing_ok=True)
        self.held.append((began_s, time.monotonic()))
        self.clock.go_on()


class Hold:
    """The client's side.

    Args:
        path: the same file; its folder is there.
        alive: whether the server is.
    """

    def __init__(self, path: Path, alive: Callable[[], bool]) -> None:
        self._path, self._alive = path, alive

    def take(self, busy: Callable[[], bool]) -> int | None:
        """Have the server wait before its next step; comes back when it does.

        Args:
            busy: whether there may be a next step.

        Returns: tokens that it has emitted; None = there was no next step.
        """
        write_atomic(self._path, str(os.getpid()))
        while self._alive() and busy():
            try:
                return int(_answer(self._path).read_text())
            except FileNotFoundError:
                time.sleep(POLL_S)
        return None

    def release(self) -> None:
        """Have it go on; comes back when it does."""
        self._path.unlink(missing_ok=True)
        while _answer(self._path).exists() and self._alive():
            time.sleep(POLL_S)

    def clear(self) -> None:
        """The server is gone."""
        for file in (self._path, _answer(self._path)):
            file.unlink(missing_ok=True)


def own_seconds(held: Sequence[Sequence[float]]) -> Callable[[float], float]:
    """From seconds of a clock to those of one that stood still while a server was held.

    Args: held: from when to when, in order.
    """
    begins, ends = np.array(held, dtype=np.float64).reshape(-1, 2).T
    waited = np.concatenate([[0.0], np.cumsum(ends - begins)])

    def own(at_s: float) -> float:
        past = int(np.searchsorted(begins, at_s))
        within = max(float(ends[past - 1]) - at_s, 0.0) if past else 0.0
        return at_s - float(waited[past]) + within

    return own


def _answer(path: Path) -> Path:
    return path.with_suffix(".waits")


def _held(path: Path) -> bool:
    """Whether a client that lives wants it."""
    try:
        os.kill(int(path.read_text()), 0)
    except (FileNotFoundError, ProcessLookupError):
        return False
    except PermissionError:  # it lives, as somebody else
        return True
    return True
