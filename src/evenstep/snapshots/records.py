"""What a rank writes of a run beside snapshots, kept elsewhere too: sent where it has changed."""

import re
from collections.abc import Iterable
from pathlib import Path

from evenstep.files import RunFiles
from evenstep.snapshots.journal import Journal
from evenstep.snapshots.storage import Folder, Storage
from evenstep.world import World

EVENTS = re.compile(r"events/rank-(\d{1,9})/", flags=re.ASCII)


class Records:
    """The events of this rank; rank 0 also has what is common to all."""

    def __init__(self, files: RunFiles, afar: Storage, place: World) -> None:
        self.files = files
        self.afar = afar
        self.journal = journal(files, afar, place.rank)
        common = [files.config, files.weights("best"), files.weights("last"), files.record]
        self._common = common if place.leads else []
        self._sent: dict[Path, tuple[int, ...]] = {}

    def send(self) -> None:
        """What has changed since the last time."""
        self.journal.send()
        for path in self._changed():
            seen = _seen(path)
            self.afar.write(self.files.name_of(path), Folder(path.parent).read(path.name))
            self._sent[path] = seen

    @property
    def behind(self) -> list[str]:
        """What is not there as it is here."""
        found = [self.files.name_of(path) for path in self._changed()]
        return [*found, *[self.files.name_of(self.journal.path)] * self.journal.behind]

    def _changed(self) -> list[Path]:
        return [path for path in self._common if path.is_file() and self._sent.get(path) != _seen(path)]


def journal(files: RunFiles, afar: Storage, rank: int) -> Journal:
    """A rank's events, and the pieces of them."""
    path = files.events(rank)
    return Journal(path, afar.within(files.name_of(path.with_suffix(""))))


def _seen(path: Path) -> tuple[int, ...]:
    """What changes with a file."""
    found = path.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino


def fetch(files: RunFiles, afar: Storage, place: World) -> None:
    """Make the records here what they are there: this rank's; on rank 0, also those that no rank of now writes."""
    journal(files, afar, place.rank).fetch()
    if not place.leads:
        return
    there = afar.files()
    for rank in ranks_of(there):
        if rank >= place.size:
            journal(files, afar, rank).fetch()
    for path in (files.weights("best"), *(path for path in (files.config, files.record) if not path.is_file())):
        if (name := files.name_of(path)) in there:
            Folder(files.folder).write(name, afar.read(name))


def ranks_of(there: Iterable[str]) -> list[int]:
    """The ranks of whose events there are pieces."""
    found = {int(match[1]) for path in there if (match := EVENTS.match(path))}
    return sorted(found)
