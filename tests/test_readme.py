"""What README.md and docs/tasks.md show works as it stands there."""

import re
import shlex
from pathlib import Path

import pytest

import commands
from evenstep.cli import make_parser
from evenstep.config import Config

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
README, TASKS = (ROOT / "README.md").read_text(), (ROOT / "docs" / "tasks.md").read_text()


def blocks(page: str, language: str = "") -> list[str]:
    """The blocks of a page in a language; without one, those of commands."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)


def lines(page: str) -> list[list[str]]:
    """The words of each `evenstep` command that a page shows, in blocks and in the running text."""
    shown = [
        line.removeprefix("$ ") for block in blocks(page) for line in block.splitlines() if "evenstep " in line
    ]
    shown += re.findall(r"`(evenstep [a-z][^`\n]*)`", page)
    words = [shlex.split(line, comments=True) for line in shown]
    return [line[line.index("evenstep") + 1 :] for line in words if "evenstep" in line]


def block(page: str, sign: str) -> str:
    """The only block of Python with this in it."""
    (found,) = [block for block in blocks(page, "python") if sign in block]
    return found


@pytest.mark.parametrize(
    "page", sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").rglob("*.md")), ids=lambda p: p.name
)
def test_every_command_is_one(page: Path) -> None:
    for words in lines(page.read_text()):
        found = vars(make_parser().parse_args(words))
        if words and words[0] == "train" and "task" in found and "resnet19" not in words:
            options = {name: value for name, value in found.items() if name not in ("act", "config")}
            Config(**options)


def test_the_readme_has_commands() -> None:
    assert len(lines(README)) > 10, "or else the test above proves nothing"


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "docs" / "tasks.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_model_of_ones_own_is_twenty_lines() -> None:
    code = [line for line in block(README, "class MyTask").splitlines() if line.strip()]
    assert len(code) <= 20


def test_the_readmes_task_learns_from_the_line_and_from_python(tmp_path: Path) -> None:
    (tmp_path / "my_task.py").write_text(block(README, "class MyTask"))
    (tmp_path / "my_script.py").write_text(block(README, "from my_task import"))
    line = commands.run("train", "my_task.py", "--procs", "2", folder=tmp_path)
    assert line.code == 0, line.err
    script = commands.run(str(tmp_path / "my_script.py"), folder=tmp_path)
    assert script.code == 0, script.err
    records = [commands.record.read(commands.RunFiles(run)) for run in line.runs]
    assert len(records) == 2
    assert records[0]["final"] == records[1]["final"]
    assert records[0]["test"]["loss"] < 0.01


def test_the_readmes_mistake_is_answered_as_shown(tmp_path: Path) -> None:
    shown = next(block for block in blocks(README) if "resnet19" in block).splitlines()
    ran = commands.run(*shlex.split(shown[0].removeprefix("$ evenstep ")), folder=tmp_path)
    assert ran.complaint() == shown[1].removeprefix("evenstep: ")


def test_the_task_of_the_guide_learns(tmp_path: Path) -> None:
    (tmp_path / "spirals.py").write_text(block(TASKS, "class Spirals"))
    ran = commands.run(
        "train", "spirals.py", "--procs", "2", "--set", "noise=0.05", "--model", "large", folder=tmp_path
    )
    assert ran.code == 0, ran.err
    assert ran.record()["test"]["accuracy"] > 0.95
