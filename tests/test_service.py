"""The order service as its users have it: a server of its own, clients over the network, each position once."""

import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import grpc
import numpy as np
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from torch.utils.data import DataLoader, IterableDataset

from evenstep import UserError
from evenstep.order.plan import POLICIES, Plan
from evenstep.service import order_pb2 as pb
from evenstep.service.connection import Connection, Server
from evenstep.service.feed import LeaseLost
from evenstep.service.reader import Reader, ServiceSampler
from evenstep.service.remote import RemoteOrder, even_sampler, order_at, spec_at
from serving import Served, serving

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server for all tests here that do no harm to it."""
    with serving(tmp_path_factory.mktemp("service"), "--metrics-port", "0") as served:
        yield served


def read(reader: Reader, into: list[tuple[int, int]], slowly: float = 0.0) -> None:
    """All blocks that a reader gets, to the end of the last epoch, as (epoch, sample)."""
    while not reader.over:
        epoch = reader.epoch
        for indices in reader:
            into += [(epoch, sample) for sample in indices.tolist()]
            if slowly:
                time.sleep(slowly)


def whole(size: int, epochs: int) -> list[tuple[int, int]]:
    return [(epoch, sample) for epoch in range(epochs) for sample in range(size)]


# Dynamic


def test_many_workers_read_each_sample_once_an_epoch_and_all_see_the_end(served: Served) -> None:
    served.open("many", size=5003, block=7, epochs=3)
    readers = [Reader(served.at("many"), size=5003, seed=0) for _ in range(5)]
    found: list[list[tuple[int, int]]] = [[] for _ in readers]
    threads = [
        threading.Thread(target=read, args=(reader, into, 0.0002 * number))
        for number, (reader, into) in enumerate(zip(readers, found, strict=True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a worker waits for ever"
    for reader in readers:
        reader.close()
    assert sorted(pair for pairs in found for pair in pairs) == whole(5003, 3)
    assert [(epoch.once, epoch.repeated, epoch.lost, epoch.rows) for epoch in served.audit("many")] == [
        (5003, 0, 0, 1)
    ] * 3


def test_what_is_read_is_the_plans_order(served: Served) -> None:
    served.open("alone", size=100_000, block=64, seed=7, epochs=2)
    plan = Plan(size=100_000, global_batch=64, seed=7)
    with Reader(served.at("alone")) as reader:
        for epoch in range(2):
            blocks = list(reader)
            steps = [share.indices for share in plan.shares(epoch, 0, 0, 1)]
            assert len(blocks) == len(steps)
            assert all(map(np.array_equal, blocks, steps))


def test_a_block_that_was_interrupted_comes_again(served: Served) -> None:
    served.open("broken", size=40, block=4)
    with Reader(served.at("broken")) as reader:
        first = []
        for number, indices in enumerate(reader):
            if number == 3:
                break
            first += indices.tolist()
        rest = [sample for indices in reader for sample in indices.tolist()]
    assert rest[:4] == indices.tolist(), "the one it was in the middle of"
    assert sorted(first + rest) == list(range(40))


def test_a_worker_that_goes_gives_back_what_it_had_not_done(served: Served) -> None:
    served.open("left", size=64, block=4, lease_seconds=3600)
    seen: list[int] = []
    with Reader(served.at("left")) as gone:
        for indices in gone:
            if len(seen) == 12:
                break
            seen += indices.tolist()
    with Reader(served.at("left")) as stays:
        seen += [sample for indices in stays for sample in indices.tolist()]
    assert sorted(seen) == list(range(64))


@pytest.mark.parametrize(("workers", "start"), [(0, None), (2, "fork")])
def test_it_is_the_batch_sampler_of_any_loader(served: Served, workers: int, start: str | None) -> None:
    name = f"loader-{workers}-{start}"
    served.open(name, size=90, block=8, epochs=2)
    sampler = ServiceSampler(90, served.at(name))
    loader: DataLoader[Any] = DataLoader(
        Rows(90), batch_sampler=sampler, num_workers=workers, multiprocessing_context=start
    )
    found: list[tuple[int, int]] = []
    while not sampler.over:
        epoch = sampler.epoch
        for batch in loader:
            found += [(epoch, sample) for sample in batch.tolist()]
            sampler.take()
    sampler.close()
    assert sorted(found) == whole(90, 2)


class Rows(torch.utils.data.Dataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def test_what_a_loader_has_read_ahead_and_nobody_took_comes_again(served: Served) -> None:
    served.open("ahead", size=80, block=8)
    sampler = ServiceSampler(80, served.at("ahead"))
    loader = DataLoader(Rows(80), batch_sampler=sampler, num_workers=2, multiprocessing_context="fork")
    found: list[int] = []
    for number, batch in enumerate(loader):
        if number == 3:
            break
        found += batch.tolist()
        sampler.take()
    while not sampler.over:
        for batch in loader:
            found += batch.tolist()
            sampler.take()
    sampler.close()
    assert sorted(found) == list(range(80))


def test_nobody_waits_for_a_loader_that_holds_the_last_blocks_itself(served: Served) -> None:
    """Its loop ends, for it has to train on them first; the other one's goes on until it has."""
    served.open("tail", size=8, block=4)
    by_hand = Connection(Server(target=served.target), patience=10)
    join = pb.JoinRequest(session="tail", worker="other", birth=bytes(16))
    other = by_hand.call("Join", join, pb.JoinReply).incarnation
    lease = pb.TakeRequest(session="tail", incarnation=other, lease=1, blocks=1)
    taken = by_hand.call("Take", lease, pb.TakeReply).lease
    sampler = ServiceSampler(8, served.at("tail"))
    batches = iter(sampler)
    last = next(batches)
    assert list(batches) == [] and sampler.epoch == 0, "there is no more for now, and it does not wait for it"
    sampler.take()
    part = pb.Part(lease=1, start=taken.start, stop=taken.stop)
    done = pb.CommitRequest(session="tail", incarnation=other, part=part)
    by_hand.call("Commit", done, pb.CommitReply)
    by_hand.close()
    assert list(sampler) == [] and sampler.over
    sampler.close()
    order = Plan(size=8, global_batch=4)
    assert sorted(last + order.block(0, taken.start, taken.stop).tolist()) == list(range(8))


