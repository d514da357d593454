"""The service without its network: finds the session, lets it answer, gathers what has to be kept first."""

from collections import deque
from dataclasses import dataclass, field, replace

from evenstep.service import ledger as ledgers
from evenstep.service.leases import Committed, Leases
from evenstep.service.ledger import Kept, Ledger
from evenstep.service.lockstep import Lockstep
from evenstep.service.refusals import Refused, Why
from evenstep.service.spec import Spec, checked_name, differences

MOST_SESSIONS = 10_000
NAMED = 20  # sessions, in a sentence that says which there are
RATE_OVER = 10  # seconds


@dataclass
class Meter:
    """Samples a second, over the last seconds."""

    _seconds: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=RATE_OVER))
    total: int = 0

    def add(self, samples: int, now: float) -> None:
        """So many more."""
        self.total += samples
        if self._seconds and self._seconds[-1][0] == int(now):
            samples += self._seconds.pop()[1]
        self._seconds.append((int(now), samples))

    def rate(self, now: float) -> float:
        return sum(samples for second, samples in self._seconds if second > now - RATE_OVER) / RATE_OVER


@dataclass
class Session:
    """A session, and what hands it out."""

    name: str
    spec: Spec
    work: Leases | Lockstep
    closed: bool = False
    meter: Meter = field(default_factory=Meter)

    def leases(self) -> Leases:
        """What hands out a dynamic session."""
        self._check_open()
        if isinstance(self.work, Leases):
            return self.work
        raise Refused(
            Why.UNFIT,
            f"session {self.name} is read in lockstep by {self.spec.world} ranks: ask for batches, not leases",
        )

    def lockstep(self) -> Lockstep:
        """What hands out a lockstep session."""
        self._check_open()
        if isinstance(self.work, Lockstep):
            return self.work
        raise Refused(
            Why.UNFIT,
            f"session {self.name} is dynamic: join and take leases; to be read in lockstep, as by a training, a "
            "session is opened with --world",
        )

    def _check_open(self) -> None:
        if self.closed:
            raise Refused(Why.UNFIT, f"session {self.name} is closed; open one of another name")


class Desk:
    """All sessions."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self._changes: list[tuple[str, ledgers.Change]] = []
        self._asked: set[str] = set()
        """Sessions that may have changed since the last look."""

    def find(self, name: str) -> Session:
        """The session of that name."""
        if name in self.sessions:
            self._asked.add(name)
            return self.sessions[name]
        known = sorted(self.sessions)
        more = f" and {len(known) - NAMED:,} more" if len(known) > NAMED else ""
        there = f"there are {', '.join(known[:NAMED])}{more}" if known else "there is none: open one first"
        raise Refused(Why.UNKNOWN, f"no session {name[:100]!r}; {there}")

    def open(self, name: str, spec: Spec) -> Session:
        """A new session; or the one there is, where that has the same plan, read by other ranks if so declared."""
        checked_name("session", name)
        session = self.sessions.get(name)
        if session is None:
            if len(self.sessions) >= MOST_SESSIONS:
                raise Refused(Why.FULL, f"there are {MOST_SESSIONS:,} sessions; close one with --forget first")
            session = self.sessions[name] = Session(name, spec, _made(spec))
            self._changes.append((name, ledgers.Opened(spec)))
        self._fit(session, spec)
        return session

    def _fit(self, session: Session, spec: Spec) -> None:
        """Let a session that there is be what was asked for, or say why it cannot be."""
        if session.closed:
            raise Refused(
                Why.EXISTS, f"session {session.name} is closed; take another name, or close it with --forget"
            )
        world = ("world",) if spec.lockstep != session.spec.lockstep else ()
        differs = differences(spec, session.spec, "epochs", "lease_seconds", *world)
        if differs:
            raise Refused(
                Why.EXISTS,
                f"there is a session {session.name} with {differs}; take another name, or the same plan",
            )
        if isinstance(session.work, Lockstep) and spec.world != session.spec.world:
            session.spec = replace(session.spec, world=spec.world)
            self._changes.append((session.name, ledgers.Opened(session.spec)))
            session.work.change_world(session.spec)
            self._asked.add(session.name)

    def close(self, name: str, forget: bool) -> Session:
        """Let a session hand out nothing more."""
        session = self.find(name)
        session.closed = True
        if forget:
            del self.sessions[name]
        self._changes.append((name, ledgers.Closed(forget)))
        return session

    def expire(self, now: float) -> None:
        """Let all sessions look for leases that are over."""
        for session in self.sessions.values():
            if isinstance(session.work, Leases) and not session.closed:
                session.work.expire(now)
                self._asked.add(session.name)

    def changes(self, now: float) -> list[tuple[str, ledgers.Change]]:
        """What has to be on disk before anybody is answered; told once."""
        for session in filter(None, map(self.sessions.get, self._asked)):
            for change in session.work.changes:
                if isinstance(change, Committed):
                    session.meter.add(change.stop - change.start, now)
                self._changes.append((session.name, change))
            session.work.changes.clear()
        self._asked.clear()
        changes, self._changes = self._changes, []
        return changes


def restored(ledger: Ledger, now: float) -> Desk:
    """The sessions that the ledger knows, as they were."""
    desk = Desk()
    for kept in ledger.sessions():
        desk.sessions[kept.name] = Session(kept.name, kept.spec, _restored(kept, ledger, now), kept.closed)
    return desk


def _restored(kept: Kept, ledger: Ledger, now: float) -> Leases | Lockstep:
    work = _made(kept.spec)
    if isinstance(work, Lockstep):
        work.restore(ledger.ranks(kept.name))
    else:
        work.restore(
            epoch=kept.epoch,
            incarnations=kept.incarnations,
            committed=ledger.epoch(kept.name, kept.epoch).ranges,
            workers=ledger.workers(kept.name, over=False),
            over=ledger.workers(kept.name, over=True),
            now=now,
        )
    return work


def _made(spec: Spec) -> Leases | Lockstep:
    if spec.lockstep:
        return Lockstep(spec)
    return Leases(size=spec.size, block=spec.block, epochs=spec.epochs, lease_seconds=spec.lease_seconds)
