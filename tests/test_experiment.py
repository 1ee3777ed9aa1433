"""Notes of trials, collected into lines."""

import json
from pathlib import Path

from adasim.experiment import TRIALS, collect
from tests.build import plan


def test_notes_say_where_they_hold(tmp_path: Path) -> None:
    p = plan(sweep={"workload.concurrency": [1, 2]}, seeds=[0])
    for trial in p.trials:
        folder = tmp_path / TRIALS / trial.key
        folder.mkdir(parents=True)
        late = trial.point["workload.concurrency"] == 2
        notes = ["always"] + ["late"] * late + ["odd"] * (late and trial.policy == "off")
        metrics = {"policy": trial.policy, "seed": 0, "backend": "sim", **trial.point, "tau": None}
        (folder / "trial.json").write_text(json.dumps({"notes": notes, "metrics": metrics}))
    table, notes = collect(p, tmp_path)
    assert notes == ["always", "late (at concurrency 2, all policies)", "odd (at concurrency 2, off)"]
    assert table["tau"].isna().all()
    assert len(table) == 4
