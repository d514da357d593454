"""Trouble for the service, on purpose: workers and the server are killed and stopped over and over, the network
delays, cuts and repeats; at the end each sample of each epoch has to be committed once, by the ledger and by what
the workers noted for themselves.
"""

import contextlib
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from evenstep import leash
from evenstep.errors import UserError
from evenstep.service.audit import Audited, audit
from evenstep.service.client import Client
from evenstep.service.connection import Connection, Server
from evenstep.service.feed import Block, Feed, LeaseLost
from evenstep.service.proxy import Faults, Proxy, between
from evenstep.service.spec import Spec

SESSION = "chaos"
BLOCK = 16
BLOCKS_A_KILL = 40  # of an epoch: so that there is work left for as long as anything is to be killed
PACE = 0.1  # seconds for a block, until all kills are done
SETTLED_AFTER = 5  # blocks, after which a worker notes what was acknowledged
UP_WITHIN, OVER_WITHIN = 60.0, 300.0  # seconds
TWICE = 0.1  # of all requests come twice


@dataclass(kw_only=True)
class Outcome:
    """What was done to it, and what came of it."""

    epochs: list[Audited]
    size: int
    workers_killed: int
    servers_killed: int
    stalls: int
    cuts: int
    acknowledged: int = 0
    """Samples, over all epochs, that a worker noted as acknowledged."""
    unheard: int = 0
    """Samples in the ledger whose worker was killed, or cut off, before it could note that."""
    contradictions: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        """Each sample of each epoch once, and nobody says otherwise."""
        whole = all(epoch.sound and epoch.over and epoch.once == self.size for epoch in self.epochs)
        return whole and bool(self.epochs) and not self.contradictions


def run(
    folder: Path,
    *,
    workers: int = 8,
    kills: int = 100,
    epochs: int = 3,
    lease_seconds: float = 2.0,
    seed: int = 0,
    say: Callable[[str], None],
) -> Outcome:
    """Kill so many workers, and the server so many times, while they read some epochs."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise UserError(f"{folder} is not empty: chaos keeps its ledger and its notes in a folder of its own")
    size = BLOCK * BLOCKS_A_KILL * kills + 5
    spec = Spec(size=size, block=BLOCK, seed=seed, epochs=epochs, lease_seconds=lease_seconds)
    with contextlib.ExitStack() as stack:
        served = stack.enter_context(_serving(folder / "served"))
        with Client(f"127.0.0.1:{served.port}") as client:
            client.open(SESSION, spec)
        proxy = stack.enter_context(between(served.port, Faults(hang=1.5 * lease_seconds), seed))
        crew = stack.enter_context(_crew(folder, workers, proxy.port, seed))
        trouble = _Trouble(served, crew, random.Random(seed), lease_seconds)
        trouble.make(kills, say)
        (folder / "hurry").touch()
        _wait_for(crew, say)
        return _outcome(folder, size, trouble, proxy)


def _outcome(folder: Path, size: int, trouble: "_Trouble", proxy: Proxy) -> Outcome:
    outcome = Outcome(
        epochs=audit(folder / "served"),
        size=size,
        workers_killed=trouble.workers_killed,
        servers_killed=trouble.servers_killed,
        stalls=trouble.stalls,
        cuts=proxy.cuts,
    )
    compare(folder, outcome)
    return outcome


# The trouble


class _Trouble:
    def __init__(
        self, served: "_Served", crew: "list[_Worker]", draw: random.Random, lease_seconds: float
    ) -> None:
        self.served = served
        self.crew = crew
        self.draw = draw
        self.lease_seconds = lease_seconds
        self.workers_killed = self.servers_killed = self.stalls = 0

    def make(self, kills: int, say: Callable[[str], None]) -> None:
        """One thing after the other, until all has been killed often enough."""
        while min(self.workers_killed, self.servers_killed) < kills:
            time.sleep(self.draw.uniform(0.05, 0.3))
            act = self.draw.choice((self._kill_worker, self._kill_worker, self._kill_server, self._stall))
            if act == self._kill_worker and self.workers_killed >= kills:
                act = self._kill_server
            act()
            for worker in self.crew:
                worker.keep_at_it()
            if all(worker.over for worker in self.crew):
                raise UserError("the workers were through before all kills were done: this machine is too quick")
            if act == self._kill_server and self.servers_killed % 10 == 0:
                say(
                    f"{self.workers_killed} workers and {self.servers_killed} servers killed, {self.stalls} stalls"
                )

    def _kill_worker(self) -> None:
        worker = self.draw.choice(self.crew)
        if worker.kill():
            self.workers_killed += 1

    def _kill_server(self) -> None:
        self.served.kill()
        self.servers_killed += 1
        time.sleep(self.draw.choice((0.0, 0.0, 0.5)))
        self.served.start()

    def _stall(self) -> None:
        if self.draw.choice(self.crew).stall(self.lease_seconds * self.draw.uniform(0.5, 2.0)):
            self.stalls += 1


class _Served:
    """A server that is killed now and then."""

    def __init__(self, data: Path) -> None:
        self.data = data
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it takes connections."""
        command = [sys.executable, "-m", "evenstep", "serve", "--data", str(self.data), "--port", str(self.port)]
        with (self.data.with_name("server.log")).open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + UP_WITHIN
        while self._process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
                return
            time.sleep(0.02)
        raise UserError(f"the server does not come up: see {log.name}")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextlib.contextmanager
