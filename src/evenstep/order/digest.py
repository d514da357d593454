"""A few numbers that stand for a set of samples: which were trained, each how often, without a list of them.

The count of the samples' numbers, and the sums of their first, second and third powers, all modulo 2^64. A
sample more, less, or in another's place changes them; and what they are for all of [0, N) follows from N.
"""

from typing import NamedTuple

import numpy as np

from evenstep.order.permutation import Indices

MODULUS = 1 << 64


class Digest(NamedTuple):
    """What stands for some samples; add up those of disjoint sets to get that of all."""

    samples: int = 0
    first: int = 0
    second: int = 0
    third: int = 0

    def plus(self, other: "Digest") -> "Digest":
        """That of both together."""
        sums = ((a + b) % MODULUS for a, b in zip(self[1:], other[1:], strict=True))
        return Digest(self.samples + other.samples, *sums)

    def minus(self, other: "Digest") -> "Digest":
        """That of what is left without the other's samples."""
        sums = ((a - b) % MODULUS for a, b in zip(self[1:], other[1:], strict=True))
        return Digest(self.samples - other.samples, *sums)


def of(indices: Indices) -> Digest:
    """The digest of these samples."""
    words = indices.astype(np.uint64)
    squares = words * words
    return Digest(len(words), *(int(powers.sum(dtype=np.uint64)) for powers in (words, squares, squares * words)))


def of_each(indices: Indices, lengths: list[int]) -> list[Digest]:
    """The digests of parts of so many samples each, that lie behind each other; none of them is empty."""
    words = indices.astype(np.uint64)
    squares = words * words
    starts = np.cumsum([0, *lengths[:-1]])
    sums = (np.add.reduceat(powers, starts).tolist() for powers in (words, squares, squares * words))
    return [Digest(*parts) for parts in zip(lengths, *sums, strict=True)]


def of_all(size: int) -> Digest:
    """The digest of 0, 1, ... size - 1, each once."""
    n = size - 1
    triangle = n * (n + 1) // 2
    pyramid = n * (n + 1) * (2 * n + 1) // 6
    return Digest(size, triangle % MODULUS, pyramid % MODULUS, triangle**2 % MODULUS)
