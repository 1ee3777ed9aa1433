"""AdaFlash's Tables 1 and 2: the fits can be repeated, and the other cells are predicted."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from scipy.optimize import brentq

from adasim import report
from adasim.calibration.cost import CostModel
from adasim.calibration.profile import Profile
from adasim.calibration.roofline import RooflineCost
from adasim.calibration.speedups import (
    Method,
    fit_roofline,
    fit_speculative_ms,
    fit_time_share,
    speedup,
    with_speculative_ms,
)
from adasim.choice import choices
from adasim.executors import Local
from adasim.experiment import collect, prepare
from adasim.plan import Plan, load
from adasim.story import tell
from adasim.tables import Tables
from tests.build import SHARED

PUBLISHED = SHARED / "facts" / "tables"
METHODS = ["off", "EAGLE-3", "DFlash", "OSD", "AdaFlash"]
DFLASH = Method(tau=5.86, verify_len=16, block=16, prompt_len=128, output_len=512)
OSD, ADAFLASH = replace(DFLASH, tau=7.05), replace(DFLASH, tau=7.28)
EAGLE3 = Method(tau=4.40, verify_len=32, block=32, prompt_len=128, output_len=512)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return Profile.load("adaflash_qwen3_8b")


@pytest.fixture(scope="module")
def fitted() -> RooflineCost:
    """The engine as DFlash's four cells fix it."""
    return fit_roofline(RooflineCost(), DFLASH, cells("DFlash"))


def cells(policy: str) -> dict[int, float]:
    reference = load("adaflash_table1").scenario.reference
    assert reference is not None
    table = reference.cells[reference.cells["policy"] == policy]
    return {int(at): float(value) for at, value in zip(table["at"], table["value"], strict=True)}


def simulate(name: str, settings: list[str], policies: list[str], out: Path) -> pd.DataFrame:
    whole = load(name, settings)
    plan = Plan(whole.scenario, [t for t in whole.trials if t.policy in policies], {}, whole.files, [])
    trials = prepare(plan, out, resume=False, overwrite=False)
    assert not Local(2).run(trials, out, trace=False, progress=lambda _: None).failures
    table, notes = collect(plan, out)
    table.attrs["notes"] = notes
    return table


@pytest.fixture(scope="module")
def table1(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tables, list[str]]:
    """One seed; at concurrency 1 fewer requests, of which each makes as many rounds."""
    crowded = ["seeds=[0]", "sweep.workload.concurrency=[32, 64, 128]"]
    alone = ["seeds=[0]", "sweep.workload.concurrency=[1]", "workload.requests=96"]
    parts = [simulate("adaflash_table1", s, METHODS, tmp_path_factory.mktemp("table1")) for s in (crowded, alone)]
    trials = pd.concat(parts, ignore_index=True)
    story = tell(load("adaflash_table1", ["seeds=[0]"]), len(trials), [])
    tables = report.tabulate(trials, story)
    assert report.failures(tables, story) == []
    return tables, parts[0].attrs["notes"]


def test_ten_cells_are_predicted(table1: tuple[Tables, list[str]]) -> None:
    """Asked for: mean error at most 8 %; EAGLE-3 at 128, extrapolated, within 20 %."""
    tables, notes = table1
    assert tables.errors["cells"] == 10
    assert tables.errors["missing"] == 0
    assert tables.errors["mean_abs"] <= 0.055
    assert tables.reference is not None
    far = tables.reference[tables.reference["role"] == "extrapolated"]
    assert far[["policy", "at"]].to_numpy().tolist() == [["EAGLE-3", 128]]
    assert abs(far["error"].iloc[0]) <= 0.10
    assert "time was extrapolated: passes of 4096 tokens, fitted 1..2048 (at concurrency 128, EAGLE-3)" in notes


def test_inputs_are_met(table1: tuple[Tables, list[str]]) -> None:
    reference = table1[0].reference
    assert reference is not None
    inputs = reference[reference["role"] == "input"]
    assert len(inputs) == 6
    assert inputs["error"].abs().max() <= 0.035


def test_ranking_is_right_in_every_column(table1: tuple[Tables, list[str]]) -> None:
    reference = table1[0].reference
    assert reference is not None
    for _, column in reference.groupby("at"):
        ranked = [column.sort_values(by)["policy"].tolist() for by in ("reference", "predicted")]
        assert ranked[0] == ranked[1] == ["EAGLE-3", "DFlash", "OSD", "AdaFlash"]
    assert choices(reference)["regret"].eq(0).all()