def _serving(data: Path) -> Iterator[_Served]:
    served = _Served(data)
    try:
        served.start()
        yield served
    finally:
        served.kill()


class _Worker:
    """A process that reads, and is started again when it was killed."""

    def __init__(self, folder: Path, name: str, port: int, seed: int) -> None:
        self.folder = folder
        self.name = name
        self.port = port
        self.seed = seed
        self._wakes = 0.0
        self._process: Any = None

    @property
    def over(self) -> bool:
        """Whether it has seen the end."""
        return self._process is not None and self._process.exitcode == 0

    def keep_at_it(self) -> None:
        """Start it, or wake it, if it is time to."""
        if self._wakes and time.monotonic() > self._wakes:
            self._signal(signal.SIGCONT)
            self._wakes = 0.0
        if self._process is None or self._process.exitcode not in (None, 0):
            self.seed += 1
            context = multiprocessing.get_context("forkserver")
            words = (self.folder, self.name, self.port, self.seed)
            self._process = context.Process(target=work, args=words, name=self.name)
            self._process.start()

    def kill(self) -> bool:
        """By the signal that nobody can answer; whether there was anybody."""
        found = self._signal(signal.SIGKILL)
        if found:
            self._process.join()
            self._wakes = 0.0
        return found

    def stall(self, seconds: float) -> bool:
        """Let it sleep in the middle of whatever it does."""
        if self._wakes or not self._signal(signal.SIGSTOP):
            return False
        self._wakes = time.monotonic() + seconds
        return True

    def _signal(self, number: signal.Signals) -> bool:
        if self._process is None or self._process.exitcode is not None:
            return False
        os.kill(self._process.pid, number)
        return True


@contextlib.contextmanager
def _crew(folder: Path, workers: int, port: int, seed: int) -> Iterator[list[_Worker]]:
    leash.start_forkserver(("evenstep.service.chaos",))
    crew = [_Worker(folder, f"w{number}", port, 1000 * (seed + number)) for number in range(workers)]
    try:
        for worker in crew:
            worker.keep_at_it()
        yield crew
    finally:
        for worker in crew:
            worker.kill()


def _wait_for(crew: list[_Worker], say: Callable[[str], None]) -> None:
    """All see the end, by themselves."""
    say("all kills are done; the workers go on to the end")
    deadline = time.monotonic() + OVER_WITHIN
    while not all(worker.over for worker in crew):
        if time.monotonic() > deadline:
            late = ", ".join(worker.name for worker in crew if not worker.over)
            raise UserError(f"{late} did not come to the end within {OVER_WITHIN:.0f} s")
        for worker in crew:
            worker.keep_at_it()
        time.sleep(0.05)


