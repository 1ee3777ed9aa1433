"""New runs are held against a profile: what moved is named, and what did not is left alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from adasim.calibrate import calibrate, write
from adasim.calibration.alarm import Alarm
from adasim.recorded import load
from adasim.tolerances import Validation
from adasim.validation.run import Run
from adasim.validation.twin import Twin
from adasim.validation.watch import Cusum, Moved, Watcher, _simulated, in_words
from tests.build import adasim, closed, config
from tests.recordings import ENGINE, record
from tests.validating import acceptance, measured, plan, profile, raw

MIXED = {"kind": "closed", "concurrency": 4, "requests": 32, "domains": {"code": 1.0, "chat": 1.0}}


def recorded(folder: Path, **backend: Any) -> list[Run]:
    changed = {"sweep": {}, "seeds": [0, 1, 2], "workload": raw()["workload"] | MIXED}
    return measured(plan(**changed, backend=raw()["backend"] | backend), folder)[1]


def watched(runs: Sequence[Run], **fields: Any) -> list[Moved]:
    watcher = Watcher(profile(**fields), Validation())
    return [moved for run in runs for moved in watcher.take(run)]


@pytest.mark.parametrize("part", ["verify", "draft", "overhead", "prefill"])
def test_a_cost_that_rose_is_named(tmp_path: Path, part: str) -> None:
    (moved,) = watched(recorded(tmp_path, adjust={part: 1.3}), uncertainty={part: 0.05})
    assert (moved.what, moved.direction) == (f"cost of {part}", "rose")
    assert moved.by == pytest.approx(0.3, abs=0.01)


def test_a_faster_machine_is_called_one(tmp_path: Path) -> None:
    faster = dict.fromkeys(("verify", "draft", "overhead", "prefill"), 0.7)
    moved = watched(recorded(tmp_path, adjust=faster))
    assert {m.what for m in moved} == {f"cost of {part}" for part in faster}
    assert all(m.direction == "fell" for m in moved)
    assert in_words(moved)[-1] == "all costs moved alike: the machine's speed, or its clock"


def test_the_domain_that_fell_is_named(tmp_path: Path) -> None:
    """Drafts of code are accepted as often as those of chat now."""
    curve = {"kind": "geometric", "alpha": 0.55}
    (moved,) = watched(recorded(tmp_path, acceptance=acceptance(curves={"code": curve, "chat": curve})))
    assert (moved.what, moved.direction) == ("acceptance of code", "fell")
    assert -0.5 < moved.by < -0.2
    assert "acceptance of code fell: tokens per request and round -" in str(moved)


def test_what_stays_inside_its_interval_raises_no_alarm(tmp_path: Path) -> None:
    """Nothing moved, or by 4 % where the profile allows 5 and 10."""
    assert not watched(recorded(tmp_path / "same"))
    runs = recorded(tmp_path / "near", adjust={"verify": 1.04, "draft": 1.04, "acceptance": 0.97})
    assert not watched(runs, uncertainty={"verify": 0.05, "draft": 0.1, "acceptance": 0.05})


def test_a_limit_that_cannot_be_reached_is_moved_towards(tmp_path: Path) -> None:
    """Twice the tau of code is more than a full block of six tokens: as near as it goes counts, not the middle."""
    short = next(run for run in recorded(tmp_path, max_draft_len=5) if run.trial.policy == "fixed 6")
    twin = Twin.of(short.trial.scenario(), profile(), short.records().requests, short.records().events)
    middle, high, higher = (_simulated(twin, factor, 0)["code"].mean() for factor in (1.0, 1.3, 2.0))
    assert middle < high < higher < 6


def test_a_text_counts_once(tmp_path: Path) -> None:
    """Policies of one seed answer the same requests: three seeds of 32 are 96, however many policies ran."""
    watcher = Watcher(profile(), Validation())
    for run in recorded(tmp_path):
        watcher.take(run)
    assert watcher.requests == 96
    assert watcher.runs == 3 * (2 + 2)


def test_what_a_profile_was_calibrated_on_has_not_moved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Recorded, calibrated, watched from the command line: the same runs raise no alarm."""
    cost = {
        "kind": "pass", "base_ms": 20.0, "per_token_ms": 2.0, "per_request_ms": 1.0,
        "prefill": {"base_ms": 5.0, "per_token_ms": 0.2}, "draft": {"kind": "linear", "base_ms": 3.0},
        "overhead": {"round_ms": 1.0},
    }  # fmt: skip
    fields: dict[str, Any] = {
        "backend": raw()["backend"] | {"cost": cost, "max_draft_len": 5},
        "policies": [{"kind": "off"}, *({"kind": "fixed", "verify_len": v} for v in (6, 3)), {"kind": "head"}],
        "workload": closed(requests=24, domains={"chat": 0.5, "code": 0.5}),
        "sweep": {"workload.concurrency": [2, 4, 8]},
        "measure": {"warmup_requests": 0, "until_last_arrival": False},
        "seeds": [0],
    }
    folder = record(tmp_path / "run", identity=ENGINE, **fields)
    write(calibrate(load(folder), "mine"), tmp_path / "mine.yaml")
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(config(**fields)))
    scenario, knows = (str(tmp_path / name) for name in ("s.yaml", "mine.yaml"))
    assert adasim("validate", scenario, "--profile", knows, "--watch", folder, "--once") == 0
    assert "nothing moved in 12 runs" in " ".join(capsys.readouterr().out.split())


def test_false_alarms_come_as_often_as_stated() -> None:
    """Both sides of a normal stream at the edge of its interval: one in 200 values, by Siegmund within a quarter."""
    alarm, rng, alarms, values = Alarm(false_alarm_requests=200), np.random.default_rng(1), 0, 0
    for _ in range(400):
        sides = [Cusum(alarm.shift / 2, alarm.threshold) for _ in range(2)]
        for score in rng.normal(size=2000).tolist():
            values += 1
            if any([sides[0].take(score, 1, 1), sides[1].take(-score, 1, 1)]):
                alarms += 1
                break
    assert values / alarms == pytest.approx(200, rel=0.25)


def test_a_cusum_remembers_since_when() -> None:
    """By hand: -1 leaves the sum at 0 and is forgotten; 2 and 3 less the slack make 4, above 3.5."""
    chart = Cusum(slack=0.5, threshold=3.5)
    assert [chart.take(score, m, 1.0) for score, m in ((-1.0, 9.0), (2.0, 1.2), (3.0, 1.4))] == [False, False, True]
    assert chart.by == pytest.approx(0.3)
    assert not chart.take(5.0, 1.3, 1.0)  # it has been said
    assert chart.by == pytest.approx(0.3)
