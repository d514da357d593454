"""Writes what has changed to the ledger, all that has come together since the last time at once: what a sync to
disk costs is shared by everyone who waits for it.
"""

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from evenstep.service.ledger import Broken, Change, Ledger
from evenstep.service.refusals import Refused, Why


class _Batch:
    def __init__(self) -> None:
        self.changes: list[tuple[str, Change]] = []
        self.written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.written.add_done_callback(lambda future: future.cancelled() or future.exception())  # none may wait


class Journal:
    """Stands between those who answer and the ledger. Nothing goes out before what led to it is on disk."""

    def __init__(self, ledger: Ledger, lost: Callable[[Exception], None]) -> None:
        self._ledger = ledger
        self._lost = lost
        self._coming = _Batch()
        self._writing: _Batch | None = None
        self._wake = asyncio.Event()

    async def settled(self, changes: list[tuple[str, Change]]) -> None:
        """Write these down; returns when they, and all that was decided before, are on disk."""
        if changes:
            self._coming.changes += changes
            self._wake.set()
        batch = self._coming if self._coming.changes else self._writing
        if batch is not None:
            await asyncio.shield(batch.written)

    async def run(self) -> None:
        """Write, until cancelled."""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, thread_name_prefix="ledger") as thread:
            while True:
                await self._wake.wait()
                self._wake.clear()
                batch = self._writing = self._coming
                self._coming = _Batch()
                try:
                    await loop.run_in_executor(thread, self._ledger.write, batch.changes)
                except (sqlite3.Error, Broken) as error:
                    self._fail(batch, error)
                else:
                    batch.written.set_result(None)
                self._writing = None

    def _fail(self, batch: _Batch, error: Exception) -> None:
        """Nobody is told what was decided since: it was decided on what is not on disk."""
        refusal = Refused(Why.LATER, f"the server cannot write its ledger: {error}; mend that, then ask again")
        for waiting in (batch, self._coming):
            waiting.written.set_exception(refusal)
        self._coming = _Batch()
        self._wake.clear()
        self._lost(error)