def test_a_loop_that_does_not_say_what_it_took_is_told_to(served: Served) -> None:
    served.open("silent", size=8, block=4)
    sampler = ServiceSampler(8, served.at("silent"))
    with pytest.raises(ValueError, match="once for each"):
        sampler.take()
    assert len(list(sampler)) == 2
    with pytest.raises(UserError, match=r"call take\(\)"):
        list(sampler)
    sampler.close()


class Blocks(IterableDataset[list[int]]):
    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    def __iter__(self) -> Iterator[list[int]]:
        for indices in self.reader:
            yield indices.tolist()


@pytest.mark.parametrize("start", ["fork", "forkserver"])
def test_the_workers_of_a_loader_can_read_each_for_itself(served: Served, start: str) -> None:
    """After a fork, from a process that has used its connection already."""
    served.open(f"inside-{start}", size=60, block=5)
    reader = Reader(served.at(f"inside-{start}"), worker="loader")
    assert reader.epoch == 0, "asked of the server, from this process"
    loader = DataLoader(Blocks(reader), batch_size=None, num_workers=2, multiprocessing_context=start)
    found: list[int] = []
    while not reader.over:
        found += [sample for block in loader for sample in block]
    assert sorted(found) == list(range(60))


def test_a_stall_costs_the_worker_its_blocks_and_nobody_the_epoch(served: Served) -> None:
    """It holds two of three blocks past the time of its leases, comes back late, and is told so."""
    served.open("stall", size=3, block=1, lease_seconds=0.3)
    stalled, other = (Reader(served.at("stall")) for _ in range(2))
    held = next(blocks := iter(stalled)).tolist()
    began = time.monotonic()
    found = [sample for indices in other for sample in indices.tolist()]
    assert other.over and time.monotonic() - began < 30
    assert sorted(found) == [0, 1, 2], "what the other one held, too"
    with pytest.warns(LeaseLost, match="1 samples of session stall were trained on too late"):
        assert list(blocks) == []
    assert stalled.refused == 1 and held[0] in found and stalled.over
    stalled.close()
    other.close()
    assert [(epoch.once, epoch.repeated) for epoch in served.audit("stall")] == [(3, 0)]


