"""The house stands as ARCHITECTURE.md draws it: imports run downwards, help comes fast, all is documented."""

import argparse
import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from evenstep.cli import make_parser

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "evenstep"

# from the ground up; a room is a module or a folder of modules, and imports from its own floor or from below
FLOORS = (
    {"errors"},
    {"world", "files", "options", "leash", "failure", "memory", "precision", "torchvision_ops"},
    {"order"},
    {"config", "progress"},
    {"tasks", "watch"},
    {"optimizing", "metrics", "batches", "ranks", "pace", "service"},
    {"strategies"},
    {"guard", "faults", "step", "evaluation", "weights"},
    {"snapshots"},
    {"records"},
    {"loop", "keeping", "home"},
    {"parts"},
    {"training", "launch"},
    {"api"},
    {"cli"},
    {"__main__", "__init__"},
)


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        yield name, ast.parse(path.read_text(encoding="utf-8"))


def room(module: str) -> str:
    return module.split(".")[0]


def floor(module: str) -> int:
    for number, rooms in enumerate(FLOORS):
        if room(module) in rooms:
            return number
    raise AssertionError(f"{module} stands on no floor: give it one in FLOORS, and in ARCHITECTURE.md")


def imports(tree: ast.Module) -> Iterator[str]:
    """What a module imports of evenstep, at any place in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "evenstep":
            inside = node.module.split(".")[1:]
            for alias in node.names:
                yield ".".join([*inside, alias.name])


def is_module(name: str) -> bool:
    path = PACKAGE.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or path.is_dir()


def test_imports_run_downwards() -> None:
    wrong = [
        f"{module} imports {imported}"
        for module, tree in modules()
        for imported in imports(tree)
        if module != "__init__" and is_module(imported.split(".")[0]) and floor(imported) > floor(module)
    ]
    assert not wrong


def test_only_world_reads_the_environment() -> None:
    readers = {
        module
        for module, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    }
    assert readers <= {"world", "records.record"}  # the latter hands it on to git, with its prompts switched off


def test_the_architecture_page_names_every_room() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text()
    missing = {room(module) for module, _ in modules()} - {"__init__", "__main__"}
    assert {name for name in missing if f"{name}.py" not in page and f"{name}/" not in page} == set()


def test_the_architecture_page_names_tests_that_there_are() -> None:
    named = set(re.findall(r"`(tests/test_\w+\.py)`", (ROOT / "ARCHITECTURE.md").read_text()))
    assert named and {name for name in named if not (ROOT / name).is_file()} == set()


def test_every_public_class_and_function_is_explained() -> None:
    silent = [
        f"{module}.{node.name}"
        for module, tree in modules()
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert not silent


def test_every_command_and_option_is_documented() -> None:
    spec = importlib.util.spec_from_file_location("write_commands", ROOT / "docs" / "write_commands.py")
    assert spec is not None and spec.loader is not None
    writer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(writer)
    assert writer.page() == writer.PAGE.read_text(), "docs/commands.md is not current: make docs"
    for name, parser in writer.commands(make_parser()):
        assert parser.description, f"evenstep {name} does not say what it is for"
        for action in parser._actions:
            assert action.help or isinstance(action, argparse._SubParsersAction), f"{name} {action.dest}"


def test_help_does_not_load_torch() -> None:
    found = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "evenstep", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    loaded = set(re.findall(r"\| +([\w.]+)$", found.stderr, flags=re.MULTILINE))
    assert "evenstep.cli" in loaded
    assert loaded.isdisjoint({"torch", "torchmetrics", "rich", "tensorboard", "sklearn", "psutil"})


@pytest.mark.parametrize("page", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE"])
def test_the_repository_has(page: str) -> None:
    assert (ROOT / page).read_text().strip()
