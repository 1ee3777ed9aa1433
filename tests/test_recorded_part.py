"""A profile can be fitted on some of the recorded runs, and says on which."""

from dataclasses import replace

import pytest

from adasim.calibrate import calibrate
from adasim.calibration.estimate.recording import Recording
from adasim.errors import InputError
from adasim.recorded import load
from adasim.recorded_part import part_of
from tests.build import closed
from tests.recordings import ENGINE, record

TEXT = {"kind": "curves", "curves": {"code": {"kind": "geometric", "alpha": 0.8}}}
COST = {"kind": "pass", "base_ms": 20.0, "per_token_ms": 2.0, "draft": {"kind": "linear", "base_ms": 3.0}}


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return load(
        record(
            tmp_path_factory.mktemp("recorded") / "run",
            identity=ENGINE,
            backend={"kind": "sim", "cost": COST, "acceptance": TEXT, "rounds": True, "max_draft_len": 5},
            policies=[{"kind": "off"}, {"kind": "fixed", "name": "six", "verify_len": 6}, {"kind": "head"}],
            workload=closed(requests=16, domains={"code": 1.0}),
            sweep={"workload.concurrency": [2, 4, 8]},
            measure={"warmup_requests": 0, "until_last_arrival": False},
            seeds=[0, 1],
        )
    )


@pytest.mark.parametrize(
    ("choices", "count"),
    [
        (["policy=[off, six]"], 12),
        (["policy=head"], 6),
        (["concurrency=[2, 4]"], 12),
        (["workload.concurrency=8", "seed=1"], 3),
        (["policy=[off]", "concurrency=[8]", "seed=[0]"], 1),
        ([], 18),
    ],
)
def test_all_choices_hold(recording: Recording, choices: list[str], count: int) -> None:
    kept = part_of(recording, choices)
    assert len(kept.trials) == count
    assert [n for n in kept.notes if n not in recording.notes] == (
        [f"{count} of 18 natural runs were fitted: {'; '.join(choices)}"] if choices else []
    )


def test_the_profile_knows_which_cells_it_has_seen(recording: Recording) -> None:
    made = calibrate(part_of(recording, ["policy=[off, six]", "concurrency=[2, 4]"]), "mine")
    assert len({run.cell for run in made.profile.fitted_on}) == 4
    assert made.profile.notes[0].startswith("8 of 18 natural runs were fitted: policy=[off, six]")


def test_what_no_run_has_is_named_all_at_once(recording: Recording) -> None:
    with pytest.raises(InputError) as caught:
        part_of(recording, ["policy=[off, seven]", "rate=3", "concurrency", "concurrency=16"])
    assert caught.value.problems == (
        "--only policy=[off, seven]: no run has policy seven; there are off, six, head",
        "--only rate=3: no run has a field rate; there are policy, seed, concurrency, workload.concurrency",
        "--only concurrency: expected field=value, like workload.concurrency=64",
        "--only concurrency=16: no run has concurrency 16; there are 2, 4, 8",
    )


def test_runs_that_measure_costs_stay(recording: Recording) -> None:
    """They are no cells: choosing a policy must not drop the profile's own runs."""
    *others, last = recording.trials
    kept = part_of(replace(recording, trials=[*others, replace(last, forced=True)]), ["policy=off"])
    assert [t.label for t in kept.trials] == ["off"] * 6 + ["head"]
