"""Keeps a run elsewhere too, beside the training and behind it: what is there is whole, and a little older.

Each rank sends what it wrote, in a thread of its own. Rank 0 says which snapshot is next, always the newest that
there is, and publishes it there when all parts have arrived. What fails is tried again, with the newest by then,
for as long as the training goes on. Nothing waits for it but the training's end, and that not for long.
"""

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from evenstep.files import RunFiles
from evenstep.snapshots.manifest import Damaged
from evenstep.snapshots.records import Records
from evenstep.snapshots.shelf import Shelf
from evenstep.snapshots.storage import Folder, Storage, why
from evenstep.watch.board import Board, Gone
from evenstep.world import World

LOOK = 0.2  # seconds between two looks at the board
TELL = 1.0  # seconds between two signs of getting on
SILENT = 3.0  # seconds of waiting of which nobody has to be told
SMALL = 1 << 16  # bytes that a note may have


@dataclass(frozen=True)
class Pace:
    """In seconds."""

    first: float = 1.0
    """Before what has failed is tried again; then twice as long, and so on."""
    most: float = 60.0
    """The longest of these."""
    end: float = 60.0
    """At the end of the training it is given up when nothing has got on for so long."""


STEADY = Pace()


class Taken(Exception):
    """The place belongs to another run, or to somebody who goes on with this one."""


@dataclass(frozen=True, kw_only=True)
class Sent:
    """How the sending of a snapshot went; of the records alone where there is none."""

    snapshot: str | None
    error: str | None
    seconds: float
    size: int


