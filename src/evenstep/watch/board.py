"""A board on which the ranks of a training leave notes for each other, beside the collectives.

It is the store at which they met, by a connection of its own: notes are read and written by threads, at any
time, while the collectives wait.
"""

import contextlib
import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, final

from torch._C._distributed_c10d import TCPStore

POLL = 0.02  # seconds between two looks
PATIENCE = timedelta(seconds=30)


class Gone(Exception):
    """Nobody keeps the board any more: the training is coming to its end, or rank 0's host is gone."""


class Board(ABC):
    """Notes by name."""

    @abstractmethod
    def post(self, name: str, note: Any) -> None:
        """Leave a note, in place of the one that may hang there."""

    @abstractmethod
    def read(self, name: str) -> Any:
        """A note, or None."""

    @abstractmethod
    def first(self, name: str, note: Any) -> Any:
        """Leave a note unless one hangs there; the one that hangs there now, the same for all who try."""

    def wait(self, name: str, until: threading.Event, patience: float) -> Any:
        """A note as soon as it hangs there; None if nobody left it in so many seconds, or before the event."""
        deadline = time.monotonic() + patience
        while (note := self.read(name)) is None and time.monotonic() < deadline:
            if until.wait(POLL):
                return self.read(name)
        return note


@final
class Private(Board):
    """The board of a rank that is alone."""

    def __init__(self) -> None:
        self._notes: dict[str, Any] = {}

    def post(self, name: str, note: Any) -> None:
        self._notes[name] = note

    def read(self, name: str) -> Any:
        return self._notes.get(name)

    def first(self, name: str, note: Any) -> Any:
        return self._notes.setdefault(name, note)


@final
class Shared(Board):
    """The board of several ranks, in their common store."""

    def __init__(self, host: str, port: int, meeting: str) -> None:
        self._store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=PATIENCE)
        self._meeting = meeting  # notes of an earlier try are none of ours
        self._lock = threading.Lock()

    def post(self, name: str, note: Any) -> None:
        with self._asking():
            self._store.set(self._key(name), json.dumps(note))

    def read(self, name: str) -> Any:
        key = self._key(name)
        with self._asking():
            return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def first(self, name: str, note: Any) -> Any:
        with self._asking():
            return json.loads(self._store.compare_set(self._key(name), "", json.dumps(note)))

    def _key(self, name: str) -> str:
        return f"evenstep/{self._meeting}/{name}"

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """One question at a time."""
        try:
            with self._lock:
                yield
        except RuntimeError as error:
            raise Gone(str(error)) from None
