"""What the README shows works."""

import re
from pathlib import Path

import pytest

from adasim.files import parse_yaml
from adasim.plan import expand
from adasim.scenario import packaged

README = Path(__file__).parents[1] / "README.md"


def test_readme_scenario_is_valid() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", README.read_text(), flags=re.DOTALL)
    plan = expand(parse_yaml(text, "README.md"), Path())
    assert len(plan.trials) == 4 * 7 * 3
    assert plan.groups == {"fixed": [f"fixed verify_len={n}" for n in (2, 4, 8, 16)]}


@pytest.mark.parametrize("name", re.findall(r"adasim run (\w+)(?= |$)", README.read_text(), flags=re.MULTILINE))
def test_readme_names_shipped_scenarios(name: str) -> None:
    assert name in {p.stem for p in packaged()} | {"mine"}


@pytest.mark.parametrize("name", ["README.md", "DESIGN.md", "CHANGELOG.md"])
def test_no_placeholder_is_left(name: str) -> None:
    """A line of capitals alone waits for a number."""
    lines = (README.parent / name).read_text().splitlines()
    assert [line for line in lines if re.fullmatch(r"[A-Z_]{4,}", line)] == []


def test_designs_tree_names_files_that_exist() -> None:
    tree = (README.parent / "DESIGN.md").read_text().split("```")[1]
    package = {p.name for p in (README.parent / "adasim").rglob("*.py")}
    assert [name for name in re.findall(r"\b\w+\.py\b", tree) if name not in package and "*" not in name] == []
