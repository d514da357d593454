"""Ranks on this machine, under torch's elastic agent, started by a forkserver that has torch loaded.

Each rank writes a report when it fails, before anything else can happen to it; from these reports and from
how the processes ended follows who failed first, and why.
"""

import contextlib
import dataclasses
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from evenstep import leash, world
from evenstep.errors import UserError
from evenstep.failure import FAILED, Failure, lost_peer, report, reported
from evenstep.world import Meeting, Surroundings, World

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler

    from evenstep.launch.agent import Ended

T = TypeVar("T")

PRELOADED = ("evenstep.training",)
INTERVAL = 0.1  # seconds between two looks at the ranks
NODES_COME_WITHIN = 900  # seconds from the first to the last
VICTIMS_WAIT = 10 * INTERVAL  # so that the look finds the rank that went first
ONE_STOP = 3.0  # seconds in which further signals do not break off what the first one set going


class RankFailed(Exception):
    """A rank came to an end that it should not have: which, and why."""

    def __init__(self, culprit: Failure) -> None:
        super().__init__(culprit.sentence)
        self.culprit = culprit


class Stopped(SystemExit):
    """A signal ended the run; left to itself, the program exits as shells expect it to."""

    def __init__(self, by: signal.Signals) -> None:
        super().__init__(128 + by)
        self.signal = by

    def __str__(self) -> str:
        return f"stopped by {self.signal.name}"


def preload() -> None:
    """Let a forkserver load torch while this process goes on with its own start."""
    leash.start_forkserver(PRELOADED)


def launch(
    entry: Callable[[World], T], procs: int, *, nodes: int = 1, meeting: Meeting | None = None, restarts: int = 0
) -> T:
    """Run `entry` in so many processes; what the first of them returned.

    When a rank is killed or fails, all are started again, so many times: `entry` has to find out how far it was.
    """
    preload()
    from torch.distributed.elastic.rendezvous import RendezvousError

    from evenstep.launch.agent import quiet

    with quiet(), tempfile.TemporaryDirectory(prefix="evenstep-", ignore_cleanup_errors=True) as reports:
        try:
            returned, ended = _run(entry, procs, nodes, meeting, reports, restarts)
        except RendezvousError as error:
            if meeting is None:
                raise
            raise UserError(_no_meeting(nodes, meeting, error)) from None
        if ended:
            failed = RankFailed(_culprit(Path(reports), ended))
            if failed.culprit.users:
                raise UserError(failed.culprit.what) from failed
            raise failed
    return returned[min(returned)]


def _run(
    entry: Callable[[World], T], procs: int, nodes: int, meeting: Meeting | None, reports: str, restarts: int
) -> "tuple[Mapping[int, T], Mapping[int, Ended]]":
    """What the ranks of this machine returned, or how those ended that did not."""
    from evenstep.launch.agent import Agent

    rendezvous = _rendezvous(nodes, meeting)
    agent = Agent(
        _rank,
        entry,
        reports,
        world.surroundings(),
        procs=procs,
        rendezvous=rendezvous,
        local_addr="localhost" if meeting is None else None,
        logs=reports,
        interval=INTERVAL,
        restarts=restarts,
        again=Judge(Path(reports)).again,
    )
    try:
        result = agent.run()
    finally:
        rendezvous.shutdown()
    return result.return_values, agent.ended if result.is_failed() else {}


