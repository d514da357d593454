"""What is acknowledged, on disk: sessions, who holds what, and the committed positions, merged.

SQLite with a write-ahead log, each transaction synced before anyone is told of it. A range that is committed must
not touch what was committed before: the ledger looks, whatever those above it believe. An epoch that went well is
one row.
"""

import contextlib
import fcntl
import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from evenstep.errors import UserError
from evenstep.service import leases, lockstep
from evenstep.service.leases import Lease, Worker
from evenstep.service.lockstep import Place
from evenstep.service.spec import Spec

NAME = "ledger.sqlite"
VERSION = 1

_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    name TEXT PRIMARY KEY, spec TEXT NOT NULL, closed INTEGER NOT NULL, epoch INTEGER NOT NULL,
    incarnations INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS committed (
    session TEXT, epoch INTEGER, start INTEGER, stop INTEGER NOT NULL, PRIMARY KEY (session, epoch, start)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS samples (
    session TEXT, epoch INTEGER, committed INTEGER NOT NULL, PRIMARY KEY (session, epoch)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS workers (
    session TEXT, incarnation INTEGER, name TEXT NOT NULL, birth BLOB NOT NULL, last INTEGER NOT NULL,
    over INTEGER NOT NULL, PRIMARY KEY (session, incarnation)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS leases (
    session TEXT, incarnation INTEGER, number INTEGER, start INTEGER NOT NULL, done INTEGER NOT NULL,
    stop INTEGER NOT NULL, PRIMARY KEY (session, incarnation, number)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS ranks (
    session TEXT, rank INTEGER, epoch INTEGER NOT NULL, step INTEGER NOT NULL, PRIMARY KEY (session, rank)
) WITHOUT ROWID;
"""
_OF_A_SESSION = ("committed", "samples", "workers", "leases", "ranks")


class Opened(NamedTuple):
    """A session is there, with these options; or, if it was there, with other ranks."""

    spec: Spec


class Closed(NamedTuple):
    """A session hands out nothing more; it is kept for those who ask, or forgotten."""

    forget: bool


Change = leases.Change | lockstep.Change | Opened | Closed


class Epoch(NamedTuple):
    """An epoch's commits: the ranges, merged, and how many samples were ever added to them."""

    ranges: list[tuple[int, int]]
    samples: int


class Kept(NamedTuple):
    """A session as the ledger knows it."""

    name: str
    spec: Spec
    closed: bool
    epoch: int
    incarnations: int


class Broken(Exception):
    """The ledger would hold something that cannot be: nothing more must be acknowledged."""


class Ledger:
    """The ledger of a server's folder. One thread uses it at a time."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection

    # Writing

    def write(self, changes: Sequence[tuple[str, Change]]) -> None:
        """All of these, in order, or none; they are on disk when this returns."""
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            for session, change in changes:
                self._apply(session, change)

    def _apply(self, session: str, change: Change) -> None:
        do = self._db.execute
        match change:
            case leases.Committed(epoch, start, stop):
                self._commit(session, epoch, start, stop)
            case leases.Leased(incarnation, lease):
                do("INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?, ?, ?)", (session, incarnation, *lease))
                last = "UPDATE workers SET last = max(last, ?) WHERE session = ? AND incarnation = ?"
                do(last, (lease.number, session, incarnation))
            case leases.Done(incarnation, number):
                done = "DELETE FROM leases WHERE session = ? AND incarnation = ? AND number = ?"
                do(done, (session, incarnation, number))
            case leases.Joined(incarnation, name, birth):
                do("INSERT INTO workers VALUES (?, ?, ?, ?, 0, 0)", (session, incarnation, name, birth))
                do("UPDATE sessions SET incarnations = ? WHERE name = ?", (incarnation, session))
            case leases.Over(incarnation):
                do("UPDATE workers SET over = 1 WHERE session = ? AND incarnation = ?", (session, incarnation))
            case leases.Forgotten(incarnation):
                for table in ("workers", "leases"):
                    do(f"DELETE FROM {table} WHERE session = ? AND incarnation = ?", (session, incarnation))
            case leases.Turned(epoch):
                do("UPDATE sessions SET epoch = ? WHERE name = ?", (epoch, session))
            case lockstep.Advanced(rank, place):
                do("INSERT OR REPLACE INTO ranks VALUES (?, ?, ?, ?)", (session, rank, *place))
            case Opened(spec):
                self._open(session, spec)
            case Closed(forget):
                self._close(session, forget)

    def _commit(self, session: str, epoch: int, start: int, stop: int) -> None:
        """A range more, merged with its neighbours."""
        do, length = self._db.execute, stop - start
        at = (session, epoch)
        nearest = "SELECT start, stop FROM committed WHERE session = ? AND epoch = ? AND start"
        before = do(f"{nearest} <= ? ORDER BY start DESC LIMIT 1", (*at, start)).fetchone()
        after = do(f"{nearest} > ? ORDER BY start LIMIT 1", (*at, start)).fetchone()
        if length < 1 or (before and before[1] > start) or (after and after[0] < stop):
            raise Broken(
                f"positions {start} to {stop} of epoch {epoch} of session {session} were committed before, in "
                f"part or whole: {before}, {after}"
            )
        if after and after[0] == stop:
            do("DELETE FROM committed WHERE session = ? AND epoch = ? AND start = ?", (*at, stop))
            stop = after[1]
        if before and before[1] == start:
            start = before[0]
        do("INSERT OR REPLACE INTO committed VALUES (?, ?, ?, ?)", (*at, start, stop))
        added = "ON CONFLICT DO UPDATE SET committed = committed + excluded.committed"
        do(f"INSERT INTO samples VALUES (?, ?, ?) {added}", (*at, length))

    def _open(self, session: str, spec: Spec) -> None:
        do, text = self._db.execute, json.dumps(spec.values())
        do(
            "INSERT INTO sessions VALUES (?, ?, 0, 0, 0) ON CONFLICT DO UPDATE SET spec = excluded.spec",
            (session, text),
        )
        do("DELETE FROM ranks WHERE session = ?", (session,))

    def _close(self, session: str, forget: bool) -> None:
        do = self._db.execute
        if not forget:
            do("UPDATE sessions SET closed = 1 WHERE name = ?", (session,))
            return
        do("DELETE FROM sessions WHERE name = ?", (session,))
        for table in _OF_A_SESSION:
            do(f"DELETE FROM {table} WHERE session = ?", (session,))

    # Reading

    def sessions(self) -> list[Kept]:
        """All there are, by name."""
        rows = self._db.execute("SELECT name, spec, closed, epoch, incarnations FROM sessions ORDER BY name")
        return [
            Kept(name, Spec(**json.loads(spec)), bool(closed), *numbers) for name, spec, closed, *numbers in rows
        ]

    def epoch(self, session: str, epoch: int) -> Epoch:
        """What is committed of an epoch."""
        of = "WHERE session = ? AND epoch = ?"
        ranges = self._db.execute(f"SELECT start, stop FROM committed {of} ORDER BY start", (session, epoch))
        samples = self._db.execute(f"SELECT committed FROM samples {of}", (session, epoch)).fetchone()
        return Epoch(list(ranges), samples[0] if samples else 0)

    def epochs(self, session: str) -> list[int]:
        """Those of which anything is committed."""
        rows = self._db.execute("SELECT epoch FROM samples WHERE session = ? ORDER BY epoch", (session,))
        return [epoch for (epoch,) in rows]

    def workers(self, session: str, over: bool) -> list[Worker]:
        """Those that live, or those that are over; with the leases that they hold, or lost."""
        of = "FROM workers WHERE session = ? AND over = ? ORDER BY incarnation"
        rows = self._db.execute(f"SELECT incarnation, name, birth, last {of}", (session, over))
        found = {row[0]: Worker(*row) for row in rows}
        held = "SELECT incarnation, number, start, done, stop FROM leases WHERE session = ? ORDER BY number"
        for incarnation, *lease in self._db.execute(held, (session,)):
            if incarnation in found:
                found[incarnation].leases[lease[0]] = Lease(*lease)
        return list(found.values())

    def ranks(self, session: str) -> dict[int, Place]:
        """How far each rank has come."""
        rows = self._db.execute("SELECT rank, epoch, step FROM ranks WHERE session = ?", (session,))
        return {rank: Place(epoch, step) for rank, epoch, step in rows}

    def close(self) -> None:
        self._db.close()


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Ledger]:
    """The ledger of a server's folder, for one server at a time; made where there is none."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UserError(f"no ledger can be kept in {folder}: {error.strerror}; name another with --data") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"another server keeps its ledger in {folder}: one folder is for one server") from None
        ledger = Ledger(connected(folder / NAME))
        try:
            yield ledger
        finally:
            ledger.close()
    finally:
        os.close(lock)


def connected(path: Path | str) -> sqlite3.Connection:
    """The database of a ledger, ready to be used; ":memory:" for one that nobody keeps."""
    try:
        # handed between the thread that starts the server and the one that writes, never used by both at once
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=64)
        for setting in ("journal_mode=WAL", "synchronous=FULL", "temp_store=MEMORY", "cache_size=-8000"):
            db.execute(f"PRAGMA {setting}")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, VERSION):
            raise UserError(
                f"{path} is of another evenstep (version {version}, not {VERSION}): upgrade, or move it"
            )
        db.executescript(_SCHEMA)
        db.execute(f"PRAGMA user_version={VERSION}")
    except sqlite3.Error as error:
        raise UserError(f"the ledger {path} cannot be used: {error}") from None
    return db


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[Ledger]:
    """The ledger of a folder, to look at, while a server may be writing it."""
    try:
        db = sqlite3.connect(f"{(folder / NAME).resolve().as_uri()}?mode=ro", uri=True, isolation_level=None)
        with contextlib.closing(db):
            db.execute("BEGIN")  # all that is read is of one moment
            yield Ledger(db)
    except sqlite3.Error as error:
        raise UserError(f"the ledger in {folder} cannot be read: {error}") from None
