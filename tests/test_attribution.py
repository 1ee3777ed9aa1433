"""The part of the model that is wrong is the one that is named."""

from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from adasim.calibration.acceptance import CurveAcceptance
from adasim.calibration.estimate.survival import survival_of
from adasim.calibration.head_quality import HeadQuality
from adasim.errors import InputError
from adasim.policies.base import Policy
from adasim.policies.fixed import Fixed
from adasim.policies.head import Head
from adasim.records import Records
from adasim.simulator.backend import SimBackend
from adasim.validation.attribution import ALL, own_acceptance, own_head, summary_of, to_blame
from adasim.validation.report import answer, bars_table
from adasim.validation.study import examine
from adasim.workload import Closed
from tests.validating import COST, acceptance, measured, plan, profile, raw


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Any:
    loose = {"throughput_mae": 0.1, "tau": 0.1, "tpot_p50": 0.1, "tpot_p95": 0.2}  # two seeds of 24 requests
    settings = {"replications": 2, "tolerances": loose}
    made = plan(seeds=[0, 1], sweep={}, validation=settings, workload=raw()["workload"] | {"requests": 24})
    return made, measured(made, tmp_path_factory.mktemp("truth"))[1]


WRONG = {
    "draft": {"cost": COST | {"draft": {"kind": "linear", "base_ms": 2.5}}},
    "overhead": {"cost": COST | {"overhead": {"speculative_ms": 3.0, "round_ms": 1.0}}},
    "acceptance": {"acceptance": acceptance(curves={"code": {"kind": "geometric", "alpha": 0.5}})},
    "head": {"acceptance": acceptance(head={"noise": 2.0, "bias": 5.0})},
}


@pytest.mark.parametrize("part", WRONG)
def test_the_wrong_part_is_named(truth: Any, part: str) -> None:
    found = examine(truth[0], truth[1], profile(**WRONG[part]), set())
    table = found.attribution.set_index("part").astype(float).to_dict("index")
    assert found.attribution.iloc[0]["part"] == part
    assert all(table[name]["swapped"] < 0.5 * table[name]["before"] for name in (part, ALL))
    blamed = found.blame[found.blame["policy"] == "head"] if part == "head" else found.blame
    assert (blamed["part"] == part).mean() > 0.6
    assert not found.passed


def test_a_right_profile_passes(truth: Any) -> None:
    found = examine(truth[0], truth[1], profile(), set())
    assert dict(zip(found.errors["metric"], found.errors["mean_abs"], strict=True))["throughput_ratio"] < 0.05
    assert found.ranking["wrong"].sum() == 0
    assert found.passed


