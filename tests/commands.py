"""Runs the command `evenstep`, and scripts, as a person would: in processes of their own, with a time limit.

Loading torch takes seconds, so most commands are forked, like the ranks of a training, from a forkserver that
has all loaded; `cold=True` starts Python anew where that is what is tested.
"""

import contextlib
import fcntl
import multiprocessing
import os
import pty
import runpy
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

from evenstep import leash
from evenstep.files import RunFiles
from evenstep.records import record

PRELOADED = (
    "pytest",
    "evenstep.cli",
    "evenstep.training",
    "evenstep.launch.agent",
    "sklearn.datasets",
    "torch.utils.tensorboard",
    "torch._dynamo",
)
EVENSTEP = Path(sys.executable).with_name("evenstep")
LIMIT = 60.0  # seconds, on a machine that may be busy


@dataclass(frozen=True)
class Ran:
    """A command that has ended."""

    code: int
    out: str
    err: str
    folder: Path

    @property
    def runs(self) -> list[Path]:
        """The runs' folders, oldest first."""
        return sorted((self.folder / "runs").glob("*"))

    def one_run(self) -> RunFiles:
        """The only run there is."""
        assert len(self.runs) == 1, f"one run expected, not {self.runs}; it said\n{self.err}"
        return RunFiles(self.runs[0])

    def record(self) -> dict[str, Any]:
        """The record of the only run there is."""
        return record.read(self.one_run())

    def complaint(self) -> str:
        """The one line of a user's mistake."""
        assert self.code == 2, f"exit code 2 expected, not {self.code}:\n{self.err}"
        assert not self.out, f"a mistake is said on stderr alone, but stdout has {self.out!r}"
        lines = self.err.splitlines()
        assert len(lines) == 1, f"one line expected, not {len(lines)}:\n{self.err}"
        assert lines[0].startswith("evenstep: "), lines[0]
        return lines[0].removeprefix("evenstep: ")


@dataclass
class Command:
    """A command that runs, in a session of its own, as in a terminal of its own."""

    folder: Path
    output: tuple[Path, Path]
    process: Any
    pid: int
    ended: Callable[[], int | None] = field(repr=False)
    terminal: int | None = None
    """The other end of its terminal, where it has one."""

    def send(self, number: signal.Signals) -> None:
        """A signal to the command's first process alone."""
        os.kill(self.pid, number)

    def send_all(self, number: signal.Signals) -> None:
        """A signal to all processes of the terminal, as Ctrl-C is."""
        os.killpg(self.pid, number)

    def type(self, keys: bytes) -> None:
        """Keys that are pressed in its terminal."""
        assert self.terminal is not None
        os.write(self.terminal, keys)

    def wait(self, limit: float = LIMIT) -> Ran:
        """The command's end; it is killed where it takes too long."""
        end = time.monotonic() + limit
        while (code := self.ended()) is None:
            self._read_terminal()
            if time.monotonic() > end:
                os.killpg(self.pid, signal.SIGKILL)
                self.ended()
                raise AssertionError(f"the command did not end within {limit:.0f} s; it said\n{self.said()}")
            time.sleep(0.02)
        self._read_terminal()
        if self.terminal is not None:
            os.close(self.terminal)
        out, err = (path.read_text(errors="replace") for path in self.output)
        return Ran(code, out, err, self.folder)

    def said(self) -> str:
        """What it has printed so far."""
        self._read_terminal()
        return "".join(path.read_text(errors="replace") for path in self.output)

    def _read_terminal(self) -> None:
        if self.terminal is None:
            return
        with self.output[0].open("ab") as file, contextlib.suppress(OSError):  # nothing to read, or all have left
            while shown := os.read(self.terminal, 1 << 16):
                file.write(shown)

    def until(self, ready: Callable[[], Any], what: str, limit: float = LIMIT) -> Any:
        """Wait until something is the case, as long as the command runs."""
        end = time.monotonic() + limit
        while not (found := ready()):
            self._read_terminal()
            assert self.ended() is None, f"it ended before {what}; it said\n{self.said()}"
            assert time.monotonic() < end, f"not {what} within {limit:.0f} s; it said\n{self.said()}"
            time.sleep(0.02)
        return found

    def until_trained(self, ranks: int = 1) -> RunFiles:
        """Wait until each rank has taken steps; the run's files."""

        def stepping() -> RunFiles | None:
            for folder in (self.folder / "runs").glob("*"):
                files = RunFiles(folder)
                paths = [files.events(rank) for rank in range(ranks)]
                if all(path.is_file() and b'"loss"' in path.read_bytes() for path in paths):
                    return files
            return None

        found: RunFiles = self.until(stepping, "its first steps")
        return found


