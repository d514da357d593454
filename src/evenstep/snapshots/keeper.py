"""When snapshots are taken, what is said of them, and what happens when they fail."""

import time
from collections.abc import Callable
from typing import Any

import torch

from evenstep.progress import Progress
from evenstep.snapshots.saver import Saved, Saver, name_of

FAILURES = 3  # in a row end the training: whoever asked for snapshots does not want to go on without


class SnapshotsFail(Exception):
    """Snapshot after snapshot has failed."""


class Keeper:
    """One rank's snapshots, over a training."""

    def __init__(
        self, saver: Saver, device: torch.device, *, minutes: float | None, report: Callable[[Saved], None]
    ) -> None:
        self.saver = saver
        self.device = device
        self.minutes = minutes
        self.report = report
        self._failures = 0
        self._last = time.monotonic()
        self._newest = -1

    def wished(self) -> bool:
        """Whether it is time for one, by the clock."""
        return self.minutes is not None and time.monotonic() - self._last >= 60 * self.minutes

    def take(self, progress: Progress) -> None:
        """Take one here, unless there is one of this step. Every rank has to ask, and the training waits
        for no more than the copying."""
        if progress.number == self._newest:
            return
        self.saver.wait()
        self._hear()  # here all ranks have heard the same, so they all go on, or none does
        name = name_of(progress.number)
        self.saver.save(progress.number, {"snapshot": name, "progress": progress.as_dict()}, self.device)
        self._newest = progress.number
        self._last = time.monotonic()

    def finish(self) -> None:
        """Wait for the last one."""
        self.saver.wait()
        self._hear()

    def _hear(self) -> None:
        while self.saver.outcomes:
            saved: Any = self.saver.outcomes.popleft()
            self.report(saved)
            self._failures = self._failures + 1 if saved.error else 0
            if self._failures == FAILURES:
                raise SnapshotsFail(f"{FAILURES} snapshots in a row have failed, the last because {saved.error}")
