"""The server: who may come in, at which port; what it needs around it, from its start to its end."""

import asyncio
import contextlib
import ipaddress
import resource
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from evenstep.errors import UserError
from evenstep.service import ledger, metrics, tokens, wire
from evenstep.service.desk import restored
from evenstep.service.handlers import Handlers, generic
from evenstep.service.journal import Journal
from evenstep.service.refusals import Refused

GRACE = 2.0  # seconds that calls have to end, when the server is asked to stop
TICK = 0.2  # seconds between two looks for leases that are over
FILES = 65_536  # a connection takes one; so many may be open, where the system lets us
OPTIONS = [
    ("grpc.so_reuseport", 0),  # or a second server would share the port, and half of the calls, without a word
    ("grpc.max_receive_message_length", 1 << 16),  # a request is a name and some integers
    ("grpc.max_metadata_size", 1 << 13),
    ("grpc.max_concurrent_streams", 256),
    ("grpc.server_handshake_timeout_ms", 10_000),  # who connects and says nothing is sent away
    ("grpc.keepalive_time_ms", 60_000),  # a client's host that died without a word keeps no connection
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.max_connection_idle_ms", 600_000),  # it reconnects when it has something to ask
]


@dataclass(frozen=True, kw_only=True)
class Serving:
    """What a server is started with."""

    data: Path
    host: str = "127.0.0.1"
    port: int = 7077
    metrics_port: int | None = None
    token_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None


def serve(serving: Serving, say: Callable[[str], None]) -> None:
    """Serve until asked to stop, by SIGTERM or SIGINT."""
    token = tokens.read(serving.token_file)
    credentials = _credentials(serving)
    if not token and not _loopback(serving.host):
        raise UserError(
            f"{serving.host} can be reached from other machines: give --token-file, or leave out --host to serve "
            "this machine alone"
        )
    if token and credentials is None and not _loopback(serving.host):
        say("the token travels unencrypted: give --tls-cert and --tls-key where others can listen")
    _allow_files()
    with ledger.opened(serving.data) as kept:
        asyncio.run(_serve(serving, token, credentials, kept, say))


async def _serve(
    serving: Serving,
    token: str,
    credentials: grpc.ServerCredentials | None,
    kept: ledger.Ledger,
    say: Callable[[str], None],
) -> None:
    handlers = Handlers(restored(kept, time.monotonic()))

    def go_back(error: Exception) -> None:
        handlers.desk = restored(kept, time.monotonic())
        with contextlib.suppress(OSError):  # the same disk may take our words, too
            say(f"the ledger cannot be written: {error}; what was not acknowledged is undone")

    journal = Journal(kept, go_back)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(_running(journal.run()))
        await stack.enter_async_context(_running(_expiring(handlers, journal)))
        server = grpc.aio.server(interceptors=[Guard(token)], options=OPTIONS, maximum_concurrent_rpcs=20_000)
        server.add_generic_rpc_handlers((generic(handlers, journal),))
        healthy = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
        for name in ("", wire.SERVICE):
            await healthy.set(name, health_pb2.HealthCheckResponse.SERVING)
        port = _bind(server, serving, credentials)
        if serving.metrics_port is not None:
            page = metrics.page(lambda: handlers.desk, token)
            shown = stack.enter_context(metrics.serving(page, serving.host, serving.metrics_port))
            say(f"metrics at http://{_shown(serving.host)}:{shown}/metrics")
        await server.start()
        say(f"order service at {_shown(serving.host)}:{port}, its ledger in {serving.data}")
        await stop.wait()
        say("stopping")
        await healthy.enter_graceful_shutdown()
        await server.stop(GRACE)


@contextlib.asynccontextmanager
async def _running(work: Any) -> AsyncIterator[None]:
    """Meanwhile this runs beside; what goes wrong in it ends the server."""
    main = asyncio.current_task()
    assert main is not None
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: None if done.cancelled() else main.cancel())
    try:
        yield
    except asyncio.CancelledError:
        if task.done():
            task.result()
        raise
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _expiring(handlers: Handlers, journal: Journal) -> None:
    while True:
        await asyncio.sleep(TICK)
        handlers.desk.expire(time.monotonic())
        changes = handlers.desk.changes(time.monotonic())
        with contextlib.suppress(Refused):  # not written, so not so: at the next look they are still over
            await journal.settled(changes)


class Guard(grpc.aio.ServerInterceptor):
    """Lets in who has the token. Health is told to anyone: who cannot ask still sees the open port."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._refusal: Any = grpc.unary_unary_rpc_method_handler(_not_let_in)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The call's handler, or the one that refuses."""
        if self._token and not handler_call_details.method.startswith(f"/{health.SERVICE_NAME}/"):
            metadata = handler_call_details.invocation_metadata or ()
            given = [value for key, value in metadata if key == tokens.HEADER]
            if not tokens.admits(self._token, given):
                return self._refusal
        return await continuation(handler_call_details)


async def _not_let_in(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    del request
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED,
        "this server wants its token: the one in the file that it was started with (--token-file)",
    )


def _credentials(serving: Serving) -> grpc.ServerCredentials | None:
    if serving.tls_cert is None and serving.tls_key is None:
        return None
    if serving.tls_cert is None or serving.tls_key is None:
        raise UserError("TLS takes both, --tls-cert and --tls-key")
    try:
        pair = serving.tls_key.read_bytes(), serving.tls_cert.read_bytes()
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}") from None
    return grpc.ssl_server_credentials([pair])


def _bind(server: Any, serving: Serving, credentials: grpc.ServerCredentials | None) -> int:
    address = f"{_shown(serving.host)}:{serving.port}"
    try:
        _try(serving.host, serving.port)
        port: int = (
            server.add_insecure_port(address)
            if credentials is None
            else server.add_secure_port(address, credentials)
        )
    except (OSError, RuntimeError) as error:
        raise UserError(f"{address} cannot be served: {error}; name another with --port or --host") from None
    return port


def _try(host: str, port: int) -> None:
    """Whether the port can be had: gRPC would say that it cannot in lines of its own."""
    kind, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(kind, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        trial.bind(address)


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _loopback(host: str) -> bool:
    """Whether a name stands for this machine only, by all of its addresses."""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise UserError(f"no address {host}: {error}; name one of this machine's with --host") from None
    return all(ipaddress.ip_address(str(address).partition("%")[0]).is_loopback for address in found)


def _allow_files() -> None:
    """As many open connections as the system lets this process have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
