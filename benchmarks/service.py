"""How quickly an order is handed out: evenstep's service against an rpyc server that holds a shuffled list.

    python benchmarks/service.py --out service.json

What a client wants is the numbers of its next 256 samples. rpyc does it in two ways: `netref`, where the list is
handed over as a reference and each number is fetched when it is looked at, and `copying`, where the service
returns the numbers themselves. evenstep hands out ranges of positions, of many blocks at a time and ahead of their
use, and the client looks its samples up itself; a block is committed before the next one, and the ledger is on
disk, synced. rpyc's server keeps nothing and shuffles once.

Clients are processes, all on this machine beside the server; each reads for some seconds after all have started
reading. Shown are all clients' indices/s together, and the time a client waits for its next 256. For 10^9 samples
rpyc's list is a NumPy array of 32-bit numbers, since a list of that many would take 36 GB.
"""

import argparse
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import figures
from evenstep.service.client import Client
from evenstep.service.reader import Reader
from evenstep.service.spec import Spec

BLOCK = 256
CLIENTS = (1, 8, 64)
SIZES = (10**6, 10**9)
LARGEST = 10**12  # for the memory of the server
SERVERS = {"rpyc": ("netref", "copying"), "evenstep": ("evenstep",)}
WAYS = ("netref", "copying", "evenstep")
TARGETS = {"netref": 1000, "copying": 20}
PACKAGES = ("grpcio", "rpyc", "numpy")
UP_WITHIN = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS)
    parser.add_argument("--sizes", type=lambda text: int(float(text)), nargs="+", default=SIZES)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    parser.add_argument("--rpyc", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rpyc:
        serve_rpyc(int(args.rpyc[0]), int(args.rpyc[1]))
        return
    cases = [case for size in args.sizes for case in cases_of(size, args.clients, args.ways, args.seconds)]
    memory = resident_at(LARGEST)
    show(cases, memory)
    figures.write(args.out, PACKAGES, cases=cases, server_bytes_at_largest=memory, command=sys.argv)


def cases_of(size: int, clients: Sequence[int], ways: Sequence[str], seconds: float) -> Iterator[dict[str, Any]]:
    """All of one size, from two servers."""
    with ExitStack() as servers:
        at = {}
        for kind, its_ways in SERVERS.items():
            if {*ways} & {*its_ways}:
                at |= dict.fromkeys(its_ways, servers.enter_context(serving(kind, size)))
        for count in clients:
            for way in ways:
                pid, port = at[way]
                found = together(way, count, port, size, seconds)
                yield {"way": way, "clients": count, "size": size, "server_bytes": resident(pid), **found}


def show(cases: list[dict[str, Any]], memory: int) -> None:
    rates = {(case["way"], case["clients"], case["size"]): case["indices_per_s"] for case in cases}
    rows = []
    for case in cases:
        ours = rates.get(("evenstep", case["clients"], case["size"]))
        times = f"{ours / case['indices_per_s']:,.0f}" if ours and case["way"] != "evenstep" else ""
        rows.append(
            [
                f"{case['way']}, {case['clients']} clients, N = 10^{len(str(case['size'])) - 1}",
                f"{case['indices_per_s']:,.0f}",
                f"{case['p50_ms']:.3f} ms",
                f"{case['p99_ms']:.3f} ms",
                f"{case['server_bytes'] / 1e6:,.0f} MB",
                times,
            ]
        )
    figures.show(["", "indices/s", "p50 of 256", "p99", "server", "evenstep's times that"], rows)
    print(f"\nevenstep's server with a session of N = 10^{len(str(LARGEST)) - 1}: {memory / 1e6:.0f} MB")
    print("targets: " + ", ".join(f"{times:,} times {way}" for way, times in TARGETS.items()) + " at 8 clients")


# A case


def together(way: str, clients: int, port: int, size: int, seconds: float) -> dict[str, float]:
    """All clients' rate together, and what one waits for a batch."""
    if way == "evenstep":  # a session for each case: what the last one's clients held is not waited for
        with Client(f"127.0.0.1:{port}") as client:
            client.open(f"for-{clients}", Spec(size=size, block=BLOCK, epochs=1_000_000, lease_seconds=600.0))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["service"])
    barrier, answers = context.Barrier(clients), context.Queue()
    processes = [
        context.Process(target=read, args=(way, port, clients, seconds, barrier, answers)) for _ in range(clients)
    ]
    for process in processes:
        process.start()
    found = [answers.get() for _ in processes]
    for process in processes:
        process.join()
    waits = np.concatenate([wait for _, wait in found])
    return {
        "indices_per_s": sum(rate for rate, _ in found),
        "p50_ms": float(np.percentile(waits, 50)) * 1e3,
        "p99_ms": float(np.percentile(waits, 99)) * 1e3,
    }


