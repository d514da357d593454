"""A worker's blocks: leases are taken ahead by a thread, which also sends what is committed, as one message for
all that has come together. Neither the training nor its loader waits for the network.
"""

import atexit
import contextlib
import os
import secrets
import socket
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from evenstep.errors import UserError
from evenstep.order.permutation import Indices
from evenstep.service import order_pb2 as pb
from evenstep.service import wire
from evenstep.service.connection import Closed, Connection, Over
from evenstep.service.spec import Spec

NOBODY = 0  # incarnations count from 1
SOON = 0.002  # seconds, after which to ask again where there was nothing; then twice as many
MOST_BLOCKS = 4096  # in a lease
MOST_SAMPLES = 1 << 18  # in a lease of more than one block: what waits here takes 2 MB
FIRST_WORDS = 30.0  # seconds to get through with them at the start
LAST_COMMITS, LAST_WORDS = 30.0, 5.0  # seconds to get through with them at the end


class LeaseLost(UserWarning):
    """What this worker had trained on and not committed was given to others, who train on it again."""


class Block(NamedTuple):
    """A worker's batch: where it stands, and its samples."""

    incarnation: int
    lease: int
    epoch: int
    start: int
    stop: int
    indices: Indices


@dataclass
class _Leased:
    """A lease that is here: its samples, and how far it was handed on."""

    incarnation: int
    number: int
    epoch: int
    next: int
    stop: int
    indices: Indices
    began: float
    first: int = field(init=False)

    def __post_init__(self) -> None:
        self.first = self.next

    def cut(self, block: int) -> Block:
        """The next block of it."""
        start, stop = self.next, min((self.next // block + 1) * block, self.stop)
        self.next = stop
        samples = self.indices[start - self.first : stop - self.first]
        return Block(self.incarnation, self.number, self.epoch, start, stop, samples)


class Feed:
    """What a worker of a dynamic session reads, and commits. Used by one thread."""

    def __init__(
        self,
        connection: Connection,
        session: str,
        *,
        size: int | None = None,
        seed: int | None = None,
        worker: str | None = None,
        most_blocks: int = MOST_BLOCKS,
    ) -> None:
        self.connection = connection
        self.session = session
        self.size = size
        self.seed = seed
        self.name = worker or f"{socket.gethostname()[:60]}-{os.getpid()}-{secrets.token_hex(3)}"
        self.most_blocks = most_blocks
        self.refused = 0
        """Samples whose commit was refused: others train on them again."""
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._leases: deque[_Leased] = deque()
        self._commits: dict[int, tuple[int, int]] = {}  # by lease: from where to where
        self._handed: deque[Block] = deque()  # to the one who trains, and not committed yet
        self._rewound: deque[Block] = deque()  # to be handed on once more
        self._taken = 0  # leases of this incarnation
        self._ask = 1  # blocks that the next lease may have
        self._dry = False  # whether the server had nothing, when last asked
        self._pause = SOON  # before it is asked again
        self._ended = False  # whether the epoch is over; `epoch` says so when the one who trains has come to it
        self._acknowledged = 0.0  # when the server last took a commit, or gave the first lease
        self._doubted = False  # whether that is so long ago that this incarnation may be over
        self._calls = 0  # signs of life of the one who trains
        self._waiting = False  # it waits for a block now
        self._failed: BaseException | None = None
        self._closing = False
        self._process = os.getpid()

    # For the one who trains

    def start(self) -> Spec:
        """Join the session; what it is."""
        joined = self._join(FIRST_WORDS)
        self.spec = wire.spec_of(joined.plan)
        self.epoch = self._coming = joined.epoch
        self._thread = threading.Thread(target=self._guarded, name=f"order {self.session}", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        return self.spec

    @property
    def over(self) -> bool:
        """Whether the last epoch is over."""
        return self.epoch >= self.spec.epochs

    def next(self, wait: bool = True) -> Block | None:
        """The next block of the epoch; None when it is over.

        None, too, where there is nothing for now but what others hold, and it is not to be waited for: for as long
        as this worker has blocks that it has not committed, they may be what the others wait for.
        """
        with self._changed:
            self._calls += 1
            self._doubted = time.monotonic() - self._acknowledged > self.spec.lease_seconds
            while self._doubted or not (self._rewound or self._leases):
                if self._failed is not None:
                    raise self._failed
                if self._ended:
                    self.epoch = self._coming
                    return None
                if self._dry and (self._handed or not wait):
                    return None
                self._waiting = True
                self._changed.notify_all()
                self._changed.wait()
                self._waiting = False
            block = self._rewound.popleft() if self._rewound else self._cut()
            self._handed.append(block)
            return block

    def _cut(self) -> Block:
        lease = self._leases[0]
        block = lease.cut(self.spec.block)
        if lease.next == lease.stop:
            self._leases.popleft()
            self._pace(time.monotonic() - lease.began)
            self._changed.notify_all()
        return block

    def commit(self) -> Block:
        """The oldest block that was handed on is trained on."""
        with self._changed:
            if self._failed is not None:
                raise self._failed
            if not self._handed:
                raise ValueError("more blocks were committed than handed out: once for each")
            self._calls += 1
            block = self._handed.popleft()
            if block.incarnation != self.incarnation:
                self._refuse(len(block.indices))
                return block
            start = self._commits.get(block.lease, (block.start, 0))[0]
            self._commits[block.lease] = (start, block.stop)
            self._changed.notify_all()
            return block

    def rewind(self) -> None:
        """Let the blocks that were handed on, and not committed, come again."""
        with self._changed:
            kept = [block for block in self._handed if block.incarnation == self.incarnation]
            self._rewound.extendleft(reversed(kept))
            self._handed.clear()

    def next_epoch(self) -> None:
        """Go on with the epoch that the session is in, if `next` has come to the end of the last one."""
        with self._changed:
            if self._ended and self.epoch == self._coming and not self.over:
                self._ended = self._dry = False
                self._changed.notify_all()

    def settle(self) -> None:
        """Wait until all that was committed is acknowledged."""
        with self._changed:
            while self._commits and self._failed is None:
                self._changed.wait()
            if self._failed is not None:
                raise self._failed

    def holds(self) -> bool:
        """Whether there are blocks here, of which not all are committed and acknowledged."""
        self.settle()
        return bool(self._handed or self._rewound or self._leases)

    def close(self) -> None:
        """Send what is committed, give back the rest, and end."""
        atexit.unregister(self.close)
        if self._thread is None or self._process != os.getpid():  # a forked process has neither
            return
        with self._changed:
            self._closing = True
            self.connection.patience = min(self.connection.patience, LAST_COMMITS)
            self._changed.notify_all()
        self._thread.join()
        self._thread = None
        self.connection.close()
        if self._commits and self._failed is not None:
            raise self._failed

    # The thread

    def _guarded(self) -> None:
        try:
            self._work()
        except Closed:
            pass
        except BaseException as error:
            with self._changed:
                self._failed = error
                self._changed.notify_all()

    def _work(self) -> None:
        while (act := self._wanted()) is not None:
            try:
                act()
            except Over:
                self._again()
        request = pb.LeaveRequest(session=self.session, incarnation=self.incarnation)
        with contextlib.suppress(Over, UserError):  # the server finds out by itself, after the time of a lease
            self.connection.call("Leave", request, pb.LeaveReply, LAST_WORDS)

    def _wanted(self) -> Callable[[], None] | None:
        """What is to be done next; waits until there is something. None when all is done."""
        with self._changed:
            while True:
                if self._doubted and not self._commits:
                    return self._check
                if self._calls and not self._ended and len(self._leases) < 2 and not self._closing:
                    return self._take
                if self._commits:
                    return self._send
                if self._closing:
                    return None
                self._changed.wait()

    def _check(self) -> None:
        """Whether what is here is still this worker's: asking once more for a lease it has had tells."""
        if self._leases:
            held = self._leases[0]
            request = pb.TakeRequest(
                session=self.session, incarnation=held.incarnation, lease=held.number, epoch=held.epoch, blocks=1
            )
            self.connection.call("Take", request, pb.TakeReply)
        with self._changed:
            self._doubted = False
            self._changed.notify_all()

    def _take(self) -> None:
        """One lease more; what waits to be committed goes with the request."""
        commit = self._first()
        request = pb.TakeRequest(
            session=self.session,
            incarnation=self.incarnation,
            lease=self._taken + 1,
            epoch=self.epoch,
            blocks=self._ask,
            commit=commit,
        )
        reply = self.connection.call("Take", request, pb.TakeReply)
        if commit is not None:
            self._acknowledge(commit)
        if reply.HasField("lease"):
            self._hold(reply.lease)
            return
        with self._changed:
            if reply.HasField("ended"):
                self._ended, self._coming = True, reply.ended.epoch
            self._dry = True
            self._changed.notify_all()
            if not self._ended and not self._commits and not self._closing:
                self._changed.wait(min(self._pause, reply.wait.milliseconds / 1000))
                self._pause *= 2

    def _hold(self, lease: pb.Lease) -> None:
        """A lease is here: look up its samples."""
        indices = self.spec.plan.block(lease.epoch, lease.done, lease.stop)
        held = _Leased(
            self.incarnation, lease.lease, lease.epoch, lease.done, lease.stop, indices, time.monotonic()
        )
        with self._changed:
            self._taken = lease.lease
            self._dry, self._pause = False, SOON
            self._acknowledged = max(self._acknowledged, held.began) if self._leases else held.began
            if not self._leases:  # they were waited for: larger ones are worth it
                self._ask = min(2 * self._ask, self._most())
            self._leases.append(held)
            self._changed.notify_all()

    def _send(self) -> None:
        """All that was committed of one lease."""
        commit = self._first()
        assert commit is not None
        request = pb.CommitRequest(session=self.session, incarnation=self.incarnation, part=commit)
        self.connection.call("Commit", request, pb.CommitReply)
        self._acknowledge(commit)

    def _first(self) -> pb.Part | None:
        """What waits to be committed of the first lease of which anything does."""
        with self._changed:
            for number, (start, stop) in self._commits.items():
                return pb.Part(lease=number, start=start, stop=stop)
        return None

    def _acknowledge(self, commit: pb.Part) -> None:
        with self._changed:
            self._acknowledged = time.monotonic()
            latest = self._commits.pop(commit.lease)[1]
            if latest > commit.stop:
                self._commits[commit.lease] = (commit.stop, latest)
            self._changed.notify_all()

    def _again(self) -> None:
        """This incarnation is over: what it held and had not committed is lost to it. Begin another, but not
        before the one who trains shows life: leases that nobody works on would hold up all others again.
        """
        with self._changed:
            self._refuse(sum(stop - start for start, stop in self._commits.values()))
            self._commits.clear()
            self._leases.clear()
            self._rewound.clear()
            self.incarnation = NOBODY  # whatever is committed from now on is too late
            self._doubted = False
            self._changed.notify_all()
            calls = self._calls
            while self._calls == calls and not self._waiting and not self._closing:
                self._changed.wait()
            if self._closing:
                return
        joined = self._join()
        with self._changed:
            self._ended = self._ended or joined.epoch > self.epoch
            self._coming = joined.epoch
            self._changed.notify_all()

    def _join(self, patience: float | None = None) -> pb.JoinReply:
        request = pb.JoinRequest(
            session=self.session,
            worker=self.name,
            birth=secrets.token_bytes(16),
            size=self.size,
            seed=self.seed,
        )
        joined = self.connection.call("Join", request, pb.JoinReply, patience)
        with self._changed:
            self.incarnation = joined.incarnation
            self._taken, self._dry = 0, False
        return joined

    def _refuse(self, samples: int) -> None:
        if not samples:
            return
        self.refused += samples
        warnings.warn(
            f"{samples:,} samples of session {self.session} were trained on too late: this worker made no "
            f"progress for {self.spec.lease_seconds:g} s, and they go to others; open sessions with longer leases "
            "(--lease-seconds) where a block takes that long",
            LeaseLost,
            stacklevel=3,
        )

    def _most(self) -> int:
        return max(1, min(self.most_blocks, MOST_SAMPLES // self.spec.block))

    def _pace(self, seconds: float) -> None:
        """A lease took so long: it should be a small part of the time that it is given."""
        if seconds > self.spec.lease_seconds / 10:
            self._ask = max(1, self._ask // 2)
