"""Which runs a profile was fitted on: what it says of these is no prediction."""

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from adasim.types import Component

LOAD = ("kind", "concurrency", "rate_rps", "cv", "path", "speed", "domains", "output_len")  # of a workload


class FittedRun(Component):
    """A recorded run that a profile was fitted on.

    Attributes:
        key: of the trial.
        policy: its label.
        cell: what was run, whatever it is called and with whatever seed; see :func:`cell_of`.
    """

    key: str
    policy: str
    cell: str


def cell_of(policy: Component, workload: Mapping[str, Any]) -> str:
    """Identifies a policy under a load: some requests more, or other prompt lengths, make no other cell.

    Args:
        policy: as configured; its name does not matter.
        workload: as a JSON dump.
    """
    load = {name: workload[name] for name in LOAD if name in workload}
    text = json.dumps([policy.model_dump(mode="json", exclude={"name"}), load], sort_keys=True)
    return sha256(text.encode()).hexdigest()[:16]
