"""Real ranks that get stuck: named by host, pid, phase and line, and the training goes on."""

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from commands import LIMIT, Ran, run
from evenstep.watch import pulse, stacks
from evenstep.watch.board import Board, Gone, Private, Shared
from evenstep.watch.patience import LEAST, LONG, LONGEST_TICK, TIMES, Patience, Stillness
from evenstep.watch.pulse import BACKWARD, DATA, EVALUATE, FIRST, FORWARD, PHASES, SNAPSHOT, START, Pulse, Where

STUCK = Path(__file__).parent / "stuck.py"
SENTENCE = re.compile(r"evenstep: rank (\d) on (\S+) \(pid (\d+)\) (.+)")


def train(folder: Path, ways: str, *more: str, procs: int = 3, **settings: Any) -> Ran:
    """Train a task in which these things happen, one after the other, each in another try."""
    happened = folder / "happened"
    happened.mkdir()
    options = ("--procs", str(procs), "--global-batch", "12", "--epochs", "24", "--snapshot-every", "10")
    task = ("--set", f"ways={ways}", "--set", f"folder={happened}")
    return run("train", str(STUCK), *options, "--stall-timeout", "2", *task, *more, folder=folder, **settings)


def pids(folder: Path) -> dict[str, str]:
    """The process in which each thing happened."""
    found = sorted((folder / "happened").iterdir())
    return {path.name.partition("-")[2]: path.read_text() for path in found}


def named(ran: Ran) -> list[tuple[str, str, str]]:
    """Rank, pid and what is said of each rank that was named."""
    return [(rank, pid, what) for rank, _, pid, what in SENTENCE.findall(ran.err)]


# Real ranks


@pytest.mark.slow
def test_whoever_is_stuck_is_named_and_the_training_goes_on(tmp_path: Path) -> None:
    """Asleep in losses(), deep in C with the interpreter's lock, stopped by SIGSTOP, gone: one after the other."""
    ran = train(tmp_path, "sleep,lock,stop,leave", "--max-restarts", "4", limit=3 * LIMIT)
    where = pids(tmp_path)
    assert list(where) == ["sleep", "lock", "stop", "leave"], ran.err
    assert ran.code == 0, ran.err
    assert [(rank, pid) for rank, pid, _ in named(ran)] == [("1", pid) for pid in where.values()], ran.err
    asleep, locked, stopped, left = (what for _, _, what in named(ran))
    step = r"forward of step \d of epoch \d+"
    assert re.match(rf"is stuck in {step}, at {STUCK}:\d+ in sleep; ranks 0 and 2 wait for it", asleep)
    assert re.match(rf"is stuck in {step}, where some code .* at {STUCK}:\d+ in lock; ranks 0 and 2 wait", locked)
    assert re.match(rf"does not answer: it is stopped, .*, last seen in {step}; ranks 0 and 2 wait", stopped)
    assert left.startswith("left with exit code 0")
    assert "time.sleep(LONG)" in ran.err, "the stack shows the line"
    assert ran.record()["state"] == "finished"


@pytest.mark.slow
def test_what_reads_the_data_is_named(tmp_path: Path) -> None:
    """The rank that is in its data set's __getitem__."""
    ran = train(tmp_path, "read", "--set", "row_by_row=1", "--max-restarts", "0")
    assert ran.code == 1, ran.err
    ((_, pid, what),) = named(ran)
    assert pid == pids(tmp_path)["read"]
    assert re.match(rf"is stuck in data of step .*, at {STUCK}:\d+ in sleep; ranks \d and \d wait for it$", what)


@pytest.mark.slow
def test_a_data_loading_process_is_named(tmp_path: Path) -> None:
    more = ("--set", "row_by_row=1", "--workers", "1", "--max-restarts", "0")
    ran = train(
        tmp_path, "read", *more, procs=2, limit=2 * LIMIT, shared=False
    )  # its semaphores go with its server
    assert ran.code == 1, ran.err
    ((_, _, what),) = named(ran)
    reader = pids(tmp_path)["read"]
    assert re.match(
        rf"is stuck in data .*: its data loading process {reader} is at {STUCK}:\d+ in sleep; rank ", what
    )


