"""Whatever happens to a snapshot's files, and whenever its writing is broken off: the newest good one is used."""

import functools
import importlib
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

import buckets
from commands import PRELOADED
from evenstep import leash
from evenstep.progress import Progress
from evenstep.snapshots.remote import storage_at
from evenstep.snapshots.restore import Places, newest
from evenstep.snapshots.shelf import MANIFEST, Shelf, name_of
from evenstep.snapshots.storage import BLOCK, Blocks, Folder, Storage
from evenstep.world import World, alone
from on_ranks import outcomes
from states import files_of, shelf_of, small

GOOD, NEWEST = name_of(2), name_of(3)


def found(shelf: Shelf) -> tuple[str | None, list[str]]:
    """The snapshot that a training would go on from, and what is said of others."""
    assert isinstance(shelf.storage, Folder)
    said: list[str] = []
    places = Places(folder=shelf.storage, afar=None, shared=True, asked_afar=True, records=lambda: None)
    manifest = newest(places, alone(), lambda manifest: Progress.of(manifest.progress), said.append)
    return (None if manifest is None else manifest.snapshot), said


def write_three(folder: Path, place: World) -> None:
    training = small("fsdp", place)
    saver = training.saver(shelf_of(folder))
    for _ in range(3):
        training.steps(1)
        assert training.save(saver).error is None


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three snapshots of two ranks."""
    folder = tmp_path_factory.mktemp("whole")
    assert not outcomes({"write": functools.partial(write_three, folder)}, 2)["write"]
    assert found(shelf_of(folder)) == (NEWEST, [])
    return folder


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Iterator[Callable[[], Path]]:
    """A fresh copy of them."""

    def copy() -> Path:
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        return Path(shutil.copytree(whole, tmp_path / "copy")) / "snapshots"

    yield copy


def passed_over(folder: Path, why: str = "") -> None:
    name, said = found(Shelf(Folder(folder)))
    assert name == GOOD, f"{name} instead of {GOOD} was found; {said}"
    assert len(said) == 1
    assert said[0].startswith(f"snapshot {NEWEST} is passed over: ")
    assert why in said[0]


FILES = ("rank-0.bin", "rank-1.bin", MANIFEST)


@pytest.mark.parametrize("file", FILES)
def test_a_file_cut_short_anywhere(file: str, copied: Callable[[], Path]) -> None:
    folder = copied()
    target = folder / NEWEST / file
    content = target.read_bytes()
    for part in range(20):
        target.write_bytes(content[: len(content) * part // 20])
        passed_over(folder)
    target.write_bytes(content[:-1])
    passed_over(folder)
    target.write_bytes(content + b"\0")
    passed_over(folder)


def test_bits_that_flip(copied: Callable[[], Path]) -> None:
    folder, draw = copied(), random.Random(7)
    contents = {file: (folder / NEWEST / file).read_bytes() for file in FILES}
    for turn in range(500):
        file = FILES[turn % len(FILES)]  # a manifest is small, and would hardly ever be hit
        place, bit = draw.randrange(len(contents[file])), draw.randrange(8)
        flipped = bytearray(contents[file])
        flipped[place] ^= 1 << bit
        (folder / NEWEST / file).write_bytes(flipped)
        passed_over(folder, "does not match")
        (folder / NEWEST / file).write_bytes(contents[file])
    assert found(Shelf(Folder(folder))) == (NEWEST, [])


@pytest.mark.parametrize("file", FILES)
def test_a_file_that_is_gone(file: str, copied: Callable[[], Path]) -> None:
    folder = copied()
    (folder / NEWEST / file).unlink()
    passed_over(folder, "its parts are taken away" if file == MANIFEST else f"{file} is not there")
    assert (folder / NEWEST).exists() == (file != MANIFEST), "what nobody can use any more takes no room"


@pytest.mark.parametrize("file", FILES)
def test_a_file_of_another_snapshot(file: str, copied: Callable[[], Path]) -> None:
    folder = copied()
    shutil.copyfile(folder / GOOD / file, folder / NEWEST / file)
    passed_over(folder)


def test_files_that_changed_places(copied: Callable[[], Path]) -> None:
    folder = copied()
    one, other, aside = (folder / NEWEST / name for name in ("rank-0.bin", "rank-1.bin", "aside"))
    one.rename(aside)
    other.rename(one)
    aside.rename(other)
    passed_over(folder)


def test_snapshots_that_changed_names(copied: Callable[[], Path]) -> None:
    folder = copied()
    (folder / NEWEST).rename(folder / "aside")
    (folder / GOOD).rename(folder / NEWEST)
    (folder / "aside").rename(folder / GOOD)
    name, said = found(Shelf(Folder(folder)))
    assert name == name_of(1)
    assert said == [
        f"snapshot {NEWEST} is passed over: its manifest is that of '{GOOD}'",
        f"snapshot {GOOD} is passed over: its manifest is that of '{NEWEST}'",
    ]


def test_what_is_no_snapshot_is_left_alone(copied: Callable[[], Path]) -> None:
    folder = copied()
    for name in ("step-4", "step-00000000000x", "notes", ".hidden", "step-000000000009.old"):
        (folder / name).mkdir()
        (folder / name / MANIFEST).write_text("{}")
    assert found(Shelf(Folder(folder))) == (NEWEST, [])
    assert (folder / "notes" / MANIFEST).exists()


def test_where_none_is_whole_each_is_named(copied: Callable[[], Path]) -> None:
    folder = copied()
    for path in folder.glob("*/rank-1.bin"):
        path.write_bytes(b"")
    name, said = found(Shelf(Folder(folder)))
    assert name is None
    assert [line.split()[1] for line in said] == [name_of(3), name_of(2), name_of(1)]


# What may be taken away


def test_a_good_one_stays_until_enough_newer_ones_are_known_to_be_good(copied: Callable[[], Path]) -> None:
    """Two damaged ones are newer, and do not count."""
    folder = copied()
    for name in (GOOD, NEWEST):
        (folder / name / "rank-0.bin").write_bytes(b"")
    run = folder.parent
    training = small("one", seed=9)
    manifest, _ = training.resume(run)
    assert manifest is not None and manifest.snapshot == name_of(1)
    saver = training.saver(shelf_of(run), keep=2)
    saver.good.append(manifest.snapshot)
    training.steps(2)
    left = []
    for _ in range(2):
        training.steps(1)
        assert training.save(saver).error is None
        left.append(shelf_of(run).names())
    assert left[0] == [name_of(1), GOOD, NEWEST, name_of(4)]
    assert left[1] == [name_of(4), name_of(5)]


# A process that dies at any stage of the writing


class Dying(Storage):
    """Hands on to another storage, and kills the process at one of the stages of what it is asked."""

    def __init__(self, storage: Storage, last: int) -> None:
        self.storage = storage
        self.address = storage.address
        self.left = last

    def stage(self) -> None:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1

    def files(self) -> dict[str, int]:
        return self.storage.files()

    def read(self, path: str) -> Iterator[memoryview]:
        return self.storage.read(path)

    def write(self, path: str, blocks: Blocks) -> None:
        self.stage()
        self.storage.write(path, self.staged(blocks))
        self.stage()

    def staged(self, blocks: Blocks) -> Iterator[bytes | memoryview]:
        for block in blocks:
            yield block[: len(block) // 2]
            self.stage()
            yield block[len(block) // 2 :]

    def remove(self, path: str) -> None:
        self.stage()
        self.storage.remove(path)
        self.stage()

    def within(self, folder: str) -> Storage:
        raise NotImplementedError(folder)


SAVES = 2


def save_until_death(storage: Storage, acknowledged: Path) -> None:
    """Several snapshots, of which one is kept: what is acknowledged is noted."""
    training = small("one")
    saver = training.saver(Shelf(storage), keep=1)
    for _ in range(SAVES):
        training.steps(1)
        assert training.save(saver).error is None
        with acknowledged.open("a") as file:
            file.write(f"{training.number}\n")


def die_everywhere(address: str, variables: Mapping[str, str], folder: Path) -> None:
    """In a process of its own, from which one is forked for each stage; the last of them lives."""
    torch.set_num_threads(1)
    os.environ.update(variables)
    importlib.import_module("evenstep.snapshots.s3")  # once for all
    for stage in range(1000):
        pid = os.fork()
        if pid == 0:
            storage = storage_at(address).within(str(stage))
            save_until_death(Dying(storage, stage), folder / f"{stage}.acknowledged")
            os._exit(0)
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if ended != -signal.SIGKILL:
            assert ended == 0, "it failed, instead of being killed"
            (folder / "stages").write_text(str(stage))
            return


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_killed_at_any_stage(
    kind: str, request: pytest.FixtureRequest, server: buckets.Server, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    address = str(kept) if kind == "folder" else request.getfixturevalue("bucket")
    variables = buckets.variables(server.endpoint)
    leash.start_forkserver(PRELOADED)
    child = get_context("forkserver").Process(target=die_everywhere, args=(address, variables, tmp_path))
    child.start()
    child.join(120)
    assert child.exitcode == 0
    stages = int((tmp_path / "stages").read_text())
    assert stages == SAVES * (2 + 2) + SAVES * 2 + (SAVES - 1) * 2 * 2, "two files are written, or taken away"
    afar = storage_at(address)
    for stage in range(stages + 1):
        seen = tmp_path / f"{stage}.acknowledged"
        last = int(seen.read_text().split()[-1]) if seen.exists() else 0
        here, there = Folder(tmp_path / "here" / str(stage)), afar.within(str(stage))
        for path in there.files():
            here.write(path, there.read(path))
        name, said = found(Shelf(here))
        number = 0 if name is None else int(name.removeprefix("step-"))
        assert number >= last, f"killed at stage {stage}: {name} is found, {last} was acknowledged; {said}"
        assert number in (last, last + 1)
        if name is not None:
            again = small("one", seed=9)
            shutil.copytree(here.path, tmp_path / "loaded" / str(stage) / "snapshots")
            again.resume(tmp_path / "loaded" / str(stage))
            assert again.number == number


def test_stages_cover_a_write_from_its_beginning_to_its_end(tmp_path: Path) -> None:
    """Or else surviving them would prove little."""
    dying = Dying(Folder(tmp_path), 1000)
    dying.write("a", [bytes(BLOCK), bytes(10)])
    dying.remove("a")
    assert dying.left == 1000 - 4 - 2
    assert list(files_of(tmp_path)) == []
