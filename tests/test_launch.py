"""Ranks that come to grief, and people who press Ctrl-C: the culprit is named, and nothing is left behind.

What a test leaves behind (processes, data loaders, ports, shared memory, files) fails it: see `nothing_left`.
"""

import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import commands
from commands import Command, Ran
from evenstep.files import RunFiles
from evenstep.records import record
from evenstep.records.events import losses_of

TROUBLED = str(Path(__file__).with_name("troubled.py"))
STEPS = ("train", TROUBLED, "--global-batch", "8")  # 6 an epoch
SHORT = (*STEPS, "--epochs", "4")
LONG = (*STEPS, "--epochs", "100000")
LOADING = ("--set", "row_by_row=true", "--workers", "1")
MISTAKE = "ValueError: a mistake in the user's own code"
HOST = socket.gethostname()

Evenstep = Callable[..., Ran]


def troubled(trouble: str, **options: object) -> tuple[str, ...]:
    """The words of a run of 24 steps on two processes, of which one comes to grief."""
    settings = [word for name, value in options.items() for word in ("--set", f"{name}={value}")]
    return (*SHORT, "--procs", "2", "--set", f"trouble={trouble}", *settings)


def last_line(ran: Ran) -> str:
    return ran.err.rstrip("\n").rpartition("\n")[2]


def culprit(rank: int, what: str) -> str:
    return rf"evenstep: rank {rank} on {re.escape(HOST)} \(pid \d+\) {re.escape(what)}"


# A rank comes to grief


def test_a_rank_that_fails_is_named_after_its_traceback(evenstep: Evenstep) -> None:
    """The first real traceback is lost behind "error_file: <N/A>" elsewhere (pytorch#113546)."""
    ran = evenstep(*troubled("fail"), "--max-restarts", "0")
    assert ran.code == 1
    first, *trace, trace_end, end = ran.err.splitlines()
    assert re.fullmatch(culprit(1, f"failed with {MISTAKE}"), end), ran.err
    assert trace_end == MISTAKE and first == "Traceback (most recent call last):"
    assert any("troubled.py" in line and "in _fail" in line for line in trace)
    assert ran.err.count("Traceback") == 1, "what the other rank found of it is nobody's business"
    told = ran.record()
    assert told["state"] == "failed" and told["rank"] == 1
    assert MISTAKE in told["error"] and "in _fail" in told["error"]


@pytest.mark.parametrize(
    ("trouble", "says"),
    [
        ("be killed", "was killed by SIGKILL; was it the kernel, for want of memory? dmesg says so"),
        ("leave at once", "left with exit code 0"),
        ("leave", "failed with SystemExit: 3"),
        (
            "abort",
            "was killed by SIGABRT; torch does so where ranks meet in exchanges that differ: has one of them left "
            "one out?",
        ),
        (
            "run out of memory",
            "failed with OutOfMemory: in step 6 of epoch 1, on samples 1, 27, 30, 41: no memory is left",
        ),
    ],
)
def test_a_rank_that_goes_is_named(evenstep: Evenstep, trouble: str, says: str) -> None:
    """And the others do not wait for it (PL#8130)."""
    ran = evenstep(*troubled(trouble), "--max-restarts", "0")
    assert ran.code == 1
    assert re.fullmatch(culprit(1, says), last_line(ran).rstrip()), ran.err
    assert ran.record()["state"] == "failed" and ran.record()["rank"] == 1


def test_rank_0_is_as_good_a_culprit(evenstep: Evenstep) -> None:
    """It keeps the record itself, so somebody else has to close it."""
    ran = evenstep(*troubled("be killed", on=0), "--max-restarts", "0")
    assert ran.code == 1 and re.match(culprit(0, "was killed by SIGKILL"), last_line(ran))
    told = ran.record()
    assert told["state"] == "failed" and told["rank"] == 0 and "SIGKILL" in told["error"]


def test_a_rank_that_is_busy_does_not_hold_up_the_end(evenstep: Evenstep) -> None:
    """One that is in no collective finds nothing wrong: it has to be ended, and at once."""
    ran = evenstep(*troubled("fail", others="hang"), "--max-restarts", "0", limit=25)
    assert ran.code == 1 and re.fullmatch(culprit(1, f"failed with {MISTAKE}"), last_line(ran)), ran.err


# All start again


def test_all_ranks_start_again_when_one_is_killed(evenstep: Evenstep) -> None:
    ran = evenstep(*troubled("be killed", once=True), "--snapshot-every", "2")
    assert ran.code == 0, ran.err
    (said,) = ran.err.splitlines()
    assert re.fullmatch(culprit(1, "was killed by SIGKILL") + ".*; starting all ranks again", said)
    straight = evenstep(*troubled("none"))
    again, undisturbed = (RunFiles(folder) for folder in straight.runs)
    assert record.read(again)["state"] == "finished"
    assert losses_of(again.events(0)) == pytest.approx(losses_of(undisturbed.events(0)), rel=1e-6)


def test_a_mistake_that_comes_again_is_not_tried_a_third_time(evenstep: Evenstep) -> None:
    ran = evenstep(*troubled("fail"))
    assert ran.code == 1 and re.fullmatch(culprit(1, f"failed with {MISTAKE}"), last_line(ran))
    assert ran.err.count("starting all ranks again") == 1 and ran.err.count("Traceback") == 2


