"""What is kept of a run: never overwritten, never half-written, true however it ended; and what a person sees."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import commands
from commands import Ran
from evenstep import files as run_files
from evenstep.config import Config, read_yaml
from evenstep.errors import UserError
from evenstep.files import RunFiles, find_run, new_run, write_json, write_text
from evenstep.order.plan import Plan
from evenstep.records import record
from evenstep.records.events import Events, losses_of, read_events
from evenstep.world import alone

TINY = str(Path(__file__).with_name("tiny.py"))
SHORT = ("train", TINY, "--global-batch", "8", "--epochs", "2", "--log-every", "5")  # 12 steps

Evenstep = Callable[..., Ran]


# A folder of its own


def test_runs_of_the_same_second_have_folders_of_their_own(tmp_path: Path) -> None:
    now = datetime(2026, 11, 19, 10, 15)
    with ThreadPoolExecutor(16) as pool:
        made = list(pool.map(lambda _: new_run(tmp_path / "runs", "digits", now).folder, range(50)))
    assert len(set(made)) == 50
    assert {folder.name for folder in made} == {
        "20261119-101500-digits",
        *(f"20261119-101500-digits-{again}" for again in range(2, 51)),
    }


@given(st.text(max_size=300))
def test_any_task_has_a_folder_with_a_plain_name(tmp_path_factory: pytest.TempPathFactory, task: str) -> None:
    parent = tmp_path_factory.getbasetemp() / "runs of any name"
    folder = new_run(parent, task, datetime.now()).folder
    assert folder.parent == parent and re.fullmatch(r"[A-Za-z0-9_.-]{1,120}", folder.name)
    shutil.rmtree(folder)


def test_where_no_run_can_be_kept_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for parent in (tmp_path / "file", tmp_path / "file" / "runs"):
        with pytest.raises(UserError, match=r"no run can be kept in .*; name another with --runs"):
            new_run(parent, "digits", datetime.now())


def test_a_run_is_found_by_its_folder_or_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = new_run(tmp_path / "runs", "digits", datetime(2026, 11, 19, 10, 15))
    write_json(made.record, {})
    monkeypatch.chdir(tmp_path)
    for spelled in (made.folder, str(made.folder), "runs/20261119-101500-digits", "20261119-101500-digits"):
        assert find_run(spelled, Path("runs")).folder.resolve() == made.folder
    for spelled, says in (
        ("digits", "no run digits; the last ones in runs are 20261119-101500-digits"),
        ("x" * 300, "the last ones in runs are 20261119-101500-digits"),
        ("runs", "no run runs; the last ones"),
    ):
        with pytest.raises(UserError, match=re.escape(says)):
            find_run(spelled, Path("runs"))
    with pytest.raises(UserError, match="no run digits; there is none in elsewhere"):
        find_run("digits", Path("elsewhere"))


# Writing


def test_what_is_replaced_is_whole_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "before")
    with pytest.raises(ZeroDivisionError), run_files.replacing(path) as temporary:
        temporary.write_text("half")
        assert path.read_text() == "before"
        1 / 0  # noqa: B018
    assert path.read_text() == "before" and [p.name for p in tmp_path.iterdir()] == ["file"]
    write_text(path, "after")
    assert path.read_text() == "after" and [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_reader_never_sees_a_half_written_record(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_json(path, {"number": 0, "long": "x" * 100_000})
    done = threading.Event()

    def write() -> None:
        for number in range(60):
            write_json(path, {"number": number, "long": "x" * 100_000})
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = [json.loads(path.read_text())["number"]]
    while not done.is_set():
        seen.append(json.loads(path.read_text())["number"])
    writer.join()
    assert seen == sorted(seen)


# Events


def test_events_are_three_kinds_of_lines(tmp_path: Path) -> None:
    path = tmp_path / "events" / "rank-0.jsonl"
    with Events(path) as events:
        events.instant("started", note='with "quotes"\nand lines')
        events.span("saved", 0.25, size=3)
        events.scalar("loss", 0, 0, [1.0, 0.5])
    with Events(path) as events:  # as a restart does
        events.scalar("loss", 0, 2, [0.25])
    found = list(read_events(path))
    assert [event["kind"] for event in found] == ["instant", "span", "scalar", "scalar"]
    assert found[0]["note"] == 'with "quotes"\nand lines' and len(path.read_bytes().splitlines()) == 4
    assert [event["time"] for event in found] == sorted(event["time"] for event in found)
    assert losses_of(path) == [1.0, 0.5, 0.25]


def test_a_line_that_a_kill_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    with Events(path) as events:
        events.scalar("loss", 0, 0, [1.0])
        events.scalar("loss", 0, 1, [2.0])
    whole = path.read_bytes()
    for cut in range(1, len(whole.splitlines()[1]) + 1):
        path.write_bytes(whole[:-cut])
        assert losses_of(path) == [1.0]
    with Events(path) as events:  # and what is written after a restart is not lost with it
        events.scalar("loss", 0, 1, [3.0])
    assert losses_of(path) == [1.0, 3.0]


@pytest.mark.parametrize("line", [b"{}", b"5", b'{"name": 3', b"\xff\xfe"])
def test_damaged_events_are_one_line(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "rank-0.jsonl"
    with Events(path) as events:
        events.instant("started")
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(UserError) as caught:
        losses_of(path)
    assert "line 2" in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


# The record


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFiles:
    """A run that has just begun, in this process, in a folder that is no repository."""
    monkeypatch.chdir(tmp_path)
    return begun(tmp_path)


def begun(folder: Path) -> RunFiles:
    files = new_run(folder / "runs", "digits", datetime.now())
    plan = Plan(size=10, global_batch=4)
    config = Config(task="digits", note="a note")
    record.open_record(files, record.identity(files), config, plan, alone(), "cpu", ["evenstep", "train"])
    return files


def test_a_record_says_what_ran_where_and_how_it_ended(opened: RunFiles) -> None:
    told = record.read(opened)
    assert told["state"] == "running" and told["process"]["pid"] == os.getpid()
    assert told["task"] == "digits" and told["note"] == "a note" and told["command"] == ["evenstep", "train"]
    assert told["plan"]["size"] == 10 and told["world"] == {"processes": 1, "nodes": 1, "device": "cpu"}
    assert told["packages"].keys() >= {"python", "torch", "numpy", "evenstep"}
    assert told["hardware"].keys() >= {"machine", "processor", "cores", "memory_bytes", "gpus"}
    assert datetime.fromisoformat(told["started"]).tzinfo is not None
    record.close_record(opened, "finished", test={"loss": float("nan")})
    ended = record.read(opened)
    assert ended["state"] == "finished" and ended["started"] == told["started"] <= ended["ended"]


def git(*words: str) -> str:
    made = {"GIT_AUTHOR_NAME": "n", "GIT_AUTHOR_EMAIL": "e", "GIT_COMMITTER_NAME": "n", "GIT_COMMITTER_EMAIL": "e"}
    done = subprocess.run(["git", *words], env={**os.environ, **made}, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_the_code_is_its_commit_and_what_differs_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inner").mkdir()

    def code() -> dict[str, Any]:
        told = record._code(Path.cwd())
        monkeypatch.chdir(tmp_path / "inner")  # from anywhere in it
        assert record._code(Path.cwd()) == told
        monkeypatch.chdir(tmp_path)
        return told

    assert code() == {"commit": None}
    git("init", "-q")
    assert code() == {"commit": None}, "nothing is committed yet"
    (tmp_path / "task.py").write_text("a = 1\n")
    (tmp_path / ".gitignore").write_text("runs/\n")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    clean = code()
    assert clean == {"commit": git("rev-parse", "HEAD"), "difference_sha256": None}

    seen = []
    for path, content in (
        ("task.py", b"a = 2\n"),
        ("task.py", b"a = 3\n"),
        ("new.py", b"b = 1\n"),
        ("new.py", b"b = 2\n"),
        ("inner/other name.py", b"\xff"),
    ):
        (tmp_path / path).write_bytes(content)
        seen.append(code()["difference_sha256"])
    git("add", ".")
    seen.append(code()["difference_sha256"])
    assert None not in seen and len(set(seen)) == len(seen)
    (tmp_path / "notes.txt").write_text("not code")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "x.py").write_text("ignored")
    assert code()["difference_sha256"] == seen[-1]
    git("commit", "-q", "-m", "second")
    assert code() == {"commit": git("rev-parse", "HEAD"), "difference_sha256": None} != clean


@pytest.mark.parametrize(
    ("process", "state"),
    [
        ({}, "running"),
        ({"pid": 1 << 22}, "killed"),
        ({"created": 1.0}, "killed"),
        ({"host": "another", "pid": 1 << 22}, "running"),
    ],
)
def test_a_run_whose_process_is_gone_was_killed(opened: RunFiles, process: dict[str, Any], state: str) -> None:
    """Also where another process has its number by now; of another host nobody knows."""
    own = {"host": socket.gethostname(), "pid": os.getpid(), "created": psutil.Process().create_time()}
    record.amend(opened, process={**own, **process})
    assert record.read(opened)["state"] == state


DAMAGED = (
    b"",
    b"{",
    b"[]",
    b"5",
    b"{}",
    b"\xff\xfe",
    b'{"state": "running", "process": 5}',
    b'{"state": "running", "process": {}}',
    b'{"state": "running", "process": {"host": "HOST", "pid": "x", "created": 0}}',
    b'{"state": ["running"], "process": {"host": "HOST", "pid": 1, "created": 0}}',
    b"[" * 100_000,
)


@pytest.mark.parametrize("content", DAMAGED, ids=lambda content: repr(content[:60]))
def test_a_damaged_or_strange_record_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "record.json").write_bytes(content.replace(b"HOST", socket.gethostname().encode()))
    with pytest.raises(UserError) as caught:
        record.read(RunFiles(tmp_path))
    assert "record" in str(caught.value) and str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_no_record_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no record of a run"):
        record.read(RunFiles(tmp_path))
    (tmp_path / "record.json").mkdir()
    with pytest.raises(UserError, match="cannot be read"):
        record.read(RunFiles(tmp_path))


# Of runs that ran


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A short run on two processes, with a note that tries everything."""
    folder = tmp_path_factory.mktemp("on_two")
    return commands.run(*SHORT, "--procs", "2", "--note", HOSTILE, folder=folder)


