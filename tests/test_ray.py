"""Trials on a real Ray of two workers: the same bytes, whoever is killed."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from tests.build import closed, config

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'adasim[ray]'")
PATIENCE_S = 120


def write_scenario(folder: Path, **fields: object) -> Path:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(config(**fields)).replace("kind: off", 'kind: "off"'))
    return path


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "adasim", *map(str, arguments)]


def adasim(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, check=False, cwd=cwd, timeout=PATIENCE_S)


def until(what: Callable[[], object], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def workers_of(parent: int) -> list[int]:
    """Ray workers that run a trial, among the descendants of a process."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue
        parents[int(stat.parent.name)] = int(text.rpartition(")")[2].split()[1])
    found = []
    for pid in parents:
        above = pid
        while above not in {0, parent}:
            above = parents.get(above, 0)
        try:
            name = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if above == parent and name.startswith(b"ray::_remote"):
            found.append(pid)
    return sorted(found)


def contents(out: Path) -> dict[Path, bytes]:
    files = (f for f in sorted(out.rglob("*")) if f.is_file() and f.name != "manifest.json")
    return {f.relative_to(out): f.read_bytes() for f in files}


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the workers in /proc")
def test_a_killed_ray_worker_is_survived_with_the_same_bytes(tmp_path: Path) -> None:
    """One of two workers is killed in the middle; then resume finds nothing to do."""
    path = write_scenario(tmp_path, workload=closed(requests=150), seeds=list(range(4)))
    out, whole = tmp_path / "out", tmp_path / "whole"
    call = command("run", path, "--executor", "ray", "--workers", "2", "--out", out)
    process = subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    trials = out / "trials"
    until(lambda: trials.is_dir() and any(p.name[0] != "." for p in trials.iterdir()), process)
    until(lambda: workers_of(process.pid), process)
    os.kill(workers_of(process.pid)[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    assert "trials were tried again: its worker process died" in errors
    assert adasim("run", path, "--workers", "1", "--out", whole).returncode == 0
    assert len(contents(out)) > 40
    assert contents(out) == contents(whole)
    before = {p: p.stat().st_mtime_ns for p in trials.rglob("*")}
    again = adasim("run", path, "--executor", "ray", "--workers", "2", "--out", out, "--resume")
    assert again.returncode == 0, again.stderr
    assert {p: p.stat().st_mtime_ns for p in trials.rglob("*")} == before


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """A Ray of two CPUs that knows nothing of this project; yields its address."""
    port = 20000 + os.getpid() % 20000
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}", "--num-cpus=2"]
    start += ["--include-dashboard=false", "--disable-usage-stats", "--object-store-memory=100000000"]
    process = subprocess.Popen(start, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        until(lambda: listens(port), process)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE_S)


def test_trials_at_an_address_get_their_input_and_send_results_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers' folder holds nothing: the trace that the scenario names reaches them with their trial."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef0123456789abcdef")  # a cluster's users share it
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    mine.mkdir()
    theirs.mkdir()
    (mine / "trace.csv").write_text(
        "arrived_at,num_prefill_tokens,num_decode_tokens\n" + "".join(f"{i / 10},50,20\n" for i in range(30))
    )
    write_scenario(mine, workload={"kind": "trace", "path": "trace.csv"}, seeds=[0])
    with cluster(theirs) as address:
        found = adasim("run", "mine.yaml", "--executor", "ray", "--address", address, "--out", "out", cwd=mine)
        assert found.returncode == 0, found.stderr
    assert adasim("run", "mine.yaml", "--workers", "1", "--out", "whole", cwd=mine).returncode == 0
    assert contents(mine / "out") == contents(mine / "whole")


def test_an_address_without_a_cluster_is_named(tmp_path: Path) -> None:
    path = write_scenario(tmp_path, seeds=[0])
    found = adasim("run", path, "--executor", "ray", "--address", "127.0.0.1:1", "--out", tmp_path / "out")
    assert found.returncode == 2, found.stderr
    assert "--address 127.0.0.1:1: cannot be reached: Connection refused" in found.stderr
