"""Costs are recovered from what the simulator wrote, noise, outliers and a drifting machine included."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pydantic import TypeAdapter

from adasim.calibration.cost import TableCost
from adasim.calibration.estimate.cost import fit_cost, join_cost, left_out, parts_of
from adasim.calibration.estimate.draft import fit_draft
from adasim.calibration.estimate.forms import nodes_of
from adasim.calibration.estimate.part import FittedPart, interval
from adasim.calibration.estimate.prefill import fit_prefill
from adasim.calibration.estimate.ragged import ragged_share
from adasim.calibration.estimate.recording import RecordedTrial, Recording
from adasim.calibration.estimate.regression import fit, independent
from adasim.calibration.estimate.steps import Speed, blocks, machine_speed, pauses, ragged, rounds_table
from adasim.calibration.estimate.verify import fit_verify
from adasim.calibration.pass_cost import PassCost, bend
from adasim.calibration.profile import Profile
from adasim.calibration.roofline import AnyCost
from adasim.errors import InputError
from adasim.types import FloatArray
from adasim.validation.parts import measured_parts
from tests.build import closed
from tests.recordings import recording

CostModels: TypeAdapter[Any] = TypeAdapter(AnyCost)
TIMES = ("verify_s", "draft_s", "overhead_s", "prefill_s")
COST: dict[str, Any] = {
    "kind": "pass", "base_ms": 20.0, "per_request_ms": 1.0, "per_token_ms": 2.0, "knee_tokens": 24.0, "sharpness": 4.0,
    "per_context_ms": 0.002, "per_attended_ms": 0.001,
    "draft": {"kind": "linear", "base_ms": 3.0, "per_request_ms": 0.2, "per_position_ms": 0.1},
    "prefill": {"base_ms": 5.0, "per_token_ms": 0.5},
    "overhead": {"round_ms": 1.0, "per_request_ms": 0.1, "speculative_ms": 0.5, "head_ms": 0.7, "per_verified_ms": 0.02},
}  # fmt: skip
STRAIGHT = {k: v for k, v in COST.items() if k not in {"knee_tokens", "sharpness"}}
TEXT = {"kind": "curves", "curves": {"default": {"kind": "geometric", "alpha": 0.8}}}
POLICIES = [{"kind": "off"}, {"kind": "fixed", "verify_len": 4}, {"kind": "fixed", "verify_len": 8}, {"kind": "head"}]


def runs(folder: Path, cost: dict[str, Any], *, seeds: Sequence[int] = (0,), **fields: Any) -> Recording:
    engine = {"kind": "sim", "cost": cost, "acceptance": TEXT, "rounds": True, "max_draft_len": 7}
    lengths = {k: {"kind": "fixed", "tokens": n} for k, n in (("prompt_len", 120), ("output_len", 48))}
    given: dict[str, Any] = {
        "measure": {"warmup_requests": 0, "until_last_arrival": False},
        "policies": POLICIES,
        "sweep": {"workload.concurrency": [1, 2, 4, 8, 16]},
        "seeds": list(seeds),
        "workload": closed(requests=24, **lengths),
    }
    return recording(folder, backend=engine, **given | fields)


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Every run with two seeds; tests disturb a copy."""
    return runs(tmp_path_factory.mktemp("twice") / "run", COST, seeds=[0, 1])


def disturb(trials: Sequence[RecordedTrial], noise: float, outliers: float, slow: FloatArray | None = None) -> None:
    """Multiply times: by noise of so many percent, by 1.5 to 5 in a share of steps, by ``slow`` of each run."""
    rng = np.random.default_rng(1)
    for i, trial in enumerate(trials):
        steps = trial.records.steps
        for name in TIMES:
            odd = rng.random(len(steps)) < outliers
            factor = np.exp(noise * rng.standard_normal(len(steps))) * np.where(odd, rng.uniform(1.5, 5, len(steps)), 1)
            steps[name] *= factor * (1.0 if slow is None else slow[i])


def contains(part: FittedPart[Any], truth: dict[str, float], misses: int = 0) -> None:
    """All but so many intervals hold the truth: one in twenty need not. Nothing is off by more than half a width."""
    outside = {}
    for name, value in truth.items():
        at = part.intervals[name]
        slack = (at.high - at.low) / 2 + 1e-9
        assert at.low - slack <= value <= at.high + slack, f"{name}: {value} far outside {at}"
        if not at.low - 1e-9 <= value <= at.high + 1e-9:
            outside[name] = (value, at)
    assert len(outside) <= misses, outside


