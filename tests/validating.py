"""A simulated engine that stands in for a real one, and profiles that are right or wrong about it."""

from pathlib import Path
from typing import Any

from adasim.calibration.profile import Profile
from adasim.experiment import open_folder
from adasim.plan import Plan, expand
from adasim.validation.blocks import Block, Measuring, blocks_of
from adasim.validation.run import Run, runs_in

CURVES = {"code": {"kind": "geometric", "alpha": 0.8}, "chat": {"kind": "geometric", "alpha": 0.55}}
COST: dict[str, Any] = {
    "kind": "roofline",
    "hardware": "h100",
    "model": "qwen3-8b",
    "draft": {"kind": "linear", "base_ms": 1.0},
    "overhead": {"round_ms": 1.0},
}
HEAD = {"noise": 2.0}
PROVENANCE = {
    "source": "a test", "hardware": "none", "model": "none", "engine": "none", "date": "2026", "how": "by hand",
    "inputs": ["none"],
}  # fmt: skip


def acceptance(**fields: Any) -> dict[str, Any]:
    return {"kind": "curves", "curves": CURVES, "head": HEAD} | fields


def raw(**fields: Any) -> dict[str, Any]:
    """A raw scenario: two domains apart, two loads, three seeds of a few requests."""
    config: dict[str, Any] = {
        "name": "rehearsal",
        "title": "Rehearsal",
        "workload": {
            "kind": "closed", "concurrency": 2, "requests": 12, "prompt_len": {"kind": "fixed", "tokens": 64},
            "output_len": {"kind": "fixed", "tokens": 48}, "domains": {"code": 1.0},
        },
        "backend": {
            "kind": "sim", "cost": COST, "acceptance": acceptance(), "max_running_requests": 16, "rounds": True,
        },
        "policies": [{"kind": "off"}, {"kind": "fixed", "name": "fixed 6", "verify_len": 6}, {"kind": "head"}],
        "sweep": {
            "domain": {d: {"workload.domains": {d: 1.0}} for d in CURVES},
            "load": {1: {"workload.concurrency": 1, "workload.requests": 6}, 8: {"workload.concurrency": 8}},
        },
        "seeds": [0, 1, 2],
        "measure": {"warmup_requests": 0, "until_last_arrival": False},
        "validation": {"replications": 3},
    }  # fmt: skip
    return config | fields


def plan(**fields: Any) -> Plan:
    return expand(raw(**fields), Path())


def profile(**fields: Any) -> Profile:
    """What is true of the stand-in, ``fields`` excepted."""
    return Profile.model_validate(
        {"name": "p", "provenance": PROVENANCE, "cost": COST, "acceptance": acceptance()} | fields
    )


def measured(made: Plan, out: Path, **fields: Any) -> tuple[list[Block], list[Run]]:
    """All runs of a plan."""
    blocks = blocks_of(made)
    open_folder(out, resume=False, overwrite=False, command="validate")
    Measuring(out, made.scenario.validation, **fields).run(blocks)
    return blocks, runs_in(out, blocks)