def test_a_single_process_is_started_again_where_that_is_asked_for(evenstep: Evenstep) -> None:
    words = ("--set", "trouble=be killed", "--set", "on=0", "--set", "once=true", "--snapshot-every", "3")
    ran = evenstep(*SHORT, *words, "--max-restarts", "1")
    assert ran.code == 0, ran.err
    assert ran.record()["state"] == "finished" and ran.record()["steps"] == 24


# Somebody ends it


def long_run(folder: Path, *words: str, **settings: Any) -> tuple[Command, RunFiles]:
    """A run on two processes that takes steps."""
    command = commands.start(*LONG, "--procs", "2", *words, folder=folder, **settings)
    return command, command.until_trained(2)


def ended_well(ran: Ran, run: RunFiles, number: signal.Signals) -> None:
    assert ran.code in (128 + number, 75) and "Traceback" not in ran.err, ran.err
    assert record.read(run)["state"] == "stopped"
    assert losses_of(run.events(0)), "what was done is kept"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_launcher_alone_ends_all(tmp_path: Path, number: signal.Signals) -> None:
    command, run = long_run(tmp_path)
    command.send(number)
    ended_well(command.wait(), run, number)


def test_ctrl_c_ends_all(tmp_path: Path) -> None:
    """It reaches every process of the terminal."""
    command, run = long_run(tmp_path, shared=False)
    command.send_all(signal.SIGINT)
    ended_well(command.wait(), run, signal.SIGINT)


def test_ctrl_c_ends_data_loaders(tmp_path: Path) -> None:
    """Those that stay hold the GPU (EgoVerse#682)."""
    command = commands.start(*LONG, *LOADING, folder=tmp_path, shared=False)
    run = command.until_trained()
    command.send_all(signal.SIGINT)
    ended_well(command.wait(), run, signal.SIGINT)


def test_a_second_ctrl_c_ends_what_does_not_listen(tmp_path: Path) -> None:
    """A step that never ends cannot be asked to be the last."""
    command, run = long_run(tmp_path, "--set", "trouble=hang", "--set", "after=13", shared=False)
    command.until(lambda: (tmp_path / "trouble came to 1").exists(), "the hang")
    command.send_all(signal.SIGINT)
    time.sleep(1)
    assert command.ended() is None
    while command.ended() is None:  # one that comes before the first was noticed is lost in it
        command.send_all(signal.SIGINT)
        time.sleep(0.3)
    ran = command.wait()
    assert ran.code == 130 and "Traceback" not in ran.err, ran.err
    assert record.read(run)["state"] == "stopped"


def test_a_terminal_that_closes_ends_all(tmp_path: Path) -> None:
    command, run = long_run(tmp_path, shared=False)
    command.send_all(signal.SIGHUP)
    ended_well(command.wait(), run, signal.SIGHUP)


def test_under_nohup_it_goes_on(tmp_path: Path) -> None:
    command, run = long_run(tmp_path, shared=False, ignoring=signal.SIGHUP)
    command.send_all(signal.SIGHUP)
    before = len(losses_of(run.events(0)))
    command.until(lambda: len(losses_of(run.events(0))) > before + 20, "it has gone on")
    command.send(signal.SIGTERM)
    ended_well(command.wait(), run, signal.SIGTERM)


def test_ctrl_c_before_the_first_step(tmp_path: Path) -> None:
    """While the ranks are being started: there is no run yet, or one that says how it ended."""
    command = commands.start(*LONG, "--procs", "2", folder=tmp_path, cold=True)
    command.until(lambda: psutil.Process(command.pid).children(), "its first process")
    command.send_all(signal.SIGINT)
    ran = command.wait()
    assert ran.code in (75, 130), ran.err
    assert all(record.read(RunFiles(folder))["state"] == "stopped" for folder in ran.runs)


# Nobody is there to clean up


def test_when_the_launcher_is_killed_all_end_and_the_next_run_is_fine(tmp_path: Path) -> None:
    """An immediate second run trips over stale shared memory in streaming#781."""
    command, run = long_run(tmp_path, *LOADING, shared=False)
    command.send(signal.SIGKILL)
    assert command.wait().code == -signal.SIGKILL
    ran = commands.run(*SHORT, "--procs", "2", folder=tmp_path)
    assert ran.code == 0, ran.err
    assert record.read(run)["state"] == "killed"
    assert sorted(record.read(RunFiles(folder))["state"] for folder in ran.runs) == ["finished", "killed"]


def test_when_a_single_process_is_killed_its_data_loaders_end(tmp_path: Path) -> None:
    command = commands.start(*LONG, *LOADING, folder=tmp_path, shared=False)
    run = command.until_trained()
    command.send(signal.SIGKILL)
    command.wait()
    assert record.read(run)["state"] == "killed"


# Side by side


def test_two_runs_at_once(tmp_path: Path) -> None:
    """Two jobs on one host collide on a port elsewhere (pytorch#126510)."""
    both = [commands.start(*SHORT, "--procs", "2", folder=tmp_path) for _ in range(2)]
    ran = [command.wait() for command in both]
    assert [r.code for r in ran] == [0, 0], ran[0].err + ran[1].err
    losses = [losses_of(RunFiles(folder).events(0)) for folder in ran[0].runs]
    assert len(losses) == 2 and losses[0] == losses[1] and len(losses[0]) == 24