def truths(names: Sequence[str]) -> dict[str, float]:
    flat = {f"verify.{k}": v for k, v in COST.items() if isinstance(v, float)}
    for part in ("draft", "prefill", "overhead"):
        flat |= {f"{part}.{k}": v for k, v in COST[part].items() if isinstance(v, float)}
    return {n: flat[n] for n in names}


@pytest.fixture(scope="module")
def clean(twice: Recording) -> Recording:
    return replace(twice, trials=[t for t in twice.trials if t.seed == 0])


def test_exact_times_give_the_exact_constants(clean: Recording) -> None:
    found = fit_cost(clean.trials).model
    assert isinstance(found, PassCost)
    assert found.sharpness == 4
    for name in ("base_ms", "per_request_ms", "per_token_ms", "knee_tokens", "per_attended_ms", "per_context_ms"):
        assert getattr(found, name) == pytest.approx(COST[name], rel=0.1), name
    for part in ("draft", "prefill", "overhead"):
        for name, value in COST[part].items():
            if isinstance(value, float) and name != "speculative_ms":
                assert getattr(getattr(found, part), name) == pytest.approx(value, rel=1e-3, abs=1e-6), name
    assert found.overhead.speculative_ms == pytest.approx(0.5, abs=0.1)  # with what passes take beside a drafter: nothing
    for batch, tokens in ((1, 1), (4, 32), (16, 128), (7, 20)):
        truth = PassCost.model_validate(COST).verify_s(batch, tokens, 150)
        assert found.verify_s(batch, tokens, 150) == pytest.approx(truth, rel=2e-3)


def test_noise_outliers_and_drift_leave_the_truth_inside_the_intervals(twice: Recording) -> None:
    found = deepcopy(twice)
    rng = np.random.default_rng(0)
    disturb(found.trials, 0.03, 0.05, np.exp(0.1 * rng.standard_normal(len(found.trials))))
    part = fit_cost(found.trials)
    names = [f"verify.{n}" for n in ("base_ms", "per_request_ms", "per_token_ms", "per_attended_ms", "per_context_ms")]
    names += ["verify.knee_tokens", "draft.base_ms", "draft.per_request_ms", "draft.per_position_ms", "prefill.base_ms"]
    names += ["prefill.per_token_ms", *(f"overhead.{n}" for n in COST["overhead"])]
    contains(part, truths(names), misses=2)
    assert any("differ by a factor of 1." in n for n in part.notes)
    for batch, tokens in ((1, 8), (4, 16), (16, 128)):
        truth = PassCost.model_validate(COST).verify_s(batch, tokens, 150)
        assert part.model.verify_s(batch, tokens, 150) == pytest.approx(truth, rel=0.08)


def test_what_heads_take_while_drafting_is_told_from_drafting(clean: Recording) -> None:
    """An engine that runs its heads within drafting: what rounds that read them take longer, and no others."""
    found = deepcopy(clean)
    for trial in found.trials:
        steps = trial.records.steps
        reads = (steps["draft_tokens"] > 0) & (trial.label == "head")
        steps["draft_s"] += 1e-3 * (0.3 + 0.05 * steps["decoding"]) * reads
        steps["end_s"] += steps["draft_s"]  # room for it; nobody looks at pauses here
        steps[["start_s", "end_s"]] += steps["draft_s"].cumsum().to_numpy()[:, None]
    parts = parts_of(found.trials)
    assert parts["draft"].extra["head_ms"] == pytest.approx(0.3, rel=0.02)
    assert parts["draft"].extra["head_per_request_ms"] == pytest.approx(0.05, rel=0.02)
    assert parts["draft"].model.base_ms == pytest.approx(3.0, rel=1e-3)
    overhead = join_cost(parts).model.overhead
    assert overhead.head_ms == pytest.approx(0.7 + 0.3, rel=0.02)
    assert overhead.head_per_request_ms == pytest.approx(0.05, rel=0.05)
    with_head, without = (overhead.seconds(32, 16, reads_head=reads, batch=4) for reads in (True, False))
    more = with_head - without
    assert more == pytest.approx(1e-3 * (1.0 + 0.05 * 4), rel=0.02)


