"""Requests to stop: the signals that schedulers and people send. The loop honours them at the next good moment."""

import signal
import threading
from typing import Any

ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
REQUEUE = 75  # the exit code of a training that stopped when asked: sysexits' "try again later"

_asked = threading.Event()


def listen() -> None:
    """From now on these signals ask, and no longer kill; a second Ctrl-C leaves at once."""
    for number in ASKING:
        signal.signal(number, _note)


def requested() -> bool:
    """Whether somebody has asked."""
    return _asked.is_set()


def _note(number: int, frame: Any) -> None:
    del frame
    if number == signal.SIGINT and _asked.is_set():
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    _asked.set()
