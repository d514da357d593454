"""Tasks by name: the built-in ones and those in files of the user's own, and back from a task to its name."""

import dataclasses
import importlib
import inspect
import sys
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenstep.errors import UserError, unknown
from evenstep.files import is_file

if TYPE_CHECKING:
    from evenstep.tasks.task import Task

BUILT_IN = {
    "digits": "evenstep.tasks.digits:Digits",
    "fraud": "evenstep.tasks.fraud:Fraud",
    "cifar10": "evenstep.tasks.cifar10:Cifar10",
    "movielens": "evenstep.tasks.movielens:MovieLens",
    "synthetic": "evenstep.tasks.synthetic:Synthetic",
}

ABOUT = {
    "digits": "1,797 handwritten digits that come with scikit-learn: nothing to download",
    "fraud": "284,807 card payments, 492 of them frauds",
    "cifar10": "60,000 images of 10 kinds of things; ResNets, and any model of timm",
    "movielens": "100,836 ratings of films: a recommender",
    "synthetic": "made-up regression data of any size, for trying machines out",
}

READERS = (bool, int, float, str, Path)  # the kinds of options that text can be read as, narrowest first


def load(task: str, options: Mapping[str, Any]) -> "Task":
    """The task of that name, or in that file, with its options; values may still be text."""
    made: Task = _fill(_find(task), task, options)
    return made


def describe(task: "Task") -> tuple[str, dict[str, Any]]:
    """The name and the options from which `load` makes an equal task again."""
    kind = type(task)
    where = f"{kind.__module__}:{kind.__qualname__}"
    for name, built_in in BUILT_IN.items():
        if where == built_in:
            return name, _options(task)
    if "<locals>" in kind.__qualname__:
        raise UserError(f"{kind.__name__} is defined inside a function; other processes cannot find it there")
    module = sys.modules.get(kind.__module__)
    spec = getattr(module, "__spec__", None)
    if spec is not None and "." in spec.name and not spec.name.startswith("evenstep.tasks.files."):
        return f"{spec.name}:{kind.__qualname__}", _options(task)
    file = getattr(module, "__file__", None)
    if file is None or not Path(file).is_file():
        raise UserError(f"{kind.__name__} is not defined in a file; put it in one, so other processes find it")
    return f"{Path(file).resolve()}:{kind.__qualname__}", _options(task)


# From a name to a class


def _find(task: str) -> type:
    if task in BUILT_IN:
        return _find(BUILT_IN[task])
    if task.endswith(".py"):
        return _only_task(_file(task), task)
    place, colon, name = task.rpartition(":")
    if not colon:
        raise UserError(f"{unknown('task', task, BUILT_IN)}, or a file ending in .py")
    module = _file(place) if place.endswith(".py") else _module(place)
    if name not in vars(module):
        raise unknown("class", name, _names(_tasks(module)), place)
    return _checked(vars(module)[name], place)


def _file(text: str) -> types.ModuleType:
    from evenstep.tasks import files

    path = Path(text).expanduser()
    if not is_file(path):
        raise UserError(f"no file {text} to take a task from; here is {Path.cwd()}")
    return files.module_of(path)


def _module(name: str) -> types.ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise UserError(f"no module can have the name {name!r}, to take a task from")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # it is there, and imports something that is not
        raise UserError(f"no module {name} to take a task from; is it installed?") from None


def _tasks(module: types.ModuleType) -> list[type]:
    """The tasks defined in a module, not those it imports, nor its private ones."""
    from evenstep.tasks.task import Task

    return [
        found
        for name, found in vars(module).items()
        if inspect.isclass(found)
        and issubclass(found, Task)
        and found.__module__ == module.__name__
        and not name.startswith("_")
    ]


def _names(classes: list[type]) -> list[str]:
    return [found.__name__ for found in classes] or ["no subclasses of evenstep.Task"]


def _only_task(module: types.ModuleType, file: str) -> type:
    tasks = _tasks(module)
    whole = [found for found in tasks if not inspect.isabstract(found)]
    if len(whole) > 1:
        choices = ", ".join(f"{file}:{name}" for name in _names(whole))
        raise UserError(f"{file} has {len(whole)} tasks; say which: {choices}")
    if not tasks:
        raise UserError(f"{file} defines no subclass of evenstep.Task")
    return _checked((whole or tasks)[0], file)