def test_a_probes_rounds_pay_for_the_heads_that_they_read(tmp_path: Path) -> None:
    shapes = [{"draft_len": 7, "verify_len": 4, "reads": r} for r in ([], ["accept_len"])]
    found = runs(tmp_path / "run", COST, policies=[{"kind": "probe", "shapes": shapes}])
    table = rounds_table(found.trials)
    assert 0.3 < table["reads_head"].mean() < 0.7
    assert set(table["reads"]) == {"", "accept_len"}
    apart = table.groupby([table["batch"], "reads_head"])["overhead_s"].median().unstack().dropna()
    np.testing.assert_allclose(apart[True] - apart[False], 0.7e-3, rtol=1e-6)
    beside = runs(tmp_path / "beside", COST, policies=[{"kind": "head"}])
    for trial in beside.trials:  # something else makes drafting cheaper there, which is not the head's doing
        trial.records.steps["draft_s"] *= 0.9
    for trial in found.trials:
        steps = trial.records.steps
        rounds = steps["decoding"] > 0
        reads = np.array(trial.reads(int(rounds.sum()))) != ""
        steps.loc[rounds, "draft_s"] += 1e-3 * reads * (0.3 + 0.05 * steps["decoding"][rounds])
    trials = [*found.trials, *beside.trials]
    names = sorted(set(blocks(trials)))
    usual = Speed(pd.Series(1.0, index=pd.Index(names, name="block")), 0, np.zeros((1, len(names))))
    heads = fit_draft(trials, speed=usual).extra
    assert heads == {"head_ms": pytest.approx(0.3, rel=0.02), "head_per_request_ms": pytest.approx(0.05, rel=0.02)}


def test_prefills_beside_a_drafter_are_told_from_others(twice: Recording) -> None:
    found = deepcopy(twice)
    for trial in found.trials:
        trial.records.steps["prefill_s"] *= 1.25 if trial.drafter_loaded else 1.0
    part = fit_prefill(found.trials)
    assert part.model.per_token_ms == pytest.approx(0.5 * 1.25, rel=0.02)
    assert any("without one it takes -20%" in n for n in part.notes)
    assert machine_speed(found.trials).factors.to_numpy() == pytest.approx(1.0, abs=1e-4)


def test_the_machines_speed_is_told_by_steps_that_runs_share(twice: Recording) -> None:
    found = deepcopy(twice)
    slow = np.where(np.arange(len(found.trials)) % 2 == 0, 1.0, 1.5)
    disturb(found.trials, 0.02, 0.05, slow)
    speed = machine_speed(found.trials)
    factors = np.array([speed.factors[t.key] for t in found.trials])
    assert speed.tied == len(found.trials)
    np.testing.assert_allclose(factors / np.median(factors) * np.median(slow), slow, rtol=0.02)
    alone = machine_speed([t for t in found.trials if t.seed == 0 and t.label == "off"][:2])
    assert alone.tied == 0  # plain runs of different batches share a prefill or two: too little to tell
    assert (alone.factors == 1).all()


def test_exact_times_divide_nothing_by_zero(clean: Recording) -> None:
    with np.errstate(all="raise"):
        speed = machine_speed(clean.trials)
    assert speed.tied > 10
    np.testing.assert_allclose(speed.factors, 1.0, atol=1e-4)  # cells hold contexts that differ a little


def test_what_outliers_take_is_said_beside_the_fit(clean: Recording) -> None:
    model = fit_cost(clean.trials).model
    assert left_out(model, clean.trials) == pytest.approx(0.0, abs=0.005)
    odd = deepcopy(clean)
    disturb(odd.trials, 0.0, 0.05)
    before, after = (rounds_table(r.trials)[["verify_s", "draft_s", "overhead_s"]].to_numpy().sum() for r in (clean, odd))
    assert 1 - before / after > 0.08  # a twentieth of the steps takes three times as long
    assert left_out(fit_cost(odd.trials).model, odd.trials) == pytest.approx(1 - before / after, abs=0.02)


