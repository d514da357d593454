"""Ranks on this machine, under torch's elastic agent, started by a forkserver that has torch loaded."""

import contextlib
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from evenstep import leash, world
from evenstep.failure import FAILED, Failure, report
from evenstep.launch.blame import failed, failure_of
from evenstep.watch import stopping
from evenstep.watch.stopping import Stopped
from evenstep.world import Meeting, Surroundings, World

if TYPE_CHECKING:
    from evenstep.launch.agent import Agent
    from evenstep.launch.judge import Judge
    from evenstep.launch.nodes import Nodes

T = TypeVar("T")

PRELOADED = ("evenstep.training",)
VICTIMS_WAIT = 1.0  # seconds, so that the agent finds the rank that went first


def preload() -> None:
    """Let a forkserver load torch while this process goes on with its own start."""
    leash.start_forkserver(PRELOADED)


def launch(
    entry: Callable[[World], T],
    procs: int,
    *,
    nodes: tuple[int, int] = (1, 1),
    meeting: Meeting | None = None,
    restarts: int = 0,
    tell: Callable[[Failure], None] = lambda _: None,
) -> T:
    """Run `entry` in so many processes on each node; what the first of this node's returned.

    When a rank is killed or fails, all are started again, so many times, and when a node comes or goes: `entry`
    has to find out how far it was. What asks this process to stop is handed on to the ranks as SIGTERM.
    """
    preload()
    from evenstep.launch.agent import Agent, quiet
    from evenstep.launch.judge import Judge
    from evenstep.launch.nodes import Count, gathered

    with (
        quiet(),
        stopping.listening(),
        tempfile.TemporaryDirectory(prefix="evenstep-", ignore_cleanup_errors=True) as folder,
        gathered(Count(*nodes), meeting) as there,
    ):
        judge = Judge(Path(folder), there.board, alone=meeting is None, tell=tell)
        agent = Agent(
            _rank,
            entry,
            folder,
            world.surroundings(),
            procs=procs,
            nodes=there,
            logs=folder,
            restarts=restarts,
            again=judge.again,
        )
        result = agent.run()
        if result is None:
            raise Stopped("the run has ended without need of this node", 0)
        if result.is_failed():
            raise _why(agent, judge, there)
    returned: T = result.return_values[min(result.return_values)]
    return returned


def _why(agent: "Agent", judge: "Judge", nodes: "Nodes") -> BaseException:
    """Why the ranks have ended before their time."""
    culprit, asked = judge.culprit(agent.attempt, agent.ended), stopping.requested()
    if asked and (culprit is None or culprit.victim or not culprit.trace):
        return Stopped.by(asked)
    if culprit is None:
        return Stopped("another node is gone without a word")
    nodes.tell({"failure": culprit.as_dict()})
    return failed(culprit)


# In each rank


def _rank(entry: Callable[[World], T], reports: str, surroundings: Surroundings, attempt: str) -> T:
    """What each process runs."""
    leash.hold(Path(reports))
    leash.die_by_signals()
    place = world.from_launcher()
    assert place is not None
    try:
        surroundings.enter(attempt)
        return entry(dataclasses.replace(place, reports=Path(reports)))
    except BaseException as error:
        failure = failure_of(place, error)
        with contextlib.suppress(OSError):  # without a report, how the process ends is told
            report(Path(reports), failure)
        sys.stdout.flush()
        sys.stderr.flush()
        if failure.victim:
            time.sleep(VICTIMS_WAIT)
        os._exit(FAILED)  # at once: others wait for this rank in collectives, and threads of torch's in it
