"""Finds the newest snapshot that is whole, and says which it passed over, and why."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from evenstep.progress import Progress
from evenstep.ranks import agreed
from evenstep.snapshots.manifest import Damaged, Manifest, sha256, unpack
from evenstep.snapshots.plans import read
from evenstep.snapshots.state import State, set_generators
from evenstep.snapshots.storage import Folder, Storage
from evenstep.world import World


class Witness(Protocol):
    """Who is told what is resumed."""

    def say(self, line: str) -> None:
        """A line for the person who watches."""
        ...

    def resumed(self, progress: Progress, snapshot: str) -> None:
        """The training goes on from a snapshot."""
        ...


class Found(NamedTuple):
    """A snapshot that can be trusted."""

    name: str
    manifest: Manifest


def newest(storage: Storage, say: Callable[[str], None]) -> Found | None:
    """The newest snapshot that is complete and intact."""
    for name in reversed(storage.names()):
        try:
            return Found(name, checked(storage, name))
        except Damaged as error:
            say(f"snapshot {name} is passed over: {error}")
        except OSError as error:
            say(f"snapshot {name} is passed over: {error.strerror or error}")
    return None


def resume(state: State, storage: Folder, place: World, device: torch.device, recorder: Witness) -> Progress:
    """Take over the newest snapshot, if there is one; how far the training has come. Every rank has to ask."""
    if place.leads:
        storage.clean()
    found = agreed(lambda: newest(storage, recorder.say), place)
    if found is None:
        return Progress()
    name, manifest = found
    tensors = state.tensors()
    read(tensors, storage.path / name, manifest, place.size)
    state.take_over(tensors, manifest.values)
    if manifest.world == place.size:  # else each rank's random draws are its own anyway
        set_generators(manifest.generators[place.rank], device)
    progress = Progress(**manifest.cursor["progress"])
    recorder.resumed(progress, name)
    return progress


def checked(storage: Storage, name: str) -> Manifest:
    """A snapshot's manifest, once every file has been compared with it."""
    manifest = unpack(storage.manifest(name))
    if manifest.cursor.get("snapshot") != name:
        raise Damaged("its manifest is that of another snapshot")
    for file in manifest.files:
        size = storage.size(name, file.name)
        if size != file.size:
            raise Damaged(f"{file.name} has {size} bytes instead of {file.size}")
        if sha256(storage.read(name, file.name)) != file.sha256:
            raise Damaged(f"{file.name} does not match its checksum")
    return manifest


def fetch(remote: Storage, name: str, manifest: Manifest, folder: Path) -> None:
    """Copy a snapshot's files here."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in manifest.files:
        with (folder / file.name).open("wb") as target:
            for block in remote.read(name, file.name):
                target.write(block)
