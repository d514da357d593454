"""The page /metrics, for Prometheus: what the sessions stand at. It wants the token, where the service has one."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from evenstep.errors import UserError
from evenstep.service import order_pb2 as pb
from evenstep.service import tokens, wire
from evenstep.service.desk import Desk

PATIENCE = 10.0  # seconds, with a reader that does not read
Page = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class Standing(Collector):
    """Asks the server, when the page is read, what its sessions stand at."""

    def __init__(self, desk: Callable[[], Desk]) -> None:
        self._desk = desk
        self._loop = asyncio.get_running_loop()

    def collect(self) -> Iterator[Metric]:
        """The figures of this moment."""
        asked = asyncio.run_coroutine_threadsafe(self._ask(), self._loop)
        sessions = asked.result(PATIENCE)
        yield GaugeMetricFamily("evenstep_sessions", "Sessions, closed ones among them", len(sessions))
        for name, about, value in _OF_A_SESSION:
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(f"evenstep_{name}", about, labels=["session"])
            for session, total in sessions:
                family.add_metric([session.name], value(session, total))
            yield family

    async def _ask(self) -> list[tuple[pb.Session, int]]:
        now = time.monotonic()
        sessions = self._desk().sessions.values()
        return [(wire.session_of(session, now, told=1), session.meter.total) for session in sessions]


_OF_A_SESSION: tuple[tuple[str, str, Callable[[pb.Session, int], float]], ...] = (
    ("size", "Samples in the data set", lambda session, _: session.plan.size),
    ("epoch", "The current epoch, counted from 0", lambda session, _: session.epoch),
    ("position", "Samples of the current epoch that are committed", lambda session, _: session.committed),
    ("handed_out", "Samples of the current epoch, committed or leased", lambda session, _: session.handed_out),
    ("committed_total", "Samples committed since the server started", lambda _, total: total),
    ("rate", "Samples committed a second, over the last ten", lambda session, _: session.rate),
    ("open_leases", "Leases that are open", lambda session, _: session.leases),
    ("workers", "Workers, or ranks", lambda session, _: session.workers_in_all),
    (
        "slowest_silent_seconds",
        "How long the worker with leases and the least progress has made none",
        lambda session, _: wire.slowest(session).silent_seconds,
    ),
)


def page(desk: Callable[[], Desk], token: str) -> Page:
    """The page, for whoever has the token."""
    registry = CollectorRegistry()
    registry.register(Standing(desk))
    metrics: Page = make_wsgi_app(registry)

    def guarded(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if not tokens.admits(token, [environ.get("HTTP_AUTHORIZATION", "")]):
            start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")])
            return [b"this page wants the server's token\n"]
        if environ["PATH_INFO"] != "/metrics":
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"there is /metrics\n"]
        return metrics(environ, start_response)

    return guarded


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    timeout = PATIENCE

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a page that is read every few seconds is no news."""


@contextlib.contextmanager
def serving(app: Page, host: str, port: int) -> Iterator[int]:
    """Serve a page meanwhile; its port."""
    try:
        server = make_server(host, port, app, _Server, _Quiet)
    except OSError as error:
        raise UserError(
            f"metrics cannot be served at {host}:{port}: {error.strerror}; name another port"
        ) from None
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
