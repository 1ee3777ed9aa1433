"""The backend on the real SGLang: a server of its own, started once by the backend itself, over HTTP."""

import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adasim.errors import InputError
from adasim.experiment import run_trial
from adasim.plan import expand
from adasim.policies.base import Policy
from adasim.policies.fixed import Fixed
from adasim.policies.head import Head
from adasim.policies.off import Off
from adasim.policies.probe import Probe, Shape
from adasim.real.sglang_client.backend import SglangBackend
from adasim.real.sglang_client.launching import launch_of
from adasim.real.sglang_client.process import Server, kept, leased, stop_kept
from adasim.recorded import check
from adasim.records import Records
from adasim.workload import Closed, Poisson

OUT = 12
FIELDS: dict[str, Any] = {
    "kind": "sglang", "drafter": "smollm2-135m", "device": "cpu", "dtype": "float32", "max_running_requests": 4,
    "kv": {"blocks": 2048, "block_tokens": 1}, "ignore_eos": True,
}  # fmt: skip


def backend(**changed: Any) -> SglangBackend:
    return SglangBackend.model_validate(FIELDS | changed)


def closed(requests: int = 4, clients: int = 2, **more: Any) -> Closed:
    lengths = {"prompt_len": {"kind": "fixed", "tokens": 20}, "output_len": {"kind": "fixed", "tokens": OUT}}
    given = {"concurrency": clients, "requests": requests, "domains": {"code": 1.0}}
    return Closed.model_validate(lengths | given | more)


@pytest.fixture(scope="module")
def own() -> Iterator[Server]:
    """Started through the command line, for no particular policy."""
    with leased(launch_of(backend())) as server:
        pass  # it stays, for runs that lease it
    yield server
    stop_kept()


@pytest.fixture(scope="module")
def attached(own: Server) -> SglangBackend:
    return backend(url=own.api.url)


@pytest.fixture(scope="module")
def runs(own: Server) -> dict[str, Records]:
    """One server for all policies."""
    policies: list[Policy] = [Off(), Fixed(verify_len=4), Head()]
    found = {p.kind: backend().run(closed(), p, 0) for p in policies}
    assert kept(launch_of(backend())) is own
    return found


def test_records_are_sound_and_complete(runs: dict[str, Records]) -> None:
    """``run`` has held tokens, rounds and acceptance of each request against SGLang's meta_info by then."""
    for records in runs.values():
        assert check(records, "x") == []
        assert records.notes == []  # its counters agree: nobody else's traffic
        assert records.requests["tokens"].tolist() == [OUT] * 4
        assert records.steps["emitted"].sum() + records.steps["first_tokens"].sum() == 4 * OUT
        rounds = records.steps[records.steps["decoding"] > 0]
        assert (rounds["verify_s"] > 0).all()
        assert rounds["verify_s"].sum() > 0.3 * (rounds["end_s"] - rounds["start_s"]).sum()
        assert (records.steps["kv_blocks"].iloc[1:] > 0).all()


def test_policies_play_as_they_are(runs: dict[str, Records]) -> None:
    rounds = {kind: r.rounds for kind, r in runs.items()}
    assert rounds["off"] is not None
    assert set(rounds["off"]["draft_len"]) == {0}
    assert rounds["fixed"] is not None
    assert set(rounds["fixed"]["verify_len"]) == {4}
    assert rounds["head"] is not None
    assert rounds["head"]["accept_len"].notna().all()
    assert len(set(rounds["head"]["verify_len"])) > 1


def test_a_held_server_waits_between_steps(own: Server, runs: dict[str, Records]) -> None:
    """Its records are those of a run that nobody held, and no clock counts the waiting."""
    run, waits = backend().turns(closed(), Fixed(verify_len=4), 0), 0
    assert next(run) == 0  # there is a server
    began_s = time.monotonic()
    while True:
        try:
            share = next(run)
        except StopIteration as end:
            records: Records = end.value
            break
        assert 0 <= share <= 1
        waits += 1
        time.sleep(1.0)
    wall_s = time.monotonic() - began_s
    assert waits > 1
    assert check(records, "x") == []
    assert records.notes == []
    held = [end - begin for begin, end in own.api.info()["adasim"]["held"]]
    assert len(held) == waits
    assert min(held) > 1.0
    assert records.steps["end_s"].max() < wall_s - waits
    pauses = (records.steps["start_s"] - records.steps["end_s"].shift()).dropna()
    assert pauses.max() < 0.9
    of = ["request", "verify_len", "accepted"]
    assert records.rounds is not None
    alone = runs["fixed"].rounds
    assert alone is not None
    tables = [t[of].sort_values("request", kind="stable").to_numpy().tolist() for t in (records.rounds, alone)]
    assert tables[0] == tables[1]


