"""Sessions of a server, for those who open, watch and close them."""

from pathlib import Path
from typing import Self

from evenstep.service import order_pb2 as pb
from evenstep.service import wire
from evenstep.service.connection import Connection, server
from evenstep.service.spec import Spec

PATIENCE = 5.0  # seconds; a person waits


class Client:
    """A server's sessions."""

    def __init__(self, target: str, *, token_file: Path | None = None, tls_ca: Path | None = None) -> None:
        to = server(target, token_file=token_file, tls_ca=tls_ca)
        self.connection = Connection(to, patience=PATIENCE)

    def open(self, name: str, spec: Spec) -> pb.Session:
        """Open a session, or find the one there is with the same plan."""
        request = pb.OpenRequest(session=name, plan=wire.plan_of(spec))
        return self.connection.call("Open", request, pb.Session)

    def list(self) -> "list[pb.Session]":
        """All sessions, by name."""
        return list(self.connection.call("List", pb.ListRequest(), pb.ListReply).sessions)

    def show(self, name: str) -> pb.Session:
        """A session, with its workers."""
        return self.connection.call("Show", pb.ShowRequest(session=name), pb.Session)

    def close_session(self, name: str, *, forget: bool = False) -> pb.Session:
        """Let a session hand out nothing more; or remove it, with its ledger."""
        return self.connection.call("Close", pb.CloseRequest(session=name, forget=forget), pb.Session)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()
