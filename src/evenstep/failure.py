"""How a rank came to an end, and the report of it that whoever started the rank reads."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAILED = 1  # the exit code
LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Connection was likely closed",
    "Broken pipe",
    "ncclRemoteError",
)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How one rank came to an end."""

    rank: int
    host: str
    pid: int
    time: float
    what: str
    trace: str = ""
    users: bool = False
    """It is the user's to mend, and `what` says how."""
    victim: bool = False
    """This rank only found that another one had gone."""

    @property
    def sentence(self) -> str:
        """Who, where, what."""
        return f"rank {self.rank} on {self.host} (pid {self.pid}) {self.what}"

    def as_dict(self) -> dict[str, Any]:
        """As it is written down; `Failure(**it)` is the same again."""
        return dataclasses.asdict(self)


def report(reports: Path, failure: Failure) -> None:
    """Leave a rank's report. A half-written one is never read: it has its name only when it is whole."""
    unfinished = reports / f"{failure.rank}.unfinished-{failure.pid}"
    unfinished.write_text(json.dumps(failure.as_dict()))
    unfinished.rename(reports / f"{failure.rank}.report")


def reported(reports: Path) -> list[Failure]:
    """The reports that are there."""
    return [Failure(**json.loads(path.read_text())) for path in reports.glob("*.report")]


def lost_peer(error: BaseException) -> bool:
    """Whether a rank failed only because another one had gone."""
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in LOST_PEER)
