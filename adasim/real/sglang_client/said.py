"""What a report must say of a run on a server, in words."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from adasim.real.sglang_client.collector import Collector
from adasim.real.sglang_client.tables import Replay
from adasim.real.sglang_client.traffic import Traffic
from adasim.types import Request

if TYPE_CHECKING:
    from adasim.real.sglang_client.backend import SglangBackend


def notes_of(backend: "SglangBackend", traffic: Traffic, collector: Collector, replay: Replay) -> list[str]:
    """What a report must say."""
    found = []
    if backend.forced is not None:
        found.append(f"acceptance was forced to {backend.forced.lengths}: the text means nothing")
    if replay.strangers:
        found.append(f"{replay.strangers} times a step of the server served a request of somebody else")
    if collector.unsure_s > 1e-3:
        found.append(
            f"the server is on another clock, known within {1e3 * collector.unsure_s:.1f} ms: TTFT is unsure by that"
        )
    if traffic.late_s > 0.01:
        found.append(f"requests were sent up to {1e3 * traffic.late_s:.0f} ms later than they arrived")
    if backend.url is not None:
        found.append(
            f"the server at {backend.url} was not started here: that its weights are those of backend.target and "
            "backend.drafter is known from their config.json only"
        )
    return found


def loss_of(traffic: Traffic, unread: str, requests: Sequence[Request], replay: Replay) -> str:
    """What a run that was cut short has lost."""
    steps = len(replay.recorder.steps)
    done, sent = len(traffic.answers), len(traffic.sent_s)
    tail = f"; its last steps could not be read ({unread})" if unread and traffic.lost else ""
    return (
        f"the server was lost: {traffic.lost or unread}; {done} of {len(requests)} requests had finished, {sent - done} "
        f"in flight are lost, {len(requests) - sent} were never sent; {steps} steps are kept{tail}"
    )