def test_a_worker_of_the_same_name_takes_over(served: Served) -> None:
    served.open("name", size=8, block=4, lease_seconds=3600)
    first = Reader(served.at("name"), worker="w")
    held = next(iter(first)).tolist()
    with Reader(served.at("name"), worker="w") as second:
        assert sorted(sample for indices in second for sample in indices.tolist()) == list(range(8))
    assert set(held) <= set(range(8))
    first.close()


# Lockstep


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world", [1, 3])
def test_lockstep_is_the_plan_for_every_rank(served: Served, policy: str, world: int) -> None:
    name = f"lockstep-{policy}-{world}"
    deal = "random" if world == 3 else "round_robin"
    served.open(
        name,
        size=1009,
        block=10,
        seed=3,
        policy=policy,
        block_size=7,
        deal=deal,
        dealt_to=world,
        world=world,
        epochs=2,
    )
    plan = Plan(size=1009, global_batch=10, seed=3, policy=policy, block_size=7, deal=deal, workers=world)
    for rank in range(world):
        order = order_at(served.at(name), plan, epochs=2, rank=rank, world=world)
        for epoch, step in ((0, 0), (1, 0), (1, 77)):
            found, expected = (list(one.shares(epoch, step, rank, world)) for one in (order, plan))
            assert len(found) == len(expected) == plan.steps(epoch) - step
            for ours, theirs in zip(found, expected, strict=True):
                assert np.array_equal(ours.indices, theirs.indices) and ours[1:] == theirs[1:]
            order.taken(epoch, plan.steps(epoch))
        order.close()
    assert [(epoch.once, epoch.repeated, epoch.lost, epoch.rows) for epoch in served.audit(name)] == [
        (1009, 0, 0, 1)
    ] * 2


def rank_of(served: Served, name: str, rank: int, world: int) -> RemoteOrder:
    connection = Connection(Server(target=served.target), patience=10)
    return RemoteOrder(connection, name, spec_at(connection, name), rank, world)


def test_a_loop_of_ones_own_reads_in_lockstep(served: Served) -> None:
    served.open("own", size=50, block=8, world=2)
    ranks = [even_sampler(rank_of(served, "own", rank, 2)) for rank in range(2)]
    samples: list[int] = []
    for batches in zip(*ranks, strict=True):
        for rank, batch in zip(ranks, batches, strict=True):
            samples += batch if rank.take() else []
    assert sorted(samples) == list(range(50))
    for rank in ranks:
        assert isinstance(rank.plan, RemoteOrder)
        rank.plan.close()
    assert [(epoch.once, epoch.rows) for epoch in served.audit("own")] == [(50, 1)]


def test_the_ledger_of_a_lockstep_session_is_as_far_as_its_slowest_rank(served: Served) -> None:
    served.open("slow", size=100, block=10, world=2)
    fast, slow = (rank_of(served, "slow", rank, 2) for rank in range(2))
    fast.taken(0, 7)
    slow.taken(0, 4)
    fast.close()
    slow.close()
    assert [(epoch.once, epoch.lost) for epoch in served.audit("slow")] == [(40, 0)]


def test_the_world_of_a_lockstep_session_changes_when_it_is_opened_again(served: Served) -> None:
    served.open("world", size=100, block=10, world=2)
    for rank in range(2):
        order = rank_of(served, "world", rank, 2)
        order.taken(0, 5)
        order.close()
    three = rank_of(served, "world", 2, 3)
    with pytest.raises(
        UserError, match="read by 2 ranks, not 3; to change that, open it once more with --world 3"
    ):
        next(three.shares(0, 5, 2, 3))
    served.open("world", size=100, block=10, world=3)
    assert len(list(three.shares(0, 5, 2, 3))) == 5
    three.close()
    for rank in range(3):
        order = rank_of(served, "world", rank, 3)
        order.taken(1, 0)
        order.close()
    assert [(epoch.once, epoch.repeated, epoch.rows) for epoch in served.audit("world")] == [(100, 0, 1)]


