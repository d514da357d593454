"""A process that was started for a training ends when the one that started it is gone, however it went."""

import os
import signal
import threading
from multiprocessing import connection, parent_process


def hold() -> None:
    """End this process as soon as its parent is gone, even from inside a collective that never returns.

    A killed launcher or rank can tell nobody, and a forkserver's children are not its own, so that
    the usual look at the parent's pid would see nothing.
    """
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_wait, args=(parent.sentinel,), name="leash", daemon=True).start()


def _wait(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)


def leave_signals_to_parent() -> None:
    """Ctrl-C reaches every process of a terminal; the one that started this one decides what it means."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def die_by_signals() -> None:
    """Let a signal end this process at once: no traceback from each rank, no waiting for a collective."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
