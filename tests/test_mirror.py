"""What is kept elsewhere is whole, comes behind the training, and holds nothing up."""

import contextlib
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.files import RunFiles
from evenstep.snapshots.journal import Journal
from evenstep.snapshots.mirror import Mirror, Pace, Sent
from evenstep.snapshots.records import Records, fetch
from evenstep.snapshots.shelf import MANIFEST, Shelf
from evenstep.snapshots.storage import Blocks, Folder, Storage
from evenstep.watch.board import Private
from evenstep.world import alone
from states import Small, shelf_of, small

QUICK = Pace(first=0.01, most=0.05, end=0.5)
WITHIN = 30.0  # seconds


class Odd(Storage):
    """Hands on to a folder, notes in which order files come, and does what it is told to."""

    def __init__(self, path: Path) -> None:
        self.folder = Folder(path)
        self.address = "odd://place"
        self.written: list[str] = []
        self.trouble: Callable[[str], None] = lambda _: None
        self._inside = ""

    def files(self) -> dict[str, int]:
        self.trouble("")
        return self.folder.within(self._inside).files()

    def read(self, path: str) -> Iterator[memoryview]:
        self.trouble("")
        return self.folder.within(self._inside).read(path)

    def write(self, path: str, blocks: Blocks) -> None:
        self.trouble(f"{self._inside}{path}")
        self.folder.within(self._inside).write(path, blocks)
        self.written.append(f"{self._inside}{path}")

    def remove(self, path: str) -> None:
        self.folder.within(self._inside).remove(path)

    def within(self, folder: str) -> "Odd":
        part = Odd(self.folder.path)
        part.written, part._inside = self.written, f"{self._inside}{folder}/"
        part.trouble = lambda path: self.trouble(path)
        return part


class Lab:
    """A run's folder, a training in it, and a place where it is kept too."""

    def __init__(self, folder: Path, run: str = "run", session: str = "first", pace: Pace = QUICK) -> None:
        self.files = RunFiles(folder / "here")
        self.afar = Odd(folder / "afar")
        self.afar.folder.path.mkdir(exist_ok=True)
        for path in (self.files.events(0), self.files.weights("best")):
            path.parent.mkdir(parents=True, exist_ok=True)
        owner = {"run": run, "session": session, "host": "here", "since": "now"}
        self.mirror = Mirror(self.files, self.afar, Private(), alone(), owner=owner, keep=2, pace=pace)
        self.there = Shelf(self.afar.folder.within("snapshots"))
        self.training: Small = small("one")
        self.saver = self.training.saver(shelf_of(self.files.folder), keep=2, mirror=self.mirror)
        self.said: list[str] = []

    def snapshot(self) -> str:
        """The next one, with all that belongs to it."""
        self.training.steps(1)
        with self.files.events(0).open("a") as file:
            file.write(f'{{"step": {self.training.number}}}\n')
        self.files.weights("best").write_text(f"of step {self.training.number}")
        saved = self.training.save(self.saver)
        assert saved.error is None
        return saved.snapshot

    def finish(self) -> str | None:
        return self.mirror.finish(self.said.append)

    def sent(self, count: int = 1) -> list[Sent]:
        """The next outcomes."""
        found: list[Sent] = []
        end = time.monotonic() + WITHIN
        while len(found) < count:
            assert time.monotonic() < end, f"only {found} within {WITHIN} s"
            if self.mirror.outcomes:
                found.append(self.mirror.outcomes.popleft())
            else:
                time.sleep(0.01)
        return found


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    found = Lab(tmp_path)
    yield found
    found.afar.trouble = lambda _: None
    with contextlib.suppress(RuntimeError):  # it was never started
        found.finish()


def away(path: str) -> None:
    raise OSError(f"{path} cannot be written: nobody is there")