# What does not fit is refused, in a sentence


def refused(call: Any) -> str:
    with pytest.raises(UserError) as told:
        call()
    return str(told.value)


def test_refusals_say_what_to_do(served: Served) -> None:
    served.open("clicks", size=100, block=10, seed=1)
    served.open("steps", size=100, block=10, world=2)
    at = served.at

    def reading(name: str, **expected: int) -> Any:
        return Reader(at(name), **expected).feed  # type: ignore[arg-type]

    said = refused(lambda: reading("click"))
    assert "no session 'click'; there are" in said and "clicks" in said and "NOT_FOUND" in said
    assert "has size 100, and the worker expects 99" in refused(lambda: reading("clicks", size=99))
    assert "has seed 1, and the worker expects 2" in refused(lambda: reading("clicks", seed=2))
    assert "is read in lockstep by 2 ranks" in refused(lambda: reading("steps"))
    said = refused(lambda: served.open("clicks", size=100, block=10, seed=2))
    assert "there is a session clicks with seed 1 instead of 2" in said and "ALREADY_EXISTS" in said
    assert "world 0 instead of 2" in refused(lambda: served.open("clicks", size=100, block=10, seed=1, world=2))
    plan = Plan(size=100, global_batch=20, seed=5)
    said = refused(lambda: order_at(at("steps"), plan, epochs=3, rank=0, world=3))
    assert "block 10 instead of 20, seed 0 instead of 5, world 2 instead of 3, epochs 1 instead of 3" in said
    assert "evenstep session open --name NAME --size 100 --block 20 --seed 5" in said and "--world 3" in said
    with served.client() as client:
        client.close_session("clicks")
    assert "session clicks is closed" in refused(lambda: reading("clicks"))
    assert "is closed; take another name" in refused(lambda: served.open("clicks", size=100, block=10, seed=1))


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".hidden", "x" * 101, "é", "a\0b", "a b", "-rf", "C:\\x"])
def test_a_name_is_a_key_and_never_a_path(served: Served, name: str) -> None:
    assert "cannot be a session's name" in refused(lambda: served.open(name, size=10))
    served.open("named", size=10)
    if name:
        assert "cannot be a worker's name" in refused(lambda: Reader(served.at("named"), worker=name).feed)


@pytest.mark.parametrize(
    "options",
    [
        {"size": 0},
        {"size": 1 << 63},
        {"size": 10, "block": 0},
        {"size": 10, "policy": "magic"},
        {"size": 10, "lease_seconds": 0.0},
        {"size": 10, "lease_seconds": float("nan")},
        {"size": 10, "policy": "shards", "dealt_to": 4},
        {"size": 10, "world": 1 << 20},
        {"size": 10, "epochs": 0},
    ],
)
def test_a_plan_that_cannot_be_is_refused(served: Served, options: dict[str, Any]) -> None:
    connection = Connection(Server(target=served.target))
    plan = pb.Plan(
        **{"block": 256, "policy": "shuffle", "block_size": 1000, "deal": "round_robin", "dealt_to": 1}
        | {"epochs": 1, "lease_seconds": 60.0}
        | options
    )
    with pytest.raises(UserError, match="INVALID_ARGUMENT"):
        connection.call("Open", pb.OpenRequest(session="cannot", plan=plan), pb.Session)
    connection.close()