def test_what_cannot_be_swapped_costs_no_report(truth: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise InputError("this part has no such value")

    monkeypatch.setattr("adasim.validation.attribution.own_acceptance", refuse)
    found = examine(truth[0], truth[1], profile(), set())
    assert found.attribution.empty
    assert found.notes[-1] == "which part is to blame in fixed 6, seed 1 cannot be told: this part has no such value"
    assert "verdict" in bars_table(found.bars)
    assert answer(found)


def run(policy: Policy, requests: int = 60, **fields: Any) -> tuple[SimBackend, Records]:
    backend = SimBackend.model_validate(raw()["backend"] | fields)
    load = Closed(concurrency=8, requests=requests, domains={"code": 1.0})
    return backend, backend.run(load, policy, 3)


def test_a_slower_machine_is_no_part_to_blame(tmp_path: Path) -> None:
    """Everything takes three times as long: ratios to plain decoding stay, and so do the parts of a right profile."""
    slow = dict.fromkeys(("verify", "draft", "overhead", "prefill"), 3.0)
    made = plan(seeds=[0], sweep={}, validation={"replications": 2}, backend=raw()["backend"] | {"adjust": slow})
    found = examine(made, measured(made, tmp_path)[1], profile(), set())
    parts = found.attribution.set_index("part")
    assert parts.loc[["verify", "draft", "overhead"], "removed"].to_numpy() == pytest.approx(0, abs=1e-3)


def test_survival_of_cut_blocks_by_hand() -> None:
    """Of 10 blocks of 3 verified, 4 reach the end and may go on; the one of 2 says nothing of the second draft."""
    rows = [("code", 3, 0, 3), ("code", 3, 1, 3), ("code", 3, 2, 4), ("code", 2, 1, 10), ("code", 1, 0, 99)]
    blocks = pd.DataFrame(rows, columns=["domain", "verify_len", "accepted", "blocks"])
    found = survival_of(blocks, 3, {"code": np.array([0.5, 0.4, 0.3])})["code"]
    assert found == pytest.approx([17 / 20, 17 / 20 * 4 / 7, 17 / 20 * 4 / 7 * 0.75])


@pytest.mark.parametrize("gamma", [1.0, 1.4])
def test_a_head_is_found_although_it_cut_the_blocks_itself(gamma: float) -> None:
    backend, records = run(Head(gamma=gamma), 200, acceptance=acceptance(head={"noise": 3.0, "bias": -0.8}))
    survival = {"code": backend.calibrated_acceptance.survival("code", 15)}  # type: ignore[attr-defined]
    found = own_head(records.rounds, HeadQuality(margin_slope=0.7), survival)
    assert found is not None
    assert found.noise == pytest.approx(3.0, rel=0.08)
    assert found.bias == pytest.approx(-0.8, abs=0.3)
    assert found.margin_slope == 0.7  # nothing is told of it


def test_short_answers_show_settled_rounds() -> None:
    """Their first rounds start anywhere and accept more; taken for settled, 16-token answers move tau by 8 %."""
    text = {"spread": 0.1, "correlation": 0.6, "range_tokens": 20.0}
    backend = SimBackend.model_validate(raw()["backend"] | {"acceptance": acceptance(**text)})
    load = Closed.model_validate(
        {"concurrency": 16, "requests": 3000, "domains": {"code": 1.0}, "output_len": {"kind": "fixed", "tokens": 16}}
    )
    records = backend.run(load, Fixed(verify_len=16), 0)
    model = backend.calibrated_acceptance
    assert isinstance(model, CurveAcceptance)
    true = 1 + model.survival("code", 15).sum()
    taken, settled = (1 + own_acceptance(records.blocks, model, 15, n).survival("code", 15).sum() for n in (inf, 15.0))
    assert taken / true - 1 > 0.06
    assert settled == pytest.approx(true, rel=0.02)


def test_too_few_reports_say_nothing() -> None:
    rounds = run(Head(), 60)[1].rounds
    assert rounds is not None
    survival = {"code": 0.8 ** np.arange(1.0, 16.0)}
    assert own_head(rounds, HeadQuality(), survival) is not None
    assert own_head(rounds[:49], HeadQuality(), survival) is None
    assert own_head(None, HeadQuality(), survival) is None


def test_errors_are_of_cells_not_of_repeats() -> None:
    """Luck of +10 and -10 % is no error; a part that a cell lacks leaves its error as it is."""
    rows = [("a", s, part, e) for s, e in ((0, 0.1), (1, -0.1)) for part in ("", "verify")]
    rows += [("b", s, part, e) for s in (0, 1) for part, e in (("", 0.2), ("verify", 0.05), ("head", 0.1))]
    table = pd.DataFrame(rows, columns=["policy", "seed", "part", "error"])
    found = summary_of(table).set_index("part").to_dict("index")
    assert [found["verify"][c] for c in ("before", "swapped", "removed")] == pytest.approx([0.1, 0.025, 0.075])
    assert [found["head"][c] for c in ("cells", "swapped")] == pytest.approx([1, 0.05])
    blamed = to_blame(table)
    assert list(zip(blamed["policy"], blamed["part"], strict=True)) == [("a", "none alone"), ("b", "verify")]
