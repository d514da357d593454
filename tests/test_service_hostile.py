"""What a server survives: noise, floods, messages that are none, and requests that make no sense."""

import asyncio
import contextlib
import os
import resource
import socket
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evenstep.service import order_pb2 as pb
from evenstep.service import wire
from evenstep.service.connection import Connection, Server
from evenstep.service.desk import Desk, restored
from evenstep.service.handlers import Handlers
from evenstep.service.journal import Journal
from evenstep.service.ledger import Ledger, connected
from evenstep.service.reader import Reader
from evenstep.service.refusals import Refused
from evenstep.service.spec import Spec
from serving import Served, serving

IDLE = 10_000  # connections


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("hostile")
    token = folder / "token"
    token.write_text("a-token-of-some-length")
    with serving(folder, "--token-file", str(token), token_file=token) as served:
        yield served


def still_serves(served: Served, name: str) -> None:
    """A good client gets all it wants, and nothing lies where it should not."""
    served.open(name, size=1000, block=10)
    with Reader(served.at(name), token_file=served.token_file) as reader:
        assert sorted(sample for indices in reader for sample in indices.tolist()) == list(range(1000))
    assert {path.name for path in served.data.iterdir()} <= {
        "lock",
        "ledger.sqlite",
        "ledger.sqlite-wal",
        "ledger.sqlite-shm",
    }
    assert {path.name for path in served.folder.iterdir()} == {"token", "served", "0.stdout", "0.stderr"}


def raw(served: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.port), timeout=10)


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        PREFACE + os.urandom(4096),
        PREFACE + b"\xff\xff\xff\x04\x00\x00\x00\x00\x00" + b"\0" * 5000,  # a frame of 16 MB
        PREFACE + b"\0\0\0\4\0\0\0\0\0" * 5000,  # settings, over and over
        PREFACE + b"\0\0\x08\6\0\0\0\0\0pingping" * 5000,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(600),  # somebody who expects TLS
    ],
    ids=["http", "garbage after the preface", "a huge frame", "settings", "pings", "tls"],
)
def test_noise_at_the_port(served: Served, noise: bytes, request: pytest.FixtureRequest) -> None:
    for _ in range(20):
        with contextlib.suppress(OSError), raw(served) as connection:
            connection.sendall(noise)
    still_serves(served, f"noise-{request.node.callspec.indices['noise']}")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(noise=st.binary(max_size=2000))
def test_random_bytes_at_the_port(served: Served, noise: bytes) -> None:
    with contextlib.suppress(OSError), raw(served) as connection:
        connection.sendall(noise)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 16):
            pass


def test_after_all_that_it_serves(served: Served) -> None:
    still_serves(served, "after-noise")


def called(served: Served, path: str, payload: bytes, **metadata: str) -> grpc.StatusCode:
    """What comes of a request that is any bytes."""
    token = served.token_file.read_text() if served.token_file else ""
    given = (("authorization", f"Bearer {token}"), *metadata.items())
    with grpc.insecure_channel(served.target) as channel:
        try:
            channel.unary_unary(path)(payload, timeout=20, metadata=given)
        except grpc.RpcError as error:
            assert isinstance(error, grpc.Call)
            return error.code()
    return grpc.StatusCode.OK


def test_messages_that_are_none_or_too_long(served: Served) -> None:
    show = wire.METHODS["Show"].path
    assert called(served, show, b"\x0a\xff\xff\xff\xff") is not grpc.StatusCode.OK
    assert called(served, show, b"\x0a\x05ab") is not grpc.StatusCode.OK
    big = pb.ShowRequest(session="x" * (1 << 20)).SerializeToString()
    assert called(served, show, big) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert called(served, "/evenstep.order.v1.OrderService/Nothing", b"") is grpc.StatusCode.UNIMPLEMENTED
    assert called(served, show, b"", padding="x" * 50_000) is grpc.StatusCode.RESOURCE_EXHAUSTED
    still_serves(served, "after-messages")


