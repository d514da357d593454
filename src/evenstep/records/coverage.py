"""How often each step of an epoch was taken, from the ranges that ranks noted; nothing is kept by the step."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple


class Range(NamedTuple):
    """Steps that were taken alike."""

    first: int
    last: int
    """The step after them."""
    least: int
    """Times that all ranks of a session took them together."""
    most: int
    """Times that some rank took them."""


class Coverage:
    """The steps of one epoch, in whichever sessions."""

    def __init__(self) -> None:
        self._noted: dict[tuple[str, int], list[list[int]]] = defaultdict(list)

    def add(self, session: str, rank: int, first: int, last: int) -> None:
        """A rank took these steps."""
        ranges = self._noted[session, rank]
        if ranges and ranges[-1][1] == first:
            ranges[-1][1] = last
        else:
            ranges.append([first, last])

    def ranges(self, steps: int, worlds: Mapping[str, int]) -> Iterator[Range]:
        """The steps 0 to `steps` in order, and any that were noted beyond; the sessions had so many ranks."""
        counts = {session: [0] * world for session, world in worlds.items()}
        place, least, most = 0, 0, 0
        for step, session, rank, change in sorted([*self._changes(), (steps, "", 0, 0)]):
            if step > place:
                yield Range(place, step, least, most)
                place = step
            if session:
                own = counts[session]
                least, most = least - min(own), most - max(own)
                own[rank] += change
                least, most = least + min(own), most + max(own)

    def _changes(self) -> Iterator[tuple[int, str, int, int]]:
        for (session, rank), ranges in self._noted.items():
            for first, last in ranges:
                yield first, session, rank, 1
                yield last, session, rank, -1
