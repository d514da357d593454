"""A network that misbehaves: a TCP proxy that delays what passes, cuts connections, and lets some hang."""

import asyncio
import contextlib
import random
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, NamedTuple


class Faults(NamedTuple):
    """How often what happens to a piece of what passes, and for how long."""

    delayed: float = 0.2
    delay: float = 0.05  # seconds, at most
    cut: float = 0.003
    hangs: float = 0.002
    hang: float = 3.0  # seconds


class Proxy:
    """Passes connections on to a port of this machine, with faults."""

    def __init__(self, to: int, faults: Faults, seed: int) -> None:
        self.to = to
        self.faults = faults
        self.port = 0
        self.cuts = 0
        self._draw = random.Random(seed)
        self._open: set[asyncio.StreamWriter] = set()

    async def serve(self, ready: threading.Event, stop: asyncio.Event) -> None:
        """Pass on what comes, until told to stop."""
        server = await asyncio.start_server(self._pass, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        await stop.wait()
        server.close()
        for writer in list(self._open):
            writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.to)
            await self._both(self._pump(reader, far_writer), self._pump(far_reader, writer), far_writer)
        writer.transport.abort()

    async def _both(
        self, there: Coroutine[Any, Any, None], back: Coroutine[Any, Any, None], far: asyncio.StreamWriter
    ) -> None:
        self._open.add(far)
        tasks = [asyncio.ensure_future(way) for way in (there, back)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._open.discard(far)
            far.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        faults, draw = self.faults, self._draw
        while piece := await reader.read(1 << 16):
            if draw.random() < faults.cut:
                self.cuts += 1
                return
            if draw.random() < faults.hangs:
                await asyncio.sleep(faults.hang)
            elif draw.random() < faults.delayed:
                await asyncio.sleep(draw.uniform(0, faults.delay))
            writer.write(piece)
            await writer.drain()


@contextlib.contextmanager
def between(to: int, faults: Faults, seed: int) -> Iterator[Proxy]:
    """Such a network in front of a port, meanwhile."""
    proxy, ready = Proxy(to, faults, seed), threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(proxy.serve(ready, stop))
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    thread = threading.Thread(target=run, name="proxy")
    thread.start()
    ready.wait()
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
