"""Who may import whom, and what an import costs."""

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {"torch", "sglang", "matplotlib", "seaborn"}


@pytest.mark.parametrize("module", ["adasim", "adasim.backends", "adasim.scenario", "adasim.experiment", "adasim.tables"])
def test_no_heavy_import(module: str) -> None:
    """Neither torch nor the plotting stack comes along; ``import adasim`` alone brings not even numpy."""
    heavy = HEAVY | ({"numpy", "pandas", "pydantic"} if module == "adasim" else set())
    code = f"import sys, {module}\nfound = {heavy!r} & set(sys.modules)\nassert not found, found"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_import_directions() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([linter], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