HOSTILE = (
    "a: [b]\n- {c} #d 'e' \"f\" !!python/object:os.system %s \\n ---\n"
    "[red]g[/red] \x1b[31m \x85 ü 雪 \U0001f680 \udc80\n"
)


def test_a_note_may_say_anything(on_two: Ran) -> None:
    assert on_two.code == 0, on_two.err
    run = on_two.one_run()
    assert record.read(run)["note"] == HOSTILE
    assert read_yaml(run.config)["note"] == HOSTILE
    assert yaml.safe_load(run.config.read_text())["procs"] == 2


def test_the_resolved_configuration_is_kept_whole(on_two: Ran) -> None:
    kept = read_yaml(on_two.one_run().config)
    assert kept["global_batch"] == 8 and kept["strategy"] == "ddp" and kept["dealt_to"] == 2
    left_open = {name for name, value in kept.items() if value is None}
    assert left_open == {
        *("model", "data", "sample", "max_steps", "patience", "batch_size", "micro_batch", "clip"),
        *("snapshot_every", "max_restarts", "stall_timeout", "spot", "to", "best"),
        *("order", "order_token", "order_ca"),
    }


def test_one_rank_alone_draws_the_curves(on_two: Ran) -> None:
    """One tracker run per rank elsewhere (PL#11380)."""
    run = on_two.one_run()
    assert len(list(run.tensorboard.iterdir())) == 1
    curves = EventAccumulator(str(run.tensorboard)).Reload()
    losses = losses_of(run.events(0))
    assert len(losses) == 12
    drawn = {event.step: event.value for event in curves.Scalars("train/loss")}
    assert drawn == pytest.approx({5: sum(losses[:5]) / 5, 10: sum(losses[5:10]) / 5, 12: sum(losses[10:]) / 2})
    measured = [event for event in read_events(run.events(0)) if event["name"] == "measured"]
    assert [event.value for event in curves.Scalars("validation/error")] == pytest.approx(
        [event["values"]["error"] for event in measured]
    )
    assert [event.step for event in curves.Scalars("validation/error")] == [6, 12]


