"""Requests to stop, by the signals that schedulers and people send: honoured at the next step that suits all."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
AGAIN = 75  # the exit code of a training that stopped when asked: "try again later", as sysexits.h has it

_asked = threading.Event()


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Meanwhile these signals ask, instead of ending the process; a second Ctrl-C ends it at once."""
    _asked.clear()
    if threading.current_thread() is not threading.main_thread():
        yield  # signals reach the main thread only: whoever has it answers them
        return
    before = {number: signal.signal(number, _note) for number in ASKING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def requested() -> bool:
    """Whether somebody has asked."""
    return _asked.is_set()


def request(number: signal.Signals) -> None:
    """Ask as if this signal had come."""
    del number
    _asked.set()


def _note(number: int, frame: Any) -> None:
    del frame
    if number == signal.SIGINT and _asked.is_set():
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    _asked.set()