def test_the_head_is_predicted(table1: tuple[Tables, list[str]]) -> None:
    """Asked for: AdaFlash at 64 within 18 %, at 128 within 10 %, both above 1; at 128 half the null model's error."""
    reference = table1[0].reference
    assert reference is not None
    adaflash = reference[reference["policy"] == "AdaFlash"].set_index("at")
    error = adaflash["error"].abs().to_dict()
    assert error[64] <= 0.18
    assert error[128] <= 0.05
    assert error[128] <= adaflash["null_error"].abs().to_dict()[128] / 2
    assert (adaflash["predicted"].loc[[64, 128]] > 1).all()
    errors = table1[0].errors
    assert errors["mean_abs_beside_null"] < errors["null_mean_abs"] / 2


def test_null_model_is_tau_scaling() -> None:
    reference = load("adaflash_table1").scenario.reference
    assert reference is not None
    taus = {"EAGLE-3": 4.40, "OSD": 7.05, "AdaFlash": 7.28}
    dflash = cells("DFlash")
    for _, c in reference.cells.dropna(subset="null").iterrows():
        assert c["null"] == pytest.approx(dflash[c["at"]] * taus[c["policy"]] / 5.86, abs=1e-4)


def test_cost_is_the_fit_of_dflash(profile: Profile, fitted: RooflineCost) -> None:
    cost = profile.cost
    assert isinstance(cost, RooflineCost)
    assert cost.compute_efficiency == pytest.approx(fitted.compute_efficiency, rel=1e-3)
    assert cost.per_request_ms == pytest.approx(fitted.per_request_ms, rel=1e-3)
    assert cost.overhead.speculative_ms == pytest.approx(fitted.overhead.speculative_ms, rel=1e-3)
    for batch, value in cells("DFlash").items():
        assert speedup(cost, batch, DFLASH) == pytest.approx(value, rel=0.02)


def test_eagle3_and_the_online_loss_are_fits_of_one_cell(profile: Profile, fitted: RooflineCost) -> None:
    eagle3, osd, adaflash = (profile.drafters[n] for n in ("eagle3", "osd", "adaflash"))
    assert eagle3.overhead is not None
    assert osd.overhead is not None
    assert osd.overhead == adaflash.overhead
    bare = with_speculative_ms(eagle3.cost_of(fitted), 0.0)
    assert eagle3.overhead.speculative_ms == pytest.approx(fit_speculative_ms(bare, EAGLE3, 1, 2.34), rel=1e-3)
    assert osd.overhead.time_share == pytest.approx(fit_time_share(speedup(fitted, 1, OSD), 3.95), abs=1e-4)
    assert osd.overhead.speculative_ms == profile.cost.overhead.speculative_ms


def test_taus_and_curves_are_the_published_ones(profile: Profile) -> None:
    taus = {"eagle3": (4.40, 31), "osd": (7.05, 15), "adaflash": (7.28, 15)}
    for name, (tau, drafts) in taus.items():
        acceptance = profile.drafters[name].acceptance
        assert 1 + acceptance.survival("default", drafts).sum() == pytest.approx(tau)  # type: ignore[union-attr]
    assert 1 + profile.acceptance.survival("default", 15).sum() == pytest.approx(5.86)  # type: ignore[union-attr]


def test_only_a_share_of_time_or_tau_explains_the_online_loss(fitted: RooflineCost) -> None:
    """Each mechanism fitted on OSD at 1, held against the five other full-block cells: the profile's numbers."""

    def more(name: str, ms: float) -> CostModel:
        ms += getattr(fitted.overhead, name)
        return fitted.model_copy(update={"overhead": fitted.overhead.model_copy(update={name: ms})})

    mechanisms: dict[str, tuple[float, Callable[[float, int, Method], float], float]] = {
        "time share": (0.99, lambda x, b, m: (1 - x) * speedup(fitted, b, m), 0.006),
        "lagging tau": (0.99, lambda x, b, m: speedup(fitted, b, replace(m, tau=m.tau - x * (m.tau - 5.86))), 0.009),
        "per request": (0.99, lambda x, b, m: 1 / (1 / speedup(fitted, b, m) + x), 0.039),
        "per round": (50, lambda x, b, m: speedup(more("speculative_ms", x), b, m), 0.047),
        "per verified": (50, lambda x, b, m: speedup(more("per_verified_ms", x), b, m), 0.315),
        "per emitted": (50, lambda x, b, m: speedup(more("speculative_ms", x * b * m.tau), b, m), 0.316),
    }
    osd, adaflash = cells("OSD"), cells("AdaFlash")
    others = [(OSD, b, osd[b]) for b in (32, 64, 128)] + [(ADAFLASH, b, adaflash[b]) for b in (1, 32)]
    for name, (most, predict, expected) in mechanisms.items():
        x = brentq(lambda x, predict=predict: predict(x, 1, OSD) - osd[1], 0, most)
        errors = [abs(predict(x, b, m) / value - 1) for m, b, value in others]
        assert sum(errors) / len(errors) == pytest.approx(expected, abs=0.002), name
    none = [speedup(fitted, b, m) / value - 1 for m, b, value in others]
    assert sum(none) / len(none) == pytest.approx(0.076, abs=0.002)


