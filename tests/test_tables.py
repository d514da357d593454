"""A table is parsed once, by one process, whatever happens to those that try."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from evenstep.errors import UserError
from evenstep.tasks import tables
from evenstep.tasks.tables import Table, table

FORK_FREE = multiprocessing.get_context("spawn")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "numbers.csv").write_text("1 2 3")
    return folder


class Parser:
    """Reads the numbers, and leaves a mark for every time it does."""

    def __init__(self, home: Path, wait: float = 0.0) -> None:
        self.source = home / "numbers.csv"
        self.marks = home / "parsed.log"
        self.wait = wait

    def __call__(self) -> Table:
        with self.marks.open("a") as log:
            log.write("parsed\n")
        time.sleep(self.wait)
        return {"x": np.array(self.source.read_text().split(), dtype=np.float64), "y": np.ones((2, 3), np.uint8)}

    @property
    def times(self) -> int:
        return len(self.marks.read_text().splitlines()) if self.marks.exists() else 0


def ask(home: Path, parse: Parser, version: int = 1) -> Table:
    return table("numbers", version, [parse.source], parse, home)


def kept(home: Path) -> set[str]:
    return {path.name for path in (home / tables.IN_HOME).iterdir()}


def test_it_is_parsed_once_and_mapped(home: Path) -> None:
    parse = Parser(home)
    for _ in range(3):
        found = ask(home, parse)
        assert found["x"].tolist() == [1, 2, 3] and found["y"].tolist() == [[1, 1, 1]] * 2
        assert found["y"].dtype == np.uint8
        assert all(isinstance(column, np.memmap) and not column.flags.writeable for column in found.values())
    assert parse.times == 1


def _ask_and_tell(home: Path, results: "multiprocessing.Queue[list[float]]") -> None:
    results.put(ask(home, Parser(home, wait=0.3))["x"].tolist())


def test_processes_that_start_at_once_share_one_parse(home: Path) -> None:
    results = FORK_FREE.Queue()
    processes = [FORK_FREE.Process(target=_ask_and_tell, args=(home, results)) for _ in range(4)]
    for process in processes:
        process.start()
    assert [results.get(timeout=60) for _ in processes] == [[1, 2, 3]] * 4
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert Parser(home).times == 1


def _ask_for_ever(home: Path) -> None:
    ask(home, Parser(home, wait=1000))


def test_a_killed_parser_leaves_nothing_and_holds_nobody_up(home: Path) -> None:
    killed = FORK_FREE.Process(target=_ask_for_ever, args=(home,))
    killed.start()
    parse = Parser(home)
    while not parse.times:
        time.sleep(0.01)
    assert killed.pid is not None
    os.kill(killed.pid, signal.SIGKILL)
    killed.join()
    assert any(name.startswith(".numbers-") for name in kept(home)), "it was killed too late for this test"
    assert ask(home, parse)["x"].tolist() == [1, 2, 3]
    assert not any(name.startswith(".") for name in kept(home)), "what the killed one left should be gone"


def test_a_failing_parse_leaves_no_table(home: Path) -> None:
    def fails() -> Table:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        table("numbers", 1, [home / "numbers.csv"], fails, home)
    assert kept(home) == {"numbers.lock"}
    assert ask(home, Parser(home))["x"].tolist() == [1, 2, 3]


def test_a_changed_source_is_parsed_anew_and_the_old_table_goes(home: Path) -> None:
    parse = Parser(home)
    before = ask(home, parse)["x"]
    parse.source.write_text("4 5 6 7")
    assert ask(home, parse)["x"].tolist() == [4, 5, 6, 7]
    assert before.tolist() == [1, 2, 3], "who mapped the old one keeps it"
    assert parse.times == 2 and len(kept(home)) == 2
    state = parse.source.stat()
    parse.source.write_text("7 6 5 4")  # the same size
    os.utime(parse.source, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    assert ask(home, parse)["x"].tolist() == [7, 6, 5, 4]


def test_another_version_is_parsed_anew(home: Path) -> None:
    parse = Parser(home)
    ask(home, parse)
    ask(home, parse, version=2)
    assert parse.times == 2


def test_a_source_that_changes_meanwhile_is_noticed(home: Path) -> None:
    parse = Parser(home)

    def slow() -> Table:
        found = parse()
        parse.source.write_text("something longer")
        return found

    with pytest.raises(UserError, match="changed while it was read"):
        table("numbers", 1, [parse.source], slow, home)
    assert kept(home) == {"numbers.lock"}


def test_a_home_that_cannot_be_written_is_no_obstacle(home: Path, tmp_path: Path) -> None:
    (home / tables.IN_HOME).write_text("in the way")
    parse = Parser(home)
    for _ in range(2):
        assert ask(home, parse)["x"].tolist() == [1, 2, 3]
    assert parse.times == 1
    assert (tmp_path / "cache" / "evenstep" / "numbers.lock").exists()


def test_two_homes_share_the_users_cache_without_clashing(home: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "numbers.csv").write_text("9 9 9")
    parsers = [Parser(home), Parser(other)]
    for place in (home, other):
        (place / tables.IN_HOME).write_text("in the way")
    for _ in range(2):
        assert ask(home, parsers[0])["x"].tolist() == [1, 2, 3]
        assert ask(other, parsers[1])["x"].tolist() == [9, 9, 9]
    assert [parse.times for parse in parsers] == [1, 1]


def test_a_home_that_moves_keeps_its_tables(home: Path, tmp_path: Path) -> None:
    ask(home, Parser(home))
    moved = home.rename(tmp_path / "moved")
    ask(moved, Parser(moved))
    assert Parser(moved).times == 1


def test_nowhere_to_write_is_one_line(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "numbers.csv"))
    (home / tables.IN_HOME).write_text("in the way")
    with pytest.raises(UserError, match=r"neither .* nor .* can be written"):
        ask(home, Parser(home))
