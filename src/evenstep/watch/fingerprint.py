"""What a rank runs, as short texts by name: what it must have in common with the others, and with its own past.

Names say to whom a difference belongs: a file of the user's or of ours, a setting, a package, the data, the
model. Values are short, so that they can be shown.
"""

import copy
import dataclasses
import hashlib
import inspect
import os
import sys
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from evenstep.config import Settled
from evenstep.order import hashing
from evenstep.order.permutation import Permutation
from evenstep.tasks import samples
from evenstep.tasks.task import Task

Fingerprint = dict[str, str]

OURS = Path(__file__).parent.parent
LOOKED_AT = 4  # samples of the data, besides the first and the last
HEX = 12  # digits of a hash that are kept
LIBRARIES = ("site-packages", "dist-packages")
PACKAGES = ("torch", "torchmetrics", "torchvision", "timm", "numpy")
# each machine's own affair
OWN = ("data", "runs", "workers", "device", "note", "spot", "log_every", "procs", "nodes")


def taken(config: Settled, task: Task, data: Any, model: nn.Module) -> Fingerprint:
    """Of this rank, before its first step."""
    return {**code(task), **settings(config), **packages(task), **of_data(data), **of_model(model)}


def settings(config: Settled) -> Fingerprint:
    """The options that must be the same everywhere."""
    given = {**dataclasses.asdict(config), **{f"set {name}": value for name, value in config.set.items()}}
    return {f"setting {name}": repr(value) for name, value in given.items() if name not in (*OWN, "set", "task")}


def code(task: Task) -> Fingerprint:
    """Every file of ours, the task's, and those that it has imported from beside it."""
    found = {f"file evenstep/{path.relative_to(OURS)}": path for path in sorted(OURS.rglob("*.py"))}
    own = inspect.getsourcefile(type(task))
    if own is not None and OURS not in Path(own).parents:
        beside = Path(own).parent
        found |= {f"file {path.relative_to(beside)}": path for path in _imported_from(beside)}
    return {name: _hash(path.read_bytes()) for name, path in found.items()}


def _imported_from(folder: Path) -> list[Path]:
    """The files of modules in a folder and below it, but for what was installed there."""
    installed = tuple(prefix for prefix in (sys.prefix, sys.base_prefix) if not str(folder).startswith(prefix))
    start = f"{folder}{os.sep}"
    # not the attribute: some modules load when they are asked for one
    files = {getattr(module, "__dict__", {}).get("__file__") for module in tuple(sys.modules.values())}
    return sorted(
        Path(file)
        for file in files
        if isinstance(file, str)
        and file.startswith(start)
        and file.endswith(".py")
        and not file.startswith(installed)
        and not any(library in file.removeprefix(start) for library in LIBRARIES)
    )


def packages(task: Task) -> Fingerprint:
    """The versions of Python, of what we stand on, and of what the task's file uses."""
    module = sys.modules[type(task).__module__]
    used = sorted({_origin(value) for value in vars(module).values()} | set(PACKAGES))
    versions = {name: vars(sys.modules[name]).get("__version__") for name in used if name in sys.modules}
    found = {f"package {name}": str(version) for name, version in versions.items() if isinstance(version, str)}
    return {"package python": ".".join(map(str, sys.version_info[:3])), **found}


def _origin(value: Any) -> str:
    """The package that something in a module comes from."""
    name = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
    return name.partition(".")[0] if isinstance(name, str) else ""


def of_data(data: Any) -> Fingerprint:
    """The size of the data, and a hash over some of its samples, if they are the same each time they are read."""
    size = len(data)
    order = Permutation(size, hashing.key("fingerprint"))
    chosen = sorted({0, size - 1, *order.block(0, min(LOOKED_AT, size)).tolist()})
    read_from = data if hasattr(data, "gather") else _apart(data)
    first, again = ([samples.digest(samples.one(read_from, index)) for index in chosen] for _ in range(2))
    known = first == again and None not in first
    return {"data size": f"{size:,}", **({"data samples": _hash(repr(first).encode())} if known else {})}


def _apart(data: Any) -> Any:
    """A copy that shares what is in it: a data set may open files at its first sample, and those must not be
    open yet when it is handed to the processes that read for it."""
    made = copy.copy(data)
    for name, value in vars(made).items() if hasattr(made, "__dict__") else ():
        if hasattr(type(value), "__getitem__") and hasattr(value, "__dict__") and not isinstance(value, Tensor):
            vars(made)[name] = _apart(value)
    return made


def of_model(model: nn.Module) -> Fingerprint:
    """The names, shapes and kinds of what it learns."""
    return {
        f"parameter {name}": f"{tuple(part.shape)} {str(part.dtype).removeprefix('torch.')}"
        for name, part in model.named_parameters()
    }


def together(found: Fingerprint) -> str:
    """All of it in one short text."""
    return _hash(repr(sorted(found.items())).encode())


def summary(found: Fingerprint) -> dict[str, dict[str, str]]:
    """As a record keeps it; the options are kept with the run anyway."""
    kinds: dict[str, dict[str, str]] = {"file": {}, "package": {}, "data": {}, "parameter": {}, "setting": {}}
    for name, value in found.items():
        kind, _, which = name.partition(" ")
        kinds[kind][which] = value
    ours = {name: kinds["file"].pop(name) for name in tuple(kinds["file"]) if name.startswith("evenstep/")}
    return {
        "code": {**kinds["file"], "evenstep": together(ours)},
        "packages": kinds["package"],
        "data": kinds["data"],
        "model": {"parameters": together(kinds["parameter"])},
    }


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:HEX]
