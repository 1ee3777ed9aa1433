"""Cost measurements cover the grid that was asked for."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from adasim.real.draft import Drafter  # noqa: E402
from adasim.real.drafter import DrafterShape  # noqa: E402
from adasim.real.profile import measure, provenance, write_csv  # noqa: E402
from adasim.real.weights import RANDOM, random_target  # noqa: E402


def test_profile_covers_its_grid(tmp_path: Path) -> None:
    arch = RANDOM["random-tiny"]
    target = random_target(arch)
    shape = DrafterShape(replace(arch, layers=1, qk_norm=True), (0, 1), arch.layers, 8, 0)
    costs = measure(target, Drafter(shape, shape.fresh(0), target), (1, 3), (1, 4), (16,), repeats=3)
    found = {(c.what, c.batch, c.tokens) for c in costs}
    assert found == {("verify", b, t) for b in (1, 3) for t in (1, 4)} | {("draft", 1, 8), ("draft", 3, 8)}
    assert all(0 < c.best_s <= c.median_s and c.repeats == 3 for c in costs)
    write_csv(tmp_path / "costs.csv", costs)
    with (tmp_path / "costs.csv").open() as stream:
        assert len(list(csv.DictReader(stream))) == len(costs)
    assert provenance(target)["dtype"] == "float32"
