"""The protocol of dynamic sessions: who holds which positions. No clock, no network, no disk; time is passed in.

An epoch's positions are, each of them, in one of four states: not yet handed out (from the cursor on), returned
(handed out once, and back), leased, or committed. What is committed is the ledger's to remember; here is only how
much. So memory follows the open leases, never the size.

A *worker* is known by its incarnation, a number that is never given twice. It numbers its leases 1, 2, 3, ...
itself, so a lease's number is the number of the request too, and asking again finds the same lease. A lease is
committed from its start on; what was committed before changes nothing when it comes again. When a worker has
made no progress for the time of a lease, the incarnation is *over*, whole: its leases return, and whatever it
says later is refused. An incarnation that lives has therefore never lost a lease, and one of its numbers that is
no longer open was committed to the end.
"""

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from evenstep.service.refusals import Refused, Why

MOST_OPEN = 16  # leases of a worker
MOST_WORKERS = 100_000
MOST_OVER = 10_000
FORGOTTEN_AFTER = 3600.0  # seconds in which a retry of an incarnation that is over gets its true answer
SMALLER = 4  # times smaller than asked for leases become at least, where there are enough for all
SHARES = 2  # leases that each busy worker has still to take, at least: so that all end at about the same time


class Lease(NamedTuple):
    """Positions start to stop of the current epoch; those before `done` are committed."""

    number: int
    start: int
    done: int
    stop: int


@dataclass
class Worker:
    """An incarnation of a worker."""

    incarnation: int
    name: str
    birth: bytes
    last: int = 0
    """The number of its newest lease."""
    leases: dict[int, Lease] = field(default_factory=dict)
    """The open ones; once it is over, those that it lost."""
    progress: float = 0.0
    """When it last committed, or took a lease while it had none."""
    heard: float = 0.0
    committed: int = 0
    """Samples, since the server started."""


# What has to be on disk before an answer goes out


class Joined(NamedTuple):
    """An incarnation begins."""

    incarnation: int
    name: str
    birth: bytes


class Leased(NamedTuple):
    """A lease is open, new or committed up to somewhere."""

    incarnation: int
    lease: Lease


class Done(NamedTuple):
    """A lease is committed to its end."""

    incarnation: int
    number: int


class Committed(NamedTuple):
    """These positions of an epoch are."""

    epoch: int
    start: int
    stop: int


class Over(NamedTuple):
    """An incarnation has ended; its leases are kept as what it lost."""

    incarnation: int


class Forgotten(NamedTuple):
    """An incarnation, with all that was known of it."""

    incarnation: int


class Turned(NamedTuple):
    """The session is in this epoch now."""

    epoch: int


Change = Joined | Leased | Done | Committed | Over | Forgotten | Turned


class Later(NamedTuple):
    """An answer to a request for a lease: nothing is free, but something may come back."""

    seconds: float


class Ended(NamedTuple):
    """An answer to a request for a lease: that epoch is over, the session is in this one."""

    epoch: int