def start(
    *words: str,
    folder: Path,
    environment: Mapping[str, str | None] | None = None,
    cold: bool = False,
    shared: bool = True,
    ignoring: signal.Signals | None = None,
    terminal: bool = False,
) -> Command:
    """Start `evenstep words...`, or a script where the first word ends in .py, in a folder.

    `shared`: its ranks come from the forkserver it came from itself, which is quick, but not in its session and
    not with its output; else it starts one, as it does when cold.
    Cold, the words may be Python's own: `-m module words...`.
    `ignoring`: with this signal switched off, as under nohup.
    `terminal`: at a terminal of its own, which shows all it says.
    """
    number = len(list(folder.glob("*.stdout")))
    output = folder / f"{number}.stdout", folder / f"{number}.stderr"
    wanted = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **(environment or {})}
    variables = {name: value for name, value in wanted.items() if value is not None}
    if cold:
        command = [sys.executable] if words[0].endswith(".py") or words[0] == "-m" else [str(EVENSTEP)]
        with output[0].open("wb") as out, output[1].open("wb") as err:
            opened = subprocess.Popen(
                [*command, *words],
                cwd=folder,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                preexec_fn=(lambda: signal.signal(ignoring, signal.SIG_IGN)) if ignoring else None,
            )
        return Command(folder, output, opened, opened.pid, opened.poll)
    leash.start_forkserver(PRELOADED)
    for path in output:
        path.touch()
    ours, screen = _open_terminal() if terminal else (None, None)
    forked = multiprocessing.get_context("forkserver").Process(
        target=_become, args=(words, folder, variables, output, shared, ignoring, screen)
    )
    forked.start()
    assert forked.pid is not None
    return Command(folder, output, forked, forked.pid, lambda: forked.exitcode, ours)


def _open_terminal() -> tuple[int, str]:
    """Our end of a new terminal, and the name of the other."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 200))
    os.set_blocking(ours, False)
    name = os.ttyname(theirs)
    os.close(theirs)
    return ours, name


def run(*words: str, limit: float = LIMIT, **settings: Any) -> Ran:
    """Start a command and wait for its end."""
    return start(*words, **settings).wait(limit)


def _become(
    words: tuple[str, ...],
    folder: Path,
    variables: Mapping[str, str],
    output: tuple[Path, Path],
    shared: bool,
    ignoring: signal.Signals | None,
    screen: str | None,
) -> None:
    """What a forked command does: look like one that was started anew, and run."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    for number, path in enumerate((screen, screen, screen) if screen else (os.devnull, *output)):
        handle = os.open(path, os.O_RDWR)
        if screen and not number:
            fcntl.ioctl(handle, termios.TIOCSCTTY, 0)  # Ctrl-C reaches all processes of this session
        os.dup2(handle, number)
        os.close(handle)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, leash.STOPPING)
    if ignoring:
        signal.signal(ignoring, signal.SIG_IGN)
    if shared:
        _keep_forkserver()
    else:
        forkserver._forkserver._forkserver_address = None
        resource_tracker._resource_tracker._fd = None  # a tracker of its own: it ends with this command
    if words[0].endswith(".py"):
        sys.argv = list(words)
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(str(Path(words[0]).resolve()), run_name="__main__")  # as Python has it
    else:
        from evenstep.cli import main

        sys.argv = [str(EVENSTEP), *words]
        main()


def _keep_forkserver() -> None:
    """Let this process's children come from where it came from; multiprocessing would start another server."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server.ensure_running = forkserver.ensure_running = lambda: None
