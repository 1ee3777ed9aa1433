"""One run on a server: orders, traffic, the server's steps read meanwhile, and the records of it all."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from threading import Thread
from typing import TYPE_CHECKING, Any

from adasim.calibration.cost import TableCost
from adasim.errors import InputError
from adasim.policies.base import Policy
from adasim.real.sglang_client.api import Api, Gone
from adasim.real.sglang_client.asking import asked, check_lengths, shapes
from adasim.real.sglang_client.collector import Collector
from adasim.real.sglang_client.counters import others
from adasim.real.sglang_client.process import stop_kept
from adasim.real.sglang_client.resolved import differences
from adasim.real.sglang_client.said import loss_of, notes_of
from adasim.real.sglang_client.tables import Replay
from adasim.real.sglang_client.traffic import Sender
from adasim.real.sglang_plugin.orders import Orders, Play
from adasim.real.sglang_plugin.turn import Hold
from adasim.real.turns import Turns
from adasim.records import CutShort, Records
from adasim.serving.drift import tell_drift
from adasim.types import Request
from adasim.workload import Workload

if TYPE_CHECKING:
    from adasim.real.sglang_client.backend import SglangBackend
    from adasim.real.sglang_client.training import Training

TURN_S = 0.5  # a server goes on at least so long before it is held, to the end of its step
_runs = count()


def serve(
    backend: "SglangBackend", api: Api, workload: Workload, policy: Policy, seed: int, hold: Hold | None = None
) -> Turns[Records]:
    """Serve one run in real time.

    Args: hold: has the server wait after each turn, while others take theirs; None = it is never held.

    Raises:
        InputError: the server is not the one that the scenario means, or refuses the run.
        CutShort: it went away, with the records of what it had done.
    """
    requests, prompts = asked(backend, workload, seed)
    check_lengths(backend, requests)
    if lines := differences(backend, info_of(api)):
        raise InputError(*(f"backend.{line}" for line in lines))
    collector, before = Collector(api), api.metrics()
    name = f"adasim-{os.getpid()}-{next(_runs)}-"
    sender = Sender(api, requests, prompts, name, shapes(backend, workload, requests))
    with _trained(backend, api, workload, f"{policy.label}-{seed}") as training:
        collector.start()
        try:
            _order(backend, api, workload, requests, policy)
            began_s = time.monotonic()
            sending = Thread(target=sender.send, args=(workload, began_s), daemon=True)
            sending.start()
            yield from _in_turns(sending, requests, hold)
        except BaseException:  # Ctrl-C: a server that stays must not go on with what nobody waits for
            sender.abort()
            collector.finish()
            raise
        unread, traffic = collector.finish(), sender.traffic
        answered = len(traffic.answers) == len(requests) and not unread
        after = api.metrics() if answered else None
    replay = Replay(
        requests, workload.domain_names, backend.caps().block, backend.kv.block_tokens, began_s + collector.offset_s,
        backend.alarm,
    )  # fmt: skip
    replay.run(traffic, collector, began_s, name)
    if training is not None:
        replay.recorder.events += training.events(began_s)
    if training is not None or backend.alarm is not None:
        tell_drift(replay.recorder.events, workload, requests, replay.lives)
    records = replay.records()
    records.notes += notes_of(backend, traffic, collector, replay)
    if training is not None:
        records.notes += training.notes()
        if training.left and backend.url is not None:
            records.notes.append(f"ALARM: the server is not as it was before the run; start it anew: {training.left}")
    if traffic.lost or unread:
        records.notes.append(f"cut short: {traffic.lost or unread}")
        raise CutShort(records, loss_of(traffic, unread, requests, replay), again=backend.url is None)
    if wrong := replay.against(traffic.answers):
        more = [f"and {len(wrong) - 5} more"] if len(wrong) > 5 else []
        raise InputError(*wrong[:5], *more)
    own = {"sglang:generation_tokens_total": int(replay.lives.done.sum())}
    own |= {"sglang:prompt_tokens_total": sum(r.prompt_len for i, r in enumerate(requests) if i in traffic.sent_s)}
    if answered:
        records.notes += others(before, after, own)
    return records


def info_of(api: Api) -> dict[str, Any]:
    """What the server says of itself.

    Raises:
        InputError: nobody answers.
    """
    try:
        return api.info()
    except Gone as error:
        raise InputError(f"backend: no server answers: {error}") from error


def _in_turns(sending: Thread, requests: Sequence[Request], hold: Hold | None) -> Turns[None]:
    """Wait until all is answered; after each turn the server is held, and others may go on."""
    first: int | None = None
    wanted = sum(r.output_len for r in requests)
    try:
        while sending.is_alive():
            sending.join(TURN_S)  # unlike a bare join, Ctrl-C gets through
            emitted = hold.take(sending.is_alive) if hold is not None and sending.is_alive() else None
            if hold is None or emitted is None:
                continue
            first = emitted if first is None else first
            yield min((emitted - first) / wanted, 1.0)
            hold.release()
    finally:
        if hold is not None:
            hold.release()


def _order(backend: "SglangBackend", api: Api, workload: Workload, requests: Sequence[Request], policy: Policy) -> None:
    """Have the policy played, and what a measurement needs beside it."""
    cost = backend.caps().cost if "cost" in policy.needs else None
    cost = cost.inline() if isinstance(cost, TableCost) else cost
    together = _together(backend, workload, requests)
    play = {"policy": policy, "cost": cost, "forced": backend.forced, "together": together}
    api.order(Orders(play=Play.model_validate(play)))


def _together(backend: "SglangBackend", workload: Workload, requests: Sequence[Request]) -> int:
    """Requests that are to begin in one step: where acceptance is decreed, those that also end in one."""
    clients = workload.clients or 0
    alike = len({(r.prompt_len, r.output_len) for r in requests}) == 1 and clients and len(requests) % clients == 0
    return clients if alike and backend.forced is not None and len(backend.forced.lengths) == 1 else 0


@contextmanager
def _trained(backend: "SglangBackend", api: Api, workload: Workload, run: str) -> "Iterator[Training | None]":
    """With a trainer beside it, where one is asked for."""
    if backend.opd is None or not backend.opd.enabled:
        yield None
        return
    from adasim.real.sglang_client.training import trained

    training = None
    try:
        with trained(api, backend.opd, run, workload.domain_names, backend.sampling) as training:
            yield training
    finally:
        if training is not None and training.left and backend.url is None:  # the next run is to have another server
            stop_kept()
