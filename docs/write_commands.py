"""Writes docs/commands.md from the commands themselves: `make docs`. A test compares the two."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from evenstep.cli import make_parser

PAGE = Path(__file__).with_name("commands.md")

EXAMPLES = {
    "train": "evenstep train fraud --procs 2 --strategy ddp --model ff --batch-size 128 --note 'first try'",
    "resume": "evenstep resume runs/20261119-101500-fraud --procs 3",
    "evaluate": "evenstep evaluate runs/20261119-101500-fraud --procs 2",
    "audit": "evenstep audit runs/20261119-101500-fraud",
    "export": "evenstep export runs/20261119-101500-fraud model.safetensors",
    "serve": "evenstep serve --data /var/lib/evenstep --metrics-port 7078",
    "session": "evenstep session list",
    "session open": "evenstep session open --name clicks --size 45840617 --block 256 --epochs 4",
    "session list": "evenstep session list --server 10.0.0.5:7077 --token-file token",
    "session show": "evenstep session show clicks",
    "session close": "evenstep session close clicks --forget",
    "data": "evenstep data list",
    "data list": "evenstep data list --data ~/data",
    "data get": "evenstep data get cifar10",
}


def commands(parser: argparse.ArgumentParser, path: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command with its parser, in the order of the help."""
    if path:
        yield path, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from commands(child, f"{path} {name}".strip())


def page() -> str:
    """The whole page."""
    lines = [
        "# Commands",
        "",
        "Written by `make docs` from what `evenstep COMMAND --help` says. Every option of `train` can also stand",
        "in a YAML file, with underscores (`global_batch: 256`), and is taken by",
        "`evenstep.train(task, global_batch=256)`.",
        "Exit codes: 0 done, 1 failed, 2 something in the line is wrong, 75 stopped when asked (resume it),",
        "128 + n ended by signal n.",
    ]
    for name, parser in commands(make_parser()):
        lines += ["", f"## evenstep {name}", "", parser.description or "", "", "```", EXAMPLES[name], "```"]
        for group in parser._action_groups:
            rows = [row for action in group._group_actions if (row := _row(action))]
            if rows:
                lines += ["", f"| {group.title or ''} | |", "|---|---|", *rows]
    return "\n".join(lines) + "\n"


def _row(action: argparse.Action) -> str:
    if isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
        return ""
    named = [option for option in action.option_strings if not option.startswith("--no-")]
    metavar = "" if action.nargs == 0 or not action.metavar else f" {action.metavar}"
    shown = f"`{named[-1]}{metavar}`" if named else f"`{action.metavar or action.dest}`"
    return f"| {shown} | {(action.help or '').replace('%%', '%').replace('|', '/')} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
