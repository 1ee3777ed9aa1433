"""Compiled kernels and their numpy reference give the same bits."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest

from adasim.errors import InputError
from adasim.kernels import compiled, kernels, plain
from adasim.kernels.form import COLUMNS, CONTEXT, DONE, HELD, LEFT, WANT, Kernels
from adasim.policies.base import Policy
from adasim.policies.dcut import DCut
from adasim.policies.fixed import Fixed
from adasim.policies.head import Head
from adasim.policies.threshold import Threshold
from adasim.records import Records
from adasim.simulator.span import NO_LUCK
from tests.build import OFF, backend, closed, simulate

LENGTHS = {"kind": "lognormal", "mean": 60, "cv": 1.0, "minimum": 1, "maximum": 200}
CURVES = {"a": {"kind": "geometric", "alpha": 0.6}, "b": {"kind": "anchored", "first": 0.89, "last": 0.13, "tau": 7.09}}
TEXT = {"kind": "curves", "curves": CURVES, "correlation": 0.4, "spread": 0.1}
RUNS: dict[str, dict[str, Any]] = {
    "correlated": {
        "workload": closed(output_len=LENGTHS, domains={"a": 1.0, "b": 2.0}),
        "backend": backend(acceptance=TEXT),
    },
    "confidences of their own": {
        "workload": closed(domains={"a": 1.0, "b": 2.0}),
        "backend": backend(acceptance=TEXT | {"head": {"confidence": {"b": {"noise": 1.0, "claims": 0.7}}}}),
    },
    "short of memory": {
        "workload": closed(prompt_len=LENGTHS, output_len=LENGTHS, requests=60),
        "backend": backend(kv={"blocks": 40}, max_prefill_tokens=100),
    },
    "chunked": {"workload": closed(prompt_len=LENGTHS, output_len=LENGTHS), "backend": backend(chunked_prefill=32)},
    "learning": {
        "workload": closed(output_len=LENGTHS, domains={"a": 1.0, "b": 2.0}, requests=80),
        "backend": backend(acceptance=TEXT, learning={"buffer": 4, "token_us": 20.0, "setup_s": 0.01}),
    },
}
POLICIES: list[Policy] = [OFF, Fixed(verify_len=16), Head(), Threshold(), DCut()]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.kind)
@pytest.mark.parametrize("run", RUNS)
def test_runs_are_the_same_to_the_bit(run: str, policy: Policy, using: Callable[[str], None]) -> None:
    records: list[Records] = []
    for name, module in (("numba", compiled), ("numpy", plain)):
        using(name)
        assert kernels() is module
        records.append(simulate(policy, **RUNS[run]))
    for table in ("steps", "requests", "blocks", "gaps"):
        one, other = (getattr(r, table) for r in records)
        pd.testing.assert_frame_equal(one, other, check_exact=True)


def test_kept_machine_code_is_loaded_without_the_compiler() -> None:
    """Half of what kernels cost at start-up was numba's library, which only compiling needs."""
    land: Any = compiled.land
    if land.stats.cache_path is None:
        pytest.skip("no folder for numba's cache can be written")
    ask = "from adasim.kernels.compiled import land; print(len(land.stats.cache_hits), 'numba.np.linalg' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", f"import sys; {ask}"], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["1", "False"]


@pytest.mark.parametrize("name", ["fortran", "Numpy"])
def test_an_unknown_choice_is_refused(name: str, using: Callable[[str], None]) -> None:
    using(name)
    with pytest.raises(InputError, match=rf"ADASIM_KERNELS={name}: allowed: numpy, numba"):
        kernels()


def table(rng: np.random.Generator, requests: int) -> np.ndarray:
    lives = rng.integers(0, 300, (requests, len(COLUMNS)))
    lives[:, LEFT] *= rng.random(requests) < 0.5
    return lives