def test_the_manifest_comes_last_and_what_belongs_to_it_first(lab: Lab) -> None:
    lab.mirror.start()
    first = lab.snapshot()
    assert [sent.error for sent in lab.sent()] == [None]
    second = lab.snapshot()
    assert [sent.snapshot for sent in lab.sent()] == [second]
    assert lab.finish() is None
    order = [path for path in lab.afar.written if not path.endswith("owner.json")]
    for name in (first, second):
        manifest = order.index(f"snapshots/{name}/{MANIFEST}")
        before = order[:manifest]
        assert f"snapshots/{name}/rank-0.bin" in before
        assert sum(path.startswith("events/rank-0/") for path in before) == int(name[-1])
        assert before.count("weights/best.safetensors") == int(name[-1])
    assert lab.there.names() == [first, second]


def test_what_is_there_is_what_is_here(lab: Lab, tmp_path: Path) -> None:
    lab.mirror.start()
    lab.snapshot()
    lab.files.config.write_text("config")
    lab.files.record.write_text("record")
    assert lab.finish() is None
    again = RunFiles(tmp_path / "again")
    fetch(again, lab.afar, alone())
    for path in ("config", "record"):
        assert getattr(again, path).read_text() == path
    assert again.events(0).read_bytes() == lab.files.events(0).read_bytes()
    assert again.weights("best").read_text() == "of step 1"
    shutil.copytree(lab.there.storage.path, again.snapshots)  # type: ignore[attr-defined]
    resumed = small("one", seed=9)
    found, said = resumed.resume(again.folder)
    assert found is not None and not said
    assert resumed.steps(1) == lab.training.steps(1)


def test_while_a_place_is_away_the_training_goes_on_and_then_the_newest_counts(lab: Lab) -> None:
    lab.afar.trouble = away
    lab.mirror.start()
    names = [lab.snapshot() for _ in range(4)]
    first = lab.sent(3)
    assert all(sent.error and "nobody is there" in sent.error for sent in first)
    assert shelf_of(lab.files.folder).names()[-2:] == names[-2:], "those here are kept as ever"
    lab.afar.trouble = lambda _: None
    while lab.sent()[0].error:
        pass
    assert lab.finish() is None
    assert lab.there.names() == names[-1:], "those in between were passed over"


def test_a_slow_place_holds_up_nothing_and_what_it_is_sent_stays(lab: Lab) -> None:
    go_on, begun = threading.Event(), threading.Event()

    def slow(path: str) -> None:
        if path.endswith(".bin"):
            begun.set()
            assert go_on.wait(WITHIN)

    lab.afar.trouble = slow
    lab.mirror.start()
    first = lab.snapshot()
    assert begun.wait(WITHIN)
    others = [lab.snapshot() for _ in range(4)]
    assert shelf_of(lab.files.folder).names() == [first, *others[-2:]], "what is being sent is not taken away"
    go_on.set()
    assert [sent.snapshot for sent in lab.sent(2)] == [first, others[-1]], "and the next one is the newest"
    lab.snapshot()
    assert first not in shelf_of(lab.files.folder).names()


def test_old_ones_go_there_too(lab: Lab) -> None:
    lab.mirror.start()
    names = []
    for _ in range(4):
        names.append(lab.snapshot())
        assert lab.sent()[0].error is None
    assert lab.there.names() == names[-2:]
    assert {path.partition("/")[0] for path in lab.there.storage.files()} == set(names[-2:])


def test_at_the_end_it_waits_as_long_as_something_gets_on(lab: Lab) -> None:
    tries = iter(range(5))

    def slowly(_: str) -> None:
        if next(tries, None) is not None:
            time.sleep(0.8 * QUICK.end)

    lab.afar.trouble = slowly
    lab.mirror.start()
    name = lab.snapshot()
    assert lab.finish() is None
    assert lab.there.names() == [name]


def test_at_the_end_it_does_not_wait_for_good_and_says_what_is_missing(lab: Lab) -> None:
    lab.mirror.start()
    lab.snapshot()
    assert lab.sent()[0].error is None
    lab.afar.trouble = away
    name = lab.snapshot()
    missing = lab.finish()
    assert missing is not None
    for part in (name, "weights/best.safetensors", "events/rank-0.jsonl", "nobody is there"):
        assert part in missing


