"""Whether to try again when a rank is lost, and what is said of it."""

import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from evenstep.failure import Failure
from evenstep.launch.blame import Ended, culprit_of
from evenstep.watch.board import Board, Gone

ELSEWHERE = 2.0  # seconds in which another node tells of its rank


class Judge:
    """Says who failed, and whether to try again."""

    def __init__(self, reports: Path, board: Board, *, alone: bool, tell: Callable[[Failure], None]) -> None:
        self.reports = reports
        self.board = board
        self.alone = alone
        self.tell = tell
        self._before = ""

    def again(self, attempt: str, ended: Mapping[int, Ended], gone: str) -> bool:
        """Not where the user has something to mend, nor where the same error has come a second time in a row."""
        culprit = self.culprit(attempt, ended)
        if culprit is None or (culprit.victim and not self.alone):
            sys.stderr.write(
                f"evenstep: {gone or 'another node'} is gone without a word; starting again without\n"
            )
        elif culprit.users or (culprit.trace and culprit.what == self._before):
            return False
        else:
            self._before = culprit.what
            self.tell(culprit)
            sys.stderr.write(f"{culprit.trace}evenstep: {culprit.sentence}; starting all ranks again\n")
        for path in self.reports.glob("*.report"):
            path.unlink()
        return True

    def culprit(self, attempt: str, ended: Mapping[int, Ended]) -> Failure | None:
        """The rank to blame, on whichever node it was; None where it was none here, and no other node says."""
        found, name = culprit_of(self.reports, ended), f"culprit/{attempt}"
        if self.alone:
            return found
        try:
            if found is not None and not found.victim:
                self.board.post(name, found.as_dict())
                return found
            note = self.board.wait(name, threading.Event(), ELSEWHERE)
        except Gone:
            return found
        return Failure(**note) if note else found
