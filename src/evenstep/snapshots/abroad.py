"""A run by its address: what of it is wanted is fetched here."""

import contextlib
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evenstep.errors import UserError
from evenstep.files import RunFiles, find_run
from evenstep.snapshots.records import journal, ranks_of
from evenstep.snapshots.remote import storage_at
from evenstep.snapshots.storage import Folder, Storage, why

NAME = re.compile(r"\w[\w.-]*", flags=re.ASCII)  # that a run may have
SMALL = 1 << 24  # bytes that a record, or a configuration, may have


def is_address(run: str | Path) -> bool:
    """Whether this is where a run is kept, not a folder or a name."""
    return "://" in str(run)


@contextlib.contextmanager
def located(run: str | Path, parent: Path, *wanted: str) -> Iterator[RunFiles]:
    """A run's files; from an address those that are wanted and the record, for a while. `events`: all of them."""
    if not is_address(run):
        yield find_run(run, parent)
        return
    with tempfile.TemporaryDirectory(prefix="evenstep-") as folder, _in_a_line(str(run)):
        files = RunFiles(Path(folder) / _name(str(run)))
        afar, there = _there(str(run))
        for name in there.keys() & {files.name_of(files.record), *wanted}:
            Folder(files.folder).write(name, afar.read(name))
        for rank in ranks_of(there) if "events" in wanted else ():
            journal(files, afar, rank).fetch()
        yield files


def adopt(address: str, parent: Path) -> RunFiles:
    """Go on here with a run that is kept at an address: the folder it gets, or that it has here already."""
    files = RunFiles(parent.expanduser() / _name(address))
    with _in_a_line(address):
        afar, there = _there(address)
        told = afar.content(files.name_of(files.record), SMALL)
        if files.record.is_file():
            if _run(files.record.read_bytes()) != _run(told):
                raise UserError(f"{files.folder} is another run than {address}; name another folder with --runs")
            return files
        for path in (files.config, files.record):  # the record last: with it there is a run
            if files.name_of(path) in there:
                Folder(files.folder).write(files.name_of(path), [afar.content(files.name_of(path), SMALL)])
    return files


def _name(address: str) -> str:
    name = address.rstrip("/").rpartition("/")[2]
    if not NAME.fullmatch(name):
        raise UserError(f"{address} does not end in the name of a run")
    return name


def _there(address: str) -> tuple[Storage, dict[str, int]]:
    """The storage of a run, and the files in it."""
    afar = storage_at(address)
    there = afar.files()
    if "record.json" not in there:
        names = sorted({path.partition("/")[0] for path in there if path.endswith("/record.json")})
        hint = f"; there are {', '.join(names[-5:])}" if names else ""
        raise UserError(f"no run is kept at {address}: the address ends in the run's name{hint}")
    return afar, there


def _run(told: bytes) -> Any:
    """Which run a record is of."""
    try:
        return json.loads(told)["run"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


@contextlib.contextmanager
def _in_a_line(address: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{address} cannot be read: {why(error)}") from None
