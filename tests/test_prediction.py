"""How wide a prediction is, and what is said of it."""

from math import isnan, log
from typing import Any

import pytest

from adasim.calibration.profile import Profile
from adasim.errors import InputError
from adasim.validation.prediction import Pair, Predictor, pairs_of
from adasim.validation.run import Run
from adasim.validation.twin import Twin, luck_seeds
from tests.validating import acceptance, measured, plan, profile

FIXED = {"kind": "fixed", "verify_len": 6}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    made = plan(policies=[{"kind": "off"}, FIXED], sweep={}, seeds=[0])
    return measured(made, tmp_path_factory.mktemp("runs"))[1]


def pair_of(runs: list[Run], knows: Profile) -> tuple[Predictor, Run, Pair]:
    ((run, pair),) = pairs_of(runs, knows)
    return Predictor(knows, 2), run, pair


def test_a_prediction_is_as_wide_as_its_input_moves_it(runs: list[Run]) -> None:
    """One input alone: the half-width is the move of the ratio itself."""
    predictor, run, pair = pair_of(runs, profile(uncertainty={"draft": 0.2}))
    luck = luck_seeds(0, 1)[0]
    moved = pair.with_(lambda twin: twin.moved("draft", 1.2))
    ratios = [p.predict(luck, p.plain())["throughput_ratio"] for p in (moved, pair)]
    assert predictor.uncertainty(run, pair)["throughput_ratio"] == pytest.approx(abs(log(ratios[0] / ratios[1])))
    assert predictor.notes == {}


def test_an_input_that_goes_only_part_of_the_way_still_widens(runs: list[Run]) -> None:
    """spread 0.8 leaves 0.2 for correlation, whose uncertainty of 0.5 reaches beyond on both sides."""
    predictor, run, pair = pair_of(runs, profile(acceptance=acceptance(spread=0.8), uncertainty={"correlation": 0.5}))
    assert predictor.uncertainty(run, pair)["tau"] > 0
    (note,) = predictor.notes
    assert note == "correlation can be moved by 39% of its uncertainty only; the interval shows that part"


def test_the_other_direction_is_tried_first(runs: list[Run]) -> None:
    """tau of full blocks cannot rise by 60 %, but fall: no part of the way is worth less than all of the other."""
    high = acceptance(curves={"code": {"kind": "geometric", "alpha": 0.98}})
    predictor, run, pair = pair_of(runs, profile(acceptance=high, uncertainty={"acceptance": 0.6}))
    assert predictor.uncertainty(run, pair)["tau"] > 0.2
    assert predictor.notes == {}


def test_what_cannot_be_moved_is_not_exactly_known(runs: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Twin:
        raise InputError("no such input")

    monkeypatch.setattr(Twin, "moved", never)
    predictor, run, pair = pair_of(runs, profile(uncertainty={"draft": 0.2}))
    assert isnan(predictor.uncertainty(run, pair)["throughput_ratio"])
    assert "draft cannot be moved by its uncertainty" in next(iter(predictor.notes))


def test_models_notes_are_passed_on(runs: list[Run]) -> None:
    knows = profile()
    predictor = Predictor(knows, 2)
    predictor.table(pairs_of(runs, knows))
    notes = {note: list(policies) for note, policies in predictor.notes.items()}
    assert notes["cost is a roofline estimate: nothing was measured on this hardware"] == ["fixed(verify_len=6)"]
