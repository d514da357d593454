"""When snapshots are taken, what is said of them, and what happens when they fail."""

import time
from typing import Protocol

from evenstep.errors import UserError
from evenstep.progress import Progress
from evenstep.ranks import agreed
from evenstep.snapshots.mirror import Mirror, Sent
from evenstep.snapshots.saver import Saved, Saver
from evenstep.world import World

FAILURES = 3  # in a row end the training: whoever asked for snapshots does not want to go on without
AGAIN = 5.0, 60.0  # seconds after which one that failed over a network is tried again: at first, and at most


class Witness(Protocol):
    """Who is told how it went."""

    def saved(self, saved: Saved) -> None:
        """A snapshot was taken, or was not."""
        ...

    def sent(self, sent: Sent, address: str) -> None:
        """One was sent to where the run is kept too, or was not."""
        ...


class Unkept:
    """Keeps no snapshots: where none could be whole, and nobody has asked for any."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def wished(self) -> bool:
        """Never."""
        return False

    def take(self, progress: Progress) -> None:
        """None is taken."""

    def finish(self, stopped: Progress | None) -> None:
        """There is nothing to wait for."""


class Keeper:
    """One rank's snapshots, over a training.

    Mostly they are written to disk, and the next waits for the one before. Where they can only be written over a
    network, nothing waits: what comes due meanwhile is taken as soon as there is room, and no failure is the last.
    """

    def __init__(
        self,
        saver: Saver,
        mirror: Mirror | None,
        place: World,
        witness: Witness,
        *,
        minutes: float | None,
        over_network: bool,
        newest: int,
    ) -> None:
        self.saver = saver
        self.mirror = mirror
        self.place = place
        self.witness = witness
        self.minutes = minutes
        self.over_network = over_network
        self.counts = {"taken": 0, "failed": 0, "sent": 0, "not_sent": 0}
        """What became of the snapshots."""
        self._newest = newest
        """The step of the last one, or of the one that the training went on from."""
        self._failures, self._why = 0, ""
        self._last = time.monotonic()
        self._owed: float | None = None

    def wished(self) -> bool:
        """Whether it is time for one, by the clock."""
        self._hear()
        now = time.monotonic()
        if self._owed is not None:
            return now >= self._owed
        return self.minutes is not None and 0 < 60 * self.minutes <= now - self._last

    def take(self, progress: Progress) -> None:
        """Take one here, unless there is one of this step. Every rank has to ask, and the training waits
        for no more than the copying, and for the one before where that goes to disk."""
        if progress.number == self._newest:
            return
        if self.over_network and agreed(lambda: self.saver.busy, self.place):
            self._owed = time.monotonic()
            return
        self._save(progress)

    def finish(self, stopped: Progress | None) -> None:
        """Wait for the last one; where the training has stopped it is of that very step."""
        if stopped is not None and stopped.number != self._newest:
            self._save(stopped)
        self.saver.wait()
        self._hear()

    def _save(self, progress: Progress) -> None:
        waited = time.perf_counter()
        self.saver.wait()
        self._hear()
        if self._failures >= FAILURES and not self.over_network:  # here all have heard the same
            raise UserError(
                f"{self._failures} snapshots in a row have failed, the last because {self._why}; the training "
                "ends here rather than go on without: see to that, then resume the run"
            )
        self.saver.save(progress.number, progress.as_dict(), waited)
        self._newest, self._last, self._owed = progress.number, time.monotonic(), None

    def _hear(self) -> None:
        while self.saver.outcomes:
            saved = self.saver.outcomes.popleft()
            self.witness.saved(saved)
            self.counts["failed" if saved.error else "taken"] += 1
            self._failures = self._failures + 1 if saved.error else 0
            if saved.error:
                self._why = saved.error
                if self.over_network:
                    self._owed = time.monotonic() + min(AGAIN[0] * 2.0 ** (self._failures - 1), AGAIN[1])
        while self.mirror is not None and self.mirror.outcomes:
            sent = self.mirror.outcomes.popleft()
            self.witness.sent(sent, self.mirror.afar.address)
            self.counts["not_sent" if sent.error else "sent"] += sent.snapshot is not None
        if self.mirror is not None and self.mirror.taken is not None:
            raise UserError(f"{self.mirror.afar.address}: {self.mirror.taken}; this start of it ends here")