@pytest.mark.slow
def test_thousands_of_idle_connections(served: Served) -> None:
    """Each takes a file on both sides, so the server raises its own limit as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(IDLE, hard - 500)
    assert count == IDLE, f"this machine lets a process have {hard} files: too few to try {IDLE} connections"
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for number in range(count):
            connection = stack.enter_context(raw(served))
            if number % 2:  # half of them say hello, and then no more
                connection.sendall(PREFACE + b"\0\0\0\4\0\0\0\0\0")
        began = time.monotonic()
        still_serves(served, "among-idle")
        assert time.monotonic() - began < 60
        memory = psutil.Process(served.command.pid).memory_info().rss
        assert memory < 2_000_000_000, f"{memory / 1e6:.0f} MB"


# The handlers, without a network: whatever is asked, they answer or refuse, and stay as they should be

TEXT = st.one_of(st.sampled_from(["s", "l", "closed", "../../etc", "", "a/b", "é\0"]), st.text(max_size=20))
NUMBER = st.one_of(st.integers(0, 5), st.integers(0, (1 << 64) - 1))
SMALL = st.one_of(st.integers(0, 5), st.integers(0, (1 << 32) - 1))
PLANS = st.builds(
    pb.Plan,
    size=NUMBER,
    block=NUMBER,
    seed=NUMBER,
    policy=st.one_of(st.sampled_from(["shuffle", "sequential", "shards", "blocks"]), st.text(max_size=5)),
    block_size=NUMBER,
    deal=st.one_of(st.sampled_from(["round_robin", "random"]), st.text(max_size=5)),
    dealt_to=NUMBER,
    epochs=NUMBER,
    world=NUMBER,
    lease_seconds=st.floats(),
)
PARTS = st.builds(pb.Part, lease=NUMBER, start=NUMBER, stop=NUMBER)
REQUESTS = st.one_of(
    st.tuples(st.just("Open"), st.builds(pb.OpenRequest, session=TEXT, plan=PLANS)),
    st.tuples(st.just("List"), st.just(pb.ListRequest())),
    st.tuples(st.just("Show"), st.builds(pb.ShowRequest, session=TEXT)),
    st.tuples(st.just("Close"), st.builds(pb.CloseRequest, session=TEXT, forget=st.booleans())),
    st.tuples(
        st.just("Join"),
        st.builds(pb.JoinRequest, session=TEXT, worker=TEXT, birth=st.one_of(st.just(b"b" * 16), st.binary()))
        | st.builds(pb.JoinRequest, session=TEXT, worker=TEXT, birth=st.binary(), size=NUMBER, seed=NUMBER),
    ),
    st.tuples(
        st.just("Take"),
        st.builds(pb.TakeRequest, session=TEXT, incarnation=NUMBER, lease=NUMBER, epoch=NUMBER, blocks=SMALL)
        | st.builds(pb.TakeRequest, session=TEXT, incarnation=NUMBER, lease=NUMBER, blocks=SMALL, commit=PARTS),
    ),
    st.tuples(st.just("Commit"), st.builds(pb.CommitRequest, session=TEXT, incarnation=NUMBER, part=PARTS)),
    st.tuples(st.just("Leave"), st.builds(pb.LeaveRequest, session=TEXT, incarnation=NUMBER)),
    st.tuples(
        st.just("Batches"),
        st.builds(
            pb.BatchesRequest, session=TEXT, epoch=NUMBER, step=NUMBER, rank=SMALL, world=SMALL, count=SMALL
        ),
    ),
    st.tuples(
        st.just("Advance"),
        st.builds(pb.AdvanceRequest, session=TEXT, rank=SMALL, world=SMALL, epoch=NUMBER, step=NUMBER),
    ),
)


def two_sessions() -> tuple[Handlers, Ledger]:
    handlers, ledger = Handlers(Desk()), Ledger(connected(":memory:"))
    for name, world in (("s", 0), ("l", 2)):
        plan = wire.plan_of(Spec(size=20, block=3, epochs=2, world=world))
        handlers.answer("Open", pb.OpenRequest(session=name, plan=plan))
    ledger.write(handlers.desk.changes(0.0))
    return handlers, ledger


@settings(max_examples=150, deadline=None)
@given(st.lists(REQUESTS, max_size=25))
def test_whatever_is_asked_is_answered_or_refused(requests: list[tuple[str, Any]]) -> None:
    handlers, ledger = two_sessions()
    for name, request in requests:
        try:
            reply = handlers.answer(name, request)
            assert type(reply) is wire.METHODS[name].reply
            assert len(reply.SerializeToString()) < 4_000_000
        except Refused as refused:
            assert str(refused)
        changes = handlers.desk.changes(0.0)
        if changes:
            ledger.write(changes)
    again = restored(ledger, 0.0)
    assert {name: (session.spec, session.closed) for name, session in again.sessions.items()} == {
        name: (session.spec, session.closed) for name, session in handlers.desk.sessions.items()
    }
    ledger.close()


# A disk that is full


def test_what_cannot_be_written_is_not_acknowledged_and_did_not_happen() -> None:
    ledger = Ledger(connected(":memory:"))
    handlers = Handlers(Desk())
    lost: list[Exception] = []

    def go_back(error: Exception) -> None:
        lost.append(error)
        handlers.desk = restored(ledger, 0.0)

    async def ask(journal: Journal, name: str) -> None:
        plan = wire.plan_of(Spec(size=20, block=3, epochs=2))
        handlers.answer("Open", pb.OpenRequest(session=name, plan=plan))
        await journal.settled(handlers.desk.changes(0.0))

    async def all_of_it() -> None:
        journal = Journal(ledger, go_back)
        writing = asyncio.create_task(journal.run())
        await ask(journal, "before")
        pages = ledger._db.execute("PRAGMA page_count").fetchone()[0]
        ledger._db.execute(f"PRAGMA max_page_count={pages}")
        acknowledged = ["before"]
        for number in range(200):
            try:
                await ask(journal, f"session-{number}")
                acknowledged.append(f"session-{number}")
            except Refused as refused:
                assert "cannot write its ledger: database or disk is full; mend that" in str(refused)
                break
        assert isinstance(lost[0], sqlite3.OperationalError)
        assert sorted(handlers.desk.sessions) == sorted(acknowledged)
        ledger._db.execute("PRAGMA max_page_count=100000")
        await ask(journal, "after")
        assert sorted(kept.name for kept in ledger.sessions()) == sorted([*acknowledged, "after"])
        writing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await writing

    asyncio.run(all_of_it())
    ledger.close()


@pytest.mark.slow
def test_a_server_whose_files_cannot_grow_says_so_and_goes_on_later(tmp_path: Path) -> None:
    """The limit on the size of a process's files stands in for the disk."""
    with serving(tmp_path) as served:
        served.open("before", size=10, lease_seconds=0.3)
        holder = Connection(Server(target=served.target))
        join = pb.JoinRequest(session="before", worker="w", birth=bytes(16))
        held = holder.call("Join", join, pb.JoinReply).incarnation
        take = pb.TakeRequest(session="before", incarnation=held, lease=1, blocks=1)
        assert holder.call("Take", take, pb.TakeReply).HasField("lease")
        holder.close()
        largest = max(path.stat().st_size for path in served.data.iterdir())
        process = psutil.Process(served.command.pid)
        before = process.rlimit(psutil.RLIMIT_FSIZE)
        process.rlimit(psutil.RLIMIT_FSIZE, (largest, before[1]))
        impatient = Connection(Server(target=served.target), patience=0.5)
        plan = wire.plan_of(Spec(size=10))
        with pytest.raises(Exception, match="cannot write its ledger"):
            for number in range(500):
                impatient.call("Open", pb.OpenRequest(session=f"s{number}", plan=plan), pb.Session)
        impatient.close()
        served.command.until(
            lambda: served.command.said().count("cannot be written") > 3, "a lease over, unwritten"
        )
        process.rlimit(psutil.RLIMIT_FSIZE, before)
        served.open("after", size=10)
        with served.client() as client:
            names = [session.name for session in client.list()]
        assert {"before", "after"} <= set(names)
        served.kill()
        served.start()
        with served.client() as client:
            assert [session.name for session in client.list()] == names, "what was told is kept, and nothing else"
