"""Finds the newest snapshot that is whole, here or elsewhere, and says which it passed over, and why."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from evenstep.errors import UserError
from evenstep.ranks import agreed, gathered
from evenstep.snapshots.manifest import Damaged, File, Manifest
from evenstep.snapshots.plans import read
from evenstep.snapshots.shelf import Shelf
from evenstep.snapshots.state import State
from evenstep.snapshots.storage import Folder, why
from evenstep.world import World

PAUSE = 2.0  # seconds before what lies elsewhere is asked for again
PATIENT_TRIES = 15  # where there is no other hope


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where snapshots may be."""

    folder: Folder
    afar: Shelf | None
    shared: bool
    """All ranks see the same folder; else only what lies afar is complete."""
    asked_afar: bool
    """Whether there may be newer ones than the newest here."""
    records: Callable[[], None]
    """Fetches what belongs to the snapshots afar."""

    @property
    def here(self) -> Shelf:
        return Shelf(self.folder)


class Trouble(NamedTuple):
    """Why a snapshot is not taken."""

    why: str
    damaged: bool
    """Else it could not be read, and may be good."""


Sound = Callable[[Manifest], object]
"""Raises Damaged where a manifest says what cannot be."""


def newest(places: Places, place: World, sound: Sound, say: Callable[[str], None]) -> Manifest | None:
    """The newest snapshot that is complete and intact, fetched where it lies afar. Every rank has to ask.

    None where there is none, or none is whole; a UserError where one could not be read, and may be good.
    """
    member, members = (place.rank, place.size) if places.shared else (place.local_rank, place.local_size)
    if member == 0:
        _clean(places.here, say)
    candidates = _Candidates(places, sound, say)
    while (candidate := agreed(candidates.next, place)) is not None:
        manifest, far = candidate
        share = manifest.files[member::members]
        steps: list[Callable[[], None]] = [partial(_look_through, places, manifest, share)]
        if far:  # it counts as one of those here when all that belongs to it is here
            publish = partial(places.here.publish, manifest) if member == 0 else lambda: None
            steps = [partial(_fetch, places, manifest, share), places.records, publish]
        troubles = _troubles(steps, place)
        if not troubles:
            return manifest
        candidates.pass_over(manifest.snapshot, far, troubles[0])
        if far and member == 0:
            _take_away(places.here, manifest.snapshot)
    return None


def take_over(state: State, folder: Folder, manifest: Manifest, world: int) -> None:
    """Go on from a snapshot. Every rank has to ask."""
    try:
        tensors = state.room(manifest)
        read(tensors, folder.path / manifest.snapshot, manifest, world)
        state.take_over(tensors, manifest)
    except Damaged as error:
        raise UserError(f"snapshot {manifest.snapshot} is refused: {error}") from None


class _Candidates:
    """What rank 0 proposes: the newest first, and of the same here rather than afar."""

    def __init__(self, places: Places, sound: Sound, say: Callable[[str], None]) -> None:
        self.places = places
        self.sound = sound
        self.say = say
        self._tried: set[tuple[str, bool]] = set()
        self._afar: set[tuple[str, bool]] | None = None
        self._unread = ""

    def next(self) -> tuple[Manifest, bool] | None:
        """A snapshot's manifest, and whether it lies afar; None where there are no more."""
        while left := self._there() - self._tried:
            name, here = max((name, not far) for name, far in left)
            self._tried.add((name, not here))
            try:
                return self._manifest(name, not here), not here
            except (Damaged, OSError) as error:
                self.pass_over(name, not here, _why(error))
        if self._unread:
            raise UserError(f"no snapshot could be read, and some may be good: {self._unread}; see to that first")
        return None

    def pass_over(self, name: str, far: bool, trouble: Trouble) -> None:
        """Say that a snapshot is not taken."""
        where = f" in {self.places.afar.storage.address}" if far and self.places.afar else ""
        self.say(f"snapshot {name}{where} is passed over: {trouble.why}")
        if not trouble.damaged:
            self._unread = trouble.why

    def _there(self) -> set[tuple[str, bool]]:
        near = {(name, False) for name in self.places.here.names()} if self.places.shared else set()
        if self._afar is None and (self.places.asked_afar or self._tried or not near):
            self._afar = self._listed(tries=1 if near else PATIENT_TRIES)
        return near | (self._afar or set())

    def _listed(self, tries: int) -> set[tuple[str, bool]]:
        if self.places.afar is None:
            return set()
        for left in reversed(range(tries)):
            try:
                return {(name, True) for name in self.places.afar.names()}
            except OSError as error:
                self._unread = f"{self.places.afar.storage.address}: {why(error)}"
                self.say(f"snapshots cannot be looked for in {self._unread}{'; once more' if left else ''}")
            time.sleep(PAUSE if left else 0)
        return set()

    def _manifest(self, name: str, far: bool) -> Manifest:
        shelf = self.places.afar if far and self.places.afar else self.places.here
        manifest = shelf.manifest(name)
        self.sound(manifest)
        return manifest


def _troubles(steps: Sequence[Callable[[], None]], place: World) -> list[Trouble]:
    """Take steps, all ranks together, until one goes wrong anywhere."""
    for step in steps:
        own = None
        try:
            step()
        except (Damaged, OSError) as error:
            own = _why(error)
        if found := [trouble for trouble in gathered(own, place) if trouble is not None]:
            return found
    return []


def _look_through(places: Places, manifest: Manifest, files: Sequence[File]) -> None:
    for file in files:
        for _ in places.here.read(manifest.snapshot, file):
            pass


def _fetch(places: Places, manifest: Manifest, files: Sequence[File]) -> None:
    """Bring files here; a network may fail once."""
    assert places.afar is not None
    for file in files:
        try:
            places.here.put(manifest.snapshot, file.name, places.afar.read(manifest.snapshot, file))
        except OSError:
            time.sleep(PAUSE)
            places.here.put(manifest.snapshot, file.name, places.afar.read(manifest.snapshot, file))


def _clean(here: Shelf, say: Callable[[str], None]) -> None:
    """Take away what was being written, or taken away, when the training ended."""
    try:
        unfinished = here.unfinished()
    except OSError as error:
        raise UserError(f"the snapshots in {here.storage.address} cannot be looked at: {why(error)}") from None
    for name in unfinished:
        say(f"snapshot {name} is passed over: it was not finished; its parts are taken away")
        _take_away(here, name)


def _take_away(here: Shelf, name: str) -> None:
    with contextlib.suppress(OSError):  # it takes room, and is in nobody's way
        here.remove(name)


def _why(error: Exception) -> Trouble:
    return Trouble(str(error), True) if isinstance(error, Damaged) else Trouble(why(error), False)
