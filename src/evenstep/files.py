"""The one place that names every file of a run, and the ways of writing that cannot be caught half-way."""

import contextlib
import errno
import fcntl
import json
import os
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from evenstep.errors import UserError


@dataclass(frozen=True)
class RunFiles:
    """A run's folder."""

    folder: Path

    @property
    def config(self) -> Path:
        """The resolved configuration: `evenstep train --config` takes it."""
        return self.folder / "config.yaml"

    @property
    def record(self) -> Path:
        """What ran, where, when, how it ended."""
        return self.folder / "record.json"

    def events(self, rank: int) -> Path:
        """What happened, one JSON line each."""
        return self.folder / "events" / f"rank-{rank}.jsonl"

    def all_events(self) -> dict[int, Path]:
        """The events of all ranks there have been, by rank."""
        paths = (self.folder / "events").glob("rank-*.jsonl")
        found = {int(number): path for path in paths if (number := path.stem.removeprefix("rank-")).isdecimal()}
        return dict(sorted(found.items()))

    def launcher_events(self, node: int) -> Path:
        """What happened to the ranks of a node, as the process that started them saw it."""
        return self.folder / "events" / f"node-{node}.jsonl"

    @property
    def snapshots(self) -> Path:
        """A folder for each snapshot."""
        return self.folder / "snapshots"

    @property
    def stop(self) -> Path:
        """A file that asks the run to stop, by being there."""
        return self.folder / "stop"

    @property
    def lock(self) -> Path:
        """Held by the one process that may train in this folder."""
        return self.folder / "lock"

    @property
    def tensorboard(self) -> Path:
        return self.folder / "tensorboard"

    @property
    def owner(self) -> Path:
        """Only where the run is kept elsewhere: which start of which run may write there."""
        return self.folder / "owner.json"

    def name_of(self, path: Path) -> str:
        """How one of these files is called where the run is kept elsewhere."""
        return path.relative_to(self.folder).as_posix()

    def weights(self, which: str) -> Path:
        """The `best` or the `last` weights, by name, whole, as safetensors."""
        return self.folder / "weights" / f"{which}.safetensors"


def new_run(parent: Path, task: str, now: datetime) -> RunFiles:
    """A folder of its own for a run, named by time and task, never one that exists."""
    name = f"{now:%Y%m%d-%H%M%S}-{re.sub(r'[^A-Za-z0-9_.-]+', '_', task).strip('.')[:80] or 'task'}"
    parent = parent.expanduser()
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for again in range(1, 10_000):
            with contextlib.suppress(FileExistsError):
                folder = parent / (name if again == 1 else f"{name}-{again}")
                folder.mkdir()
                (folder / "events").mkdir()
                (folder / "weights").mkdir()
                return RunFiles(folder)
    except OSError as error:
        raise UserError(f"no run can be kept in {parent}: {error.strerror}; name another with --runs") from None
    raise UserError(f"{parent} holds ten thousand runs named {name}; name another folder with --runs")


def find_run(run: str | Path, parent: Path) -> RunFiles:
    """The run that a user means: a folder, or the name of one in the folder of runs."""
    parent = parent.expanduser()
    for folder in (Path(run).expanduser(), parent / run):
        if is_file(folder / "record.json"):
            return RunFiles(folder)
    names = sorted(p.parent.name for p in parent.glob("*/record.json"))
    known = f"the last ones in {parent} are {', '.join(names[-5:])}" if names else f"there is none in {parent}"
    raise UserError(f"no run {run}; {known}")


def is_file(path: Path) -> bool:
    """Whether there is a file, also of a name that none can have."""
    try:
        return path.is_file()
    except OSError:  # too long, say
        return False


@contextlib.contextmanager
def locked(run: RunFiles) -> Iterator[bool]:
    """Only one at a time trains in a folder; the lock is gone with whoever held it, however that ended. Some file
    systems know no locks: whether it is one."""
    sure = True
    with run.lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{run.folder} is being trained in by another process") from None
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                raise
            sure = False
        yield sure


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place, whole and on disk, if all goes well."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file in one atomic step."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def write_text(path: Path, text: str) -> None:
    """Replace a file's text in one atomic step."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Replace a file with a value as JSON, in one atomic step."""
    write_text(path, json.dumps(value, indent=2, allow_nan=True) + "\n")


def sync_folder(folder: Path) -> None:
    """A rename is on disk when its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
