"""Cost models: interpolation, staircase, cliff, ranges, overheads, roofline."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from adasim.calibration.cost import LinearDraft, Overhead, TableCost
from adasim.calibration.pass_cost import PassCost
from adasim.calibration.roofline import RooflineCost
from adasim.calibration.specs import MODELS, ModelSpec
from adasim.errors import InputError

TABLE = """batch,tokens,context,ms
1,1,100,4
1,16,100,6
8,1,100,8
8,16,100,12
1,1,300,6
1,16,300,8
8,1,300,10
8,16,300,14
"""


def table(tmp_path: Path, text: str = TABLE, **fields: Any) -> TableCost:
    path = tmp_path / "cost.csv"
    path.write_text(text)
    return TableCost(verify=str(path), **fields)


def test_linear_in_every_axis(tmp_path: Path) -> None:
    cost = table(tmp_path)
    assert cost.verify_s(1, 1, 100) == pytest.approx(0.004)
    assert cost.verify_s(8, 16, 300) == pytest.approx(0.014)
    # halfway in batch (4.5), tokens (8.5) and context (200): mean of all eight corners
    mean = (4 + 6 + 8 + 12 + 6 + 8 + 10 + 14) / 8
    assert cost._grid.at(4.5, 8.5, 200) == pytest.approx(mean / 1e3)


def test_tokens_per_request_are_divided(tmp_path: Path) -> None:
    cost = table(tmp_path, "batch,tokens_per_request,ms\n1,1,1\n1,4,4\n2,1,10\n2,4,40\n")
    assert cost.verify_s(2, 8, 0) == pytest.approx(0.040)
    assert cost.verify_s(2, 5, 999) == pytest.approx(0.025)


def test_outside_the_table_is_an_error_unless_asked_for(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"tokens 17 is outside the measured 1\.\.16; measure it, or set"):
        table(tmp_path).verify_s(1, 17, 100)
    with pytest.raises(InputError, match=r"context 400 is outside the measured 100\.\.300"):
        table(tmp_path).verify_s(1, 1, 400)
    cost = table(tmp_path, extrapolate=True)
    assert cost.verify_s(1, 31, 100) == pytest.approx(0.008)
    assert cost.verify_s(15, 1, 100) == pytest.approx(0.012)
    assert cost.notes[1:] == [
        "time was extrapolated: batch outside the measured 1..8",
        "time was extrapolated: tokens outside the measured 1..16",
    ]


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        (TABLE.replace("8,16,300,14\n", ""), ["batch 8, tokens 16, context 300 is missing"]),
        (TABLE + "1,1,100,5\n", ["batch 1, tokens 1, context 100 is measured twice"]),
        (TABLE.replace("1,1,100,4", "1,1,100,-4"), ["row 1: ms is -4, must be a number > 0"]),
        (TABLE.replace("1,1,100,4", "1,1,100,nan"), ["row 1: ms is nan"]),
        (TABLE.replace("ms", "time"), ["column ms is missing", "unknown column time; allowed"]),
        ("", ["cannot be read as a table"]),
        ("batch,tokens,ms\n", ["no rows"]),
        ("batch,ms\n1,2\n", ["needs one of the columns tokens and tokens_per_request"]),
    ],
)
def test_bad_tables_are_refused(tmp_path: Path, text: str, messages: list[str]) -> None:
    with pytest.raises(ValidationError) as error:
        table(tmp_path, text)
    for message in messages:
        assert message in str(error.value)


def test_staircase_and_cliff(tmp_path: Path) -> None:
    """A batch pays for the next captured size; past the largest it pays the eager penalty."""
    cost = table(tmp_path, captured_tokens=[4, 8], eager_penalty_ms=50.0)
    assert cost.staircase_s(1, 5, 100) == cost.verify_s(1, 8, 100)
    assert cost.staircase_s(1, 4, 100) == cost.verify_s(1, 4, 100)
    assert cost.staircase_s(1, 9, 100) == pytest.approx(cost.verify_s(1, 9, 100) + 0.05)
    # prefill tokens in the same pass count for its size
    assert cost.staircase_s(1, 5, 100, prefill=2) == cost.verify_s(1, 6, 100)
    assert cost.step(1, 0, 5, 100, prefill=4).verify == pytest.approx(cost.verify_s(1, 5, 100) + 0.05)
    with pytest.raises(ValidationError, match="captured_tokens needs a table over tokens of the whole batch"):
        TableCost(verify="dcut_h20_verify.csv", captured_tokens=[64])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"captured_tokens": [8, 4]}, "must rise"),
        ({"eager_penalty_ms": 5.0}, "no effect without captured_tokens"),
        ({"draft": {"kind": "linear", "passes": 6}}, "no effect unless autoregressive"),
        ({"overhead": {"round_ms": -1.0}}, "greater than or equal to 0"),
        ({"verify": "nowhere.csv"}, "no file nowhere.csv"),
    ],
)
def test_options_without_effect_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TableCost.model_validate({"kind": "table", "verify": "dcut_h20_verify.csv"} | fields)


def test_parts_of_a_step(tmp_path: Path) -> None:
    cost = table(
        tmp_path,
        draft=LinearDraft(base_ms=2.0, per_request_ms=0.5),
        overhead=Overhead(round_ms=1.0, speculative_ms=0.25, per_draft_position_ms=0.1, per_verified_ms=0.2, head_ms=3.0),
    )
    plain = cost.step(1, 0, 1, 100)
    assert plain == pytest.approx((0, 0.004, 0.001, 0))
    step = cost.step(1, 16, 16, 100, longest_draft=15, reads_head=True)
    assert step == pytest.approx((0.0025, 0.006, 0.001 + 0.00025 + 0.0016 + 0.0032 + 0.003, 0))
    assert cost.round_s(1, 16, 16, 100) == pytest.approx(step.total)
    assert cost.step(0, 0, 0, 0, prefill=10) == (0, 0, 0, 0)


def test_ragged_rounds_verify_longer(tmp_path: Path) -> None:
    """By a share, the graph's padding included; drafting and overhead take what they take."""
    cost = table(tmp_path, ragged=0.25, captured_tokens=[16], overhead=Overhead(round_ms=1.0))
    even, ragged = (cost.step(8, 24, 9, 100, ragged=r) for r in (False, True))
    assert (even.verify, ragged.verify) == pytest.approx((0.012, 0.015))
    assert (even.draft, even.overhead) == (ragged.draft, ragged.overhead)
    assert cost.round_s(8, 24, 9, 100) == pytest.approx(even.total)  # what policies believe


