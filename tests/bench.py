"""Speed, as ratios measured side by side in one run. The last line is one JSON document.

- Engine rounds per second with full records, as a share of bare SimPy timeouts per second. Steps that only prefill take
  time and do not count.
- CPU seconds of whole processes that simulate 20,000 requests of 512 + 256 tokens at concurrency 128 and write their
  files, in units of what a million bare timeouts take; their peak memory.
- Time against tokens; and the speed-up of two worker processes over one, beside that of two processes of bare timeouts:
  more the machine does not give.

CPU time except for the workers; garbage is collected as the command line does; interleaved and repeated; medians. Run
with nothing else running.
"""

import gc
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, get_args

import simpy
import yaml

from adasim.cli import COLLECT
from adasim.executors import Local
from adasim.experiment import prepare
from adasim.policies import AnyPolicy
from adasim.policies.base import Policy
from adasim.policies.dcut import DCut
from adasim.policies.fixed import Fixed
from adasim.policies.head import Head
from adasim.policies.off import Off
from tests.build import backend, closed, config, plan, scenario

REPEATS = 3
TIMEOUTS = 100_000
KINDS = [kind.model_fields["kind"].default for kind in get_args(get_args(AnyPolicy)[0])]
BUDGET: dict[str, Any] = {"kind": "dspark"} if "dspark" in KINDS else {"kind": "dcut", "keep_ratio": 0.3}
TARGETS = {"1": 1 / 12, "128": 1 / 40}  # rounds / timeouts, by concurrency

Row = dict[str, float | None]


def timeouts_s(count: int) -> float:
    """CPU seconds of bare SimPy timeouts."""

    def clock(env: simpy.Environment) -> Any:
        for _ in range(count):
            yield env.timeout(1.0)

    env = simpy.Environment()
    env.process(clock(env))
    start = time.process_time()
    env.run()
    return time.process_time() - start


def rounds_share(policy: Policy, concurrency: int) -> float:
    """Rounds per second of one run, its start and its records included, over timeouts per second."""
    tokens = 8000 if concurrency == 1 else 800
    s = scenario(
        workload=closed(
            concurrency=concurrency, requests=4 * concurrency, output_len={"kind": "fixed", "tokens": tokens}
        ),
        backend=backend(max_running_requests=concurrency),
    )
    start = time.process_time()
    records = s.backend.run(s.workload, policy, 0)
    round_s = (time.process_time() - start) / int((records.steps["decoding"] > 0).sum())
    return timeouts_s(TIMEOUTS) / TIMEOUTS / round_s


def process(policy: dict[str, Any], requests: int) -> tuple[float, float]:
    """CPU seconds and peak MiB of a whole ``adasim run`` that writes records but no report."""
    raw = config(
        workload=closed(
            concurrency=128, requests=requests,
            prompt_len={"kind": "fixed", "tokens": 512}, output_len={"kind": "fixed", "tokens": 256},
        ),
        backend=backend(max_running_requests=128), policies=[policy], seeds=[0],
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scenario.yaml"
        path.write_text(yaml.safe_dump(raw))
        command = [sys.executable, "-m", "adasim", "run", str(path), "--out", f"{folder}/out", "--workers", "1"]
        quiet = [(os.POSIX_SPAWN_OPEN, n, os.devnull, os.O_WRONLY, 0) for n in (1, 2)]
        kept = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}  # bytecode is kept, as it is unless somebody forbids it
        child = os.posix_spawn(sys.executable, [*command, "--no-report"], kept, file_actions=quiet)
        _, status, used = os.wait4(child, 0)
        assert status == 0, f"{command} failed"
        assert list(Path(folder).glob("out/trials/*/steps.parquet"))
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return used.ru_utime + used.ru_stime, used.ru_maxrss / unit


def linearity(policy: Policy) -> float:
    """Time for 20 times the requests, over 20 times the time."""

    def run_s(requests: int) -> float:
        s = scenario(
            workload=closed(concurrency=128, requests=requests, output_len={"kind": "fixed", "tokens": 256}),
            backend=backend(max_running_requests=128),
        )
        start = time.process_time()
        s.backend.run(s.workload, policy, 0)
        return time.process_time() - start

    return run_s(20_000) / run_s(1000)


