"""Who is to blame when no step ends: a pure function of what is known of each rank.

A rank that waits in an exchange between ranks is nobody's culprit as long as another has not come to it. How
many exchanges a rank has begun tells who is behind, also inside of a backward pass, where no line of Python
does; what a rank's stack shows tells whether it waits or is stuck in something of its own.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from evenstep.watch.patience import LONG
from evenstep.watch.pulse import Where
from evenstep.watch.stacks import COLLECTIVES, TORCH, Frame, Stack, telling

DEBUGGERS = ("/bdb.py", "/pydevd.py", "/debugpy/")
COMPILERS = ("/torch/_dynamo/", "/torch/_inductor/")
INNERMOST = 3  # of torch's frames: whoever waits in an exchange waits in its outermost function


class Condition(StrEnum):
    """How a rank's process is."""

    ANSWERS = "answers"
    DONE = "done"
    GONE = "gone"
    STOPPED = "stopped"
    SILENT = "silent"
    TRACED = "traced"
    """A debugger of another language holds it."""


@dataclass(frozen=True, kw_only=True)
class Helper:
    """A process that reads data for a rank."""

    pid: int
    stopped: bool
    stack: Stack

    @property
    def line(self) -> Frame | None:
        """The line of its stack that says most."""
        return telling(self.stack)


@dataclass(frozen=True, kw_only=True)
class Statement:
    """What is known of a rank."""

    rank: int
    host: str
    pid: int
    created: float
    """When its process was: a pid alone may be another's by now."""
    condition: Condition
    where: Where
    still: float
    """Seconds for which it has not moved."""
    patience: float
    """Seconds for which it may stay there."""
    exchanges: int | None = None
    """Collectives that it has begun."""
    stack: Stack = ()
    helpers: tuple[Helper, ...] = ()

    def as_note(self) -> dict[str, Any]:
        """As the board takes it."""
        return dataclasses.asdict(self)

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks in an exchange."""
        for frame in self.stack[: -INNERMOST - 1 : -1]:
            if COLLECTIVES in frame.file:
                return True
            if TORCH not in frame.file:
                return False
        return False

    @property
    def excused(self) -> bool:
        """Whether it may take its time."""
        if self.condition is Condition.TRACED or self._is_in(DEBUGGERS):
            return True
        return self.still < (max(self.patience, LONG) if self._is_in(COMPILERS) else self.patience)

    def _is_in(self, places: Sequence[str]) -> bool:
        return any(place in frame.file for frame in self.stack for place in places)

    @property
    def progress(self) -> tuple[int, ...]:
        """Grows as it goes through its training: the ranks that lag behind have the least."""
        return (_begun(self), *self.where)

    @property
    def line(self) -> Frame | None:
        """The line of its stack that says most."""
        return telling(self.stack)


class Finding(NamedTuple):
    """Who, and what about them; nobody, where all ranks are at the same place."""

    culprits: tuple[int, ...]
    apart: bool = False
    """They have left out the exchange in which the rest waits."""


def judge(statements: Sequence[Statement]) -> Finding | None:
    """Who is to blame; None where it is too early to say, as those that the rest waits for may take their time."""
    ended = [told for told in statements if told.condition is Condition.DONE]
    going = [told for told in statements if told.condition is not Condition.DONE]
    if any(told.waits or _begun(told) > _begun(left) for told in going for left in ended):
        return Finding(tuple(left.rank for left in ended))
    for bad in (Condition.GONE, Condition.STOPPED, Condition.SILENT):
        found = [told for told in going if told.condition is bad and not told.waits]
        if found:
            return _unless_excused(found)
    if not going:
        return None
    busy = [told for told in going if not told.waits]
    if not busy or len({(told.progress, told.line) for told in going}) == 1 < len(going):
        return _odd_ones(going)
    least = min(told.progress for told in busy)
    behind = [told for told in busy if told.progress == least]
    waiting = [told.progress for told in going if told.waits]
    return _unless_excused(behind, apart=bool(waiting) and max(waiting) < least)


def _begun(told: Statement) -> int:
    return told.exchanges or 0


def _unless_excused(found: Sequence[Statement], *, apart: bool = False) -> Finding | None:
    stuck = [told.rank for told in found if told.condition is Condition.GONE or not told.excused]
    return Finding(tuple(stuck), apart) if stuck else None


def _odd_ones(alike: Sequence[Statement]) -> Finding | None:
    """All wait in exchanges. If not in the same one, some have left one out: the fewer, or those further on."""
    if any(told.excused for told in alike):
        return None
    places = Counter((told.where, told.line) for told in alike)
    furthest = {
        place: max(told.progress for told in alike if (told.where, told.line) == place) for place in places
    }
    common = min(places, key=lambda place: (-places[place], furthest[place]))
    odd = tuple(told.rank for told in alike if (told.where, told.line) != common)
    return Finding(odd, apart=bool(odd))
