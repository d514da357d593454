"""Takes snapshots while the training goes on.

A rank stops only for the copying of its part of the state into memory. A thread writes the copy, checks it
and reports; rank 0 makes the snapshot visible once all ranks have reported, and only then takes old ones away.
"""

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evenstep.snapshots.manifest import File, Manifest, sha256
from evenstep.snapshots.plans import Writing, shapes
from evenstep.snapshots.state import State, generators
from evenstep.snapshots.storage import Storage
from evenstep.watch.board import Board, Gone
from evenstep.world import World

PATIENCE = 600.0  # seconds that rank 0 waits for the others' parts


@dataclass(frozen=True, kw_only=True)
class Saved:
    """How a snapshot went."""

    snapshot: str
    step: int
    error: str | None
    seconds: float
    """From its beginning until it was visible."""
    stalled: float
    """Of which training stood still."""
    size: int
    """Bytes, of all ranks."""


@dataclass(frozen=True, kw_only=True)
class _Order:
    name: str
    step: int
    cursor: Mapping[str, Any]
    values: Mapping[str, Any]
    generators: Mapping[str, Any]
    since: float
    stalled: float


def name_of(step: int) -> str:
    """A snapshot's name, which sorts by step."""
    return f"step-{step:012d}"


class Saver:
    """One rank's part in the taking of snapshots."""

    def __init__(self, state: State, storage: Storage, board: Board, place: World, *, keep: int) -> None:
        self.state = state
        self.storage = storage
        self.board = board
        self.rank = place.rank
        self.world = place.size
        self.keep = keep
        self.outcomes: deque[Saved] = deque()
        self._writing: Writing | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    def save(self, step: int, cursor: Mapping[str, Any], device: Any) -> None:
        """Snapshot the state as it is after so many steps; returns when it is copied. Every rank has to ask."""
        since = time.perf_counter()
        self.wait()
        tensors = self.state.tensors()
        if self._writing is None or self._writing.shapes != shapes(tensors):
            self._writing = Writing(tensors, self.rank, self.world)
        self._writing.stage(tensors)
        order = _Order(
            name=name_of(step),
            step=step,
            cursor=cursor,
            values=self.state.values(),
            generators=generators(device),
            since=since,
            stalled=time.perf_counter() - since,
        )
        self._thread = threading.Thread(target=self._run, args=(order, self._writing), name="snapshot")
        self._thread.start()

    def wait(self) -> None:
        """Until what was begun is done."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def abandon(self) -> None:
        """Wait for no other rank any more: some are gone."""
        self._closing.set()
        self.wait()

    # In the thread

    def _run(self, order: _Order, writing: Writing) -> None:
        size, error = 0, None
        try:
            self.board.post(f"{order.name}/{self.rank}", self._written(order, writing))
            if self.rank == 0:
                size, error = self._published(order, writing)
                self.board.post(f"{order.name}/done", {"size": size, "error": error})
            else:
                done = self.board.wait(f"{order.name}/done", self._closing, PATIENCE)
                size, error = (done["size"], done["error"]) if done else (0, "rank 0 said nothing of it")
        except Gone:
            error = "the ranks have parted"
        self.outcomes.append(
            Saved(
                snapshot=order.name,
                step=order.step,
                error=error,
                seconds=time.perf_counter() - order.since,
                stalled=order.stalled,
                size=size,
            )
        )

    def _written(self, order: _Order, writing: Writing) -> dict[str, Any]:
        """Write this rank's file; what the others have to know of it."""
        file = f"rank-{self.rank}.bin"
        try:
            self.storage.put(order.name, file, writing.content)
        except OSError as error:
            return {"error": f"rank {self.rank} could not write {file}: {error.strerror or error}"}
        written = File(name=file, size=writing.length, sha256=sha256([writing.content]))
        return {"error": None, "file": dataclasses.asdict(written), "generators": order.generators}

    def _published(self, order: _Order, writing: Writing) -> tuple[int, str | None]:
        """Rank 0: once all parts are there, make the snapshot visible, and take old ones away."""
        parts = []
        for rank in range(self.world):
            part = self.board.wait(f"{order.name}/{rank}", self._closing, PATIENCE)
            if part is None:
                return 0, f"rank {rank} said nothing of its part"
            if part["error"] is not None:
                return 0, str(part["error"])
            parts.append(part)
        files = [File(**part["file"]) for part in parts]
        manifest = Manifest(
            cursor=order.cursor,
            values=order.values,
            generators=[part["generators"] for part in parts],
            files=files,
            chunks=writing.chunks,
            world=self.world,
        )
        try:
            self.storage.publish(order.name, manifest.pack(), {file.name: file.size for file in files})
            for old in self.storage.names()[: -self.keep]:
                self.storage.remove(old)
        except OSError as error:
            return 0, f"it could not be published: {error.strerror or error}"
        return sum(file.size for file in files), None
