"""Where files are kept that have to outlive a process: the few questions asked of a folder or of an object store.

All that is said of snapshots, such as that the manifest comes last, is said above this, once, for every storage.
"""

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self, final

from evenstep.files import replacing, sync_folder

BLOCK = 1 << 24  # bytes read or sent at a time

Blocks = Iterable[bytes | memoryview]


class Storage(ABC):
    """Files by path, `/` between folders. What goes wrong is an OSError."""

    address: str
    """Where this is, as a person writes it."""

    @abstractmethod
    def files(self) -> dict[str, int]:
        """The size in bytes of every file; also of what a broken-off write has left, under a name of its own."""

    @abstractmethod
    def read(self, path: str) -> Iterator[memoryview]:
        """A file's content, a block at a time; FileNotFoundError where there is none."""

    @abstractmethod
    def write(self, path: str, blocks: Blocks) -> None:
        """Keep a file, in place of the one of that name: whole and durable when this returns, until then not."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Take a file away, if it is there."""

    @abstractmethod
    def within(self, folder: str) -> Self:
        """The part of this storage that lies in a folder."""

    def content(self, path: str, most: int) -> bytes:
        """A small file's content; OSError where it is larger than it can be."""
        found = bytearray()
        for block in self.read(path):
            found += block
            if len(found) > most:
                raise OSError(f"{path} is larger than the {most:,} bytes that it can have")
        return bytes(found)


@final
class Folder(Storage):
    """A folder of this machine, or of a file system that it shares with others."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.address = str(path)

    def files(self) -> dict[str, int]:
        found = {}
        for folder, _, names in os.walk(self.path, onerror=_unless_gone):
            for name in names:
                path = Path(folder, name)
                with contextlib.suppress(FileNotFoundError):  # gone since
                    found[path.relative_to(self.path).as_posix()] = path.lstat().st_size
        return found

    def read(self, path: str) -> Iterator[memoryview]:
        with (self.path / path).open("rb") as source:
            while block := source.read(BLOCK):
                yield memoryview(block)

    def write(self, path: str, blocks: Blocks) -> None:
        target = self.path / path
        _make_folders(target.parent)
        with replacing(target) as temporary, temporary.open("wb") as file:
            for block in blocks:
                file.write(block)

    def remove(self, path: str) -> None:
        target = self.path / path
        target.unlink(missing_ok=True)
        if target.parent != self.path:
            with contextlib.suppress(OSError):  # others lie there
                target.parent.rmdir()

    def within(self, folder: str) -> Self:
        return type(self)(self.path / folder)


def _unless_gone(error: OSError) -> None:
    """A folder that cannot be read is not an empty one."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _make_folders(folder: Path) -> None:
    """As durable as what will lie in them."""
    if not folder.is_dir():
        _make_folders(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def in_blocks(content: memoryview) -> Iterator[memoryview]:
    """What lies in memory, a block at a time."""
    for start in range(0, len(content), BLOCK):
        yield content[start : start + BLOCK]


def why(error: Exception) -> str:
    """What went wrong, in a line."""
    if isinstance(error, OSError):
        return " ".join(str(error.strerror or str(error) or type(error).__name__).split()).rstrip(".")
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
