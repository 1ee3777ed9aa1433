"""What the README shows works."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from adasim.cli import app
from adasim.files import parse_yaml
from adasim.plan import expand
from adasim.scenario import packaged

README = Path(__file__).parents[1] / "README.md"
QUESTIONS = README.parent / "reports" / "questions"
PAGES = sorted(QUESTIONS.glob("*.md"))


def commands(text: str) -> list[list[str]]:
    """Words of every adasim command in code blocks, comments left out."""
    blocks = "".join(re.findall(r"```(?:bash)?\n(.*?)```", text, flags=re.DOTALL)).replace("\\\n", " ")
    lines = (shlex.split(line, comments=True) for line in blocks.splitlines() if line.lstrip().startswith("adasim "))
    return list(lines)


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda p: p.stem)
def test_commands_shown_have_the_options_shown(page: Path) -> None:
    top = get_command(app)
    for words in commands(page.read_text()):
        command: Any = top
        rest = words[1:]
        while rest and rest[0] in getattr(command, "commands", {}):
            command, rest = command.commands[rest[0]], rest[1:]
        assert not getattr(command, "commands", {}), f"{words}: no such command"
        known = {name for p in command.params for name in (*p.opts, *p.secondary_opts)} | {"--help", "--version"}
        assert {w.split("=")[0] for w in rest if w.startswith("--")} <= known, words


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_pages_link_to_what_is_there_and_show_a_picture(page: Path) -> None:
    text = page.read_text()
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []
    assert page.name == "README.md" or re.search(r"^!\[.+\]\(.+\.png\)$", text, flags=re.MULTILINE)


def test_every_page_is_in_the_index() -> None:
    index = (QUESTIONS / "README.md").read_text()
    assert [p.name for p in PAGES if p.name != "README.md" and f"({p.name})" not in index] == []


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