class Mirror:
    """One rank's part in keeping a run elsewhere."""

    def __init__(
        self,
        files: RunFiles,
        afar: Storage,
        board: Board,
        place: World,
        *,
        owner: Mapping[str, str],
        keep: int,
        pace: Pace = STEADY,
    ) -> None:
        self.afar = afar
        self.records = Records(files, afar, place)
        self.here = Shelf(Folder(files.snapshots))
        self.there = Shelf(afar.within(files.name_of(files.snapshots)))
        self.board = board
        self.place = place
        self.owner = owner
        """The run, and which start of it this is."""
        self.keep = keep
        self.pace = pace
        self.sending: str | None = None
        self.outcomes: deque[Sent] = deque()
        self.taken: Taken | None = None
        self._owned = files.name_of(files.owner)
        self._claimed = False
        self._newest: str | None = None
        self._good: list[str] = []
        self._trouble: str | None = None
        self._moved = time.monotonic()
        self._told = 0.0
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)

    def start(self) -> None:
        """From now on, in the background."""
        self._thread.start()

    def offer(self, snapshot: str) -> None:
        """There is a new one."""
        self._newest = snapshot
        self._wake.set()

    def finish(self, say: Callable[[str], None]) -> str | None:
        """Send what is left, while that gets on; what did not get there, and why. Every rank has to ask."""
        since = self._moved = time.monotonic()
        self._closing.set()
        self._wake.set()
        said = False
        while self._thread.is_alive() and not self._stuck(2 * self.pace.end):  # by itself it gives up before
            self._thread.join(LOOK)
            if not said and time.monotonic() - since > SILENT:
                said = True
                say(f"sending what is left to {self.afar.address}")
        left = [*filter(None, [self._next()]), *self.records.behind]
        if not self.place.leads or (self._trouble is None and not left):
            return None
        return f"{', '.join(left) or 'what other ranks have'} ({self._trouble or 'no answer'})"

    def hold(self) -> None:
        """Make sure that the place is ours: claimed, and by nobody else since; Taken if not."""
        try:
            found = json.loads(self.afar.content(self._owned, SMALL))
        except FileNotFoundError:
            found = None
        except (ValueError, RecursionError):
            found = {}
        match found:
            case None:
                self._claimed = False
            case {"run": run, "session": session} if run == self.owner["run"]:
                if self._claimed and session != self.owner["session"]:
                    host, since = found.get("host"), found.get("since")
                    raise Taken(f"{host!r:.100} goes on with this run since {since!r:.40}")
            case _:
                raise Taken("another run is kept there")
        if not self._claimed and self.place.leads:
            self.afar.write(self._owned, [json.dumps(self.owner).encode()])
            self._claimed = True

    def send_records(self) -> None:
        """Send what this rank has written beside snapshots; OSError, or Taken, where that cannot be."""
        self.hold()
        self.records.send()

    # In the thread

    def _run(self) -> None:
        with contextlib.suppress(Gone):  # the training is over, or rank 0 is gone
            self._lead() if self.place.leads else self._follow()

    def _lead(self) -> None:
        number, delay, over = 0, self.pace.first, False
        while not over:
            closing = self._closing.is_set()
            self.sending = snapshot = self._next()
            if snapshot is None and not closing:
                self._wake.wait()
                self._wake.clear()
                continue
            number += 1
            self._trouble = self._round(number, snapshot)
            over = self.taken is not None or (closing and snapshot is None and not self._trouble)
            if self._trouble and not over:
                over = self._stuck(self.pace.end)
                self._pause(delay)
                delay = min(2 * delay, self.pace.most)
            else:
                delay = self.pace.first
        self._post("target", number=number + 1, over=True)

    def _follow(self) -> None:
        done, signs = 0, None
        while True:
            target = self.board.read(self._name("target"))
            if target is None or target["number"] == done:
                before, signs = signs, self.board.read(self._name("0"))
                if signs != before:  # rank 0 is still at work
                    self._moved = time.monotonic()
                time.sleep(LOOK)
            elif target.get("over"):
                return
            else:
                done = target["number"]
                self._post(str(self.place.rank), number=done, error=self._part(target["snapshot"]))

    def _round(self, number: int, snapshot: str | None) -> str | None:
        """Have a snapshot sent by all ranks; what went wrong."""
        since, size = time.perf_counter(), 0
        try:
            self.hold()
            if snapshot is not None and self._there(snapshot):
                return None
            self._post("target", number=number, snapshot=snapshot)
            errors = [self._part(snapshot), *(self._answer(rank, number) for rank in range(1, self.place.size))]
            error = next(filter(None, errors), None)
            if snapshot is not None and error is None:
                size = self._publish(snapshot)
        except Gone:
            raise
        except Exception as raised:
            error = why(raised)
            self.taken = raised if isinstance(raised, Taken) else None
        self.outcomes.append(Sent(snapshot=snapshot, error=error, seconds=time.perf_counter() - since, size=size))
        return error

    def _there(self, snapshot: str) -> bool:
        """Whether it is there already, since an earlier start; what is like it by name alone is taken away."""
        files = self.here.manifest(snapshot).files
        if snapshot not in self.there.names():
            return False
        with contextlib.suppress(Damaged):
            if self.there.manifest(snapshot).files == files:
                self._good.append(snapshot)
                return True
        self.there.remove(snapshot)
        return False

    def _publish(self, snapshot: str) -> int:
        manifest = self.here.manifest(snapshot)
        self.there.publish(manifest)
        self._good.append(snapshot)
        self._headway()
        self.there.retire(self._good, self.keep)
        return manifest.size

    def _part(self, snapshot: str | None) -> str | None:
        """Send this rank's part of a snapshot, and before it what belongs to it; what went wrong."""
        try:
            self.records.send()
            self._headway()
            if snapshot is not None:
                for file in self.here.manifest(snapshot).files[self.place.rank :: self.place.size]:
                    self.there.put(snapshot, file.name, self._watched(self.here.read(snapshot, file)))
        except Exception as error:  # whatever it is, rank 0 waits for word of it
            return f"rank {self.place.rank}: {why(error)}"
        return None

    def _answer(self, rank: int, number: int) -> str | None:
        """What went wrong with another rank's part."""
        signs = None
        while True:
            before, signs = signs, self.board.read(self._name(str(rank)))
            if signs is not None and signs["number"] == number and "error" in signs:
                answer: str | None = signs["error"]
                return answer
            if signs != before:
                self._moved = time.monotonic()
            if self._stuck(self.pace.end):
                return f"rank {rank}: does not get on"
            time.sleep(LOOK)

    def _next(self) -> str | None:
        """The newest snapshot, unless it is there."""
        return None if self._newest is None or self._newest in self._good else self._newest

    def _watched(self, blocks: Iterable[memoryview]) -> Iterator[memoryview]:
        for block in blocks:
            yield block
            self._headway()

    def _headway(self) -> None:
        """It gets on: whoever waits for that may see it."""
        now = self._moved = time.monotonic()
        if now - self._told > TELL:
            self._told = now
            self._post(str(self.place.rank), number=0, sign=now)

    def _stuck(self, seconds: float) -> bool:
        """Whether, at the end of the training, nothing has got on for so long."""
        return self._closing.is_set() and time.monotonic() - self._moved > seconds

    def _pause(self, seconds: float) -> None:
        if self._closing.is_set():
            time.sleep(min(seconds, self.pace.first))
        else:
            self._closing.wait(seconds)

    def _name(self, note: str) -> str:
        return f"{self.owner['session']}/mirror/{note}"

    def _post(self, note: str, **facts: Any) -> None:
        self.board.post(self._name(note), facts)
