"""Where the agents of several nodes meet, see each other come and go, and tell each other how it ended.

The first node keeps the place where they meet. The ranks meet there too, under a new name for every try: none of
them may find what a rank of an earlier try has left.
"""

import contextlib
import time
import uuid
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from evenstep.errors import UserError
from evenstep.failure import Failure
from evenstep.launch.blame import failed, first_line
from evenstep.watch.board import Board, Gone, Private, Shared
from evenstep.watch.stopping import AGAIN, Stopped
from evenstep.world import Meeting

COME_WITHIN = 900  # seconds from the first node to the last that is needed
LAST_CALL = 3  # seconds for more nodes, once there are enough
ALIVE = 2  # seconds between two signs of life
SILENT = 10  # seconds without one, and a node is gone; as much may the nodes' clocks differ
ANSWER_WITHIN = 20  # seconds for the first node to answer
FAREWELL = 5.0  # seconds for which the first node stays when it leaves early, so that the others learn why


class Count(NamedTuple):
    """How many nodes there have to be, and may be."""

    least: int = 1
    most: int = 1


class Nodes:
    """The nodes of a training, seen from one of them."""

    def __init__(self, count: Count, meeting: Meeting | None) -> None:
        self.count = count
        self.meeting = meeting
        parameters = _parameters(count, meeting)
        backend, store = create_backend(parameters)
        self.rendezvous = create_handler(store, backend, parameters)
        self.board: Board = Shared(meeting.address, meeting.port, "nodes") if meeting else Private()
        self._there: set[Any] = set()

    # Who is there

    def met(self, store: Any, place: int, count: int) -> int:
        """A try begins, with the nodes that are there now; this one's place in the order of their numbers.

        torch has given them other places, by the names of their hosts.
        """
        self._there = self._present()
        if self.meeting is None:
            return place
        store.set(f"evenstep/number/{place}", str(self.meeting.node))
        numbers = sorted(int(store.get(f"evenstep/number/{other}")) for other in range(count))
        for number, next_one in pairwise(numbers):
            if number == next_one:
                why = f"two nodes have the NODE_RANK {number}; number them 0, 1, ..."
                self.tell({"why": why, "code": 2})
                raise UserError(why)
        return numbers.index(self.meeting.node)

    def gone(self) -> str:
        """Those that were there when the try began and are not any more, in words."""
        missing = self._there - self._present()
        return ", ".join(sorted(f"{node.addr} (pid {node.pid})" for node in missing))

    def _present(self) -> set[Any]:
        return set(self.rendezvous._state_holder.state.participants)  # what torch knows and does not tell

    # How it ended

    def tell(self, note: Mapping[str, Any]) -> None:
        """Let the other nodes know why this one leaves; the first takes the place where they meet with it."""
        with contextlib.suppress(Gone):
            self.board.post("ended", note)
            self.rendezvous.shutdown()
            if self.meeting and self.meeting.node == 0 and len(self._there) > 1:
                time.sleep(FAREWELL)

    def told(self) -> BaseException | None:
        """Why another node has left, if it has said so."""
        try:
            note = self.board.read("ended")
        except Gone:
            return None
        if note is None:
            return None
        return failed(Failure(**note["failure"])) if "failure" in note else Stopped(note["why"], note["code"])

    def explained(self, error: Exception) -> BaseException:
        """What it means that the nodes could not meet."""
        if self.meeting is None:
            return error
        if isinstance(error, RendezvousClosedError):
            return self.told() or Stopped("the run has ended on the other nodes", AGAIN if self._there else 0)
        if not self._there:
            return UserError(_no_meeting(self.count, self.meeting, error))
        if isinstance(error, RendezvousTimeoutError):
            return Stopped(f"in {COME_WITHIN} s no {self.count.least} nodes have come together again")
        where = f"{self.meeting.address}:{self.meeting.port}"
        return Stopped(f"the first node, where the others meet ({where}), is gone; resume the run without it")


@contextlib.contextmanager
def gathered(count: Count, meeting: Meeting | None) -> Iterator[Nodes]:
    """The nodes, for as long as they train together."""
    try:
        nodes = Nodes(count, meeting)
    except (RendezvousError, dist.DistError) as error:
        if meeting is None:
            raise
        raise UserError(_no_meeting(count, meeting, error)) from None
    try:
        yield nodes
    except (RendezvousError, dist.DistError) as error:
        raise nodes.explained(error) from None
    except Stopped as stopped:
        nodes.tell({"why": stopped.why, "code": stopped.code})
        raise
    finally:
        nodes.rendezvous.shutdown()


def _parameters(count: Count, meeting: Meeting | None) -> RendezvousParameters:
    return RendezvousParameters(
        backend="c10d",
        endpoint=f"{meeting.address}:{meeting.port}" if meeting else "localhost:0",
        run_id="evenstep" if meeting else uuid.uuid4().hex,
        min_nodes=count.least,
        max_nodes=count.most,
        local_addr=None if meeting else "localhost",
        join_timeout=COME_WITHIN,
        last_call_timeout=LAST_CALL,
        keep_alive_interval=ALIVE,
        keep_alive_max_attempt=SILENT // ALIVE,
        read_timeout=ANSWER_WITHIN,
        # by itself torch hosts only where the host's name leads to the address; the first node knows better
        **({"is_host": meeting.node == 0} if meeting else {}),
    )


def _no_meeting(count: Count, meeting: Meeting, error: Exception) -> str:
    why = first_line(error.__cause__ or error) or type(error).__name__
    return (
        f"node {meeting.node} of {count.most} met no other at {meeting.address}:{meeting.port} ({why}); is "
        "MASTER_ADDR the first node's, MASTER_PORT free there and open to the others, and does the same line run "
        "on each?"
    )
