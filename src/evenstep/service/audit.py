"""What a server's ledger says of its sessions: each position of an epoch committed once, none twice, none lost."""

from dataclasses import dataclass
from pathlib import Path

from evenstep.errors import UserError
from evenstep.service import ledger
from evenstep.service.ledger import Epoch, Kept, Ledger


@dataclass(frozen=True, kw_only=True)
class Audited:
    """What became of the samples of an epoch of a session."""

    session: str
    epoch: int
    size: int
    once: int
    repeated: int
    lost: int
    """Of an epoch that is over; of the current one, nothing is lost yet."""
    rows: int
    over: bool

    @property
    def sound(self) -> bool:
        """Each sample once, so far."""
        return self.repeated == self.lost == 0


def is_ledger(folder: Path) -> bool:
    """Whether a server keeps its ledger there."""
    return (folder.expanduser() / ledger.NAME).is_file()


def audit(folder: Path) -> list[Audited]:
    """All sessions of a server's folder, epoch by epoch; a server may be using it."""
    with ledger.reading(folder.expanduser()) as kept:
        found = [
            _audited(session, epoch, kept.epoch(session.name, epoch))
            for session in kept.sessions()
            for epoch in _epochs(kept, session)
        ]
    if not found:
        raise UserError(f"nothing has been committed to the ledger in {folder}: there is nothing to prove yet")
    return found


def _epochs(kept: Ledger, session: Kept) -> list[int]:
    """Those with commits, and those that are over: these should have some."""
    return sorted({*kept.epochs(session.name), *range(session.epoch)})


def _audited(session: Kept, epoch: int, told: Epoch) -> Audited:
    size, over = session.spec.size, epoch < session.epoch
    covered = end = 0
    for start, stop in told.ranges:
        covered += max(0, min(stop, size) - max(start, end))
        end = max(end, stop)
    return Audited(
        session=session.name,
        epoch=epoch,
        size=size,
        once=covered,
        repeated=told.samples - covered,
        lost=size - covered if over else 0,
        rows=len(told.ranges),
        over=over,
    )
