"""A server of one's own: started for the first run that needs it, kept for those that follow, stopped in the end."""

import atexit
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from adasim.errors import InputError
from adasim.real.sglang_client.api import Api
from adasim.real.sglang_plugin.turn import VARIABLE, Hold

PYTHON = "ADASIM_SGLANG_PYTHON"  # environment variable: the Python of the environment that holds SGLang
STARTS_S = 1800.0  # a start takes one to three minutes, more beside others
STOPS_S = 20.0
PR_SET_PDEATHSIG = 1  # of prctl(2)
LAST_LINES = 5  # of a log that says nothing in a form that is known


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server is started.

    Attributes:
        arguments: SGLang's own, in the order of the command line, without host and port.
        environment: variables beside this process's own.
    """

    arguments: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]


class Server:
    """A running server. Raises InputError with the reason when it does not come up.

    Attributes:
        api: how it is spoken to.
        hold: has it wait between steps.
        leased: whether somebody uses it.
    """

    def __init__(self, launch: Launch) -> None:
        self.launch, self.leased, port = launch, False, _free_port()
        handle, name = tempfile.mkstemp(prefix="adasim-sglang-", suffix=".log")
        self.log = Path(name)
        turn = self.log.with_suffix(".turn")
        self.hold = Hold(turn, lambda: self.alive)
        print(f"SGLang is starting, which takes minutes; its log is {self.log}", file=sys.stderr)
        command = [python(), "-m", "sglang.launch_server", *launch.arguments, "--host", "127.0.0.1", "--port", str(port)]
        environment = os.environ | dict(launch.environment) | {VARIABLE: str(turn)}
        with os.fdopen(handle, "wb") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                start_new_session=True, preexec_fn=end_with_parent,  # noqa: PLW1509 (no other thread starts servers)
            )  # fmt: skip
        self.api = Api(f"http://127.0.0.1:{port}")
        try:
            self._wait()
        except BaseException:
            self.stop(keep_log=True)
            raise

    @property
    def alive(self) -> bool:
        """Whether its process is there."""
        return self.process.poll() is None

    def stop(self, *, keep_log: bool = False) -> None:
        """End it and all that it started."""
        for number, wait_s in ((signal.SIGTERM, STOPS_S), (signal.SIGKILL, STOPS_S)):
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                break
            try:
                self.process.wait(wait_s)
            except subprocess.TimeoutExpired:
                continue
        self.hold.clear()
        if not keep_log:
            self.log.unlink(missing_ok=True)

    def _wait(self) -> None:
        until_s = time.monotonic() + STARTS_S
        while not self.api.healthy():
            if not self.alive:
                raise InputError(*(f"SGLang did not start: {line}" for line in reasons(self.log)))
            if time.monotonic() > until_s:
                raise InputError(f"SGLang did not start within {STARTS_S:g} s; see {self.log}")
            time.sleep(1.0)


_kept: list[Server] = []


@contextmanager
def leased(launch: Launch) -> Iterator[Server]:
    """A server of that launch that nobody else here uses, started if need be and kept afterwards.

    Those of another launch go first, as both may not fit.
    """
    for server in [s for s in _kept if s.launch != launch or not s.alive]:
        _kept.remove(server)
        server.stop()
    server = next((s for s in _kept if not s.leased), None) or Server(launch)
    if server not in _kept:
        _kept.append(server)
    server.leased = True
    try:
        yield server
    finally:
        server.leased = False


def kept(launch: Launch) -> Server | None:
    """A server of that launch, if one runs."""
    return next((s for s in _kept if s.launch == launch and s.alive), None)


@atexit.register
def stop_kept() -> None:
    """Stop the servers that are kept."""
    while _kept:
        _kept.pop().stop()


def end_with_parent() -> None:
    """Have this process ended when the one that started it is gone, killed or not. On Linux; elsewhere it may stay."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def python() -> str:
    """The Python that has SGLang: ``ADASIM_SGLANG_PYTHON``, or this one.

    Raises:
        InputError: neither has.
    """
    given = os.environ.get(PYTHON)
    if given is None and find_spec("sglang") is None:
        raise InputError(
            f"backend: kind sglang: `pip install adasim[sglang]` in an environment of its own, and {PYTHON} = "
            "its python (or run adasim from there); or give backend.url of a server that runs"
        )
    return given or sys.executable


@lru_cache
def versions(interpreter: str) -> tuple[str, str]:
    """Of SGLang and Python in that environment.

    Raises:
        InputError: it has no SGLang.
    """
    ask = "import platform, importlib.metadata as m; print(m.version('sglang'), platform.python_version())"
    try:
        done = subprocess.run([interpreter, "-c", ask], capture_output=True, text=True, check=False, timeout=300)
    except OSError as error:
        raise InputError(f"{PYTHON}: {interpreter}: {error.strerror}") from error
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it does not say why"])[-1]
        raise InputError(f"{PYTHON}: {interpreter} has no SGLang: {said}")
    sglang, own = done.stdout.split()
    return sglang, own


def reasons(log: Path) -> list[str]:
    """Why a server ended, by its log: adasim's own errors, else the last exception, else the last lines."""
    lines = [line.rstrip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    for i in range(len(lines) - 1, -1, -1):
        if "adasim.errors.InputError: " in lines[i]:
            first = lines[i].partition("adasim.errors.InputError: ")[2]
            more = lines[i + 1 :]
            ours = [first, *more[: next((n for n, line in enumerate(more) if not line.startswith("ADAFLASH")), None)]]
            return [*ours, f"(its log is {log})"]
    errors = [line for line in lines if re.match(r"\w[\w.]*(Error|Exception): ", line)]
    return [*(errors[-1:] or lines[-LAST_LINES:]), f"(its log is {log})"]


def command_line(arguments: dict[str, Any]) -> tuple[str, ...]:
    """SGLang's arguments as its command line takes them: true = the flag alone, false and null = left out."""
    found: list[str] = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        found.append(f"--{name.replace('_', '-')}")
        if value is not True:
            found += [str(v) for v in value] if isinstance(value, list) else [str(value)]
    return tuple(found)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
