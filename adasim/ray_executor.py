"""Trials on Ray: a cluster of this machine, or one at an address. Imports Ray only when it runs."""

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import adasim
from adasim.errors import InputError
from adasim.executors import DIED, Executor, Pool, Result
from adasim.experiment import Failure, execute, failure, trial_folder
from adasim.plan import Trial
from adasim.scenario import Scenario

STORE_BYTES = 256 * 2**20  # of shared memory, for results on their way
REACH_S = 10.0
Files = dict[str, bytes]


@dataclass(frozen=True, slots=True)
class Ray(Executor):
    """Ray tasks, one CPU each.

    A task gets its scenario with every input file already read, and gives the content of its files back; this process
    writes them. Workers share no folder with it, and get adasim's code from it where they are not on this machine.

    Attributes:
        workers: CPUs of a cluster of this machine, which ends with the run.
        address: of a running cluster instead.
    """

    address: str | None = None

    @contextmanager
    def open(self, trials: int, out: Path, trace: bool) -> Iterator[Pool]:
        """See :meth:`Executor.open`."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
        if self.address is None:
            start = {"address": "local", "num_cpus": min(self.workers, trials), "object_store_memory": STORE_BYTES}
        else:
            _reach(self.address)
            code = {"py_modules": [str(Path(adasim.__file__).parent)], "excludes": ["**/real/drafters/**"]}
            start = {"address": self.address, "runtime_env": code}
            del quiet["include_dashboard"]
        try:
            ray.init(**start, **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            hint = "" if self.address is None else "; if it asks for a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
            raise InputError(f"--executor ray: {error}{hint}") from error
        try:
            yield _Tasks(out, trace)
        finally:
            ray.shutdown()  # a cluster of its own and all tasks end with it


def _reach(address: str) -> None:
    """Refuse an address where nobody listens, which Ray itself takes minutes to say.

    Raises:
        InputError: nobody does.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return  # "auto" and other names that Ray resolves itself
    try:
        socket.create_connection((host, int(port)), REACH_S).close()
    except OSError as error:
        raise InputError(f"--address {address}: cannot be reached: {error.strerror or error}") from error


class _Tasks(Pool):
    """Trials in flight on a cluster."""

    def __init__(self, out: Path, trace: bool) -> None:
        import ray

        self.ray, self.out, self.trace = ray, out, trace
        self.task = ray.remote(num_cpus=1, max_retries=0)(_remote)
        self.places = 2 * max(int(ray.cluster_resources().get("CPU", 1)), 1)
        self.running: dict[Any, Trial] = {}

    def submit(self, trial: Trial) -> None:
        self.running[self.task.remote(trial, trial.scenario(), self.trace)] = trial

    def results(self) -> list[Result]:
        done, _ = self.ray.wait(list(self.running), num_returns=1)
        return [(trial, self._result(ref, trial)) for ref in done for trial in [self.running.pop(ref)]]

    def _result(self, ref: Any, trial: Trial) -> Failure | None:
        try:
            answer = self.ray.get(ref)
        except self.ray.exceptions.RayError as error:
            died = isinstance(error, self.ray.exceptions.WorkerCrashedError | self.ray.exceptions.NodeDiedError)
            return Failure(trial, DIED if died else f"{type(error).__name__}: {error}", again=True)
        if isinstance(answer, Failure):
            return answer
        try:
            with trial_folder(trial, self.out) as folder:
                for name, content in answer.items():
                    (folder / name).write_bytes(content)
        except OSError as error:
            return failure(trial, error)
        return None


def _remote(trial: Trial, scenario: Scenario, trace: bool) -> Files | Failure:
    """Run a trial in a folder of the worker's own; returns its files."""
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            execute(trial, scenario, folder, trace=trace)
            return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}
    except Exception as error:  # reported by the process that asked
        return failure(trial, error)
