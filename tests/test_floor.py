"""Two measurements of one scenario are compared by what counts for each policy."""

import json
from pathlib import Path

import pytest

from adasim.errors import InputError
from adasim.validation.floor import compare
from tests.build import closed, config
from tests.recordings import ENGINE, record

POLICIES = [
    {"kind": "off"},
    {"kind": "sglang_ema", "name": "ema", "candidates": {1: [3, 5], 8: [0, 3]}},  # JSON keeps keys of tables as text
    {"kind": "smartspec"},
]


def measured(folder: Path, **cost: object) -> Path:
    engine = config()["backend"] | {"rounds": True, "max_draft_len": 5}
    engine["cost"] = engine["cost"] | cost
    load = closed(requests=8, domains={"default": 1.0})
    return record(
        folder, identity=ENGINE, backend=engine, policies=POLICIES, workload=load, seeds=[0],
        measure={"warmup_requests": 0, "until_last_arrival": False},
    )  # fmt: skip


def test_a_run_does_not_move_against_itself(tmp_path: Path) -> None:
    folder = measured(tmp_path / "one")
    moved, notes = compare(folder, folder)
    assert set(moved["policy"]) == {"off", "ema", "smartspec"}
    assert moved["output_tok_s"].tolist() == [0.0] * 3
    assert notes == []


def test_what_policies_believe_of_time_counts_where_they_ask(tmp_path: Path) -> None:
    """SmartSpec asks for a cost: another belief is another rule. Plain decoding and SGLang's EMA do not ask."""
    one, other = measured(tmp_path / "one"), measured(tmp_path / "other", overhead={"round_ms": 9.0})
    with pytest.raises(InputError, match=r"round_ms 0\.0, the other says 9\.0"):
        compare(one, other)
    for folder in (one, other):
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["trials"] = [t for t in manifest["trials"] if t["policy"] != "smartspec"]
        (folder / "manifest.json").write_text(json.dumps(manifest))
    assert set(compare(one, other)[0]["policy"]) == {"off", "ema"}
