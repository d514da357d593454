"""Snapshots by name in a storage.

A snapshot is a folder with a file from each rank and a manifest, which is written last, in one step: with it the
snapshot exists, without it nobody takes the rest for one.
"""

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping

from evenstep.snapshots.manifest import MOST, Damaged, File, Manifest, unpack
from evenstep.snapshots.storage import Blocks, Storage

MANIFEST = "manifest.json"
NAME = re.compile(r"step-\d{12}", flags=re.ASCII)


def name_of(step: int) -> str:
    """A snapshot's name, which sorts by step."""
    return f"step-{step:012d}"


class Shelf:
    """The snapshots of a run, in one place."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def names(self) -> list[str]:
        """Those that have a manifest, oldest first."""
        return sorted(name for name, files in self._folders().items() if MANIFEST in files)

    def unfinished(self) -> list[str]:
        """Those that have none: they were never finished, or are half taken away."""
        return sorted(name for name, files in self._folders().items() if MANIFEST not in files)

    def put(self, snapshot: str, file: str, blocks: Blocks) -> None:
        """Keep a file of a snapshot to be."""
        self.storage.write(f"{snapshot}/{file}", blocks)

    def publish(self, manifest: Manifest) -> None:
        """Make a snapshot of the files that were put; OSError if they are not all there, at their full size."""
        if wrong := _wrong(manifest, self._folders().get(manifest.snapshot, {})):
            raise OSError(wrong)
        self.storage.write(f"{manifest.snapshot}/{MANIFEST}", [manifest.pack()])

    def manifest(self, snapshot: str) -> Manifest:
        """A snapshot's manifest; Damaged if it is none, or speaks of files that are not there as it says."""
        there = self._folders().get(snapshot, {})
        if MANIFEST not in there:
            raise Damaged("it has no manifest: it was never finished, or lost it")
        manifest = unpack(self.storage.content(f"{snapshot}/{MANIFEST}", MOST))
        if manifest.snapshot != snapshot:
            raise Damaged(f"its manifest is that of {manifest.snapshot!r:.40}")
        if wrong := _wrong(manifest, there):
            raise Damaged(wrong)
        return manifest

    def read(self, snapshot: str, file: File) -> Iterator[memoryview]:
        """A file of a snapshot, a block at a time; Damaged, behind the last, if it does not match its checksum."""
        digest = hashlib.sha256()
        for block in self.storage.read(f"{snapshot}/{file.name}"):
            digest.update(block)
            yield block
        if digest.hexdigest() != file.sha256:
            raise Damaged(f"{file.name} does not match its checksum")

    def remove(self, snapshot: str) -> None:
        """Take a snapshot away, or what there is of one; from the first moment on it is none any more."""
        self.storage.remove(f"{snapshot}/{MANIFEST}")
        for file in self._folders().get(snapshot, {}):
            self.storage.remove(f"{snapshot}/{file}")

    def retire(self, good: Collection[str], keep: int, spare: str | None = None) -> None:
        """Take away what is older than so many snapshots that are known to be good; one may be spared."""
        if len(good) >= keep:
            oldest = sorted(good)[-keep]
            for name in self._folders():
                if name < oldest and name != spare:
                    self.remove(name)

    def _folders(self) -> dict[str, dict[str, int]]:
        """The size of each file, by snapshot."""
        found: dict[str, dict[str, int]] = {}
        for path, size in self.storage.files().items():
            folder, _, file = path.partition("/")
            if NAME.fullmatch(folder):
                found.setdefault(folder, {})[file] = size
        return found


def _wrong(manifest: Manifest, there: Mapping[str, int]) -> str:
    """Which file is not there as it should be; nothing where all are."""
    for name, size, _ in manifest.files:
        if name not in there:
            return f"{name} is not there"
        if there[name] != size:
            return f"{name} has {there[name]:,} bytes instead of {size:,}"
    return ""