@pytest.mark.parametrize("available", [0, 5, 10_000])
def test_reserve(available: int) -> None:
    """Either all blocks are taken and every context with its drafts has its blocks, or none."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        before = table(rng, 9)
        ids, drafts = rng.permutation(9)[:6], rng.integers(0, 16, 6)
        results = []
        for kernel in both():
            lives = before.copy()
            results.append((kernel.reserve(lives, ids, drafts, 16, available), lives))
        assert results[0][0] == results[1][0]
        np.testing.assert_array_equal(results[0][1], results[1][1])
        taken, lives = results[0]
        assert taken == (lives[:, HELD] - before[:, HELD]).sum() if taken >= 0 else (lives == before).all()


@pytest.mark.parametrize("whole", [True, False])
def test_prefill_takes_prompts_in_order(whole: bool) -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        lives = table(rng, 9)
        ids = np.flatnonzero(lives[:, LEFT])
        limit = int(rng.integers(1, 600))
        outcomes = []
        for kernel in both():
            tokens = np.zeros(len(ids), dtype=np.int64)
            count, total, context = kernel.prefill(lives, ids, limit, whole, tokens)
            outcomes.append((count, total, context, tokens[:count].tolist()))
        assert outcomes[0] == outcomes[1]
        count, total, _, given = outcomes[0]
        assert 0 < total == sum(given)
        assert total <= limit or (whole and count == 1)
        assert given[:-1] == lives[ids[: count - 1], LEFT].tolist()


def test_tokens_are_graded() -> None:
    """By the levels of their own domain; infinite levels are none."""
    levels = np.array([[-1.0, 0.0, 1.0], [0.5, np.inf, np.inf]])
    values, counts = np.array([-1.5, 0.0, 0.1, 9.0, 0.5, 0.6]), np.array([4, 2])
    for kernel in both():
        grades = np.full(8, -1, dtype=np.int16)
        kernel.grade(values, counts, np.array([0, 1]), levels, np.array([3, 0]), grades)
        assert grades.tolist() == [0, 1, -1, 0, 1, 2, 3, -1]


def test_distinct_values_are_counted() -> None:
    for kernel in both():
        values, counts = np.empty(9), np.empty(9, dtype=np.int64)
        n = kernel.distinct(np.array([0.5, 0.25, 0.5, 1.5, 0.25, 0.5]), values, counts)
        assert (n, values[:3].tolist(), counts[:3].tolist()) == (3, [0.25, 0.5, 1.5], [2, 3, 1])


def test_lengths_outside_are_found() -> None:
    most = np.array([3, 3, 0])
    for kernel in both():
        assert kernel.first_outside(np.array([4, 1, 1]), 1, most) == -1
        assert kernel.first_outside(np.array([4, 5, 9]), 1, most) == 1
        assert kernel.first_outside(np.array([4, 4, 0]), 1, most) == 2


def test_who_finishes_within_a_span_is_replaced() -> None:
    """Blocks of 16. 0 wants one token more, 1 four more; 2 comes in the place of 0 with a prompt of 40 and wants 3."""
    lives = np.zeros((3, len(COLUMNS)), dtype=np.int64)
    lives[:, WANT], lives[:, DONE], lives[:, CONTEXT], lives[:, HELD] = [2, 5, 3], [1, 1, 0], [11, 21, 40], [1, 2, 0]
    ids, left, out = np.array([0, 1]), np.zeros((4, 3), dtype=np.int64), np.zeros((9, 8), dtype=np.int64)
    ended = compiled.rounds(
        lives, ids, *NO_LUCK, 0, 1, 1.0, 0, False, 1, 0.0, 0.0, 16, 100, 2, 1, 2, 16, 99,
        np.zeros((1, 2, 1), dtype=np.int64), left, out,
    )  # fmt: skip
    assert ended == (4, 1, True)  # 2 has all its tokens; nobody is left to come
    assert ids.tolist() == [1, 2]
    assert left[0].tolist() == [0, 0, 1]  # 0 left after the first step, the second prefilled the prompt of 2
    assert out[:4].tolist() == [
        [2, 1, 32, 0, 2, 0, 2, 2],  # three blocks for 40 tokens, less the one of 0
        [40, 0, 1600, 0, 1, 0, 0, 0],
        [2, 1, 63, 0, 2, 0, 0, 2],
        [2, 1, 65, 0, 2, 0, 0, 2],
    ]
    assert lives[:, DONE].tolist() == [2, 4, 3]
    assert lives[:, HELD].tolist() == [1, 2, 3]


def test_land_gives_no_more_than_was_asked_for() -> None:
    """A request that wants 3 more tokens gets 3 of the 5 its round made; both count as accepted drafts."""
    for kernel in both():
        lives = np.zeros((1, len(COLUMNS)), dtype=np.int64)
        lives[0, WANT] = 3
        out = np.zeros((2, 1), dtype=np.int64)
        one = np.zeros(1, dtype=np.int64)
        accepted, emitted, _, complete = kernel.land(
            lives,
            one,
            one + 15,
            one + 5,
            one + 9,
            2.0,
            16,
            np.ones(1),
            np.zeros((1, 17, 16), np.int64),
            out[0],
            out[1],
            np.empty(1),
        )
        assert (accepted, emitted, complete, out.tolist()) == (4, 3, True, [[4], [3]])


def both() -> list[Kernels]:
    return [compiled, plain]


def test_normal_numbers_are_those_of_numpy() -> None:
    """Several streams, all parts of the ziggurat: of a million numbers some 270 lie in its tail."""
    streams, counts = np.arange(10), np.full(10, 100_001)
    starts = 7 + np.cumsum(counts) - counts
    draws = np.zeros((2, 7 + counts.sum()))
    for kernel, mine in zip(both(), draws, strict=True):
        kernel.normals((5 << 2) + 1, streams, starts, counts, mine)
    np.testing.assert_array_equal(draws[0], draws[1])
    assert np.abs(draws[0]).max() > 3.66  # beyond the last layer


def falling(rng: np.random.Generator, n: int) -> np.ndarray:
    """Survival curves with equal values in many rows, and some rows that end early."""
    curves = np.round(np.cumprod(rng.uniform(0.6, 1.0, (n, 6)), axis=1), 1)
    curves[np.arange(6) >= rng.integers(0, 8, n)[:, None]] = -1.0
    return curves


def test_budgets_are_found_and_spent_alike() -> None:
    for seed in range(60):
        rng = np.random.default_rng(seed)
        curves = falling(rng, int(rng.integers(1, 20)))
        rising, seconds = np.sort(curves, axis=None), np.linspace(1, rng.uniform(1, 9), curves.size + 1)
        found = {kernel.early_budget(len(curves), rising, seconds) for kernel in both()}
        assert len(found) == 1
        for budget in {max(found.pop(), 1), int((curves >= 0).sum())} - {0}:
            lengths = np.zeros((2, len(curves)), dtype=np.int64)
            for kernel, mine in zip(both(), lengths, strict=True):
                kernel.spend(curves, budget, rising[-budget], mine)
            np.testing.assert_array_equal(lengths[0], lengths[1])
            assert lengths[0].sum() == budget + len(curves) or rising[-budget] < 0


def test_stale_curves_follow_their_requests() -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        ids, curves = rng.permutation(30)[:9], rng.random((9, 4))
        today = np.concatenate([ids[rng.random(9) < 0.7], np.arange(100, 100 + seed % 3)])
        carried = np.zeros((2, len(today), 4))
        for kernel, mine in zip(both(), carried, strict=True):
            kernel.carry(ids, curves, today, mine)
        np.testing.assert_array_equal(carried[0], carried[1])
        assert (carried[0][-(seed % 3) :] == curves.mean(axis=0)).all() or not seed % 3


def test_who_has_finished_comes_last() -> None:
    for seed in range(20):
        lives = table(np.random.default_rng(seed), 9)
        ids, sorted_ids = np.arange(1, 8), np.zeros((2, 7), dtype=np.int64)
        stay = {kernel.finished(lives, ids, mine) for kernel, mine in zip(both(), sorted_ids, strict=True)}
        np.testing.assert_array_equal(sorted_ids[0], sorted_ids[1])
        done = (lives[:, DONE] >= lives[:, WANT]) & (lives[:, LEFT] == 0)
        assert not done[sorted_ids[0][: min(stay)]].any()
        assert done[sorted_ids[0][max(stay) :]].all()


def test_confidence_curves_are_looked_up_alike() -> None:
    rng = np.random.default_rng(0)
    domains, signal, posterior = rng.integers(0, 2, 50), rng.uniform(-9, 9, 50), rng.random((2, 40, 3))
    found = np.zeros((2, 50, 3))
    for kernel, mine in zip(both(), found, strict=True):
        kernel.curves(domains, signal, posterior, -5.0, 4, mine)
    np.testing.assert_array_equal(found[0], found[1])
