"""Starts `evenstep serve` as a person would, kills it, starts it again."""

import contextlib
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import commands
from evenstep.service.audit import Audited, audit
from evenstep.service.client import Client
from evenstep.service.spec import Spec


@dataclass
class Served:
    """A server that runs, and what it keeps."""

    folder: Path
    options: tuple[str, ...] = ()
    port: int = 0
    token_file: Path | None = None
    tls_ca: Path | None = None
    command: commands.Command = field(init=False, repr=False)

    def start(self) -> None:
        """At the port of last time, if there was one."""
        words = ("serve", "--data", str(self.data), "--port", str(self.port), *self.options)
        self.command = commands.start(*words, folder=self.folder)
        said = self.command.until(lambda: re.search(r"order service at \S+:(\d+)", self.command.said()), "serving")
        self.port = int(said[1])

    @property
    def data(self) -> Path:
        return self.folder / "served"

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    def at(self, session: str) -> str:
        """The address of a session."""
        return f"{'grpcs' if self.tls_ca else 'grpc'}://{self.target}/{session}"

    def client(self) -> Client:
        return Client(self.target, token_file=self.token_file, tls_ca=self.tls_ca)

    def open(self, name: str, **options: object) -> None:
        """A session."""
        with self.client() as client:
            client.open(name, Spec(**options))  # type: ignore[arg-type]

    def kill(self) -> None:
        """By the signal that nobody can answer."""
        self.command.send(signal.SIGKILL)
        self.command.wait()

    def stop(self) -> commands.Ran:
        self.command.send(signal.SIGTERM)
        return self.command.wait()

    def audit(self, session: str) -> list[Audited]:
        """What the ledger says of a session, whether the server runs or not."""
        return [epoch for epoch in audit(self.data) if epoch.session == session]


@contextlib.contextmanager
def serving(folder: Path, *options: str, **access: Path | None) -> Iterator[Served]:
    """A server, meanwhile."""
    served = Served(folder, options, **access)  # type: ignore[arg-type]
    served.start()
    try:
        yield served
    finally:
        ran = served.stop()
    assert ran.code == 0, ran.err
    assert "Traceback" not in ran.err + ran.out, ran.err + ran.out
