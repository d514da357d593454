"""Ranks on this machine, under torch's elastic agent, started by a forkserver that has torch loaded.

Each rank writes a report when it fails, before anything else can happen to it; from these reports and from
how the processes ended follows who failed first, and why.
"""

import contextlib
import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, TypeVar

from evenstep import leash, world
from evenstep.errors import UserError
from evenstep.world import Meeting, World

T = TypeVar("T")

PRELOADED = ["evenstep.training"]
LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")
FAILED = 1


class RankFailed(Exception):
    """A rank came to an end that it should not have: which, and why."""

    def __init__(self, culprit: "Failure") -> None:
        super().__init__(culprit.sentence)
        self.culprit = culprit


class Stopped(Exception):
    """A signal to the launcher ended the run."""

    def __init__(self, by: signal.Signals) -> None:
        super().__init__(f"stopped by {by.name}")
        self.signal = by


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How one rank came to an end."""

    rank: int
    host: str
    pid: int
    time: float
    what: str
    trace: str = ""
    users: bool = False
    """It is the user's to mend, and `what` says how."""

    @property
    def sentence(self) -> str:
        """Who, where, what."""
        return f"rank {self.rank} on {self.host} (pid {self.pid}) {self.what}"

    @property
    def victim(self) -> bool:
        """Whether this rank only found that another one had gone."""
        return any(sign in self.what for sign in LOST_PEER)


def preload() -> None:
    """Let a forkserver load torch while this process goes on with its own start."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


def launch(entry: Callable[[World], T], procs: int, *, nodes: int = 1, meeting: Meeting | None = None) -> T:
    """Run `entry` in so many processes; what the first of them returned."""
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what it says, we say in a line
    preload()
    alone = meeting is None
    with tempfile.TemporaryDirectory(prefix="evenstep-") as reports, _signals_kept():
        config = LaunchConfig(
            min_nodes=nodes,
            max_nodes=nodes,
            nproc_per_node=procs,
            run_id=uuid.uuid4().hex if alone else "evenstep",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0" if meeting is None else f"{meeting.address}:{meeting.port}",
            # by itself torch hosts only where the host's name leads to the address; the first node knows better
            rdzv_configs={} if meeting is None else {"is_host": meeting.node == 0},
            local_addr="localhost" if alone else None,
            max_restarts=0,
            monitor_interval=0.1,
            start_method="forkserver",
            logs_specs=DefaultLogsSpecs(log_dir=reports),
        )
        try:
            returned: dict[int, T] = elastic_launch(config, _rank)(entry, reports)
        except ChildFailedError as error:
            raise RankFailed(_culprit(Path(reports), error.failures)) from None
        except SignalException as error:
            raise Stopped(error.sigval) from None
    return returned[min(returned)]


def _rank(entry: Callable[[World], T], reports: str) -> T:
    """What each process runs."""
    leash.hold()
    leash.die_by_signals()
    place = world.from_launcher()
    assert place is not None
    try:
        return entry(place)
    except BaseException as error:
        _report(Path(reports), place, error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(FAILED)  # at once: others wait for this rank in collectives, and threads of torch's in it


def _report(reports: Path, place: World, error: BaseException) -> None:
    users = isinstance(error, UserError)
    what = str(error) if users else f"failed with {type(error).__name__}: {error}"
    facts = {
        "rank": place.rank,
        "host": place.host,
        "pid": os.getpid(),
        "time": time.time(),
        "what": what,
        "trace": "".join(traceback.format_exception(error)),
        "users": users,
    }
    # a half-written report is never read: it has its name only when it is whole
    unfinished = reports / f"{place.rank}.unfinished"
    unfinished.write_text(json.dumps(facts))
    unfinished.rename(reports / f"{place.rank}.report")


def _culprit(reports: Path, ended: dict[int, Any]) -> Failure:
    """The rank to blame: one killed by a signal, else the first that failed of itself, else the first."""
    reported = [Failure(**json.loads(path.read_text())) for path in reports.glob("*.report")]
    known = {failure.rank for failure in reported}
    killed = [
        Failure(
            rank=rank,
            host=socket.gethostname(),
            pid=failure.pid,
            time=failure.timestamp,
            what=_how_it_ended(failure.exitcode),
        )
        for rank, failure in ended.items()
        if rank not in known
    ]
    return min(killed + reported, key=lambda f: (f.victim, bool(f.trace), f.time))


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"left with exit code {code}"
    name = signal.Signals(-code).name
    hint = "; was it the kernel, for want of memory? dmesg says so" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """The elastic agent sets handlers of its own and leaves them behind."""
    names = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {name: signal.getsignal(name) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            with contextlib.suppress(ValueError):  # not the main thread, where the agent set none either
                signal.signal(name, handler)