class Leases:
    """A dynamic session's state, and the requests that change it.

    `changes` gathers what has to be kept; whoever answers a request takes it away, and writes it down first.
    """

    def __init__(self, *, size: int, block: int, epochs: int, lease_seconds: float) -> None:
        self.size = size
        self.block = block
        self.epochs = epochs
        self.lease_seconds = lease_seconds
        self.epoch = 0
        self.cursor = 0
        """Positions from here on were never handed out in this epoch."""
        self.committed = 0
        self.returned: list[tuple[int, int]] = []
        """Sorted, and no two of them touch."""
        self.workers: dict[int, Worker] = {}
        self.over: dict[int, Worker] = {}
        """Those that ended lately, in the order in which they did."""
        self.incarnations = 0
        self._by_name: dict[str, int] = {}
        self._by_birth: dict[bytes, int] = {}
        self.changes: list[Change] = []

    # Requests

    def join(self, name: str, birth: bytes, now: float) -> int:
        """An incarnation for a worker; whoever had the name before is over."""
        if birth in self._by_birth:
            return self._by_birth[birth]  # if it is over by now, what follows will be refused
        if name in self._by_name:
            self._end(self.workers[self._by_name[name]], now)
        if len(self.workers) >= MOST_WORKERS:
            raise Refused(Why.FULL, f"{MOST_WORKERS:,} workers are the most that a session can have")
        self.incarnations += 1
        self._add(Worker(self.incarnations, name, birth, progress=now, heard=now))
        self.changes.append(Joined(self.incarnations, name, birth))
        return self.incarnations

    def take(self, incarnation: int, number: int, epoch: int, blocks: int, now: float) -> Lease | Later | Ended:
        """A lease of so many blocks at most; the same one when it is asked for again."""
        worker = self._alive(incarnation, now)
        if number in worker.leases:
            return worker.leases[number]
        if number != worker.last + 1 or blocks < 1:
            raise Refused(
                Why.INVALID,
                f"the next lease of incarnation {incarnation} is number {worker.last + 1}, of 1 block or more; "
                f"it asked for number {number}, of {blocks}",
            )
        if epoch < self.epoch or self.epoch == self.epochs:
            return Ended(self.epoch)
        if epoch > self.epoch:
            raise Refused(Why.INVALID, f"epoch {epoch} has not begun: epoch {self.epoch} is not over")
        if len(worker.leases) >= MOST_OPEN:
            raise Refused(Why.FULL, f"a worker has {MOST_OPEN} open leases at most: commit, then take more")
        found = self._free(self._fair(worker, blocks))
        if found is None:
            return Later(min(0.5, self.lease_seconds / 10))
        if not worker.leases:
            worker.progress = now
        worker.last = number
        lease = worker.leases[number] = Lease(number, found[0], *found)
        self.changes.append(Leased(incarnation, lease))
        return lease

    def commit(self, incarnation: int, number: int, start: int, stop: int, now: float) -> None:
        """Positions of a lease are trained on, for good."""
        if self._committed_before_its_end(incarnation, number, stop):
            return
        worker = self._alive(incarnation, now)
        if not 1 <= number <= worker.last:
            raise Refused(Why.INVALID, f"incarnation {incarnation} was never given a lease {number}")
        lease = worker.leases.get(number)
        if lease is None or stop <= lease.done:
            return  # that was committed, and comes again
        if not lease.start <= start <= lease.done or stop > lease.stop:
            raise Refused(
                Why.INVALID,
                f"lease {number} is of positions {lease.start} to {lease.stop} and committed up to {lease.done}: "
                f"{start} to {stop} cannot be what comes next",
            )
        worker.progress = now
        worker.committed += stop - lease.done
        self.committed += stop - lease.done
        self.changes.append(Committed(self.epoch, lease.done, stop))
        if stop == lease.stop:
            del worker.leases[number]
            self.changes.append(Done(incarnation, number))
        else:
            worker.leases[number] = lease._replace(done=stop)
            self.changes.append(Leased(incarnation, worker.leases[number]))
        if self.committed == self.size:
            self._turn()

    def leave(self, incarnation: int, now: float) -> None:
        """A worker goes, and what it has not committed is free at once."""
        if incarnation in self.workers:
            self._end(self.workers[incarnation], now)

    def expire(self, now: float) -> None:
        """End those that hold leases without making progress, and forget those of long ago."""
        for worker in list(self.workers.values()):
            if worker.leases and worker.progress + self.lease_seconds <= now:
                self._end(worker, now)
        idle = [worker for worker in self.workers.values() if not worker.leases]
        for worker in [*idle, *self.over.values()]:
            if worker.heard + FORGOTTEN_AFTER <= now:
                self._forget(worker)

    # What is so

    def holders(self) -> Iterator[Worker]:
        """The workers that hold leases."""
        return (worker for worker in self.workers.values() if worker.leases)

    def open_leases(self) -> int:
        """How many."""
        return sum(len(worker.leases) for worker in self.workers.values())

    def handed_out(self) -> int:
        """Samples of the epoch that are committed or leased."""
        return self.cursor - sum(stop - start for start, stop in self.returned)

    # Inside

    def _alive(self, incarnation: int, now: float) -> Worker:
        worker = self.workers.get(incarnation)
        if worker is None:
            raise Refused(
                Why.OVER,
                f"incarnation {incarnation} is over: it made no progress for {self.lease_seconds:g} s, left, or "
                "joined again; join again; what it had not committed goes to others",
            )
        worker.heard = now
        return worker

    def _committed_before_its_end(self, incarnation: int, number: int, stop: int) -> bool:
        """Whether one that is over had committed this while it lived, and only missed the answer."""
        worker = self.over.get(incarnation)
        if worker is None or not 1 <= number <= worker.last:
            return False
        lost = worker.leases.get(number)
        return lost is None or stop <= lost.done

    def _fair(self, worker: Worker, blocks: int) -> int:
        """Not so many blocks that the others run out long before this one has trained on them."""
        busy = sum(1 for _ in self.holders()) + (not worker.leases)
        if busy == 1:
            return blocks
        left = -(-(self.size - self.handed_out()) // self.block)
        # one that asks for many is quick with them: a part of that is a fair share, if there is one for each
        share = max(left // (SHARES * busy), min(blocks // SMALLER, left // busy))
        return max(1, min(blocks, share))

    def _free(self, blocks: int) -> tuple[int, int] | None:
        """Positions that nobody holds, up to the end of a block; what came back goes first."""
        if self.returned:
            start, stop = self.returned.pop(0)
            end = self._after(start, blocks)
            if end < stop:
                self.returned.insert(0, (end, stop))
            return start, min(end, stop)
        if self.cursor == self.size:
            return None
        start, self.cursor = self.cursor, min(self._after(self.cursor, blocks), self.size)
        return start, self.cursor

    def _after(self, position: int, blocks: int) -> int:
        return (position // self.block + blocks) * self.block

    def _add(self, worker: Worker) -> None:
        self.workers[worker.incarnation] = worker
        self._by_name[worker.name] = self._by_birth[worker.birth] = worker.incarnation

    def _end(self, worker: Worker, now: float) -> None:
        del self.workers[worker.incarnation], self._by_name[worker.name]
        for lease in worker.leases.values():
            insort(self.returned, (lease.done, lease.stop))
        self.returned = joined(self.returned)
        self.over[worker.incarnation] = replace(worker, heard=now)
        self.changes.append(Over(worker.incarnation))
        if len(self.over) > MOST_OVER:
            self._forget(next(iter(self.over.values())))

    def _forget(self, worker: Worker) -> None:
        if self.workers.pop(worker.incarnation, None):
            del self._by_name[worker.name]
        self.over.pop(worker.incarnation, None)
        del self._by_birth[worker.birth]
        self.changes.append(Forgotten(worker.incarnation))

    def _turn(self) -> None:
        """The epoch is over: all is committed, so nobody holds anything, and nothing lies returned."""
        assert self.cursor == self.size and not self.returned and not self.open_leases()
        self.epoch += 1
        self.cursor = self.committed = 0
        self.changes.append(Turned(self.epoch))

    # Coming back from the disk

    def restore(
        self,
        *,
        epoch: int,
        incarnations: int,
        committed: Sequence[tuple[int, int]],
        workers: Sequence[Worker],
        over: Sequence[Worker],
        now: float,
    ) -> None:
        """The state that the ledger knows; whoever holds a lease has the whole time of one from now on."""
        self.epoch = epoch
        self.incarnations = incarnations
        for worker in workers:
            self._add(replace(worker, progress=now, heard=now))
        for worker in over:
            self.over[worker.incarnation] = replace(worker, heard=now)
            self._by_birth[worker.birth] = worker.incarnation
        leased = [(lease.done, lease.stop) for worker in self.workers.values() for lease in worker.leases.values()]
        taken = joined(sorted([*committed, *leased]))
        self.committed = sum(stop - start for start, stop in committed)
        self.cursor = taken[-1][1] if taken else 0
        ends = [0, *(stop for _, stop in taken)]
        starts = [start for start, _ in taken]
        self.returned = [(end, start) for end, start in zip(ends, starts, strict=False) if end < start]


def joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted ranges, those that touch made one."""
    result: list[tuple[int, int]] = []
    for start, stop in ranges:
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        else:
            result.append((start, stop))
    return result