def test_each_rank_writes_its_own_events(on_two: Ran) -> None:
    run = on_two.one_run()
    of_ranks = [list(read_events(run.events(rank))) for rank in range(2)]
    assert [events[0]["rank"] for events in of_ranks] == [0, 1]
    assert len({events[0]["session"] for events in of_ranks}) == 1
    for rank, events in enumerate(of_ranks):
        trained = [event for event in events if event["name"] == "trained"]
        assert sum(event["steps"] for event in trained) == 12
        assert sum(event["digest"][0] for event in trained) == (46, 48)[rank], "samples of this rank"
    assert [event for event in of_ranks[1] if event["name"] == "loss"] == []


def test_the_record_and_the_events_tell_the_same(on_two: Ran) -> None:
    run = on_two.one_run()
    told = record.read(run)
    measured = [event for event in read_events(run.events(0)) if event["name"] == "measured"]
    assert told["state"] == "finished" and told["epochs"] == 2 and told["steps"] == 12 and told["samples"] == 94
    assert told["final"] == measured[-1]["values"]
    assert told["best"] == measured[told["best_epoch"]]["values"]
    assert told["best"]["loss"] == min(event["values"]["loss"] for event in measured)
    assert told["samples_per_second"] == pytest.approx(94 / told["seconds"])
    assert told["world"] == {"processes": 2, "nodes": 1, "device": "cpu"}
    assert told["command"][:2] == ["evenstep", "train"] and told["command"][-1] == HOSTILE
    assert told["folder_it_ran_in"] == str(on_two.folder)
    assert all(run.weights(which).is_file() for which in ("best", "last"))
    assert list(run.folder.rglob(".*")) == [], "nothing half-written is left"


