"""Where a run is kept: in its folder, which all ranks may see or not, and where `--to` says."""

import contextlib
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from evenstep import world
from evenstep.errors import UserError
from evenstep.files import RunFiles
from evenstep.ranks import gathered
from evenstep.snapshots.manifest import Manifest
from evenstep.snapshots.mirror import Mirror, Taken
from evenstep.snapshots.records import fetch
from evenstep.snapshots.remote import Unreachable, make_sure, storage_at
from evenstep.snapshots.restore import Places, Sound, newest
from evenstep.snapshots.shelf import Shelf
from evenstep.snapshots.storage import Folder, Storage, why
from evenstep.watch.board import Board
from evenstep.world import World

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Home:
    """The places of a run, as a rank sees them."""

    files: RunFiles
    place: World
    afar: Storage | None
    shared: bool
    """All ranks see the run's folder."""

    @property
    def keeps(self) -> bool:
        """Whether a snapshot can be whole: all ranks see the folder, or there is a place that all reach."""
        return self.shared or self.afar is not None

    @property
    def folder(self) -> Folder:
        """Of the snapshots that lie here."""
        return Folder(self.files.snapshots)

    @property
    def shelf(self) -> Shelf:
        """Where snapshots are kept first: here, unless only what is elsewhere can be complete."""
        if self.shared or self.afar is None:
            return Shelf(self.folder)
        return self._shelf_afar(self.afar)

    def _shelf_afar(self, afar: Storage) -> Shelf:
        return Shelf(afar.within(self.files.name_of(self.files.snapshots)))

    def newest(self, sound: Sound, say: Say) -> Manifest | None:
        """The newest snapshot that is whole; where it comes from afar, with the records. Every rank has to ask."""
        if not self.keeps:
            return None
        places = Places(
            folder=self.folder,
            afar=self._shelf_afar(self.afar) if self.afar else None,
            shared=self.shared,
            asked_afar=not world.restarted(),
            records=self._fetch_records,
        )
        return newest(places, self.place, sound, say)

    def _fetch_records(self) -> None:
        if self.afar is not None:
            fetch(self.files, self.afar, self.place)

    @contextlib.contextmanager
    def mirrored(
        self, board: Board, found: Manifest | None, owner: Mapping[str, str], *, keep: int, fresh: bool, say: Say
    ) -> Iterator[Mirror | None]:
        """Meanwhile, what the run keeps here is kept where --to says too; in the end, as far as that goes on."""
        if self.afar is None:
            yield None
            return
        mirror = Mirror(self.files, self.afar, board, self.place, owner=owner, keep=keep)
        if self.place.leads and (fresh or not self.shared):
            self._claim(mirror)
        if found is not None and self.shared:
            mirror.offer(found.snapshot)
        mirror.start()
        yield mirror
        if missing := mirror.finish(say):
            say(f"NOT all of the run got to {self.afar.address}: {missing}; it is in {self.files.folder}")

    def _claim(self, mirror: Mirror) -> None:
        try:
            mirror.hold()
        except Taken as error:
            raise UserError(f"{mirror.afar.address}: {error}; name another place") from None
        except OSError as error:
            raise UserError(f"{mirror.afar.address}: {why(error)}") from None


def at_home(files: RunFiles, to: str | None, place: World) -> Home:
    """Where a run is kept. Every rank has to ask."""
    shared = place.local_size == place.size or _all_see(files, place)
    afar = storage_at(to).within(files.folder.name) if to else None
    return Home(files=files, place=place, afar=afar, shared=shared)


def try_out(to: str | None, place: World, say: Say, *, fresh: bool) -> None:
    """Find out, on each host, whether a run can be kept there: before the first step, not after the first hour."""
    if to is None or place.local_rank or world.restarted():
        return
    try:
        make_sure(storage_at(to))
    except Unreachable as error:
        if fresh:
            raise
        say(f"{error} Until it can, the run is kept here alone.")


def _all_see(files: RunFiles, place: World) -> bool:
    """Whether the folder that rank 0 sees is the one that the others see."""
    sign = files.folder / f".seen-{gathered(uuid.uuid4().hex, place)[0]}"
    if place.leads:
        sign.touch()
    gathered(None, place)
    seen = all(gathered(sign.exists(), place))
    if place.leads:
        sign.unlink()
    return seen