def _rendezvous(nodes: int, meeting: Meeting | None) -> "RendezvousHandler":
    """Where the nodes' agents find each other."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    parameters = RendezvousParameters(
        backend="c10d",
        endpoint="localhost:0" if meeting is None else f"{meeting.address}:{meeting.port}",
        run_id=uuid.uuid4().hex if meeting is None else "evenstep",
        min_nodes=nodes,
        max_nodes=nodes,
        local_addr="localhost" if meeting is None else None,
        timeout=NODES_COME_WITHIN,
        # by itself torch hosts only where the host's name leads to the address; the first node knows better
        **({} if meeting is None else {"is_host": meeting.node == 0}),
    )
    return get_rendezvous_handler(parameters)


def _no_meeting(nodes: int, meeting: Meeting, error: Exception) -> str:
    why = _first_line(error.__cause__ or error) or type(error).__name__
    return (
        f"node {meeting.node} of {nodes} met no other at {meeting.address}:{meeting.port} ({why}); is MASTER_ADDR "
        "the first node's, MASTER_PORT free there and open to the others, and does the same line run on each?"
    )


# In each rank


def _rank(entry: Callable[[World], T], reports: str, surroundings: Surroundings) -> T:
    """What each process runs."""
    leash.hold(Path(reports))
    leash.die_by_signals()
    place = world.from_launcher()
    assert place is not None
    try:
        surroundings.enter()
        return entry(dataclasses.replace(place, reports=Path(reports)))
    except BaseException as error:
        failure = _failure(place, error)
        with contextlib.suppress(OSError):  # without a report, how the process ends is told
            report(Path(reports), failure)
        sys.stdout.flush()
        sys.stderr.flush()
        if failure.victim:
            time.sleep(VICTIMS_WAIT)
        os._exit(FAILED)  # at once: others wait for this rank in collectives, and threads of torch's in it


def _failure(place: World, error: BaseException) -> Failure:
    users = isinstance(error, UserError)
    return Failure(
        rank=place.rank,
        host=place.host,
        pid=os.getpid(),
        time=time.time(),
        what=str(error) if users else f"failed with {type(error).__name__}: {_first_line(error)}",
        trace="".join(traceback.format_exception(error)),
        users=users,
        victim=lost_peer(error),
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


# Who is to blame


class Judge:
    """Says who failed, and whether to try again."""

    def __init__(self, reports: Path) -> None:
        self.reports = reports
        self._before = ""

    def again(self, ended: "Mapping[int, Ended]") -> bool:
        """Not where the user has something to mend, nor where the same error has come a second time in a row."""
        culprit = _culprit(self.reports, ended)
        if culprit.users or (culprit.trace and culprit.what == self._before):
            return False
        self._before = culprit.what
        sys.stderr.write(f"{culprit.trace}evenstep: {culprit.sentence}; starting all ranks again\n")
        for path in self.reports.glob("*.report"):
            path.unlink()
        return True


def _culprit(reports: Path, ended: "Mapping[int, Ended]") -> Failure:
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
            victim=how.code == -signal.SIGABRT,  # torch's way out of a broken collective
        )
        for rank, how in ended.items()
        if rank not in known
    ]
    return min(silent + told, key=lambda f: (f.victim, bool(f.trace), f.time))


HINTS = {
    signal.SIGKILL: "; was it the kernel, for want of memory? dmesg says so",
    signal.SIGABRT: "; torch does so where ranks meet in exchanges that differ: has one of them left one out?",
}


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"left with exit code {code}"
    number = signal.Signals(-code)
    return f"was killed by {number.name}{HINTS.get(number, '')}"


# Stopping


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """A signal that asks this process to end becomes an exception: KeyboardInterrupt, or Stopped.

    Signals that somebody else has taken over, or that nohup or the shell have switched off, stay as they are.
    """
    if threading.current_thread() is not threading.main_thread() or world.from_launcher() is not None:
        yield  # signals reach the main thread only, and a rank's are its launcher's to answer
        return
    stopped = -ONE_STOP

    def stop(number: int, frame: Any) -> None:
        del frame
        nonlocal stopped
        if time.monotonic() - stopped < ONE_STOP:  # a second Ctrl-C must not break off the cleaning up
            return
        stopped = time.monotonic()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise Stopped(signal.Signals(number))

    untouched = (signal.SIG_DFL, signal.default_int_handler)
    before = {n: handler for n in leash.STOPPING if (handler := signal.getsignal(n)) in untouched}
    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