def test_a_run_that_was_killed_is_shown_as_such(tmp_path: Path) -> None:
    command = commands.start(*SHORT[:4], "--epochs", "100000", folder=tmp_path)
    run = command.until_trained()
    assert record.read(run)["state"] == "running"
    command.send(signal.SIGKILL)
    command.wait()
    assert record.read(run)["state"] == "killed"
    assert json.loads(run.record.read_text())["state"] == "running", "reading changes nothing"
    assert losses_of(run.events(0))


@pytest.mark.parametrize(
    ("command", "content"),
    [
        ("audit", b"{"),
        ("audit", b'{"state": "failed", "process": {"host": "h", "pid": 1, "created": 0.5}, "plan": {"a": 1}}'),
        ("resume", b"{"),
    ],
)
def test_commands_say_in_one_line_that_a_record_is_damaged(
    on_two: Ran, tmp_path: Path, command: str, content: bytes
) -> None:
    copy = shutil.copytree(on_two.one_run().folder, tmp_path / "copy")
    (copy / "record.json").write_bytes(content)
    assert f"the record in {copy} " in commands.run(command, str(copy), folder=tmp_path).complaint()


# What a person sees


def test_without_a_terminal_there_is_a_line_per_epoch(evenstep: Evenstep) -> None:
    ran = evenstep(*SHORT)
    assert ran.code == 0 and ran.err == ""
    first, *epochs, last = ran.out.splitlines()
    assert first.startswith(TINY) and "47 samples, 8 a step, one on 1 process (cpu)" in first
    assert [line.split("  ")[0] for line in epochs] == ["epoch 1/2", "epoch 2/2"]
    assert last == f"kept in {ran.one_run().folder.relative_to(ran.folder)}"
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", ran.out), "no control characters in a log"


def test_on_a_terminal_a_bar_moves(tmp_path: Path) -> None:
    words = (*SHORT[:4], "--epochs", "100000")
    command = commands.start(*words, folder=tmp_path, terminal=True, environment={"TERM": "xterm"})
    moved = re.compile(r"epoch (\d+)/100000.*?step ([\d,]+)/600,000.*?loss \S+ .*?samples/s")

    def steps() -> set[str]:
        return {found[2] for found in moved.finditer(command.said())}

    command.until(lambda: len(steps()) >= 3, "the bar has moved")
    command.type(b"\x03")
    ran = command.wait()
    assert ran.out.rindex("\x1b[?25h") > ran.out.rindex("\x1b[?25l"), "the cursor is back"
    assert ran.out.endswith("\x1b[2K"), "and the bar is gone"
    assert re.search(r"stopped after [\d,]+ steps; to go on: evenstep resume runs/", ran.out)
