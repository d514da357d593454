"""Integers that look random and are the same everywhere: the source of every order and every draw.

The mixing function is SplitMix64's finalizer (Steele, Lea and Flood 2014): a bijection on 64 bits, defined
by arithmetic alone, so that neither NumPy's nor torch's generators can change an order between versions.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def mix(x: Words) -> Words:
    """A 64-bit word for each 64-bit word; distinct ones stay distinct."""
    x = x + GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))


def key(*parts: int | str) -> int:
    """64 bits that stand for these parts: change any of them and every bit may change."""
    text = "\0".join(f"{type(p).__name__}:{p}" for p in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def stream(seed: int, count: int) -> Words:
    """`count` distinct 64-bit words that follow from a seed; other seeds', however close, look unrelated."""
    start = mix(np.array([seed], dtype=np.uint64))  # without this, two seeds GOLDEN apart share their words
    return mix(start + np.arange(count, dtype=np.uint64) * GOLDEN)