@pytest.mark.slow
def test_a_rank_that_leaves_an_exchange_out_is_named(tmp_path: Path) -> None:
    ran = train(tmp_path, "skip", "--set", "meets=1", "--max-restarts", "0")
    assert ran.code == 1, ran.err
    ((rank, pid, what),) = named(ran)
    assert (rank, pid) == ("1", pids(tmp_path)["skip"])
    assert re.search(
        rf"left out the exchange in which ranks 0 and 2 wait: forward of .* at {STUCK}:\d+ in losses", what
    )


@pytest.mark.slow
def test_a_process_that_is_alone_says_where_it_is_stuck_and_goes_on(tmp_path: Path) -> None:
    """Nobody waits for it, and nobody would start it again; a person may be at a prompt in it."""
    ran = train(tmp_path, "nap", "--set", "rank=0", "--stall-timeout", "1", procs=1)
    ((rank, pid, what),) = named(ran)
    assert (ran.code, rank, pid) == (0, "0", pids(tmp_path)["nap"]), ran.err
    assert re.match(rf"is stuck in forward of step \d of epoch \d, at {STUCK}:\d+ in nap$", what)
    assert ran.record()["state"] == "finished"


@pytest.mark.slow
def test_a_process_that_is_alone_is_ended_where_somebody_would_start_it_again(tmp_path: Path) -> None:
    ran = train(tmp_path, "sleep", "--set", "rank=0", "--max-restarts", "1", procs=1)
    assert ran.code == 0, ran.err
    assert [(rank, pid) for rank, pid, _ in named(ran)] == [("0", pids(tmp_path)["sleep"])]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["sleep", "leave"])
def test_under_torchrun(tmp_path: Path, way: str) -> None:
    """The right rank is named in a line of ours, and as the root cause in torchrun's summary."""
    script = tmp_path / "by_torchrun.py"
    script.write_text(
        "import sys\nfrom torch.distributed.run import main\n"
        "main(['--standalone', '--log-dir', 'logs', '--nproc-per-node', '2', '-m', 'evenstep', *sys.argv[1:]])\n"
    )
    happened = tmp_path / "happened"
    happened.mkdir()
    task = ("train", str(STUCK), "--set", f"ways={way}", "--set", f"folder={happened}", "--stall-timeout", "2")
    ran = run(str(script), *task, "--global-batch", "12", "--epochs", "24", folder=tmp_path, limit=2 * LIMIT)
    pid = pids(tmp_path)[way]
    assert ran.code != 0
    if way == "sleep":
        ((rank, found, what),) = named(ran)
        assert (rank, found) == ("1", pid) and "is stuck in forward of" in what
        cause = ran.err[ran.err.index("Root Cause") :]
        assert f"(pid: {pid})" in cause and "is stuck in forward of" in cause
    else:
        assert re.search(rf"LostRank: rank 1 on \S+ \(pid {pid}\) has gone", ran.err)


# How long a rank may stay


def at(phase: int, step: int = 0) -> Where:
    return Where(0, step, 0, phase)


def test_patience_is_ten_usual_steps_and_at_least_thirty_seconds() -> None:
    patience = Patience()
    assert patience.at(at(DATA)) == LONG, "the first step may take long"
    patience.step_took(200.0)
    for _ in range(200):
        patience.step_took(60.0)
    assert patience.at(at(DATA)) == pytest.approx(TIMES * 60.0)
    for _ in range(200):
        patience.step_took(0.01)
    assert patience.at(at(DATA)) == LEAST


def test_what_nobody_can_foresee_may_take_long() -> None:
    patience = Patience(2.0)
    for phase in (START, SNAPSHOT, FIRST):
        assert patience.at(at(phase)) == LONG
    assert patience.at(at(FORWARD)) == LONG, "no step has ended yet"
    patience.step_took(0.1)
    for phase in (DATA, FORWARD, BACKWARD, EVALUATE):
        assert patience.at(at(phase)) == 2.0
    assert Patience(2 * LONG).at(at(START)) == 2 * LONG


def test_compiling_may_happen_in_any_step_unless_a_time_out_is_given() -> None:
    for given, expected in ((None, LONG), (5.0, 5.0)):
        patience = Patience(given, compiles=True)
        patience.step_took(0.1)
        assert patience.at(at(FORWARD)) == expected


def test_whatever_moves_is_not_still() -> None:
    """A step of many micro-batches, an evaluation of many batches."""
    seen = Pulse()
    stillness = Stillness(Patience(1.0), seen, now=0.0)
    seen.phase, seen.taken = DATA, 1
    for moment in range(1, 50):
        seen.piece += 1
        stillness.look(0.4 * moment)
        assert stillness.still == 0.0
    stillness.look(20.5)
    assert stillness.still > 0.0 and stillness.left < 1.0