def test_ragged_rounds_are_told_from_equal_ones(tmp_path: Path) -> None:
    """A head's lengths differ; 20 % longer than equal ones of as many tokens is what they take."""
    cost, grid = STRAIGHT | {"ragged": 0.2}, {"workload.concurrency": [2, 8]}
    equal = [{"kind": "fixed", "verify_len": n} for n in (1, 2, 3, 4, 6, 8)]
    found = runs(tmp_path / "run", cost, policies=[*equal, {"kind": "head"}], sweep=grid)
    rounds = rounds_table(found.trials)
    assert set(rounds.loc[rounds["ragged"], "trial"]) == {i for i, t in enumerate(found.trials) if t.label == "head"}
    parts = parts_of(found.trials)
    assert parts["verify"].model.ragged == pytest.approx(0.2, abs=0.01)
    known = parts["verify"].intervals
    assert known["verify.ragged"].value == parts["verify"].model.ragged
    assert [known[f"verify.{n}"].value for n in ("per_token_ms", "base_ms")] == pytest.approx([2.0, 20.0], rel=0.01)
    assert left_out(join_cost(parts).model, found.trials) == pytest.approx(0, abs=0.01)
    seen = measured_parts(found.trials[-1], CostModels.validate_python(cost), Profile.load("dcut_h20"))
    assert seen.levels().verify == pytest.approx(1, abs=1e-6)  # a profile that knows it leaves no part to blame

    alone = [t for t in found.trials if t.label in {"head", "fixed(verify_len=1)", "fixed(verify_len=8)"}]
    for trial in alone:  # keep rounds of equal lengths of the fixed ones only
        if trial.label == "head":
            trial.records.steps = trial.records.steps[ragged(trial.records)]
    part = fit_verify(alone)
    assert part.model.ragged == 0
    assert any("no equal lengths of about as many tokens" in n for n in part.notes)


def test_ragged_cells_by_hand() -> None:
    """20 tokens take 10 ms, 30 take 20: 25 would take 15, and take 18 where lengths differ."""
    names = ["batch", "tokens", "context", "drafter_loaded", "ragged", "ms", "block"]
    even = [(8, 20, 100, True, False, 10.0, "a"), (8, 30, 110, True, False, 20.0, "a")]
    uneven = [(8, 25, 105, True, True, 18.0, "b")] * 2 + [(8, 20, 105, True, True, 12.0, "c")] * 2
    odd = [(4, 25, 105, True, True, 99.0, "b"), (8, 25, 300, True, True, 99.0, "b"), (8, 31, 105, True, True, 99.0, "b")]
    found = ragged_share(pd.DataFrame(even + uneven + odd, columns=names), 0)
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((0.2, 0.2, 0.2))
    assert ragged_share(pd.DataFrame(even + uneven[:3] + odd, columns=names), 0) is None
    quick = [(*row[:5], 0.8 * row[5], row[6]) for row in uneven]
    none = ragged_share(pd.DataFrame(even + quick, columns=names), 0)
    assert none is not None
    assert none.value == 0


def test_straight_lines_are_no_knee(tmp_path: Path) -> None:
    found = runs(tmp_path / "run", STRAIGHT)
    disturb(found.trials, 0.02, 0.0)
    part = fit_verify(found.trials)
    assert isinstance(part.model, PassCost)
    assert part.model.knee_tokens < 8  # a knee near the first token bends nothing that was measured
    assert part.model.verify_s(4, 16, 150) == pytest.approx(
        PassCost.model_validate(STRAIGHT).verify_s(4, 16, 150), rel=0.02
    )


def test_times_that_rise_in_steps_are_linear_between_nodes(tmp_path: Path) -> None:
    """Steep to 8 tokens, flat to 32, steep again: no line and no knee; the table between nodes comes back."""
    nodes = [{"tokens": t, "ms": ms} for t, ms in ((1, 10.0), (8, 24.0), (32, 26.0), (128, 90.0))]
    truth = {k: v for k, v in STRAIGHT.items() if not k.startswith(("base", "per"))} | {"nodes": nodes}
    found = runs(tmp_path / "run", truth)
    disturb(found.trials, 0.02, 0.05)
    part = fit_verify(found.trials)
    assert isinstance(part.model, PassCost)
    assert part.model.nodes is not None
    right = PassCost.model_validate(truth)
    for batch, tokens in ((1, 1), (2, 2), (1, 8), (8, 32), (16, 64), (16, 128)):
        assert part.model.verify_s(batch, tokens, 150) == pytest.approx(right.verify_s(batch, tokens, 150), rel=0.06)
    assert any("lines between" in note and "are used" in note for note in part.notes)
    assert {n for n in part.intervals if "_tokens_ms" in n} == {
        f"verify.at_{n.tokens}_tokens_ms" for n in part.model.nodes
    }
    assert nodes_of(np.array([1.0, 2, 3, 4, 5, 6, 20, 100, 120])) == (1, 2, 4, 20, 120)


