"""The lease protocol as a machine: whatever is lost, repeated, late or killed, each position is committed once."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from evenstep import UserError
from evenstep.service import ledger as ledgers
from evenstep.service.desk import Desk, restored
from evenstep.service.leases import MOST_OPEN, MOST_OVER, Committed, Ended, Later, Lease, Leases
from evenstep.service.refusals import Refused, Why
from evenstep.service.spec import Spec

LEASE = 10.0
NAMES = st.sampled_from(["a", "b", "c", "d"])
WHICH = st.integers(0, 119)


def birth(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Workers(RuleBasedStateMachine):
    """Workers that take and commit, over a network that loses and repeats, from a server that is killed at times.

    The ledger is a real one, in memory. What a worker knows is what it was told; the checks compare the two.
    """

    @initialize(size=st.integers(1, 90), block=st.integers(1, 9), epochs=st.integers(1, 3))
    def open(self, size: int, block: int, epochs: int) -> None:
        self.ledger = ledgers.Ledger(ledgers.connected(":memory:"))
        self.now = 100.0
        self.births = 0
        self.desk = Desk()
        self.spec = Spec(size=size, block=block, epochs=epochs, lease_seconds=LEASE)
        self.desk.open("s", self.spec)
        self.keep()
        # what the workers know: of each incarnation its name, its leases, and what it was told is committed
        self.name: dict[int, str] = {}
        self.born: dict[int, bytes] = {}
        self.held: dict[int, dict[int, tuple[int, Lease]]] = {}
        self.acknowledged: dict[tuple[int, int], int] = {}  # epoch and position -> incarnation
        self.asked: list[tuple[int, int, int, int]] = []  # commits that may come once more
        self.told_over: set[int] = set()

    def teardown(self) -> None:
        if hasattr(self, "desk"):
            self.all_can_come_to_its_end()
            self.ledger.close()

    @property
    def leases(self) -> Leases:
        return self.desk.find("s").leases()

    def keep(self) -> None:
        changes = self.desk.changes(self.now)
        if changes:
            self.ledger.write(changes)

    # What workers do; `heard` is whether the answer reaches them

    def one(self, which: int) -> int | None:
        """One of those that lately joined: mostly one that lives."""
        lately = sorted(self.held)[-5:]
        alive = [incarnation for incarnation in lately if incarnation in self.leases.workers]
        among = lately if which % 5 == 0 or not alive else alive
        return among[which % len(among)] if among else None

    @rule(name=NAMES, heard=st.booleans())
    def join(self, name: str, heard: bool) -> None:
        self.births += 1
        found = self.leases.join(name, birth(self.births), self.now)
        self.keep()
        assert found not in self.name, "an incarnation's number is never given twice"
        self.name[found], self.born[found] = name, birth(self.births)
        if heard:
            self.held[found] = {}

    def join_comes_again(self, which: int) -> None:
        incarnation = self.one(which)
        if incarnation is None:
            return
        alive = set(self.leases.workers)
        assert self.leases.join(self.name[incarnation], self.born[incarnation], self.now) == incarnation
        assert set(self.leases.workers) == alive, "an old request ends nobody"
        self.keep()

    @rule(which=WHICH, blocks=st.integers(1, 5), heard=st.booleans())
    def take(self, which: int, blocks: int, heard: bool) -> None:
        incarnation = self.one(which)
        if incarnation is None:
            return
        number = max(self.held[incarnation], default=0) + 1
        epoch = self.leases.epoch
        try:
            found = self.leases.take(incarnation, number, epoch, blocks, self.now)
        except Refused as refused:
            self.keep()
            assert refused.why in (Why.OVER, Why.FULL), refused
            return
        self.keep()
        if isinstance(found, Lease):
            assert self.leases.take(incarnation, number, epoch, blocks, self.now) == found, "asked again"
            assert found.start == found.done < found.stop <= self.spec.size
            if heard:
                self.held[incarnation][number] = epoch, found
        elif isinstance(found, Ended):
            assert self.leases.epoch == self.spec.epochs
        else:
            assert 0 < found.seconds < LEASE
            assert self.leases.open_leases(), "who is told to wait waits for somebody"

    @rule(which=WHICH, data=st.data(), heard=st.booleans())
    def commit(self, which: int, data: st.DataObject, heard: bool) -> None:
        incarnation = self.one(which)
        if incarnation is None or not self.held[incarnation]:
            return
        number = data.draw(st.sampled_from(sorted(self.held[incarnation])))
        epoch, lease = self.held[incarnation][number]
        if lease.done == lease.stop:
            return
        stop = data.draw(st.integers(lease.done + 1, lease.stop))
        self.asked.append((incarnation, number, lease.done, stop))
        try:
            self.leases.commit(incarnation, number, lease.done, stop, self.now)
        except Refused as refused:
            assert refused.why is Why.OVER
            assert incarnation not in self.leases.workers
            self.told_over.add(incarnation)
            self.keep()
            return
        self.keep()
        if heard:
            self.held[incarnation][number] = epoch, lease._replace(done=stop)
            for position in range(lease.done, stop):
                at = epoch, position
                assert at not in self.acknowledged, f"{at} was acknowledged to {self.acknowledged[at]} before"
                self.acknowledged[at] = incarnation

    @rule(which=WHICH, data=st.data())
    def old_requests_come_again(self, which: int, data: st.DataObject) -> None:
        self.join_comes_again(which)
        if not self.asked:
            return
        before = self.leases.epoch, self.leases.committed
        request = data.draw(st.sampled_from(self.asked))
        known = request[0] in self.leases.workers
        with contextlib.suppress(Refused):
            self.leases.commit(*request, self.now)
        self.keep()
        if not known:
            assert (self.leases.epoch, self.leases.committed) == before, "one that is over commits nothing"

    @rule(which=WHICH, name=NAMES, blocks=st.integers(1, 5), data=st.data(), heard=st.booleans())
    def work(self, which: int, name: str, blocks: int, data: st.DataObject, heard: bool) -> None:
        """What they do most of the time, in one."""
        if self.one(which) is None:
            self.join(name, True)
        self.take(which, blocks, True)
        self.commit(which, data, heard)

    @rule(which=WHICH)
    def leave(self, which: int) -> None:
        incarnation = self.one(which)
        if incarnation is not None:
            self.leases.leave(incarnation, self.now)
        self.keep()

    # What befalls the server

    @rule(seconds=st.floats(0, 1.5 * LEASE))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        late = [
            worker.incarnation
            for worker in self.leases.workers.values()
            if worker.leases and self.now - worker.progress >= LEASE
        ]
        self.leases.expire(self.now)
        self.keep()
        assert not set(late) & set(self.leases.workers), "who makes no progress keeps nothing"

    @rule(unwritten=st.booleans(), name=NAMES)
    def is_killed(self, unwritten: bool, name: str) -> None:
        """What was not written was acknowledged to nobody."""
        if unwritten:
            self.births += 1
            incarnation = self.leases.join(name, birth(self.births), self.now)
            self.leases.take(incarnation, 1, self.leases.epoch, 3, self.now)
            self.desk.changes(self.now)
        before = None if unwritten else self.state()
        self.desk = restored(self.ledger, self.now)
        assert unwritten or self.state() == before

    def state(self) -> Any:
        work = self.leases
        holders = {worker.incarnation: dict(worker.leases) for worker in work.workers.values()}
        lost = {worker.incarnation: dict(worker.leases) for worker in work.over.values()}
        free = {*((start, stop) for start, stop in work.returned), (work.cursor, work.size)}
        covered = {position for start, stop in free for position in range(start, stop)}
        return work.epoch, work.committed, holders, lost, covered, work.incarnations

    # What is so at all times

    @invariant()
    def each_position_is_in_one_state(self) -> None:
        if not hasattr(self, "desk"):
            return
        work = self.leases
        leased = [
            position
            for worker in work.workers.values()
            for lease in worker.leases.values()
            for position in range(lease.done, lease.stop)
        ]
        returned = [position for start, stop in work.returned for position in range(start, stop)]
        fresh = list(range(work.cursor, work.size))
        told = self.ledger.epoch("s", work.epoch)
        committed = [position for start, stop in told.ranges for position in range(start, stop)]
        assert sorted(leased + returned + fresh + committed) == list(range(work.size))
        assert work.committed == len(committed) == told.samples

    @invariant()
    def what_is_acknowledged_is_in_the_ledger(self) -> None:
        if not hasattr(self, "desk"):
            return
        ranges = {epoch: self.ledger.epoch("s", epoch).ranges for epoch in range(self.spec.epochs)}
        for epoch, position in self.acknowledged:
            assert any(start <= position < stop for start, stop in ranges[epoch])

    @invariant()
    def memory_follows_the_leases(self) -> None:
        if not hasattr(self, "desk"):
            return
        work = self.leases
        assert not work.changes
        assert all(len(worker.leases) <= MOST_OPEN for worker in work.workers.values())
        assert len(work.returned) <= sum(len(worker.leases) for worker in work.over.values())

    def all_can_come_to_its_end(self) -> None:
        """From wherever this is: one worker that goes on, within the time of a lease, ends the epoch."""
        epoch = self.leases.epoch
        if epoch == self.spec.epochs:
            return
        self.now += LEASE
        self.leases.expire(self.now)
        self.births += 1
        incarnation = self.leases.join("last", birth(self.births), self.now)
        for number in range(1, 10 * self.spec.size):
            found = self.leases.take(incarnation, number, epoch, 4, self.now)
            if isinstance(found, Ended):
                break
            assert isinstance(found, Lease), "nothing is held by anyone else any more"
            self.leases.commit(incarnation, number, found.start, found.stop, self.now)
        self.keep()
        assert self.ledger.epoch("s", epoch) == ([(0, self.spec.size)], self.spec.size), "one row"


Workers.TestCase.settings = settings(max_examples=250, stateful_step_count=40, deadline=None)
TestWorkers = pytest.mark.slow(Workers.TestCase)


# By hand, what a person would ask


@pytest.fixture
def leases() -> Leases:
    return Leases(size=100, block=10, epochs=2, lease_seconds=LEASE)


def taken(leases: Leases, incarnation: int, number: int, now: float = 0.0, blocks: int = 1) -> Lease:
    found = leases.take(incarnation, number, leases.epoch, blocks, now)
    assert isinstance(found, Lease)
    return found


def test_who_comes_back_late_is_told_so_and_the_block_is_anothers(leases: Leases) -> None:
    late, other = leases.join("late", birth(1), 0.0), leases.join("other", birth(2), 0.0)
    lease = taken(leases, late, 1)
    leases.expire(LEASE)
    assert taken(leases, other, 1, LEASE)[1:] == lease[1:], "what came back goes first"
    with pytest.raises(Refused, match="join again") as told:
        leases.commit(late, 1, lease.start, lease.stop, LEASE)
    assert told.value.why is Why.OVER
    leases.commit(other, 1, lease.start, lease.stop, LEASE)
    assert leases.committed == 10


def test_whose_last_answer_was_lost_is_still_told_the_truth(leases: Leases) -> None:
    """It committed one lease to its end and half of another, and was silent for too long after that."""
    worker = leases.join("w", birth(1), 0.0)
    first, second = taken(leases, worker, 1), taken(leases, worker, 2)
    leases.commit(worker, 1, first.start, first.stop, 1.0)
    leases.commit(worker, 2, second.start, second.start + 4, 1.0)
    leases.expire(1.0 + LEASE)
    leases.commit(worker, 1, first.start, first.stop, 20.0)
    leases.commit(worker, 2, second.start, second.start + 4, 20.0)
    with pytest.raises(Refused):
        leases.commit(worker, 2, second.start, second.stop, 20.0)
    assert leases.committed == 14


def test_a_worker_that_starts_again_frees_what_it_held_at_once(leases: Leases) -> None:
    first = leases.join("w", birth(1), 0.0)
    lease = taken(leases, first, 1)
    second = leases.join("w", birth(2), 0.0)
    assert taken(leases, second, 1).start == lease.start
    with pytest.raises(Refused):
        leases.take(first, 2, 0, 1, 0.0)


def test_progress_keeps_all_leases_and_asking_keeps_none(leases: Leases) -> None:
    """Or a worker whose training hangs would hold up the others for ever, as long as its loader asks for more."""
    worker = leases.join("w", birth(1), 0.0)
    first = taken(leases, worker, 1)
    taken(leases, worker, 2, now=LEASE - 1)
    leases.commit(worker, 1, first.start, first.stop, LEASE - 0.5)
    leases.expire(LEASE + 1)
    assert worker in leases.workers
    taken(leases, worker, 3, now=2 * LEASE - 1)
    leases.expire(2 * LEASE)
    assert worker not in leases.workers


def test_towards_the_end_leases_get_smaller(leases: Leases) -> None:
    """So that all end at about the same time, however many blocks each asks for."""
    workers = [leases.join(f"w{number}", birth(number), 0.0) for number in range(2)]
    assert taken(leases, workers[1], 1).stop == 10, "another one holds something, too"
    sizes = []
    for number in range(1, 20):
        for worker in workers[:1]:
            found = leases.take(worker, number, 0, 100, 0.0)
            if isinstance(found, Later):
                assert sizes == sorted(sizes, reverse=True) and 50 >= sizes[0] > sizes[-1] == 10
                return
            assert isinstance(found, Lease)
            sizes.append(found.stop - found.start)
    raise AssertionError("it never came to its end")


def test_what_makes_no_sense_is_refused(leases: Leases) -> None:
    worker = leases.join("w", birth(1), 0.0)
    lease = taken(leases, worker, 1)
    for what in (
        lambda: leases.take(worker, 3, 0, 1, 0.0),
        lambda: leases.take(worker, 2, 0, 0, 0.0),
        lambda: leases.take(worker, 2, 1, 1, 0.0),
        lambda: leases.commit(worker, 2, 10, 20, 0.0),
        lambda: leases.commit(worker, 1, lease.start + 1, lease.stop, 0.0),
        lambda: leases.commit(worker, 1, lease.start, lease.stop + 1, 0.0),
    ):
        with pytest.raises(Refused) as told:
            what()
        assert told.value.why is Why.INVALID
    assert leases.committed == 0


def test_a_worker_can_hold_so_many_leases_and_no_more() -> None:
    leases = Leases(size=10_000, block=10, epochs=1, lease_seconds=LEASE)
    worker = leases.join("w", birth(1), 0.0)
    for number in range(1, MOST_OPEN + 1):
        taken(leases, worker, number)
    with pytest.raises(Refused) as told:
        leases.take(worker, MOST_OPEN + 1, 0, 1, 0.0)
    assert told.value.why is Why.FULL


def test_a_worker_that_crashes_over_and_over_does_not_fill_the_memory(leases: Leases) -> None:
    for number in range(MOST_OVER + 50):
        taken(leases, leases.join("w", birth(number + 1), 0.0), 1)
    assert len(leases.over) == MOST_OVER and len(leases.returned) <= 1
    leases.expire(10_000.0)
    leases.expire(20_000.0)
    assert not leases.over and not leases.workers


# The ledger


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[ledgers.Ledger]:
    with ledgers.opened(tmp_path) as opened:
        yield opened


def test_an_epoch_that_is_committed_in_any_order_is_one_row(ledger: ledgers.Ledger) -> None:
    parts = [(30, 40), (0, 10), (20, 30), (90, 100), (10, 20), (40, 90)]
    ledger.write([("s", Committed(0, *part)) for part in parts])
    assert ledger.epoch("s", 0) == ([(0, 100)], 100)


@pytest.mark.parametrize("again", [(10, 20), (5, 11), (19, 21), (5, 12), (0, 100), (12, 13), (15, 15)])
def test_the_ledger_itself_refuses_what_was_committed(ledger: ledgers.Ledger, again: tuple[int, int]) -> None:
    ledger.write([("s", Committed(0, 10, 20))])
    with pytest.raises(ledgers.Broken):
        ledger.write([("s", Committed(0, 50, 60)), ("s", Committed(0, *again))])
    assert ledger.epoch("s", 0) == ([(10, 20)], 10), "all of a write or nothing"


def test_a_folder_is_for_one_server(ledger: ledgers.Ledger, tmp_path: Path) -> None:
    del ledger
    with pytest.raises(UserError, match="another server"), ledgers.opened(tmp_path):
        pass


def test_a_file_that_is_no_ledger_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / ledgers.NAME).write_bytes(b"somebody's novel, chapter one" * 100)
    with pytest.raises(UserError, match="cannot be used"), ledgers.opened(tmp_path):
        pass
    assert (tmp_path / ledgers.NAME).read_bytes().startswith(b"somebody's novel")