def read(way: str, port: int, clients: int, seconds: float, barrier: Any, answers: Any) -> None:
    """A client: its rate, and how long it waited each time."""
    batches = CLIENT[way](port, clients)
    next(batches)
    barrier.wait()
    began = last = time.perf_counter()
    waits, samples = [], 0
    while last - began < seconds:
        samples += len(next(batches))
        now = time.perf_counter()
        waits.append(now - last)
        last = now
    answers.put((samples / (last - began), np.array(waits[:: max(1, len(waits) // 100_000)])))
    answers.close()
    answers.join_thread()
    os._exit(0)  # what the client still holds is not the question


def read_evenstep(port: int, clients: int) -> Any:
    reader = Reader(f"grpc://127.0.0.1:{port}/for-{clients}")
    while True:
        yield from reader


def read_copying(port: int, _: int) -> Any:
    import rpyc

    root = rpyc.connect("127.0.0.1", port).root
    while True:
        yield root.copied()


def read_netref(port: int, _: int) -> Any:
    import rpyc

    root = rpyc.connect("127.0.0.1", port).root
    while True:
        yield list(root.referred())  # all 256 are looked at


CLIENT = {"evenstep": read_evenstep, "copying": read_copying, "netref": read_netref}


# Servers


@contextmanager
def serving(kind: str, size: int) -> Iterator[tuple[int, int]]:
    """A server that takes connections: its process and its port."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        free.close()
        command = [sys.executable, "-m", "evenstep", "serve", "--data", f"{folder}/served", "--port", str(port)]
        if kind == "rpyc":
            command = [sys.executable, __file__, "--rpyc", str(port), str(size)]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            wait_for(port, server)
            yield server.pid, port
        finally:
            server.kill()
            server.wait()


def wait_for(port: int, server: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + UP_WITHIN
    while time.monotonic() < end and server.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        except OSError:
            time.sleep(0.05)
    raise SystemExit("a server did not come up")


def serve_rpyc(port: int, size: int) -> None:
    """A shuffled list, handed out in batches: what one would write."""
    import rpyc
    from rpyc.utils.server import ThreadedServer

    order: Any = np.random.default_rng(0).permutation(np.arange(size, dtype=np.int32))
    if size <= 10**7:
        order = order.tolist()

    class Service(rpyc.Service):  # type: ignore[misc]
        place = 0

        @classmethod
        def batch(cls) -> list[int]:
            start, cls.place = cls.place, (cls.place + BLOCK) % (size - BLOCK)
            part = order[start : start + BLOCK]
            return part if isinstance(part, list) else part.tolist()

        def exposed_referred(self) -> list[int]:
            return self.batch()

        def exposed_copied(self) -> tuple[int, ...]:
            return tuple(self.batch())  # rpyc sends tuples of plain values whole

    ThreadedServer(Service, hostname="127.0.0.1", port=port, protocol_config={"allow_public_attrs": True}).start()


def resident(pid: int) -> int:
    memory: int = psutil.Process(pid).memory_info().rss
    return memory


def resident_at(size: int) -> int:
    """The memory of a server while 8 clients read an epoch of so many."""
    with serving("evenstep", size) as (pid, port):
        together("evenstep", 8, port, size, 3.0)
        return resident(pid)


if __name__ == "__main__":
    main()
