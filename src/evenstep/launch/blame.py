"""Who is to blame when a training breaks off.

Each rank writes a report when it fails, before anything else can happen to it; from these reports and from how
the processes ended follows who failed first, and why.
"""

import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from evenstep.errors import UserError
from evenstep.failure import Failure, lost_peer, reported
from evenstep.world import World

UNGUARDED = (
    "this script is being read by another process to find the task in it, and would start the training again: "
    'put evenstep.train(...) under  if __name__ == "__main__":'
)
HINTS = {
    signal.SIGKILL: "; was it the kernel, for want of memory? dmesg says so",
    signal.SIGABRT: "; torch does so where ranks meet in exchanges that differ: has one of them left one out?",
}
READ_AGAIN = 78  # the exit code of such a process: a configuration error, as sysexits.h has it


class Ended(NamedTuple):
    """How a rank's process ended: an exit code, or a signal as a negative one."""

    pid: int
    code: int
    time: float


class RankFailed(Exception):
    """A rank came to an end that it should not have: which, and why."""

    def __init__(self, culprit: Failure) -> None:
        super().__init__(culprit.sentence)
        self.culprit = culprit
        if culprit.trace:  # to be seen where nobody catches it
            self.add_note(culprit.trace.rstrip())


def failed(culprit: Failure) -> Exception:
    """The error that says so."""
    error = RankFailed(culprit)
    if culprit.users:
        mistake = UserError(culprit.what)
        mistake.__cause__ = error
        return mistake
    return error


# In each rank


def leave_if_read_again() -> None:
    """End a process that came to start a training while it was still reading the script it is to work for."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # so multiprocessing marks it
        sys.stderr.write(f"evenstep: {UNGUARDED}\n")
        sys.stderr.flush()
        os._exit(READ_AGAIN)  # a forkserver makes 1 of any other way out


def failure_of(place: World, error: BaseException) -> Failure:
    """How this rank failed."""
    users = isinstance(error, UserError)
    return Failure(
        rank=place.rank,
        host=place.host,
        pid=os.getpid(),
        time=time.time(),
        what=str(error) if users else f"failed with {type(error).__name__}: {first_line(error)}",
        trace="".join(traceback.format_exception(error)),
        users=users,
        victim=lost_peer(error),
    )


def first_line(error: BaseException) -> str:
    """What an error says, without what follows."""
    return str(error).strip().partition("\n")[0]


# In the process that started them


def culprit_of(reports: Path, ended: Mapping[int, Ended]) -> Failure | None:
    """The rank to blame: one that died without a word, else the first that failed of itself, else the first."""
    told = reported(reports)
    known = {failure.rank for failure in told}
    silent = [
        Failure(
            rank=rank,
            host=socket.gethostname(),
            pid=how.pid,
            time=how.time,
            what=_how_it_ended(how.code),
            users=how.code == READ_AGAIN,
            victim=how.code == -signal.SIGABRT,  # torch's way out of a broken collective
        )
        for rank, how in ended.items()
        if rank not in known
    ]
    return min(silent + told, key=lambda f: (f.victim, bool(f.trace), f.time), default=None)


def _how_it_ended(code: int) -> str:
    if code == READ_AGAIN:
        return UNGUARDED
    if code >= 0:
        return f"left with exit code {code}"
    number = signal.Signals(-code)
    return f"was killed by {number.name}{HINTS.get(number, '')}"