def test_what_fails_again_and_again_is_no_headway(lab: Lab) -> None:
    """Its files can be read and written, but one."""

    def not_that(path: str) -> None:
        if path.endswith(MANIFEST):
            raise PermissionError("not that one")

    lab.afar.trouble = not_that
    lab.mirror.start()
    name = lab.snapshot()
    missing = lab.finish()
    assert missing is not None and name in missing and "not that one" in missing


def test_a_place_that_never_answers_is_left(lab: Lab) -> None:
    never = threading.Event()
    lab.afar.trouble = lambda _: never.wait(WITHIN) and None
    lab.mirror.start()
    name = lab.snapshot()
    missing = lab.finish()
    assert missing is not None and name in missing and "no answer" in missing
    never.set()


def test_a_snapshot_that_is_damaged_here_does_not_get_there(lab: Lab) -> None:
    name = lab.snapshot()
    path = lab.files.snapshots / name / "rank-0.bin"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    lab.mirror.start()
    error = lab.sent()[0].error
    assert error is not None and "rank-0.bin does not match its checksum" in error
    assert lab.there.storage.files() == {}
    newer = lab.snapshot()
    while lab.sent()[0].error:
        pass
    assert lab.there.names() == [newer]


def test_what_is_there_already_is_not_sent_again(lab: Lab, tmp_path: Path) -> None:
    lab.mirror.start()
    name = lab.snapshot()
    assert lab.finish() is None
    later = Lab(tmp_path, session="second")
    later.mirror.start()
    later.mirror.offer(name)
    assert later.finish() is None
    assert not [path for path in later.afar.written if path.startswith("snapshots/")]
    assert later.there.names() == [name]


def test_one_that_is_alike_by_name_alone_gives_way(lab: Lab, tmp_path: Path) -> None:
    """Another machine had gone on from an older one, and came as far."""
    lab.mirror.start()
    name = lab.snapshot()
    assert lab.finish() is None
    shutil.rmtree(lab.files.folder)
    later = Lab(tmp_path, session="second")
    later.training.stepper.lr_factor = lambda _: 0.5
    later.snapshot()
    later.mirror.start()
    assert later.finish() is None
    manifests = [
        Shelf(storage).manifest(name).files for storage in (Folder(later.files.snapshots), later.there.storage)
    ]
    assert manifests[0] == manifests[1]


def test_somebody_else_who_goes_on_with_the_run_has_the_place(lab: Lab, tmp_path: Path) -> None:
    lab.mirror.start()
    lab.snapshot()
    assert lab.sent()[0].error is None
    other = Lab(tmp_path, session="second")
    other.mirror.hold()
    before = dict(lab.there.storage.files())
    lab.snapshot()
    error = lab.sent()[0].error
    assert error is not None and "'here' goes on with this run since 'now'" in error
    assert lab.mirror.taken is not None
    assert lab.there.storage.files() == before, "nothing more is written there"
    assert "goes on with this run" in str(lab.finish())
    other.mirror.hold()


def test_another_run_of_that_name_keeps_its_place(lab: Lab, tmp_path: Path) -> None:
    lab.mirror.hold()
    other = Lab(tmp_path, run="another", session="second")
    other.mirror.start()
    other.snapshot()
    error = other.sent()[0].error
    assert error is not None and "another run is kept there" in error
    assert json.loads(lab.afar.folder.content("owner.json", 1000))["run"] == "run"


@pytest.mark.parametrize("content", [b"", b"nonsense", b"[" * 50_000, b'{"run": 1}', b"null", b"\xff\xfe"])
def test_an_owner_that_is_none_is_nobody_we_know(content: bytes, lab: Lab) -> None:
    lab.afar.folder.write("owner.json", [content])
    lab.mirror.start()
    lab.snapshot()
    error = lab.sent()[0].error
    assert error is not None and "another run is kept there" in error


# Events, as the pieces by which they grow


def lines(*numbers: int) -> bytes:
    return b"".join(b'{"number": %d}\n' % number for number in numbers)


