"""Takes snapshots while the training goes on.

A rank stops only for the copying of its part of the state into memory. A thread writes the copy and reports;
rank 0 makes the snapshot visible once all ranks have reported, and only then takes old ones away.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from evenstep.snapshots.manifest import File, Manifest, sha256
from evenstep.snapshots.mirror import Mirror
from evenstep.snapshots.plans import Writing, shapes
from evenstep.snapshots.shelf import Shelf, name_of
from evenstep.snapshots.state import State
from evenstep.snapshots.storage import in_blocks, why
from evenstep.watch.board import Board, Gone
from evenstep.world import World

PATIENCE = 600.0  # seconds that rank 0 waits for the others' parts
POLLS = 0.02, 0.5  # seconds between two looks at the board: at first, and after a while


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
    left: str | None
    """Why older ones could not be taken away."""


NOTHING: Mapping[str, Any] = {"size": 0, "error": None, "left": None}


@dataclass(frozen=True, kw_only=True)
class _Order:
    step: int
    progress: Mapping[str, Any]
    values: Mapping[str, Any]
    since: float
    stalled: float

    @property
    def name(self) -> str:
        return name_of(self.step)


@dataclass(frozen=True, kw_only=True)
class Saving:
    """How the snapshots of a training are taken."""

    shelf: Shelf
    keep: int
    run: Mapping[str, Any]
    """Whose training it is: kept with each."""
    session: str
    """What no other start of the training has; notes of earlier ones may still hang on the board."""
    records: Callable[[], None]
    """Makes sure, before a snapshot counts, that the records up to it are kept; OSError where they are not."""
    mirror: Mirror | None
    """Has to hear of each snapshot that there is."""


class Saver:
    """One rank's part in the taking of snapshots."""

    def __init__(self, state: State, saving: Saving, board: Board, place: World, *, good: list[str]) -> None:
        self.state = state
        self.saving = saving
        self.board = board
        self.rank = place.rank
        self.world = place.size
        self.good = good
        """Those of which this start of the training knows that they are whole."""
        self.outcomes: deque[Saved] = deque()
        self._writing: Writing | None = None
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether one is being written."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, step: int, progress: Mapping[str, Any], since: float) -> None:
        """Snapshot the state as it is after so many steps; returns when it is copied. Every rank has to ask.

        The training has stood still for it since `since`.
        """
        self.wait()
        tensors = self.state.tensors()
        if self._writing is None or self._writing.shapes != shapes(tensors):
            self._writing = Writing(tensors, self.rank, self.world)
        self._writing.stage(tensors)
        values = self.state.values()
        stalled = time.perf_counter() - since
        order = _Order(step=step, progress=progress, values=values, since=since, stalled=stalled)
        self._thread = threading.Thread(target=self._run, args=(order, self._writing), name="snapshot")
        self._thread.start()

    def wait(self) -> None:
        """Until what was begun is done."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    # In the thread

    def _run(self, order: _Order, writing: Writing) -> None:
        try:
            self._post(f"part/{self.rank}", order.name, self._written(order.name, writing))
            if self.rank == 0:
                self._post("done", order.name, self._published(order, writing))
            done = self._note("done", order.name) or {**NOTHING, "error": "rank 0 said nothing of it"}
        except Gone:
            done = {**NOTHING, "error": "the ranks have parted"}
        seconds = time.perf_counter() - order.since
        self.outcomes.append(
            Saved(snapshot=order.name, step=order.step, seconds=seconds, stalled=order.stalled, **done)
        )

    def _written(self, name: str, writing: Writing) -> dict[str, Any]:
        """Write this rank's file; what rank 0 has to know of it."""
        file = f"rank-{self.rank}.bin"
        try:
            self.saving.records()
            self.saving.shelf.put(name, file, in_blocks(writing.content))
            return {"error": None, "file": File(file, len(writing.content), sha256([writing.content]))}
        except Exception as error:  # whatever it is, the others wait for word of it
            return {"error": f"rank {self.rank} could not write its part: {why(error)}"}

    def _published(self, order: _Order, writing: Writing) -> dict[str, Any]:
        """Rank 0: once all parts are there, make the snapshot visible, and take old ones away."""
        parts = [self._note(f"part/{rank}", order.name) for rank in range(self.world)]
        try:
            manifest = Manifest(
                snapshot=order.name,
                world=self.world,
                progress=order.progress,
                run=self.saving.run,
                values=order.values,
                files=[_file(rank, part) for rank, part in enumerate(parts)],
                tensors=writing.tensors,
            )
            self.saving.shelf.publish(manifest)
        except Exception as error:
            with contextlib.suppress(OSError):  # a part of one takes room from the next
                self.saving.shelf.remove(order.name)
            return {**NOTHING, "error": why(error)}
        self.good.append(order.name)
        if self.saving.mirror is not None:
            self.saving.mirror.offer(order.name)
        return {**NOTHING, "size": manifest.size, "left": self._retired()}

    def _retired(self) -> str | None:
        """Take old ones away; why not, if that cannot be done."""
        spare = self.saving.mirror.sending if self.saving.mirror is not None else None
        try:
            self.saving.shelf.retire(self.good, self.saving.keep, spare)
        except OSError as error:
            return why(error)
        return None

    def _post(self, name: str, snapshot: str, note: Mapping[str, Any]) -> None:
        self.board.post(f"{self.saving.session}/{name}", {"of": snapshot, **note})

    def _note(self, name: str, snapshot: str) -> dict[str, Any] | None:
        """What is said of a snapshot, as soon as it is; None where nobody says anything for a long time.

        Names are used again for the next snapshot, lest the board fill up.
        """
        pause, end = POLLS[0], time.monotonic() + PATIENCE
        while time.monotonic() < end:
            note = self.board.read(f"{self.saving.session}/{name}")
            if note is not None and note.pop("of") == snapshot:
                found: dict[str, Any] = note
                return found
            time.sleep(pause)
            pause = min(1.5 * pause, POLLS[1])
        return None


def _file(rank: int, part: Mapping[str, Any] | None) -> File:
    if part is None:
        raise OSError(f"rank {rank} said nothing of its part")
    if part["error"] is not None:
        raise OSError(part["error"])
    return File(*part["file"])
