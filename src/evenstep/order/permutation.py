"""The keyed bijection on [0, size): who stands at each position, computed where it is asked.

Nothing is stored that grows with the size, so an epoch over 10 samples or over 10**12 starts equally fast.

Small sizes get an exact shuffle: positions sorted by a 64-bit hash of their number. Larger ones get a
bijection of the smallest power of two that holds the size, eight rounds of "add, multiply by an odd number,
fold the high half onto the low", each of which can be undone; positions that land outside [0, size) go
round again until they land inside (cycle walking), which keeps the whole a bijection on [0, size).
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenstep.order import hashing

Indices = NDArray[np.int64]

EXACT = 1 << 14  # up to here a shuffle takes a millisecond and 128 KiB: no reason for less than exact
ROUNDS = 8
CHUNK = 1 << 15  # positions worked on at a time: two buffers of 256 KiB stay in the second-level cache


@dataclass(frozen=True)
class Permutation:
    """An order of [0, size) that follows from a key."""

    size: int
    key: int

    def __post_init__(self) -> None:
        if not 0 <= self.size <= 1 << 63:
            raise ValueError(f"a permutation has between 0 and 2**63 members, not {self.size}")

    def at(self, positions: Indices) -> Indices:
        """The member at each position."""
        if self.size <= EXACT:
            return _shuffled(self.size, self.key)[positions]
        return self._bijection.walk(positions)

    def block(self, start: int, stop: int) -> Indices:
        """The members at positions start, start + 1, ... stop - 1."""
        return self.at(np.arange(start, stop, dtype=np.int64))

    @cached_property
    def _bijection(self) -> "Bijection":
        return Bijection(self.size, self.key)


@lru_cache(maxsize=16)
def _shuffled(size: int, key: int) -> Indices:
    """The exact shuffle: distinct words have distinct hashes, so the sort knows no ties."""
    words = hashing.mix(np.uint64(key) + np.arange(size, dtype=np.uint64) * hashing.GOLDEN)
    order = np.argsort(words, kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order


class Bijection:
    """The rounds of one key on the smallest power of two that holds `size`."""

    def __init__(self, size: int, key: int) -> None:
        bits = max(1, (size - 1).bit_length())
        # half as wide words are twice as fast, and four thousand million positions are most people's data
        self.word: Any = np.uint32 if bits <= 32 else np.uint64
        whole = (1 << bits) - 1
        self.mask = self.word(whole)
        self.fold = self.word((bits + 1) // 2)
        self.last = self.word(size - 1)
        words = hashing.stream(key, 2 * ROUNDS)
        # the high bits of a stream's words are as good as its low ones; an odd factor can be undone
        self.rounds = [
            (self.word((add >> 7) & whole), self.word((factor >> 7) & whole | 1))
            for add, factor in zip(words[:ROUNDS], words[ROUNDS:], strict=True)
        ]

    def walk(self, positions: Indices) -> Indices:
        """Each position's member: go round until inside."""
        members = positions.astype(self.word)
        self._forward(members)
        outside = np.flatnonzero(members > self.last)
        while outside.size:
            again = members[outside]
            self._forward(again)
            members[outside] = again
            outside = outside[again > self.last]
        return members.astype(np.int64)

    def _forward(self, x: NDArray[Any]) -> None:
        """All rounds, in place."""
        folded = np.empty(min(len(x), CHUNK), dtype=self.word)
        for start in range(0, len(x), CHUNK):
            part = x[start : start + CHUNK]
            high = folded[: len(part)]
            for add, factor in self.rounds:
                part += add
                part *= factor
                part &= self.mask
                np.right_shift(part, self.fold, out=high)
                part ^= high
