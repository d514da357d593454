"""A process that was started for a training ends when the one that started it is gone, however it went.

And the other way round: a signal that reaches every process of a terminal is for the one that started the
others to answer. Until they run our code, signals wait.
"""

import contextlib
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Sequence
from multiprocessing import connection, forkserver, parent_process, resource_tracker, util
from pathlib import Path

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # what people and schedulers send


def start_forkserver(preload: Sequence[str]) -> None:
    """Let a forkserver load these modules, while this process goes on with its own work.

    Neither it nor the process that tracks shared memory for it may fall to Ctrl-C in a terminal: they clean up
    after the others, and end by themselves.
    """
    multiprocessing.set_forkserver_preload(list(preload))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # children inherit it
    try:
        resource_tracker.ensure_running()  # lets some of them through again
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    # left to itself, it would first finish loading; when all others have ended, it can go
    util.Finalize(None, _end_forkserver, exitpriority=-1)


def _end_forkserver() -> None:
    server: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if server is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)


def await_forkserver() -> None:
    """Until it has loaded all, and starts a process in no time."""
    first = multiprocessing.get_context("forkserver").Process(target=_nothing)
    first.start()
    first.join()


def _nothing() -> None:
    pass


def hold(*leftovers: Path) -> None:
    """End this process as soon as its parent is gone, even from inside a collective that never returns.

    A killed launcher or rank can tell nobody, and a forkserver's children are not its own, so that the usual
    look at the parent's pid would see nothing. What it could not remove is removed for it.
    """
    parent = parent_process()
    if parent is None:
        return
    if parent.name == "MainProcess":  # the folder of its sockets is handed down to its children
        leftovers += (Path(util.get_temp_dir()),)
    threading.Thread(target=_wait, args=(parent.sentinel, leftovers), name="leash", daemon=True).start()


def _wait(sentinel: int, leftovers: Sequence[Path]) -> None:
    connection.wait([sentinel])
    for folder in leftovers:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def leave_signals_to_parent() -> None:
    """What asks to stop often reaches all processes: the one that started this one decides what it means."""
    for number in STOPPING:
        signal.signal(number, _leave)  # to ignore them would be handed on to programs that this process starts
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def _leave(number: int, frame: object) -> None:
    del number, frame


def die_by_signals() -> None:
    """Let a signal end this process at once: no traceback from each rank, no waiting for a collective."""
    for number in STOPPING:
        if signal.getsignal(number) != signal.SIG_IGN:  # the shell's word for a job in the background
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
