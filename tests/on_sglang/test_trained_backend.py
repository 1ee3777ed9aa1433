"""``opd:`` of a scenario and confidences on the real SGLang: one server, started by the backend, for both."""

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest

from adasim.policies.fixed import Fixed
from adasim.policies.head import Head
from adasim.policies.threshold import Threshold
from adasim.real.backend import TorchBackend
from adasim.real.sglang_client import training
from adasim.real.sglang_client.launching import launch_of
from adasim.real.sglang_client.process import Server, kept, leased, stop_kept
from adasim.recorded import check
from adasim.records import Records
from tests.fake_trainer import FAKE
from tests.on_sglang.test_backend import backend, closed

OPD = {"buffer": 4, "rollback": {"requests": 4, "confidence": 0.6}, "full_verify_share": 0.2}


@pytest.fixture(scope="module")
def own() -> Iterator[Server]:
    with leased(launch_of(backend())) as server:
        pass  # it stays, for runs that lease it
    yield server
    stop_kept()


def rounds_of(records: Records) -> pd.DataFrame:
    assert records.rounds is not None
    return records.rounds.sort_values(["request", "position"], ignore_index=True)


def test_confidences_are_the_torch_engines(own: Server) -> None:
    workload, engine = closed(2, 1), {"drafter": "smollm2-135m", "dtype": "float32", "ignore_eos": True}
    there = rounds_of(backend().run(workload, Threshold(), 0))
    here = rounds_of(TorchBackend.model_validate({"kind": "torch", **engine}).run(workload, Threshold(), 0))
    same = ["request", "position", "draft_len", "verify_len", "accepted"]
    pd.testing.assert_frame_equal(there[same], here[same])
    np.testing.assert_allclose(there["confidence"], here["confidence"], rtol=1e-3)
    assert there["confidence"].between(0, there["draft_len"], inclusive="neither").all()
    assert rounds_of(backend().run(workload, Head(), 0))["confidence"].isna().all()


def test_a_worse_drafter_comes_and_goes_within_a_run(own: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros pass every check, and accept nothing. In the end the server is the one that it was."""
    monkeypatch.setattr(training, "COMMAND", (sys.executable, "-c", FAKE, "degraded"))
    before = backend().run(closed(), Fixed(verify_len=8), 0)
    trained: dict[str, Any] = {"opd": OPD}
    records = backend(**trained).run(closed(32, 2), Fixed(verify_len=8), 0)
    after = backend().run(closed(), Fixed(verify_len=8), 0)
    assert kept(launch_of(backend())) is own
    assert check(records, "x") == []
    assert records.events["kind"].tolist()[:3] == ["trained", "reload", "rollback"], records.events.to_dict("records")
    assert records.events["draft_version"].tolist()[:3] == [1, 1, 0]
    rounds, steps = rounds_of(records), records.steps
    assert set(rounds["draft_version"]) == {0, 1}
    assert rounds["whole"].any()
    assert set(rounds.loc[rounds["whole"], "verify_len"]) == {16}
    tau = {v: 1 + g["accepted"].mean() for v, g in rounds.groupby("draft_version")}
    assert tau[1] < tau[0] - 0.3
    for event, old, new in zip(records.events.to_dict("records")[1:3], (0, 1), (1, 0), strict=True):
        change = int(np.flatnonzero((steps["draft_version"].shift() == old) & (steps["draft_version"] == new))[0])
        assert steps["end_s"].iloc[change - 1] <= event["time_s"] <= steps["start_s"].iloc[change]
    assert not any("ALARM" in note for note in records.notes)
    columns = ["request", "position", "draft_len", "verify_len", "accepted", "whole", "draft_version"]
    pd.testing.assert_frame_equal(rounds_of(before)[columns], rounds_of(after)[columns])
    assert after.events.empty
