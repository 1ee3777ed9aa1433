"""Speed, as ratios measured side by side in one run. The last line is one JSON document.

Rounds per second of the simulator, full records on, as a share of bare SimPy timeouts per second; and the
speed-up of two worker processes over one. Interleaved and repeated; medians. Run with nothing else running.
"""

import json
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import simpy

from adasim.executors import Local
from adasim.experiment import prepare
from adasim.policies.base import Policy
from adasim.policies.dcut import DCut
from adasim.policies.fixed import Fixed
from adasim.policies.head import Head
from adasim.policies.off import Off
from tests.build import backend, closed, plan, scenario

REPEATS = 5
TIMEOUTS = 100_000


def timeouts_per_s() -> float:
    """Bare SimPy timeouts per second."""

    def clock(env: simpy.Environment) -> Any:
        for _ in range(TIMEOUTS):
            yield env.timeout(1.0)

    env = simpy.Environment()
    env.process(clock(env))
    start = time.perf_counter()
    env.run()
    return TIMEOUTS / (time.perf_counter() - start)


def rounds_per_s(policy: Policy, concurrency: int) -> float:
    """Engine rounds per second of one run, start-up of the run included."""
    s = scenario(
        workload=closed(
            concurrency=concurrency,
            requests=4 * concurrency,
            output_len={"kind": "fixed", "tokens": 1500},
            drain=False,
        ),
        backend=backend(max_running_requests=concurrency),
    )
    start = time.perf_counter()
    records = s.backend.run(s.workload, policy, 0)
    return len(records.steps) / (time.perf_counter() - start)


def experiment_s(workers: int) -> float:
    """Seconds of eight equal trials."""
    p = plan(workload=closed(requests=160), policies=[{"kind": "off"}], seeds=list(range(8)))
    out = Path(tempfile.mkdtemp())
    try:
        todo = prepare(p, out, resume=False, overwrite=False)
        start = time.perf_counter()
        Local(workers).run(todo, out, trace=False, progress=lambda _: None)
        return time.perf_counter() - start
    finally:
        shutil.rmtree(out)


def shares(one: Callable[[], float], other: Callable[[], float]) -> list[float]:
    """``one`` / ``other``, interleaved."""
    return [one() / other() for _ in range(REPEATS)]


def main() -> None:
    """Measure and print."""
    results: dict[str, dict[str, float]] = {}
    policies: list[tuple[Policy, int]] = [(p, c) for c in (1, 128) for p in (Off(), Fixed(verify_len=16), Head(), DCut())]
    for policy, concurrency in policies:
        name = f"rounds / SimPy timeouts, {policy.label}, concurrency {concurrency}"
        values = shares(lambda p=policy, c=concurrency: rounds_per_s(p, c), timeouts_per_s)  # type: ignore[misc]
        results[name] = {"median": median(values), "min": min(values), "max": max(values)}
    values = shares(lambda: experiment_s(1), lambda: experiment_s(2))
    results["two workers / one worker"] = {"median": median(values), "min": min(values), "max": max(values)}
    for name, row in results.items():
        print(f"{name:60s} {row['median']:.4f}  ({row['min']:.4f}..{row['max']:.4f})")
    machine = f"{platform.machine()}, Python {platform.python_version()}, {platform.system()}"
    print(json.dumps({"machine": machine, "repeats": REPEATS, "ratios": results}))


if __name__ == "__main__":
    main()