def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    """Ctrl-Z, and an hour later fg: nobody was stuck."""
    seen = Pulse()
    stillness = Stillness(Patience(10.0), seen, now=0.0)
    seen.phase, seen.taken = DATA, 1
    stillness.look(0.5)
    stillness.look(3600.0)
    assert stillness.still <= LONGEST_TICK


def test_the_usual_step_is_learnt_from_steps_alone() -> None:
    """Not from the start before them, nor from an evaluation between them."""
    seen, patience = Pulse(), Patience()
    stillness = Stillness(patience, seen, now=0.0)
    now = 0.0

    def passing(seconds: float) -> None:
        nonlocal now
        for _ in range(round(seconds / 0.5)):
            now += 0.5
            stillness.look(now)

    passing(500.0)  # the start
    seen.phase = DATA
    for _ in range(20):
        passing(6.0)
        seen.taken += 1
        seen.step += 1
        seen.phase = EVALUATE
        passing(300.0)
        seen.phase = DATA
    passing(0.5)
    assert patience.at(at(DATA)) == pytest.approx(TIMES * 6.0, rel=0.2)


# Seen from another process


@pytest.fixture
def other() -> Iterator[subprocess.Popen[str]]:
    """A process that shows its pulse and its stack, and keeps the interpreter to itself."""
    script = (
        "import re, threading\n"
        "from evenstep.watch import pulse, stacks\n"
        "found = pulse.shown('name')\n"
        "found.epoch, found.step, found.phase = 2, 7, pulse.BACKWARD\n"
        "stacks.answer_when_asked()\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "def held():\n"
        "    re.match('(a+)+b', 'a' * 60)\n"
        "print(threading.get_ident(), flush=True)\n"
        "held()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


@pytest.mark.slow
def test_a_process_that_cannot_answer_shows_where_it_is(other: subprocess.Popen[str]) -> None:
    assert other.stdout is not None
    thread = int(other.stdout.readline())
    time.sleep(0.2)
    for _ in range(2):  # one asks, and another one asks again
        stack = stacks.ask(other.pid, thread)
        assert [frame.function for frame in stack[:2]] == ["<module>", "held"], stack
        assert stacks.ask(other.pid) == stack, "the first thread is the one that was there first"
    assert pulse.seen(other.pid, "name") == Where(2, 7, 0, BACKWARD)
    assert pulse.seen(other.pid, "another") is None
    other.send_signal(signal.SIGSTOP)
    assert stacks.ask(other.pid, thread) == ()
    assert pulse.seen(other.pid, "name") == Where(2, 7, 0, BACKWARD)


def test_who_shows_nothing_is_not_asked() -> None:
    """The signal would end a process that does not expect it."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert stacks.ask(process.pid) == ()
    assert pulse.seen(process.pid, "name") is None
    process.communicate(b"\n")
    assert process.returncode == 0


def test_the_phases_have_names() -> None:
    assert (
        PHASES[START] == "start" and PHASES[BACKWARD] == "backward and sync" and PHASES[FIRST] != PHASES[EVALUATE]
    )
    assert Where(0, 3, 0, DATA).in_words == "data of step 4 of epoch 1"
    assert Where(1, 3, 0, EVALUATE).in_words == "evaluate after epoch 2"
    assert Where(0, 0, 0, START).in_words == "start"


# The board: of several notes of one name, the first stays


@pytest.fixture(params=["private", "shared"])
def board(request: pytest.FixtureRequest) -> Iterator[Board]:
    if request.param == "private":
        yield Private()
        return
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    yield Shared("127.0.0.1", server.port, "0")
    del server


def test_the_first_note_stays(board: Board) -> None:
    found: list[Any] = []
    writing = [
        threading.Thread(target=lambda n=n: found.append(board.first("verdict", {"by": n}))) for n in range(8)
    ]
    for thread in writing:
        thread.start()
    for thread in writing:
        thread.join()
    assert found[0] == board.read("verdict")
    assert all(note == found[0] for note in found)
    board.post("other", None)
    assert board.read("other") is None


def test_a_board_that_nobody_keeps_any_more_says_so() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    shared = Shared("127.0.0.1", server.port, "0")
    shared.post("name", 1)
    del server
    with pytest.raises(Gone):
        for _ in range(10):
            shared.first("name", 2)
            shared.read("name")