@pytest.mark.parametrize("address", ["host:7077/S", "http://h:1/S", "grpc://h/S", "grpc://h:1/", "grpc://h:1/a/b"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    assert "an order is grpc://HOST:PORT/SESSION" in refused(lambda: Reader(address))


def test_a_server_that_is_not_there_is_named(evenstep: Any) -> None:
    said = evenstep("session", "list", "--server", "127.0.0.1:1").complaint()
    assert "the order service at 127.0.0.1:1 does not answer" in said and "given up after 5 s" in said


# The commands


def test_the_commands_of_a_session(served: Served, evenstep: Any) -> None:
    at = ("--server", served.target)
    opened = evenstep("session", "open", "--name", "S", "--size", "1000", "--block", "10", "--epochs", "2", *at)
    assert opened.code == 0 and "session S: 1,000 samples, shuffle, seed 0, blocks of 10" in opened.out, opened.err
    with Reader(served.at("S"), worker="laptop") as reader:
        next(iter(reader))
        shown = evenstep("session", "show", "S", *at).out
        assert "laptop" in shown and "epoch 1 of 2" in shown
        status = evenstep("serve", "--status", "--port", str(served.port)).out
        assert "S " in status and "laptop, " in status, status
        assert " S " in evenstep("session", "list", *at).out
        read(reader, [])
    audited = evenstep("audit", str(served.data))
    assert audited.code == 0 and "0 repeated, 0 lost" in audited.out, audited.err
    assert "session S is closed" in evenstep("session", "close", "S", *at).out
    assert "session S is forgotten" in evenstep("session", "close", "S", "--forget", *at).out
    assert "no session 'S'" in evenstep("session", "show", "S", *at).complaint()
    assert not served.audit("S")


def test_an_audit_finds_what_was_lost_and_what_was_repeated(served: Served, evenstep: Any, tmp_path: Path) -> None:
    served.open("proof", size=100, block=10)
    with Reader(served.at("proof")) as reader:
        read(reader, [])
    import sqlite3

    copy = tmp_path / "copy"
    copy.mkdir()
    with sqlite3.connect(served.data / "ledger.sqlite") as db, sqlite3.connect(copy / "ledger.sqlite") as other:
        db.backup(other)
        other.execute("UPDATE committed SET stop = 90 WHERE session = 'proof'")
    db.close()
    other.close()
    found = evenstep("audit", str(copy))
    assert found.code == 1 and "10 repeated, 10 lost: NOT each sample exactly once" in found.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("serve",), "--data DIR names the folder of the ledger"),
        (("serve", "--data", "d", "--host", "0.0.0.0"), "can be reached from other machines: give --token-file"),
        (("serve", "--data", "d", "--host", "::"), "can be reached from other machines: give --token-file"),
        (("serve", "--data", "d", "--host", "no.such.host.invalid"), "no address no.such.host.invalid"),
        (("serve", "--data", "d", "--token-file", "t"), "the token file t cannot be read"),
        (("serve", "--data", "d", "--tls-cert", "c"), "TLS takes both"),
        (("serve", "--data", "/proc/no"), "no ledger can be kept in /proc/no"),
        (("session", "open", "--name", "x"), "--size N says it"),
        (("session", "list", "--server", "nowhere"), "a server is HOST:PORT, not nowhere"),
    ],
)
def test_what_is_wrong_with_a_command_is_said_in_a_line(evenstep: Any, words: Sequence[str], said: str) -> None:
    assert said in evenstep(*words).complaint()


def test_a_port_that_is_taken_is_not_shared(served: Served, evenstep: Any) -> None:
    said = evenstep("serve", "--data", "other", "--port", str(served.port)).complaint()
    assert f"127.0.0.1:{served.port} cannot be served: [Errno 98] Address already in use; name another" in said


def test_a_folder_that_is_in_use_is_not_shared(served: Served, evenstep: Any) -> None:
    assert "another server keeps its ledger" in evenstep("serve", "--data", str(served.data)).complaint()


