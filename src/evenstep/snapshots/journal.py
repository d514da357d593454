"""A file that only grows, kept elsewhere as the pieces by which it grew.

The name of a piece says where in the file it begins and what it holds, so whoever goes on with the file can tell
which pieces belong to it: another machine may have gone on with an older part of it meanwhile.
"""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from evenstep.files import replacing
from evenstep.snapshots.manifest import sha256
from evenstep.snapshots.storage import BLOCK, Storage

PIECE = re.compile(r"(\d{15})-([0-9a-f]{16})\.jsonl", flags=re.ASCII)


class Journal:
    """A file of lines and its pieces."""

    def __init__(self, path: Path, storage: Storage) -> None:
        self.path = path
        self.storage = storage
        self._sent: int | None = None

    def send(self) -> None:
        """Send the whole lines that are not there yet."""
        if self._sent is None:
            self._sent = self._settled()
        end = self._end()
        if end > self._sent:
            content = sha256(self._read(self._sent, end))
            self.storage.write(f"{self._sent:015d}-{content[:16]}.jsonl", self._read(self._sent, end))
            self._sent = end

    @property
    def behind(self) -> bool:
        """Whether there is anything to send."""
        return self._end() > (self._sent or 0)

    def fetch(self) -> None:
        """Make the file what the pieces say, in place of what it may be, as far as they are whole."""
        pieces = self._pieces()
        if not pieces:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as temporary, temporary.open("wb") as file:
            for name, (start, _) in pieces.items():
                if start == file.tell() and not self._copied(name, file):
                    break

    def _copied(self, name: str, file: BinaryIO) -> bool:
        """Whether a piece is what it says; if not, the file is as before."""
        start, digest = file.tell(), hashlib.sha256()
        for block in self.storage.read(name):
            digest.update(block)
            file.write(block)
        if digest.hexdigest()[:16] == _content(name):
            return True
        file.seek(start)
        file.truncate()
        return False

    def _settled(self) -> int:
        """How much of the file is there; pieces of a story that went another way are taken away."""
        end = 0
        for name, (start, size) in self._pieces().items():
            ours = start == end and sha256(self._read(start, start + size))[:16] == _content(name)
            if ours:
                end += size
            else:
                self.storage.remove(name)
        return end

    def _pieces(self) -> dict[str, tuple[int, int]]:
        """Where each begins, and its size; in the order of the file."""
        found = {name: size for name, size in self.storage.files().items() if PIECE.fullmatch(name)}
        return {name: (int(name[:15]), found[name]) for name in sorted(found)}

    def _end(self) -> int:
        """Of the last whole line."""
        if not self.path.is_file():
            return 0
        with self.path.open("rb") as file:
            end = file.seek(0, 2)
            while end:
                start = file.seek(max(0, end - BLOCK))
                if (found := file.read(end - start).rfind(b"\n")) >= 0:
                    return start + found + 1
                end = start
        return 0

    def _read(self, start: int, end: int) -> Iterator[bytes]:
        if start == end or not self.path.is_file():
            return
        with self.path.open("rb") as file:
            file.seek(start)
            while start < end and (block := file.read(min(BLOCK, end - start))):
                start += len(block)
                yield block


def _content(name: str) -> str:
    found = PIECE.fullmatch(name)
    assert found is not None
    return found[2]
