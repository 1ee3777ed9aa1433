"""Prefill, chunks, and the prefix cache."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from adasim import metrics
from adasim.policies.fixed import Fixed
from adasim.serving.kv import KvMemory
from tests.build import OFF, backend, closed, simulate

PREFILL = {
    "kind": "table",
    "verify": "dcut_h20_verify.csv",
    "extrapolate": True,
    "prefill": {"base_ms": 5.0, "per_token_ms": 0.1},
}


def one(prompt: int, output: int) -> dict[str, Any]:
    return closed(
        concurrency=1,
        requests=1,
        prompt_len={"kind": "fixed", "tokens": prompt},
        output_len={"kind": "fixed", "tokens": output},
    )


def test_ttft_of_one_request_is_its_prefill() -> None:
    records = simulate(OFF, workload=one(200, 3), backend=backend(cost=PREFILL))
    assert metrics.ttft_s(records.requests)[0] == pytest.approx(0.005 + 200 * 0.0001)
    assert records.steps["prefill_tokens"].tolist() == [200, 0, 0]
    assert records.steps["first_tokens"].tolist() == [1, 0, 0]


def test_whole_prompts_share_a_step_up_to_the_limit() -> None:
    records = simulate(
        OFF,
        workload=closed(
            concurrency=4,
            requests=4,
            prompt_len={"kind": "fixed", "tokens": 100},
            output_len={"kind": "fixed", "tokens": 2},
        ),
        backend=backend(cost=PREFILL, max_prefill_tokens=250),
    )
    assert records.steps["prefill_tokens"].tolist() == [200, 200, 0]
    alone = simulate(OFF, workload=one(900, 1), backend=backend(cost=PREFILL, max_prefill_tokens=250))
    assert alone.steps["prefill_tokens"].tolist() == [900]  # one prompt always fits


def test_chunks_are_mixed_into_rounds() -> None:
    records = simulate(
        OFF,
        workload=closed(
            concurrency=2,
            requests=2,
            prompt_len={"kind": "fixed", "tokens": 100},
            output_len={"kind": "fixed", "tokens": 3},
        ),
        backend=backend(cost=PREFILL, chunked_prefill=150),
    )
    # step 0: all of request 0 and half of request 1; step 1: the rest, beside the first round of request 0
    assert records.steps["prefill_tokens"].tolist() == [150, 50, 0, 0]
    assert records.steps["decoding"].tolist() == [0, 1, 2, 1]
    assert records.steps["prefill_s"][1] == pytest.approx(50 * 0.0001)  # no base: the step was needed anyway
    assert (records.requests["status"] == "finished").all()


def mooncake(tmp_path: Path, cached: bool, blocks: int | None = None) -> dict[str, Any]:
    rows = [
        {"timestamp": 5000 * i, "input_length": 1500, "output_length": 4, "hash_ids": [1, 2, 100 + i]} for i in range(4)
    ]
    path = tmp_path / "mooncake.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    kv = {"blocks": blocks, "prefix_cache": cached} if blocks else {"prefix_cache": cached}
    return {"workload": {"kind": "trace", "path": str(path)}, "backend": backend(cost=PREFILL, kv=kv)}


def test_prefix_cache_skips_shared_blocks(tmp_path: Path) -> None:
    """Each prompt after the first finds two blocks of 512 of its 1,500 tokens."""
    cold = simulate(Fixed(verify_len=4), **mooncake(tmp_path, cached=False))
    warm = simulate(Fixed(verify_len=4), **mooncake(tmp_path, cached=True))
    assert cold.requests["cached_tokens"].tolist() == [0, 0, 0, 0]
    assert warm.requests["cached_tokens"].tolist() == [0, 1024, 1024, 1024]
    assert warm.steps["prefill_tokens"].sum() == cold.steps["prefill_tokens"].sum() - 3 * 1024
    assert metrics.ttft_s(warm.requests)[1] == pytest.approx(0.005 + (1500 - 1024) * 0.0001)


def test_prefix_cache_needs_fitting_blocks() -> None:
    with pytest.raises(ValidationError, match="block_tokens that divide 512, not 48"):
        KvMemory(prefix_cache=True, block_tokens=48)


def test_short_memory_drops_cached_blocks(tmp_path: Path) -> None:
    """101 blocks hold one request (1,520 tokens), not its successor's cache as well."""
    warm = simulate(Fixed(verify_len=4), **mooncake(tmp_path, cached=True, blocks=101))
    assert warm.steps["kv_blocks"].max() <= 101
    assert (warm.requests["status"] == "finished").all()
    assert warm.requests["cached_tokens"].tolist()[1:] == [1024, 1024, 1024]
