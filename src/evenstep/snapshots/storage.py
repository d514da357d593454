"""Where snapshots are kept: the few questions they ask of a folder or of an object store.

A snapshot is a name with files under it. It exists once it is published: before that nobody sees it, and
publishing is a single step that happens or does not.
"""

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, final

from evenstep.files import sync_folder, write_bytes

MANIFEST = "manifest.json"
BLOCK = 1 << 24


class Storage(ABC):
    """Keeps snapshots."""

    @abstractmethod
    def names(self) -> list[str]:
        """The published snapshots."""

    @abstractmethod
    def put(self, snapshot: str, file: str, content: memoryview) -> None:
        """Keep a file of a snapshot that is not published yet; returns when it is durable."""

    @abstractmethod
    def publish(self, snapshot: str, manifest: bytes, sizes: Mapping[str, int]) -> None:
        """Make a snapshot visible in one step; OSError if its files are not all there, of these sizes."""

    @abstractmethod
    def manifest(self, snapshot: str) -> bytes:
        """A published snapshot's manifest."""

    @abstractmethod
    def read(self, snapshot: str, file: str) -> Iterator[memoryview]:
        """A file's content, a block at a time."""

    @abstractmethod
    def size(self, snapshot: str, file: str) -> int:
        """The length in bytes of a published snapshot's file."""

    @abstractmethod
    def remove(self, snapshot: str) -> None:
        """Take a snapshot away; from the first moment on it is not published any more."""

    @abstractmethod
    def clean(self) -> None:
        """Take away what was never published, and what was half removed."""


@final
class Folder(Storage):
    """Snapshots as folders in a folder; publishing is a rename."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def names(self) -> list[str]:
        if not self.path.is_dir():
            return []
        return sorted(p.name for p in self.path.iterdir() if not p.name.startswith(".") and p.is_dir())

    def put(self, snapshot: str, file: str, content: memoryview) -> None:
        folder = self._incoming(snapshot)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / file).open("wb") as target:
            target.write(content)
            target.flush()
            os.fsync(target.fileno())

    def publish(self, snapshot: str, manifest: bytes, sizes: Mapping[str, int]) -> None:
        incoming, final_place = self._incoming(snapshot), self.path / snapshot
        _check_sizes(sizes, lambda file: (incoming / file).stat().st_size)
        write_bytes(incoming / MANIFEST, manifest)  # and with it the folder's entries are on disk
        if final_place.exists():  # of the same step, and passed over by whoever resumed before it
            self.remove(snapshot)
        incoming.rename(final_place)
        sync_folder(self.path)

    def manifest(self, snapshot: str) -> bytes:
        return (self.path / snapshot / MANIFEST).read_bytes()

    def read(self, snapshot: str, file: str) -> Iterator[memoryview]:
        with (self.path / snapshot / file).open("rb") as source:
            while block := source.read(BLOCK):
                yield memoryview(block)

    def size(self, snapshot: str, file: str) -> int:
        return (self.path / snapshot / file).stat().st_size

    def remove(self, snapshot: str) -> None:
        doomed = self.path / f".removed-{snapshot}"
        shutil.rmtree(doomed, ignore_errors=True)
        (self.path / snapshot).rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def clean(self) -> None:
        for left in (*self.path.glob(".incoming-*"), *self.path.glob(".removed-*")):
            shutil.rmtree(left, ignore_errors=True)

    def _incoming(self, snapshot: str) -> Path:
        return self.path / f".incoming-{snapshot}"


@final
class Remote(Storage):
    """Snapshots under an fsspec address; publishing is the upload of the manifest, which comes last."""

    def __init__(self, filesystem: Any, prefix: str) -> None:
        self.filesystem = filesystem
        self.prefix = prefix.rstrip("/")

    def names(self) -> list[str]:
        self.filesystem.invalidate_cache()
        found = self.filesystem.glob(f"{self.prefix}/*/{MANIFEST}")
        return sorted(str(path).rsplit("/", 2)[-2] for path in found)

    def put(self, snapshot: str, file: str, content: memoryview) -> None:
        place = self._place(snapshot, file)
        self.filesystem.makedirs(self._place(snapshot), exist_ok=True)
        with self.filesystem.open(place, "wb", block_size=BLOCK) as target:
            for start in range(0, len(content), BLOCK):
                target.write(content[start : start + BLOCK])

    def publish(self, snapshot: str, manifest: bytes, sizes: Mapping[str, int]) -> None:
        _check_sizes(sizes, lambda file: self.size(snapshot, file))
        self.filesystem.pipe_file(self._place(snapshot, MANIFEST), manifest)

    def manifest(self, snapshot: str) -> bytes:
        content: bytes = self.filesystem.cat_file(self._place(snapshot, MANIFEST))
        return content

    def read(self, snapshot: str, file: str) -> Iterator[memoryview]:
        with self.filesystem.open(self._place(snapshot, file), "rb", block_size=BLOCK) as source:
            while block := source.read(BLOCK):
                yield memoryview(block)

    def size(self, snapshot: str, file: str) -> int:
        self.filesystem.invalidate_cache()
        return int(self.filesystem.size(self._place(snapshot, file)))

    def remove(self, snapshot: str) -> None:
        self.filesystem.rm_file(self._place(snapshot, MANIFEST))
        self.filesystem.rm(self._place(snapshot), recursive=True)

    def clean(self) -> None:
        self.filesystem.invalidate_cache()
        if not self.filesystem.isdir(self.prefix):
            return
        published = set(self.names())
        for path in self.filesystem.ls(self.prefix, detail=False):
            if str(path).rstrip("/").rsplit("/", 1)[-1] not in published:
                self.filesystem.rm(path, recursive=True)

    def _place(self, *parts: str) -> str:
        return "/".join((self.prefix, *parts))


def _check_sizes(expected: Mapping[str, int], size: Callable[[str], int]) -> None:
    for file, bytes_written in expected.items():
        try:
            found = size(file)
        except FileNotFoundError:
            raise OSError(f"{file} is not there; do all ranks write to the same place?") from None
        if found != bytes_written:
            raise OSError(f"{file} has {found} bytes instead of {bytes_written}")