def experiment_s(workers: int) -> float:
    """Seconds of eight equal trials, each so long that starting the workers hardly counts."""
    p = plan(
        workload=closed(concurrency=64, requests=25_600, output_len={"kind": "fixed", "tokens": 256}),
        backend=backend(max_running_requests=64),
        policies=[{"kind": "head"}],
        seeds=list(range(8)),
    )
    out = Path(tempfile.mkdtemp())
    try:
        todo = prepare(p, out, resume=False, overwrite=False)
        start = time.perf_counter()
        Local(workers).run(todo, out, trace=False, progress=lambda _: None)
        return time.perf_counter() - start
    finally:
        shutil.rmtree(out)


def two_processes() -> float:
    """What two processes of bare timeouts do in the time in which one does its part, as a multiple."""
    with ProcessPoolExecutor(2) as pool:
        list(pool.map(timeouts_s, [1000, 1000]))  # both are up

        def wall_s(processes: int) -> float:
            start = time.perf_counter()
            list(pool.map(timeouts_s, [2_000_000] * processes))
            return time.perf_counter() - start

        return 2 * wall_s(1) / wall_s(2)


def row(values: list[float], at_least: float | None = None, at_most: float | None = None) -> Row:
    """A measurement and its target."""
    middle: Row = {"median": median(values), "min": min(values), "max": max(values)}
    return middle | {"at_least": at_least, "at_most": at_most}


class Results(dict[str, Row]):
    """Rows by name, printed as they come."""

    def __setitem__(self, name: str, r: Row) -> None:
        super().__setitem__(name, r)
        target = f"at least {r['at_least']:.4g}" if r["at_least"] else f"at most {r['at_most']:g}" if r["at_most"] else ""
        print(f"{name:66s} {r['median']:9.4f}  ({r['min']:.4f}..{r['max']:.4f})  {target}", flush=True)


def repeated(measure: Callable[[], float], times: int = REPEATS) -> list[float]:
    """Several measurements."""
    return [measure() for _ in range(times)]


def main() -> None:
    """Measure and print."""
    results = Results()
    warm = scenario()
    warm.backend.run(warm.workload, Head(), 0)  # the kernels are compiled and loaded
    gc.freeze()
    gc.set_threshold(*COLLECT)
    for concurrency, share in TARGETS.items():
        policies: list[Policy] = [Off(), Fixed(verify_len=16), Head(), DCut()]
        for policy in policies:
            name = f"rounds / SimPy timeouts, {policy.label}, concurrency {concurrency}"
            values = repeated(lambda p=policy, c=int(concurrency): rounds_share(p, c))  # type: ignore[misc]
            results[name] = row(values, at_least=share)
    for raw in ({"kind": "off"}, {"kind": "head"}, BUDGET):
        process(raw, 300)  # warm caches of files
        seconds, memory = [], []
        for _ in range(REPEATS):
            million_s = timeouts_s(1_000_000)
            cpu_s, mib = process(raw, 20_000)
            seconds.append(cpu_s / million_s)
            memory.append(mib)
        results[f"20,000 requests / a million timeouts, {raw['kind']}"] = row(seconds, at_most=4)
        results[f"20,000 requests: peak MiB, {raw['kind']}"] = row(memory, at_most=400)
    for policy in (Off(), Head()):
        name = f"time for 20 times the requests, {policy.label}"
        results[name] = row(repeated(lambda p=policy: linearity(p), 3), at_most=22)  # type: ignore[misc]
    pairs = [(two_processes(), experiment_s(1) / experiment_s(2)) for _ in range(REPEATS)]
    results["two processes of bare timeouts / one"] = row([ceiling for ceiling, _ in pairs])
    results["two workers / one worker"] = row([gain for _, gain in pairs], at_least=1.7)
    machine = f"{platform.machine()}, Python {platform.python_version()}, {platform.system()}"
    print(json.dumps({"machine": machine, "repeats": REPEATS, "ratios": results}))


if __name__ == "__main__":
    main()
