"""Requests to stop, by the signals that schedulers and people send.

While a process listens, a signal is a request, honoured at the next moment that suits all ranks. Elsewhere, where
there is nothing to be saved, it ends what the process is at by an exception. However often it comes, from
whomever, it is one request; only a second Ctrl-C says more: leave at once.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from signal import Signals
from typing import Any

from evenstep import leash, world

AGAIN = 75  # the exit code of a training that stopped when asked: "try again later", as sysexits.h has it
ECHO = 0.5  # seconds in which a rank's second Ctrl-C is the first one, handed on by torchrun

_UNTOUCHED = (signal.SIG_DFL, signal.default_int_handler)


class Stopped(SystemExit):
    """Somebody asked to stop. Left to itself, it ends the program with its exit code."""

    def __init__(self, why: str = "", code: int = AGAIN) -> None:
        super().__init__(code)
        self.code: int = code
        self.why = why

    def __str__(self) -> str:
        return self.why

    @classmethod
    def by(cls, number: Signals) -> "Stopped":
        """By a signal: the exit code is what shells expect."""
        return cls(f"stopped by {number.name}", 128 + number)


class _Requests:
    """What this process has been asked, and what it does when it is."""

    def __init__(self) -> None:
        self.asked: Signals | None = None
        self.interrupted: float | None = None
        """When Ctrl-C first came."""
        self.noted = False
        """A request is noted; else it raises."""

    def forget(self) -> None:
        """Nothing has been asked so far."""
        self.asked = self.interrupted = None

    def take(self, number: int, frame: Any) -> None:
        """The handler of all signals that ask."""
        del frame
        if number == signal.SIGINT and self._came_before():
            self._leave()
        if self.asked is None:
            self.asked = Signals(number)
            if not self.noted:
                raise Stopped.by(self.asked)

    def _came_before(self) -> bool:
        """Whether Ctrl-C had come already, for another time than this."""
        now, before = time.monotonic(), self.interrupted
        if before is None:
            self.interrupted = now
            return False
        return now - before >= ECHO or world.from_launcher() is None

    def _leave(self) -> None:
        if world.from_launcher() is None:
            raise KeyboardInterrupt
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a rank may be deep in a collective
        signal.raise_signal(signal.SIGINT)


_requests = _Requests()


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Meanwhile signals that ask to stop are noted."""
    with _taken(), _noting(True):
        yield


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Meanwhile they raise `Stopped`, and at once where one has come already. They end a rank as they end any
    process: it may be deep in a collective, and its launcher knows."""
    if world.from_launcher() is not None:
        yield
        return
    with _taken(), _noting(False):
        if _requests.asked is not None:
            raise Stopped.by(_requests.asked)
        yield


@contextlib.contextmanager
def resumable() -> Iterator[None]:
    """As `interruptible`, for what can be started again by the same line: the exit code says so to schedulers."""
    try:
        with interruptible():
            yield
    except Stopped as stopped:
        raise Stopped(stopped.why, AGAIN if stopped.code else 0) from None


def requested() -> Signals | None:
    """Which signal has asked, if any has."""
    return _requests.asked


def request(number: Signals) -> None:
    """Ask as if this signal had come."""
    _requests.asked = _requests.asked or number


@contextlib.contextmanager
def _noting(noted: bool) -> Iterator[None]:
    before, _requests.noted = _requests.noted, noted
    try:
        yield
    finally:
        _requests.noted = before


@contextlib.contextmanager
def _taken() -> Iterator[None]:
    """Answer the signals that ask, but for those that somebody else has taken, or that nohup or a shell has
    switched off. Outside of all this, nothing has been asked."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals reach the main thread only: whoever has it answers them
        return
    before = {n: handler for n in leash.STOPPING if (handler := signal.getsignal(n)) in _UNTOUCHED}
    if before:
        _requests.forget()
    for number in before:
        signal.signal(number, _requests.take)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
