"""The table of rounds: every request of every round, in agreement with all other tables."""

import numpy as np
import pandas as pd
import pytest

from adasim.policies.fixed import Fixed
from adasim.policies.head import Head
from adasim.records import RoundRecord
from tests.build import backend, closed, simulate


def agree_with_the_other_tables(rounds: pd.DataFrame, blocks: pd.DataFrame, requests: pd.DataFrame) -> None:
    keys = ["domain", "verify_len", "accepted", "draft_version"]
    pd.testing.assert_series_equal(rounds.groupby(keys).size(), blocks.groupby(keys)["blocks"].sum(), check_names=False)
    sums = rounds.groupby("request").agg(
        rounds=("step", "size"), draft_tokens=("draft_len", "sum"), verify_tokens=("verify_len", "sum"),
        accepted=("accepted", "sum"), domain=("domain", "first"),
    )  # fmt: skip
    pd.testing.assert_frame_equal(sums, requests.set_index("request").loc[sums.index, sums.columns])


def follow_each_other(rounds: pd.DataFrame, requests: pd.DataFrame) -> None:
    """Positions move on by what was accepted and one more token; the context is the prompt and the position."""
    prompt = requests.set_index("request")["prompt_len"].loc[rounds["request"]].to_numpy()
    np.testing.assert_array_equal(rounds["context"], prompt + rounds["position"])
    for _, mine in rounds.groupby("request"):
        np.testing.assert_array_equal(np.diff(mine["position"]), mine["accepted"].iloc[:-1] + 1)
        assert mine["position"].iloc[0] == 1  # the prefill gave the first


def test_the_simulator_writes_rounds_when_asked() -> None:
    curves = {"a": {"kind": "geometric", "alpha": 0.8}, "b": {"kind": "geometric", "alpha": 0.5}}
    engine = backend(rounds=True, acceptance={"kind": "curves", "curves": curves})
    records = simulate(Fixed(verify_len=6), backend=engine, workload=closed(domains={"a": 0.5, "b": 0.5}))
    rounds = records.rounds
    assert rounds is not None
    assert list(rounds.columns) == list(RoundRecord._fields)
    agree_with_the_other_tables(rounds, records.blocks, records.requests)
    follow_each_other(rounds, records.requests)
    assert rounds["accept_len"].isna().all()
    assert not rounds["whole"].any()
    assert rounds["whole"].dtype == bool


def test_recording_rounds_changes_nothing_else() -> None:
    quiet, loud = simulate(Head()), simulate(Head(), backend=backend(rounds=True))
    assert quiet.rounds is None
    for name in ("steps", "requests", "blocks", "gaps"):
        pd.testing.assert_frame_equal(getattr(quiet, name), getattr(loud, name))


def test_the_head_decides_by_what_the_rounds_say_it_reported() -> None:
    rounds = simulate(Head(), backend=backend(rounds=True)).rounds
    assert rounds is not None
    expected = np.clip(np.rint(rounds["accept_len"]), 1, rounds["draft_len"] + 1)
    np.testing.assert_array_equal(rounds["verify_len"], expected)
    follow_each_other(rounds, simulate(Head()).requests)


def test_blocks_drawn_to_be_verified_in_full_are_marked() -> None:
    learning = {"head": {"label": "full_verify", "full_verify_share": 0.25}}
    rounds = simulate(Fixed(verify_len=3, draft_len=15), backend=backend(rounds=True, learning=learning)).rounds
    assert rounds is not None
    whole = rounds["whole"].to_numpy()
    assert whole.mean() == pytest.approx(0.25, abs=0.05)
    np.testing.assert_array_equal(rounds["verify_len"], np.where(whole, 16, 3))