def _checked(found: Any, where: str) -> type:
    from evenstep.tasks.task import Task

    if not (inspect.isclass(found) and issubclass(found, Task)):
        raise UserError(f"{getattr(found, '__name__', found)} in {where} is not a subclass of evenstep.Task")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise UserError(f"{found.__name__} in {where} lacks the methods {missing}")
    return found


# From options to fields


def _fill(kind: Any, task: str, options: Mapping[str, Any]) -> Any:
    fields = _fields(kind)
    if not fields and any(map(_required, inspect.signature(kind).parameters.values())):
        raise UserError(f"{kind.__name__} wants arguments nobody here can give; make it a dataclass, for --set")
    given = dict(options)
    for name in ("model_name", "data_dir"):  # --model and --data
        if given.get(name) is None or (name == "data_dir" and name not in fields):
            given.pop(name, None)
    if "model_name" in given and "model_name" not in fields:
        raise UserError(f"{task} has one model only; leave --model out")
    for name in given:
        if name not in fields:
            raise _no_option(task, name, fields)
    hints = typing.get_type_hints(kind) if given else {}
    values = {name: _read(name, value, hints[name]) for name, value in given.items()}
    needed = [name for name, field in fields.items() if _required(field) and name not in values]
    if needed:
        raise UserError(f"{task} needs a value for {needed[0]}: --set {needed[0]}=...")
    return kind(**values)


def _fields(kind: type) -> dict[str, Any]:
    if not dataclasses.is_dataclass(kind):
        return {}
    return {field.name: field for field in dataclasses.fields(kind) if field.init}


def _required(field: Any) -> bool:
    """Whether a field, or a parameter, has to be given."""
    if isinstance(field, inspect.Parameter):
        return field.default is field.empty and field.kind not in (field.VAR_POSITIONAL, field.VAR_KEYWORD)
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _no_option(task: str, name: str, fields: Mapping[str, Any]) -> UserError:
    if not fields:
        return UserError(f"{task} has no option {name}: its class has no dataclass fields, so it takes none")
    kinds = (f"{field.name} ({_label(field.type)})" for field in fields.values())
    return unknown("option", name, kinds, task)


def _label(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _read(name: str, value: Any, annotation: Any) -> Any:
    """A value as the kind its field is declared as."""
    union = isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union
    kinds = typing.get_args(annotation) if union else (annotation,)
    if typing.get_origin(annotation) is typing.Literal:
        return _one_of(name, value, typing.get_args(annotation))
    if type(value) in kinds:
        return value
    if type(None) in kinds and str(value).lower() in ("none", "null", ""):
        return None
    for reader in READERS:
        if reader in kinds:
            try:
                return _read_as(reader, value)
            except (ValueError, OverflowError):
                continue
    if not isinstance(value, str) and not set(kinds) & set(READERS):
        return value  # of a kind of the user's own, from Python
    raise UserError(f"{name}={value} will not do: {name} is {_label(annotation)}")


def _one_of(name: str, value: Any, valid: tuple[Any, ...]) -> Any:
    for choice in valid:
        if str(choice) == str(value):
            return choice
    raise unknown(name, value, map(str, valid))


WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def _read_as(kind: type, value: Any) -> Any:
    text = str(value).strip()
    if kind is bool:
        if text.lower() not in WORDS:
            raise ValueError(text)
        return WORDS[text.lower()]
    if kind is int:
        number = float(text) if any(c in text for c in ".eE") else int(text)  # 1e9 is a fine size
        if number != int(number):
            raise ValueError(text)
        return int(number)
    return kind(value)


def _options(task: "Task") -> dict[str, Any]:
    """The values of a task's fields, as a file of options can hold them."""
    kind = type(task)
    if not dataclasses.is_dataclass(kind):
        if inspect.signature(kind).parameters:
            raise UserError(f"{kind.__name__} takes arguments that cannot be recorded; make it a dataclass")
        return {}
    options = {}
    for name in _fields(kind):
        value = getattr(task, name)
        if isinstance(value, Path):
            value = str(value)
        if not isinstance(value, bool | int | float | str | None):
            raise UserError(
                f"{kind.__name__}.{name} holds a {type(value).__name__}, which cannot be recorded; "
                "an option is a number, a text, true, false, a path or None"
            )
        options[name] = value
    return options
