"""Notices that EC2 takes a spot instance back: asked for as an instance asks, answered by a stop."""

import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import commands
from evenstep.records.audit import audit
from evenstep.watch import spot
from evenstep.watch.stopping import AGAIN

TASK = str(Path(__file__).with_name("tiny.py"))
LONG = ("train", TASK, "--global-batch", "8", "--epochs", "100000", "--spot", "aws")


class Service(ThreadingHTTPServer):
    """Answers as the service of an instance does: 404 where there is nothing to know."""

    known: dict[str, str]
    old: bool = False
    """The token that it has given out is too old."""


class Answering(BaseHTTPRequestHandler):
    server: Service

    def do_PUT(self) -> None:
        fresh = self.path == spot.TOKEN and "X-aws-ec2-metadata-token-ttl-seconds" in self.headers
        self.server.old = False
        self._answer(200 if fresh else 400, "a token")

    def do_GET(self) -> None:
        if self.server.old or self.headers["X-aws-ec2-metadata-token"] != "a token":
            self._answer(401, "")
        elif self.path in self.server.known:
            self._answer(200, self.server.known[self.path])
        else:
            self._answer(404, "")

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def service() -> Iterator[Service]:
    server = Service(("127.0.0.1", 0), Answering)
    server.known = {}
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def address(service: Service) -> str:
    return f"http://127.0.0.1:{service.server_port}"


def taken_back() -> str:
    return json.dumps({"action": "terminate", "time": f"{datetime.now(UTC) + timedelta(seconds=120):%FT%TZ}"})


def test_each_notice_is_noticed_once(service: Service) -> None:
    heard: list[str] = []
    asking = spot.Spot(
        address(service), stop=lambda: heard.append("stop"), save=lambda: heard.append("save"), say=heard.append
    )
    assert not asking._look() and heard == []
    service.known[spot.REBALANCE] = "{}"
    service.old = True
    assert not asking._look() and heard[1:] == ["save"], "a token that is too old is replaced"
    assert not asking._look() and len(heard) == 2, "the advice is taken once"
    service.known[spot.INTERRUPTION] = taken_back()
    assert asking._look() and heard[3:] == ["stop"]
    assert heard[2].startswith("this spot instance is taken back in 1") and "(terminate)" in heard[2]


@pytest.mark.slow
@pytest.mark.parametrize("procs", ["1", "2"])
def test_a_training_stops_with_a_snapshot_and_goes_on_elsewhere(
    service: Service, tmp_path: Path, procs: str
) -> None:
    where = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": address(service)}
    training = commands.start(*LONG, "--procs", procs, folder=tmp_path, environment=where)
    files = training.until_trained(int(procs))
    service.known[spot.INTERRUPTION] = taken_back()
    ran = training.wait()
    assert ran.code == AGAIN, ran.err
    assert "this spot instance is taken back" in ran.err or procs == "2"  # ranks say it on the forkserver's stderr
    assert ran.record()["state"] == "stopped" and list(files.snapshots.glob("step-*"))
    assert audit(files).sound


@pytest.mark.slow
def test_where_nobody_answers_the_training_goes_on(tmp_path: Path) -> None:
    """On a machine that is no instance of EC2."""
    where = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:1"}
    words = ("train", TASK, "--global-batch", "8", "--epochs", "2", "--spot", "aws")
    ran = commands.run(*words, folder=tmp_path, environment=where)
    assert ran.code == 0, ran.err
    assert ran.err.count("no word of spot notices from http://127.0.0.1:1") == 1, ran.err
