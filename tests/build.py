"""Small scenarios and runs that tests are made of."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from adasim.calibration.luck import Luck
from adasim.cli import main
from adasim.plan import Plan, expand
from adasim.policies.base import Policy
from adasim.policies.fixed import Fixed
from adasim.policies.off import Off
from adasim.records import Records
from adasim.scenario import Scenario, validate
from adasim.serving.lives import Lives
from adasim.types import FloatArray, IntArray, Request

SHARED = Path(__file__).parents[2] / "shared"

FREE_COST: dict[str, Any] = {
    "kind": "roofline",
    "hardware": "h100",
    "model": "qwen3-8b",
    "draft": {"kind": "linear", "base_ms": 1.0},
}


def adasim(*arguments: object) -> int:
    """Exit code of one call of the command line in this process."""
    try:
        main([str(a) for a in arguments])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def config(**fields: Any) -> dict[str, Any]:
    """A raw scenario: 4 clients, 40 requests of 64 + 64 tokens, alpha 0.8; ``fields`` replace top-level ones."""
    raw: dict[str, Any] = {
        "name": "test",
        "title": "Test",
        "workload": closed(),
        "backend": backend(),
        "policies": [{"kind": "off"}, {"kind": "fixed", "verify_len": 4}],
        "seeds": [0, 1],
    }
    return raw | fields


def closed(**fields: Any) -> dict[str, Any]:
    """A raw closed loop."""
    raw: dict[str, Any] = {
        "kind": "closed",
        "concurrency": 4,
        "requests": 40,
        "prompt_len": {"kind": "fixed", "tokens": 64},
        "output_len": {"kind": "fixed", "tokens": 64},
    }
    return raw | fields


def backend(**fields: Any) -> dict[str, Any]:
    """A raw simulated backend."""
    curve = {"kind": "geometric", "alpha": 0.8}
    raw: dict[str, Any] = {
        "kind": "sim",
        "cost": FREE_COST,
        "acceptance": {"kind": "curves", "curves": {"default": curve}},
        "max_running_requests": 8,
    }
    return raw | fields


def scenario(**fields: Any) -> Scenario:
    """The same, validated."""
    return validate(config(**fields))


def plan(**fields: Any) -> Plan:
    """The same, expanded into trials."""
    return expand(config(**fields), Path())


def simulate(policy: Policy | None = None, seed: int = 0, **fields: Any) -> Records:
    """Records of one run."""
    s = scenario(**fields)
    return s.backend.run(s.workload, policy or Fixed(verify_len=8), seed)


def everywhere(luck: Luck, requests: Sequence[Request]) -> tuple[IntArray, FloatArray]:
    """L and what heads see of it at every output position of the first requests, in order, [sum output_len]."""
    lives = Lives(requests, luck.base[: len(requests)])
    lengths = np.array([r.output_len for r in requests])
    runs, signals = [np.zeros((len(requests), lengths.max()), dtype=t) for t in (np.int64, np.float64)]
    for t in range(lengths.max()):
        lives.done[:] = t
        ids = np.flatnonzero(lengths > t)
        at, run = luck.look_up(lives.table, ids)
        runs[ids, t], signals[ids, t] = run, luck.signal(ids, at, run)
    there = np.arange(lengths.max()) < lengths[:, None]
    return runs[there], signals[there]


OFF = Off()
