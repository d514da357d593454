"""Parsed data sets, kept as memory-mapped arrays that all processes of a machine share.

The first process to ask parses; those that ask meanwhile wait for it. A table becomes visible in one rename,
whole, under a name that says what it was parsed from: a source that has changed is parsed anew. The lock goes
with the process that holds it, however that ends, and only saves work: without it, two would parse the same.
"""

import fcntl
import os
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from evenstep import world
from evenstep.errors import UserError
from evenstep.order import hashing

Table = Mapping[str, NDArray[Any]]

IN_HOME = ".evenstep"  # the folder of tables beside the data


def table(name: str, version: int, sources: Sequence[Path], parse: Callable[[], Table], home: Path) -> Table:
    """The columns that `parse` makes of the sources, which lie in `home`: memory-mapped, parsed at most once.

    `version` belongs to `parse`: raise it when what it makes changes.
    """
    folders = (home / IN_HOME, world.cache_home() / "evenstep")
    for folder in folders:
        kept = folder / _key(folder, name, version, sources)
        if kept.is_dir():
            return _mapped(kept)
    for folder in folders:
        if lock := _lock(folder, name):
            with lock:
                return _mapped(_made(folder, name, version, sources, parse))
    raise UserError(f"neither {folders[0]} nor {folders[1]} can be written, to keep the parsed {name} data in")


def _made(folder: Path, name: str, version: int, sources: Sequence[Path], parse: Callable[[], Table]) -> Path:
    """Parse, unless somebody else did while we waited for the lock."""
    kept = folder / _key(folder, name, version, sources)
    if kept.is_dir():
        return kept
    for leftover in folder.glob(f".{name}-*"):  # of a process that was killed: only one at a time gets here
        shutil.rmtree(leftover, ignore_errors=True)
    temporary = folder / f".{name}-{uuid.uuid4().hex}"
    temporary.mkdir()
    try:
        for column, values in parse().items():
            _save(temporary / f"{column}.npy", values)
        if folder / _key(folder, name, version, sources) != kept:
            raise UserError(f"{sources[0]} changed while it was read; run this again")
        temporary.rename(kept)
    except OSError as error:
        if kept.is_dir():  # where a file system has no locks, somebody may have been faster
            return kept
        raise UserError(f"the parsed {name} data cannot be kept in {folder}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    for old in folder.glob(f"{kept.name.rpartition('-')[0]}-*"):
        if old != kept:
            shutil.rmtree(old, ignore_errors=True)
    return kept


def _key(folder: Path, name: str, version: int, sources: Sequence[Path]) -> str:
    """A table's name: what of, from where, and from which state of it."""
    places = [os.path.relpath(source.resolve(), folder.resolve()) for source in sources]
    states = [source.stat() for source in sources]
    state = hashing.key(version, *(number for s in states for number in (s.st_size, s.st_mtime_ns)))
    return f"{name}-{hashing.key(*places):016x}-{state:016x}"


def _lock(folder: Path, name: str) -> IO[str] | None:
    """A file of which only one process at a time holds the lock, until it is closed; None if it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / f"{name}.lock").open("a")
    except OSError:
        return None
    with suppress(OSError):  # not every network file system knows locks
        fcntl.flock(file, fcntl.LOCK_EX)
    return file


def _save(path: Path, values: NDArray[Any]) -> None:
    with path.open("wb") as file:
        np.save(file, values)
        file.flush()
        os.fsync(file.fileno())


def _mapped(folder: Path) -> Table:
    return {path.stem: np.load(path, mmap_mode="r") for path in sorted(folder.glob("*.npy"))}
