"""What a person sees of the service."""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from evenstep.service import order_pb2 as pb
from evenstep.service import wire
from evenstep.service.audit import Audited


def say(line: str) -> None:
    """A line, at once, whoever reads it."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def sessions(found: Sequence[pb.Session]) -> None:
    """Sessions, a line each."""
    if not found:
        say("no session yet: evenstep session open --name NAME --size N")
        return
    table = Table("session", "size", "epoch", "committed", "rate", "workers", "leases", "slowest")
    for session in found:
        table.add_row(
            session.name,
            f"{session.plan.size:,}",
            _epoch(session),
            "" if _ended(session) else f"{session.committed:,} ({session.committed / session.plan.size:.0%})",
            f"{session.rate:,.0f}/s",
            f"{session.workers_in_all:,}",
            f"{session.leases:,}",
            _slowest(session),
        )
    Console().print(table)


def session(found: pb.Session) -> None:
    """One session, and who reads it."""
    plan = found.plan
    how = f"in lockstep by {plan.world} ranks" if plan.world else f"by leases of {plan.lease_seconds:g} s"
    say(
        f"session {found.name}: {plan.size:,} samples, {plan.policy}, seed {plan.seed}, "
        f"blocks of {plan.block:,}, {how}"
    )
    say(
        f"epoch {_epoch(found)}: {found.committed:,} samples committed, {found.handed_out:,} handed out, "
        f"{found.leases:,} open leases, {found.rate:,.0f} samples/s"
    )
    if found.workers:
        table = Table("rank" if plan.world else "worker", "committed", "leases", "no progress for")
        for worker in found.workers:
            if plan.world:
                table.add_row(worker.name, f"epoch {worker.epoch + 1}, {worker.committed:,} steps", "", "")
            else:
                table.add_row(
                    worker.name, f"{worker.committed:,}", f"{worker.leases:,}", f"{worker.silent_seconds:,.1f} s"
                )
        Console().print(table)
    if found.workers_in_all > len(found.workers):
        say(f"and {found.workers_in_all - len(found.workers):,} more")


def _epoch(session: pb.Session) -> str:
    if session.closed:
        return "closed"
    if _ended(session):
        return f"all {session.plan.epochs:,} over"
    return f"{session.epoch + 1:,} of {session.plan.epochs:,}"


def _ended(session: pb.Session) -> bool:
    return session.epoch == session.plan.epochs


def _slowest(session: pb.Session) -> str:
    worker = wire.slowest(session)
    return f"{worker.name}, {worker.silent_seconds:.0f} s" if worker.name else ""


def audited(epochs: Sequence[Audited]) -> None:
    """The finding of an audit, a line an epoch."""
    table = Table("session", "epoch", "samples", "once", "repeated", "lost", "rows", "")
    for epoch in epochs:
        table.add_row(
            epoch.session,
            str(epoch.epoch + 1),
            f"{epoch.size:,}",
            f"{epoch.once:,}",
            f"{epoch.repeated:,}",
            f"{epoch.lost:,}",
            f"{epoch.rows:,}",
            "over" if epoch.over else "goes on",
        )
    Console().print(table)
    repeated, lost = sum(epoch.repeated for epoch in epochs), sum(epoch.lost for epoch in epochs)
    sound = all(epoch.sound for epoch in epochs)
    say(f"{repeated:,} repeated, {lost:,} lost{'' if sound else ': NOT each sample exactly once'}")