def fetched(journal: Journal) -> bytes:
    """What another machine gets."""
    with tempfile.TemporaryDirectory() as folder:
        elsewhere = Path(folder) / "events"
        Journal(elsewhere, journal.storage).fetch()
        return elsewhere.read_bytes() if elsewhere.exists() else b""


def test_only_whole_lines_are_sent(tmp_path: Path) -> None:
    path = tmp_path / "events"
    journal = Journal(path, Folder(tmp_path / "afar"))
    journal.send()
    assert not journal.behind
    path.write_bytes(lines(1, 2) + b'{"numb')
    assert journal.behind
    journal.send()
    assert not journal.behind
    assert fetched(journal) == lines(1, 2)
    path.write_bytes(lines(1, 2, 3))
    journal.send()
    assert fetched(journal) == lines(1, 2, 3)


def test_a_piece_that_is_damaged_ends_what_is_believed(tmp_path: Path) -> None:
    path, afar = tmp_path / "events", Folder(tmp_path / "afar")
    journal = Journal(path, afar)
    for number in range(3):
        with path.open("ab") as file:
            file.write(lines(number))
        journal.send()
    middle = sorted(afar.files())[1]
    for damaged in (lines(7), lines(1)[:-1]):
        afar.write(middle, [damaged])
        assert fetched(journal) == lines(0)
    afar.write("notes.jsonl", [b"nothing of ours"])
    Journal(path, afar).send()
    assert fetched(journal) == path.read_bytes(), "who has them whole mends it"
    assert "notes.jsonl" in afar.files()


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 9)),
        st.tuples(st.just("tear"), st.just(0)),
        st.tuples(st.just("send"), st.just(0)),
        st.tuples(st.just("start again"), st.just(0)),
        st.tuples(st.just("go on elsewhere"), st.just(0)),
        st.tuples(st.just("go back"), st.integers(1, 3)),
    ),
    max_size=30,
)


@settings(max_examples=150, deadline=None)
@given(ACTIONS)
def test_what_was_sent_is_always_a_beginning_of_what_is_here(actions: list[tuple[str, int]]) -> None:
    """Through restarts, torn lines, other machines that go on, and older copies that go on after all."""
    with tempfile.TemporaryDirectory() as folder:
        afar, here = Folder(Path(folder) / "afar"), Path(folder) / "0"
        journal, older = Journal(here, afar), [here]
        for turn, (action, number) in enumerate(actions):
            match action:
                case "write":
                    with here.open("ab") as file:
                        file.write(lines(number))
                case "tear":
                    with here.open("ab") as file:
                        file.write(b'{"num')
                case "send":
                    journal.send()
                    content = here.read_bytes() if here.exists() else b""
                    assert fetched(journal) == content[: content.rfind(b"\n") + 1]
                    continue
                case "start again":
                    pass
                case "go on elsewhere":
                    here = Path(folder) / str(turn + 1)
                    Journal(here, afar).fetch()
                    older.append(here)
                case "go back":
                    here = older[-min(number, len(older))]
            if action != "write":  # as Events does when it opens
                content = here.read_bytes() if here.exists() else b""
                if action != "tear" and content:
                    here.write_bytes(content[: content.rfind(b"\n") + 1])
                journal = Journal(here, afar) if action != "tear" else journal
                if action == "tear":
                    here.write_bytes(content[: content.rfind(b"\n") + 1])
        Journal(here, afar).send()
        assert fetched(journal) == (here.read_bytes() if here.exists() else b"")


def test_only_what_has_changed_is_sent(tmp_path: Path) -> None:
    files, afar = RunFiles(tmp_path / "here"), Odd(tmp_path / "afar")
    files.events(0).parent.mkdir(parents=True)
    records = Records(files, afar, alone())
    files.config.write_text("1")
    records.send()
    records.send()
    assert afar.written == ["config.yaml"]
    assert records.behind == []
    files.config.write_text("2")
    files.events(0).write_bytes(lines(1))
    assert records.behind == ["config.yaml", "events/rank-0.jsonl"]
    records.send()
    assert afar.folder.content("config.yaml", 10) == b"2"