def test_autoregressive_drafters_pay_per_token() -> None:
    one_pass = LinearDraft(base_ms=2.0)
    eagle = LinearDraft(base_ms=2.0, autoregressive=True)
    tree = LinearDraft(base_ms=2.0, autoregressive=True, passes=6)
    assert one_pass.seconds(4, 24, 5) == pytest.approx(0.002)
    assert eagle.seconds(4, 24, 5) == pytest.approx(0.010)
    assert tree.seconds(4, 128, 31) == pytest.approx(0.012)


def test_roofline_of_a_dense_model() -> None:
    """One token reads all weights once; many tokens are bound by arithmetic; attention reads the KV cache."""
    cost = RooflineCost(memory_efficiency=1.0, compute_efficiency=1.0, launch_ms=0.0)
    params = 36 * (4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 12288) + 4096 * 151936
    assert params == pytest.approx(7.57e9, rel=0.01)  # Qwen3-8B less its input embedding
    assert cost.verify_s(1, 1, 0) == pytest.approx(2 * params / 3.35e12)
    assert cost.verify_s(64, 4096, 0) == pytest.approx(2 * params * 4096 / 989e12)
    kv_bytes = 36 * 2 * 8 * 128 * 2
    assert cost.verify_s(8, 8, 1000) - cost.verify_s(8, 8, 0) == pytest.approx(8 * 1000 * kv_bytes / 3.35e12)


def test_roofline_drafters() -> None:
    block = RooflineCost.model_validate({"draft": {"kind": "layers", "layers": 1}})
    chain = RooflineCost.model_validate({"draft": {"kind": "layers", "layers": 1, "autoregressive": True}})
    assert chain.draft_s(4, 64, 15, 100) > 5 * block.draft_s(4, 64, 15, 100)
    assert block.draft_s(1, 16, 15, 100) < 0.3 * block.verify_s(1, 16, 100)


def test_a_copy_is_priced_by_its_own_fields() -> None:
    """Whatever the original has already worked out."""
    cost = RooflineCost(compute_efficiency=0.6, launch_ms=0.5)
    cost.verify_s(64, 64 * 16, 500.0)
    changed: dict[str, Any] = {"compute_efficiency": 0.3, "launch_ms": 2.0}
    step = cost.model_copy(update=changed).step(64, 64 * 16, 64 * 16, 500.0, longest_draft=15)
    assert step == RooflineCost(**changed).step(64, 64 * 16, 64 * 16, 500.0, longest_draft=15)


def test_prefill_beside_decoding_is_cheaper_than_alone() -> None:
    """Weights are read once for both."""
    cost = RooflineCost()
    assert cost.prefill_s(32, 16, verified=32) < 0.2 * cost.prefill_s(32, 16, verified=0)
    assert cost.prefill_s(4096, 2048, verified=0) > 20 * cost.prefill_s(32, 16, verified=0) * 0.1


def test_impossible_experts_are_refused() -> None:
    shape = MODELS["qwen3-30b-a3b"].model_dump()
    for fields in ({"experts": 4, "top_experts": 8}, {"top_experts": 0}, {"experts": 0}):
        with pytest.raises(ValidationError, match="experts and top_experts go together"):
            ModelSpec.model_validate(shape | fields)


def test_unknown_hardware_and_model_name_what_is_allowed() -> None:
    with pytest.raises(ValidationError, match=r"unknown 'h900'; allowed: a100"):
        RooflineCost(hardware="h900")
    with pytest.raises(ValidationError, match=r"unknown 'gpt'; allowed: llama"):
        RooflineCost(model="gpt")


def test_a_pass_between_nodes() -> None:
    """By hand: 2 ms a token from 1 to 4, 1 ms from 4 to 8; beyond, as before; requests and contexts come on top."""
    nodes = [{"tokens": 1, "ms": 10.0}, {"tokens": 4, "ms": 16.0}, {"tokens": 8, "ms": 20.0}]
    cost = PassCost.model_validate({"nodes": nodes, "per_request_ms": 0.5})
    assert [1e3 * cost.verify_s(2, t, 0.0) for t in (1, 2, 4, 6, 8, 16)] == pytest.approx([11, 13, 17, 19, 21, 29])
    assert PassCost.model_validate_json(cost.model_dump_json()) == cost
    with pytest.raises(ValidationError, match="have no effect with nodes"):
        PassCost.model_validate({"nodes": nodes, "base_ms": 1.0})
    with pytest.raises(ValidationError, match="tokens must rise"):
        PassCost.model_validate({"nodes": nodes[::-1]})
