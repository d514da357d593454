"""A client's way to the server: a channel for each process, made when first needed, and calls that come through.

A call that finds nobody is made again, until the server is back or patience ends: each request may come twice.
"""

import os
import random
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from evenstep.errors import UserError
from evenstep.service import tokens, wire

Reply = TypeVar("Reply", bound=Message)

ATTEMPT = 10.0  # seconds for one try
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0  # seconds between two
AGAIN = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,  # by a server that goes
    grpc.StatusCode.INTERNAL,  # by a connection that breaks in the middle
)
OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.keepalive_time_ms", 30_000),  # a server's host that died without a word is noticed
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.enable_http_proxy", 0),  # the address is meant as it is given
    ("grpc.use_local_subchannel_pool", 1),
]
_ADDRESS = re.compile(r"(grpcs?)://([^/\s]+:\d{1,5})/([^/\s]+)")


class Over(Exception):
    """This incarnation of the worker is over: what it has not committed goes to others."""


class Closed(Exception):
    """The connection was closed while a call was under way."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """Where a server is, and what it takes to be let in."""

    target: str
    """HOST:PORT"""
    token: str = field(default="", repr=False)
    authority: bytes | None = None
    """The certificates to trust, in PEM, for TLS; empty for those of the system."""


def server(target: str, *, token_file: Path | None = None, tls_ca: Path | None = None) -> Server:
    """A server by HOST:PORT, with the token and the certificates in these files."""
    if not re.fullmatch(r"[^/\s]+:\d{1,5}", target):
        raise UserError(f"a server is HOST:PORT, not {target}")
    try:
        authority = None if tls_ca is None else tls_ca.expanduser().read_bytes()
    except OSError as error:
        raise UserError(f"{tls_ca} cannot be read: {error.strerror}") from None
    return Server(target=target, token=tokens.read(token_file), authority=authority)


def session_at(address: str, *, token_file: Path | None = None, tls_ca: Path | None = None) -> tuple[Server, str]:
    """The server and the session of an address, grpc://HOST:PORT/SESSION, or grpcs:// for TLS."""
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise UserError(f"an order is grpc://HOST:PORT/SESSION, or grpcs:// for TLS, not {address}")
    scheme, target, session = found.groups()
    if scheme == "grpc" and tls_ca is not None:
        raise UserError(f"a certificate is for TLS: grpcs://{target}/{session}")
    where = server(target, token_file=token_file, tls_ca=tls_ca)
    if scheme == "grpcs" and where.authority is None:
        where = Server(target=target, token=where.token, authority=b"")
    return where, session


class Connection:
    """Calls to a server, from any thread; it can be pickled, and goes on working in a process that was forked."""

    def __init__(
        self,
        to: Server,
        *,
        patience: float = 600.0,
        interceptors: Sequence[grpc.UnaryUnaryClientInterceptor] = (),
    ) -> None:
        self.to = to
        self.patience = patience
        self.interceptors = interceptors
        self._start()

    def _start(self) -> None:
        self._channel: grpc.Channel | None = None
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def call(self, name: str, request: Message, reply: type[Reply], patience: float | None = None) -> Reply:
        """Make a call until it is answered; a refusal is a `UserError`, or `Over`."""
        assert wire.METHODS[name].reply is reply
        began, pause = time.monotonic(), FIRST_PAUSE
        while True:
            try:
                answer: Reply = self._method(name)(request, timeout=ATTEMPT, metadata=tokens.header(self.to.token))
                return answer
            except grpc.RpcError as error:
                said = _refused(error, self.to.target)
                limit = self.patience if patience is None else min(patience, self.patience)
                if time.monotonic() - began > limit:
                    raise UserError(f"{said}; given up after {limit:g} s") from None
            except ValueError:  # the channel was closed under us
                if not self._closed.is_set():
                    raise
            if self._closed.wait(pause * random.uniform(0.5, 1.0)):
                raise Closed
            pause = min(2 * pause, LONGEST_PAUSE)

    def close(self) -> None:
        """End it, and the calls that are under way."""
        self._closed.set()
        with self._lock:
            if self._channel is not None and self._process == os.getpid():
                self._channel.close()
            self._channel = None

    def _method(self, name: str) -> Any:
        if self._process != os.getpid():
            self._start()  # the other process's channel is not ours to close
        with self._lock:
            if self._closed.is_set():
                raise Closed
            if self._channel is None:
                self._channel = self._opened()
            method = wire.METHODS[name]
            return self._channel.unary_unary(
                method.path, method.request.SerializeToString, method.reply.FromString
            )

    def _opened(self) -> grpc.Channel:
        if self.to.authority is None:
            channel = grpc.insecure_channel(self.to.target, OPTIONS)
        else:
            channel = grpc.secure_channel(
                self.to.target, grpc.ssl_channel_credentials(self.to.authority or None), OPTIONS
            )
        return grpc.intercept_channel(channel, *self.interceptors) if self.interceptors else channel

    def __getstate__(self) -> dict[str, Any]:
        return {"to": self.to, "patience": self.patience, "interceptors": self.interceptors}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def _refused(error: grpc.RpcError, target: str) -> str:
    """What to say of an error that may pass; one that will not is raised."""
    assert isinstance(error, grpc.Call)
    code, details = error.code(), error.details() or ""
    if code in AGAIN:
        return f"the order service at {target} does not answer ({code.name.lower()}: {details})"
    if code is grpc.StatusCode.ABORTED:
        raise Over(details) from None
    raise UserError(f"{details} ({target} says {code.name})") from None