def test_the_server_is_known(own: Server, attached: SglangBackend) -> None:
    assert attached.identity().differs(backend().identity()) == []
    resolved = attached.identity().resolved
    assert resolved is not None
    assert (resolved["kv_tokens"], resolved["page_size"], resolved["block"]) == (2048, 1, 16)
    assert resolved["disable_overlap_schedule"] is True
    text = own.api.metrics()
    assert text is not None
    assert "sglang:generation_tokens_total" in text


def test_a_server_that_differs_is_refused(attached: SglangBackend) -> None:
    other = attached.model_copy(update={"max_running_requests": 8, "lag_steps": 1, "max_prefill_tokens": 512})
    with pytest.raises(InputError) as caught:
        other.run(closed(), Off(), 0)
    assert caught.value.problems == (
        "backend.max_running_requests: 8, the server has 4",
        "backend.lag_steps (1 = overlapped scheduling): 1, the server has 0",
        "backend.max_prefill_tokens: 512, the server has 2048",
    )


def test_an_attached_server_serves_an_open_loop(attached: SglangBackend) -> None:
    load = Poisson.model_validate(
        {"rate_rps": 2.0, "requests": 4, "output_len": {"kind": "fixed", "tokens": 6}, "domains": {"code": 1.0}}
    )
    records = attached.run(load, Fixed(verify_len=4), 0)
    assert records.requests["tokens"].tolist() == [6] * 4
    asked = [r.arrival_s for r in load.generate(0)]
    assert (records.requests["arrival_s"].to_numpy() >= asked).all()
    assert any("was not started here" in note for note in records.notes)


def test_decreed_rounds_are_those_of_the_probe(attached: SglangBackend) -> None:
    shapes = [Shape(draft_len=0, verify_len=1), Shape(draft_len=3, verify_len=4), Shape(draft_len=7, verify_len=8)]
    probe = Probe(shapes=shapes)
    forced = attached.model_copy(update={"forced": backend(forced={"lengths": [1], "prompts": "random"}).forced})
    out = 1 + 1 + 1 + 2 + 2  # the prefill's, the first shape twice, the others
    records = forced.run(closed(2, 2, output_len={"kind": "fixed", "tokens": out}), probe, 0)
    rounds = records.steps[records.steps["decoding"] > 0]
    assert set(rounds["decoding"]) == {2}
    assert (rounds["verify_tokens"] // 2).tolist() == [s.verify_len for s in probe.played(4)]
    assert set(rounds["accepted"]) == {0, 2}
    assert any("acceptance was forced" in note for note in records.notes)


def test_a_server_that_is_killed_leaves_what_it_had_done(own: Server, tmp_path: Path, runs: dict[str, Records]) -> None:
    """The last test: the server is gone after it."""
    from threading import Timer

    load = closed(40, 2).model_dump(mode="json", exclude_none=True)
    config = {
        "name": "mine", "title": "t", "workload": load, "backend": FIELDS | {"url": own.api.url},
        "policies": [{"kind": "off"}], "seeds": [0],
    }  # fmt: skip
    out = tmp_path / "out"
    (out / "trials").mkdir(parents=True)
    killer = Timer(8.0, lambda: os.killpg(own.process.pid, 9))
    killer.start()
    failed = run_trial(expand(config, Path()).trials[0], out)
    killer.join()
    assert failed is not None
    assert "of 40 requests had finished" in failed.error
    (lost,) = (out / "lost").iterdir()
    assert Counter(p.suffix for p in lost.iterdir())[".parquet"] >= 5
    own.process.wait(10)
    assert kept(launch_of(backend())) is None
