"""When the traffic of a run changed, as events beside those of drafter and alarms."""

from collections.abc import Sequence

import numpy as np

from adasim.records import EventRecord
from adasim.serving.lives import DROPPED, Lives
from adasim.types import Request
from adasim.workload import Drift, Workload


def tell_drift(events: list[EventRecord], workload: Workload, requests: Sequence[Request], lives: Lives) -> None:
    """Add drift to a run's events, and put all in order of time."""
    events += _drifts(workload, requests, lives)
    events.sort(key=lambda event: event.time_s)


def _drifts(workload: Workload, requests: Sequence[Request], lives: Lives) -> list[EventRecord]:
    """When the workload's mix began to change: at its drift points after the first, if they were reached."""
    if not isinstance(workload.domains, Drift) or workload.domains.kind == "periodic":
        return []
    events = []
    progress = np.array([i if workload.clients is not None else r.arrival_s for i, r in enumerate(requests)])
    for point in workload.domains.points[1:]:
        after = (progress >= point.at) & (lives.status != DROPPED)
        if after.any():
            at_s = float(lives.arrival_s[after].min())
            finished = int(np.count_nonzero(lives.finish_s <= at_s))
            mix = ", ".join(f"{name} {weight:g}" for name, weight in sorted(point.mix.items()) if weight)
            events.append(EventRecord(at_s, "drift", 0, 0.0, f"mix {mix}", finished=finished))
    return events