def test_lengths_hardly_matter() -> None:
    """The scenario says so: refitted with 1024 or 2048 output tokens, no full-block prediction moves by over 3 %."""
    for output_len in (1024, 2048):
        moved = fit_roofline(RooflineCost(), replace(DFLASH, output_len=output_len), cells("DFlash"))
        kept = fit_roofline(RooflineCost(), DFLASH, cells("DFlash"))
        for batch in (1, 32, 64, 128):
            head = replace(ADAFLASH, tau=6.39, verify_len=8.54)
            for method in (OSD, ADAFLASH, head):
                longer = speedup(moved, batch, replace(method, output_len=output_len))
                assert longer == pytest.approx(speedup(kept, batch, method), rel=0.04 if method is head else 0.03)


@pytest.fixture(scope="module")
def table2(tmp_path_factory: pytest.TempPathFactory) -> Tables:
    plan = load("adaflash_table2", ["seeds=[0]"])
    labels = [p.label for p in plan.scenario.policies]
    trials = simulate("adaflash_table2", ["seeds=[0]"], labels, tmp_path_factory.mktemp("table2"))
    story = tell(plan, len(trials), [])
    tables = report.tabulate(trials, story)
    assert report.failures(tables, story) == []
    return tables


def test_ablation(table2: Tables) -> None:
    """Nothing was fitted: both heads beat fixed 11; the updated head's 1.27 is missed by 6 to 10 %."""
    assert table2.reference is not None
    errors = table2.reference.set_index("policy")["error"]
    assert table2.errors["mean_abs"] <= 0.07
    assert abs(errors["fixed 11"]) <= 0.08
    assert -0.10 <= errors["updated head"] <= -0.06
    speed = table2.summary.set_index("policy")["speedup"].to_dict()
    assert min(speed["updated head"], speed["frozen head"]) > speed["fixed 11"]


def test_what_the_ablation_leaves_open(table2: Tables) -> None:
    by = table2.summary.set_index("policy")
    speed, taus, lengths = (by[m].to_dict() for m in ("speedup", "tau", "verify_len"))
    stretched = "stretched head"
    assert lengths[stretched] == pytest.approx(11, abs=0.15)
    assert 1.01 <= speed[stretched] / speed["fixed 11"] <= 1.06  # 1.27 is published, 1.10 by tau alone
    assert speed["sharp head"] == pytest.approx(1.27, rel=0.02)
    assert taus["sharp head"] == pytest.approx(7.1, abs=0.1)
    assert taus["frozen head"] < taus["updated head"]  # published: above it
    assert max(speed, key=lambda p: speed[p]) == "oracle(drafter=gsm8k)"


def test_verify_lengths_that_the_ablation_implies(profile: Profile) -> None:
    """Published tau and speed-up at 128 fix the mean verify length in this model; 11.271 is none of them."""
    overhead = profile.drafters["adaflash"].overhead
    assert overhead is not None

    def at(tau: float, verify_len: float) -> float:
        method = replace(DFLASH, tau=tau, verify_len=verify_len)
        return (1 - overhead.time_share) * speedup(profile.cost, 128, method)

    rows = [(6.802, 1.18, 8.5), (7.212, 1.25, 8.4), (7.270, 1.27, 8.2), (7.652, 1.21, 9.8)]
    for tau, published, length in rows:
        assert brentq(lambda n, t=tau, s=published: at(t, n) - s, 2, 16, xtol=0.01) == pytest.approx(length, abs=0.1)
    assert at(6.594, 11) == pytest.approx(1.00, abs=0.01)
    assert at(7.270, 11.271) == pytest.approx(1.07, abs=0.01)


def test_cells_are_the_published_ones() -> None:
    if not PUBLISHED.is_dir():
        pytest.skip("the published tables are not at hand")
    table = pd.read_csv(PUBLISHED / "adaflash_table1_qwen3_8b_avg6.csv").set_index("method")
    for method in METHODS[1:]:
        assert cells(method) == {c: table.loc[method, f"speedup_c{c}"] for c in (1, 32, 64, 128)}
    ablation = pd.read_csv(PUBLISHED / "adaflash_table2_ablation_gsm8k.csv")["speedup_c128"].tolist()
    reference = load("adaflash_table2").scenario.reference
    assert reference is not None
    assert reference.cells["value"].tolist() == [ablation[3], ablation[2], ablation[4]]
