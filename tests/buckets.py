"""A real S3-compatible server of the tests' own, SeaweedFS, and a proxy before it that makes faults."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

BUCKET = "bucket"
KEY, SECRET = "tester", "a-secret-of-the-tests"
READER, READERS_SECRET = "reader", "a-secret-of-the-readers"
OPTIONS = (
    *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3", "-s3.autoCreateBucket=false", "-s3.iam=false"),
    *("-s3.port.iceberg=0", "-s3.port.lance=0", "-master.volumeSizeLimitMB=64", "-volume.max=40"),
)
UP_WITHIN = 60.0  # seconds
WEED = Path(sys.executable).with_name("weed")


@dataclass
class Server:
    """SeaweedFS, with one bucket in it."""

    folder: Path
    ports: list[int] = field(default_factory=list)
    process: Any = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.ports[0]}"

    def start(self) -> None:
        """Start it, and make the bucket where there is none yet."""
        if not WEED.is_file():
            pytest.fail(f"{WEED} is not there: pip install -c constraints.txt '.[s3,dev]'", pytrace=False)
        self.ports = self.ports or _free_ports(8)
        names = "s3.port s3.port.grpc master.port master.port.grpc volume.port volume.port.grpc filer.port"
        ports = [
            f"-{name}={port}" for name, port in zip([*names.split(), "filer.port.grpc"], self.ports, strict=True)
        ]
        config = self.folder / "s3.json"
        config.write_text(json.dumps({"identities": IDENTITIES}))
        (self.folder / "data").mkdir(exist_ok=True)
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [WEED, "server", f"-dir={self.folder / 'data'}", f"-s3.config={config}", *OPTIONS, *ports],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "TMPDIR": str(self.folder)},
            )
        end = time.monotonic() + UP_WITHIN
        while not self._ready():
            assert self.process.poll() is None, f"weed ended: {(self.folder / 'log').read_text()[-2000:]}"
            assert time.monotonic() < end, f"weed is not up: {(self.folder / 'log').read_text()[-2000:]}"
            time.sleep(0.05)

    def _ready(self) -> bool:
        import fsspec

        try:
            _fetch(self.endpoint)
            store = fsspec.filesystem(
                "s3", key=KEY, secret=SECRET, endpoint_url=self.endpoint, skip_instance_cache=True
            )
            if not store.exists(BUCKET):
                store.mkdir(BUCKET)
            store.pipe_file(f"{BUCKET}/up", b"yes")
        except Exception:
            return False
        return True

    def stop(self) -> None:
        """Kill it; what it has acknowledged is on disk."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()

    def pause(self) -> None:
        """Let it answer nothing, and hold on to its connections."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it answer again."""
        self.process.send_signal(signal.SIGCONT)


IDENTITIES = [
    {
        "name": name,
        "credentials": [{"accessKey": name, "secretKey": secret}],
        "actions": actions,
    }
    for name, secret, actions in (
        (KEY, SECRET, ["Admin", "Read", "Write", "List", "Tagging"]),
        (READER, READERS_SECRET, ["Read", "List"]),
    )
]


def variables(endpoint: str, key: str = KEY, secret: str = SECRET) -> dict[str, str]:
    """The environment that leads to it."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _fetch(address: str) -> None:
    host = address.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=5)
    try:
        connection.request("GET", "/")
        connection.getresponse().read()
    finally:
        connection.close()


@dataclass(frozen=True)
class Request:
    """What came to the proxy."""

    method: str
    path: str
    body: bytes


Fault = Callable[[Request], "int | str | None"]


class Proxy:
    """Hands requests on to a server, but for those that its fault says otherwise of.

    A fault answers a request with a status such as 503, with "cut" (half of the body arrives), "drop" (no answer
    comes), or None: nothing happens to it.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self.fault: Fault = lambda _: None
        self.seen: list[Request] = []
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02})

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@contextlib.contextmanager
def proxy_before(server: Server) -> Iterator[Proxy]:
    """A proxy for a while."""
    proxy = Proxy(server)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()


def _handler(proxy: Proxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 5  # an idle connection must not outlive its test for long

        def handle_one_request(self) -> None:
            with contextlib.suppress(ConnectionError):
                super().handle_one_request()

        def do(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            request = Request(self.command, self.path, body)
            proxy.seen.append(request)
            match proxy.fault(request):
                case None:
                    self._hand_on(body, len(body))
                case int(status):
                    self._answer(status, {"Content-Type": "application/xml"}, _refusal(status))
                case "cut":
                    self._hand_on(body, len(body) // 2)
                case "drop":
                    self.close_connection = True
                case other:
                    raise AssertionError(other)

        def _hand_on(self, body: bytes, sent: int) -> None:
            connection = http.client.HTTPConnection(proxy.server.endpoint.removeprefix("http://"), timeout=60)
            try:
                connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():
                    if name.lower() != "expect":
                        connection.putheader(name, value)
                connection.endheaders()
                connection.send(body[:sent])
                if sent < len(body):
                    self.close_connection = True
                    return
                response = connection.getresponse()
                self._answer(response.status, dict(response.getheaders()), response.read())
            except OSError:
                self.close_connection = True
            finally:
                connection.close()

        def _answer(self, status: int, headers: Mapping[str, str], content: bytes) -> None:
            self.send_response_only(status)
            for name, value in headers.items():
                if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                    self.send_header(name, value)
            length = len(content)
            if self.command == "HEAD":
                length = int(headers.get("Content-Length", 0))
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do  # noqa: N815 - the names are http.server's

        def log_message(self, format: str, *args: Any) -> None:
            del format, args

    return Handler


def _refusal(status: int) -> bytes:
    code = {503: "SlowDown", 500: "InternalError", 403: "AccessDenied"}[status]
    return f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>Not now.</Message></Error>'.encode()