# Who is let in


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a token and TLS."""
    folder = tmp_path_factory.mktemp("guarded")
    token, cert, key = folder / "token", folder / "cert.pem", folder / "key.pem"
    token.write_text("correct-horse-battery-staple\n")
    made = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    subject = ("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert)
    subprocess.run([*made.split(), *subject], check=True, capture_output=True)
    options = ("--token-file", str(token), "--tls-cert", str(cert), "--tls-key", str(key), "--host", "0.0.0.0")
    with serving(folder, *options, token_file=token, tls_ca=cert) as served:
        yield served


def test_with_the_token_over_tls_all_is_as_without(guarded: Served) -> None:
    guarded.open("safe", size=100, block=10)
    found: list[tuple[int, int]] = []
    with Reader(guarded.at("safe"), token_file=guarded.token_file, tls_ca=guarded.tls_ca) as reader:
        read(reader, found)
    assert sorted(found) == whole(100, 1)


@pytest.mark.parametrize("token", ["", "wrong", "correct-horse-battery-stapl", "correct-horse-battery-staple2"])
def test_without_the_token_nothing_is_told(guarded: Served, token: str) -> None:
    assert guarded.tls_ca is not None
    ours = Connection(
        Server(target=guarded.target, token=token, authority=guarded.tls_ca.read_bytes()), patience=5
    )
    for name, request, reply in (
        ("List", pb.ListRequest(), pb.ListReply),
        ("Open", pb.OpenRequest(session="mine"), pb.Session),
        ("Take", pb.TakeRequest(session="safe"), pb.TakeReply),
    ):
        with pytest.raises(UserError, match=r"wants its token.*UNAUTHENTICATED"):
            ours.call(name, request, reply)  # type: ignore[type-var]
    ours.close()


def test_health_is_told_to_anyone(guarded: Served) -> None:
    assert guarded.tls_ca is not None
    credentials = grpc.ssl_channel_credentials(guarded.tls_ca.read_bytes())
    with grpc.secure_channel(guarded.target, credentials) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", "evenstep.order.v1.OrderService"):
            reply = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_a_short_token_is_refused(evenstep: Any, tmp_path: Path) -> None:
    (tmp_path / "t").write_text("hunter2\n")
    assert (
        "t holds no token: 16 letters or more" in evenstep("serve", "--data", "d", "--token-file", "t").complaint()
    )


# What there is to see


def page(port: int, path: str = "/metrics", token: str = "") -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=10) as reply:
        text: str = reply.read().decode()
    return text


def test_metrics_say_where_sessions_stand(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a-token-of-some-length")
    with serving(tmp_path, "--metrics-port", "0", "--token-file", str(token), token_file=token) as served:
        shown = re.search(r"metrics at http://\S+:(\d+)/metrics", served.command.said())
        assert shown is not None
        port = int(shown[1])
        served.open("seen", size=100, block=10)
        with Reader(served.at("seen"), token_file=token) as reader:
            blocks = iter(reader)
            for _ in range(4):
                next(blocks)
            reader.feed.settle()
            found = page(port, token="a-token-of-some-length")
            assert 'evenstep_position{session="seen"} 30.0' in found
            assert 'evenstep_committed_total{session="seen"} 30.0' in found
            assert 'evenstep_workers{session="seen"} 1.0' in found
            assert "evenstep_slowest_silent_seconds" in found and "evenstep_open_leases" in found
        with pytest.raises(HTTPError, match="401"):
            page(port)
        with pytest.raises(HTTPError, match="404"):
            page(port, "/../../etc/passwd", token="a-token-of-some-length")


# Through its death


@pytest.mark.slow
def test_a_server_that_is_killed_and_comes_back_loses_nothing(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        served.open("lives", size=4000, block=5, epochs=2, lease_seconds=5)
        readers = [Reader(served.at("lives")) for _ in range(3)]
        found: list[list[tuple[int, int]]] = [[] for _ in readers]
        threads = [
            threading.Thread(target=read, args=(reader, into, 0.001))
            for reader, into in zip(readers, found, strict=True)
        ]
        for thread in threads:
            thread.start()
        for _ in range(3):
            time.sleep(0.4)
            served.kill()
            time.sleep(0.1)
            served.start()
        for thread in threads:
            thread.join(90)
            assert not thread.is_alive()
        for reader in readers:
            reader.close()
        assert sorted(pair for pairs in found for pair in pairs) == whole(4000, 2)
        assert [(epoch.once, epoch.repeated, epoch.rows) for epoch in served.audit("lives")] == [(4000, 0, 1)] * 2


# The repository


def test_the_generated_code_is_current(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "grpc_tools.protoc", "-Isrc", "src/evenstep/service/order.proto")
    subprocess.run([*command, f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"], cwd=ROOT, check=True)
    for name in ("order_pb2.py", "order_pb2.pyi"):
        fresh = (tmp_path / "evenstep" / "service" / name).read_text()
        assert fresh == (ROOT / "src" / "evenstep" / "service" / name).read_text(), f"{name} is old: make proto"
