"""The command line of a dataclass of options: its class body is the help page.

A comment line in the class body heads a group, the text below a field explains it. argparse reads the words;
what it has to complain about is said in one line, as all else that is the user's to mend.
"""

import argparse
import difflib
import inspect
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from evenstep.errors import UserError

_HEADING = re.compile(r"    # (.+)")
_FIELD = re.compile(r"    (\w+): ")
_TEXT = re.compile(r'    """(.+?)(""")?$')


class Described(NamedTuple):
    """What a class body says of a field."""

    group: str
    text: str


class Parser(argparse.ArgumentParser):
    """Complains in one line, and knows what was meant."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Help, **settings)

    def error(self, message: str) -> NoReturn:
        """Turn argparse's complaint into ours."""
        raise UserError(f"{message}; {self.prog} --help says what there is")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does, but each command complains of what it does not know itself."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            raise self._not_known(rest[0])
        return found, rest

    def _not_known(self, word: str) -> UserError:
        if not word.startswith("-"):
            return UserError(f"{word} is one word too many; {self.prog} --help says what there is")
        name = word.partition("=")[0]
        valid = [option for option in self.options() if option.startswith("--")]
        near = difflib.get_close_matches(name, valid, n=2) or valid
        return UserError(f"no option {name}; there {'is' if len(near) == 1 else 'are'} {', '.join(near)}")

    def options(self) -> list[str]:
        """The names of all options."""
        return sorted(self._option_string_actions)


class _Help(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=110)


class _Assignments(argparse.Action):
    """Collects name=value words into a mapping."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        del parser
        name, equals, value = values.partition("=")
        if not equals or not name:
            raise UserError(f"{option_string} takes name=value, not {values}")
        setattr(namespace, self.dest, {**(getattr(namespace, self.dest, None) or {}), name: value})


def described(kind: type) -> dict[str, Described]:
    """What a class body says of each of its fields."""
    group, name = "options", ""
    found = {}
    for line in inspect.getsource(kind).splitlines():
        if heading := _HEADING.fullmatch(line):
            group = heading[1]
        elif text := _TEXT.match(line):
            found[name] = Described(group, text[1])
        elif field := _FIELD.match(line):
            name = field[1]
    found.pop("", None)  # the text of the class itself
    return found


def add_options(
    parser: argparse.ArgumentParser,
    kind: type,
    choices: Mapping[str, Sequence[str]],
    *,
    positional: str = "",
) -> None:
    """An option for each field of a dataclass; one not given leaves no trace in what is read."""
    hints = typing.get_type_hints(kind)
    groups: dict[str, Any] = {}
    for name, (group, text) in described(kind).items():
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        reader = _reader(hints[name])
        settings: dict[str, Any] = {"help": text.replace("%", "%%"), "default": argparse.SUPPRESS}
        if name == positional:
            groups[group].add_argument(name, nargs="?", metavar=name.upper(), **settings)
            continue
        if reader is bool:
            settings["action"] = argparse.BooleanOptionalAction
        elif reader is dict:
            settings |= {"action": _Assignments, "metavar": "NAME=VALUE"}
        elif name in choices:
            settings["metavar"] = "{" + ",".join(choices[name]) + "}"  # the dataclass checks them itself
        else:
            settings |= {"type": _number_reader(reader), "metavar": _METAVARS[reader]}
        groups[group].add_argument(f"--{name.replace('_', '-')}", **settings)


_METAVARS: dict[Any, str] = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


def _reader(annotation: Any) -> Any:
    """What turns a word into a value of this kind."""
    if isinstance(annotation, types.UnionType):
        annotation = next(kind for kind in typing.get_args(annotation) if kind is not types.NoneType)
    return dict if typing.get_origin(annotation) is not None else annotation


def _number_reader(reader: Any) -> Any:
    """argparse names the reader when a word will not do, so it should have a name a person understands."""
    if reader not in (int, float):
        return reader

    def read(word: str) -> Any:
        return reader(word)

    read.__name__ = "whole number" if reader is int else "number"
    return read
