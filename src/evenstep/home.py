"""Where a run lives: the folder that its ranks agree on, when it begins and whenever they are started again."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenstep import world
from evenstep.config import Settled, read_yaml
from evenstep.files import RunFiles, locked
from evenstep.ranks import agreed, known
from evenstep.records import record
from evenstep.watch.board import Private, Shared
from evenstep.watch.stopping import Stopped
from evenstep.world import World

STAYS = ("global_batch", "dealt_to")  # what was derived from the number of ranks at launch


_trainings = itertools.count()  # a script that is started again comes to the same one by the same way


@dataclass(frozen=True, kw_only=True)
class Home:
    """What is known of a run's folder as its ranks come together."""

    folder: Path | None
    """None: it has none yet."""
    state: str | None
    """What its record says."""
    kept: Mapping[str, Any]
    """What was settled when the run began, and stays, whoever computes now."""
    leave: Callable[[str], None]
    """Leave word of it for ranks that a launcher such as torchrun starts after these."""
    guarded: bool
    """A process of ours stands above the ranks, and lets nobody else into the folder."""

    def settled(self, config: Settled) -> Settled:
        """The options, with what stays as it was."""
        return dataclasses.replace(config, **self.kept)


def find(folder: Path | None, place: World) -> Home:
    """The run's folder where a rank knows it, or one that was here before has left word of it."""
    guarding = known(folder, place)
    board = Shared(*world.store(), "home") if guarding is None and world.store_stays() else Private()
    word = f"folder of training {next(_trainings)}"

    def look() -> tuple[Path | None, str | None, Mapping[str, Any]]:
        left = board.read(word)
        found = guarding or (Path(left) if left else None)
        files = RunFiles(found) if found else None
        if files is None or not files.record.is_file():
            return found, None, {}
        options = read_yaml(files.config)
        return found, record.read(files)["state"], {name: options[name] for name in STAYS}

    found, state, kept = agreed(look, place)
    return Home(
        folder=found, state=state, kept=kept, leave=functools.partial(board.post, word), guarded=bool(guarding)
    )


@contextlib.contextmanager
def opened(home: Home, make: Callable[[], Path], place: World) -> Iterator[RunFiles]:
    """The run's folder, made if there is none yet, and no one else's for as long as this training takes."""
    if home.state == "stopped" and not home.guarded:
        raise Stopped(f"{home.folder} was asked to stop, and its launcher has started it again")
    files = RunFiles(home.folder or agreed(make, place))
    with locked(files) if place.leads and not home.guarded else contextlib.nullcontext():
        if place.leads:
            home.leave(str(files.folder.resolve()))
        yield files