# A worker


def work(folder: Path, name: str, port: int, seed: int) -> None:
    """Read to the end of the last epoch, with a note of each block before it is committed, and one after."""
    leash.hold()
    leash.leave_signals_to_parent()
    warnings.simplefilter("ignore", LeaseLost)
    draw = random.Random(seed)
    twice = Twice(draw)
    connection = Connection(Server(target=f"127.0.0.1:{port}"), interceptors=(twice,))
    feed = Feed(connection, SESSION, worker=name if draw.random() < 0.5 else None, most_blocks=8)
    feed.start()
    with (folder / f"{name}.jsonl").open("ab", buffering=0) as notes:
        while not feed.over:
            _epoch(feed, _Notes(notes, feed), draw, folder / "hurry")
            feed.next_epoch()
    feed.close()


def _epoch(feed: Feed, notes: "_Notes", draw: random.Random, hurry: Path) -> None:
    while (block := feed.next()) is not None:
        if not hurry.exists():
            time.sleep(draw.uniform(0, 2 * PACE))
        notes.will(block)
        feed.commit()
        if len(notes.waiting) >= SETTLED_AFTER:
            notes.did()
    notes.did()


class _Notes:
    """What a worker writes down for itself; a line is in the file, whole, before anything else happens."""

    def __init__(self, file: Any, feed: Feed) -> None:
        self._file = file
        self._feed = feed
        self._refused = feed.refused
        self.waiting: list[list[int]] = []

    def will(self, block: Block) -> None:
        """About to commit this."""
        self.waiting.append([block.epoch, block.start, block.stop])
        self._write("will", self.waiting[-1:])

    def did(self) -> None:
        """All that is waiting was acknowledged, or some of it refused."""
        self._feed.settle()
        self._write("did" if self._feed.refused == self._refused else "some", self.waiting)
        self._refused = self._feed.refused
        self.waiting = []

    def _write(self, what: str, blocks: list[list[int]]) -> None:
        self._file.write((json.dumps({what: blocks}) + "\n").encode())


class Twice(grpc.UnaryUnaryClientInterceptor):
    """A network that delivers some requests twice, the second time at any moment."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """Make the call, and perhaps once more, with nobody to hear the answer."""
        if self._draw.random() < TWICE:
            delay = self._draw.choice((0.0, 0.01, 1.0))
            again = threading.Timer(delay, self._again, (continuation, client_call_details, request))
            again.daemon = True
            again.start()
        return continuation(client_call_details, request)

    def _again(self, continuation: Any, details: Any, request: Any) -> None:
        with contextlib.suppress(grpc.RpcError, ValueError):  # the server, or our own channel, is gone by now
            continuation(details, request).result()


# What the workers noted, against the ledger


def compare(folder: Path, outcome: Outcome) -> None:
    """Nothing is acknowledged twice, and everything in the ledger somebody was about to commit."""
    tried: set[tuple[int, int]] = set()
    acknowledged: dict[tuple[int, int], str] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_bytes().splitlines():
            for what, blocks in json.loads(line).items():
                places = [(epoch, place) for epoch, start, stop in blocks for place in range(start, stop)]
                tried.update(places)
                if what != "did":
                    continue
                twice = [f"{at} by {acknowledged[at]} and {path.stem}" for at in places if at in acknowledged]
                if twice:
                    outcome.contradictions.append(f"acknowledged twice: {', '.join(twice[:5])}")
                acknowledged.update(dict.fromkeys(places, path.stem))
    all_places = {(epoch.epoch, place) for epoch in outcome.epochs for place in range(outcome.size)}
    if all_places - tried:
        outcome.contradictions.append(f"in the ledger, and nobody committed it: {sorted(all_places - tried)[:5]}")
    if set(acknowledged) - all_places:
        outcome.contradictions.append("acknowledged, and not of any epoch in the ledger")
    outcome.acknowledged = len(acknowledged)
    outcome.unheard = len(all_places - set(acknowledged))