def test_what_no_formula_has_becomes_a_table(tmp_path: Path) -> None:
    """Times that fall off with batch and length, measured over a grid by a probe."""
    batches, lengths = (1, 2, 4, 8, 16), (1, 2, 3, 4, 6, 8)
    ms = {(b, n): 8.0 * (1 + np.log2(b)) ** 0.6 * n**0.35 for b in batches for n in lengths}
    points = [{"batch": b, "tokens_per_request": float(n), "ms": float(t)} for (b, n), t in ms.items()]
    shapes = [{"draft_len": v - 1, "verify_len": v} for v in lengths]
    truth = {"kind": "table", "points": points, "extrapolate": True}
    found = runs(tmp_path / "run", truth, policies=[{"kind": "probe", "shapes": shapes}])
    for trial in found.trials:  # as in a profile, whose forced acceptance keeps a batch in step to its end
        steps = trial.records.steps
        trial.records.steps = steps[steps["decoding"] == steps["decoding"].max()]
    part = fit_verify(found.trials)
    assert isinstance(part.model, TableCost)
    assert part.model.points is not None
    assert len(part.model.points) == len(points)
    for (batch, length), t in ms.items():
        assert part.model.verify_s(batch, batch * length, 100) == pytest.approx(t / 1e3, rel=1e-6)
    again = TableCost.model_validate(part.model.model_dump())  # points stand in the profile itself
    assert again.verify_s(4, 20, 100) == part.model.verify_s(4, 20, 100)


def test_a_thin_grid_is_refused(tmp_path: Path) -> None:
    found = runs(tmp_path / "run", COST, policies=[{"kind": "off"}], sweep={"workload.concurrency": [2, 4]})
    with pytest.raises(InputError, match=r"the grid is too thin: \d+ different passes of [12] different token counts"):
        fit_cost(found.trials)


def test_what_never_happened_is_said_to_be_unknown(tmp_path: Path) -> None:
    found = runs(tmp_path / "run", COST, policies=[{"kind": "fixed", "verify_len": 8}])
    parts = parts_of(found.trials)
    notes = [n for p in parts.values() for n in p.notes]
    assert any("head_ms" in n and "no such step was recorded" in n for n in notes)
    assert any("cannot be told from the other terms" in n for n in notes)


def test_one_run_says_nothing_of_drift(clean: Recording) -> None:
    part = fit_verify([t for t in clean.trials if t.label == "head"][-1:])
    assert any("its drift over 1 runs is unknown" in n for n in part.notes)
    assert "cells of few runs" in part.intervals["verify.base_ms"].how


def test_pauses_count_only_while_somebody_is_there(clean: Recording) -> None:
    trial = clean.trials[0]
    assert pauses(trial).max() < 1e-9  # simulated steps follow each other
    assert len(set(blocks(clean.trials))) == len(clean.trials)


def test_runs_that_took_turns_met_the_same_machine(clean: Recording) -> None:
    """However long they are; others of 20 s or more are blocks of their own, shorter neighbours share one."""
    one, two, three, four = clean.trials[:4]
    began = [replace(t, began_s=s) for t, s in ((one, 100.0), (two, 100.0), (three, 200.0), (four, 205.0))]
    names = blocks(began)
    assert names[0] == names[1] == "turns at 100.000"
    assert names[2] not in names[:2]


def test_terms_that_cannot_be_told_apart_are_left_out() -> None:
    one, rise = np.ones(20), np.linspace(1, 20, 20)
    terms = np.stack([one, rise, 2 * rise], axis=1)
    assert independent(terms, ("one", "rise", "twice"), 3 + rise) == [0, 1]
    np.testing.assert_allclose(fit(terms[:, :2], 3 + rise, one), np.array([3.0, 1.0]), rtol=1e-9)
    values = 3 + rise
    values[4] *= 10  # an outlier
    np.testing.assert_allclose(fit(terms[:, :2], values, one), np.array([3.0, 1.0]), rtol=1e-3)


def test_few_groups_widen_intervals_and_one_says_nothing() -> None:
    draws = np.random.default_rng(0).normal(1.0, 0.1, 500)
    widths = [(i := interval(1.0, draws, n, "test")).high - i.low for n in (100, 5, 2)]
    assert widths[0] == pytest.approx(2 * 1.96 * 0.1, rel=0.15)
    assert widths[0] < widths[1] / 1.3 < widths[2] / 4
    alone = interval(1.0, draws, 1, "test", (0.0, 9.0))
    assert (alone.low, alone.high) == (0.0, 9.0)


@pytest.mark.parametrize("sharpness", [1.0, 2.0, 8.0])
def test_the_bend_is_flat_then_proportional(sharpness: float) -> None:
    assert bend(0, 100, sharpness) == 100
    assert bend(1e6, 100, 8) == pytest.approx(1e6)
    assert bend(50, 50, sharpness) == pytest.approx(50 * 2 ** (1 / sharpness))
    assert bend(7, 0, sharpness) == 7
    assert bend(0, 0, sharpness) == 0
