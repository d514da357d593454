"""Who reads what in which step: (epoch, step, rank) -> indices and weights, by arithmetic.

A plan deals the samples of an epoch to *workers*, each of which holds a lane: a sequence of samples that it
goes through in order. In global step k every worker takes the next part of its lane; these parts together
are the samples of the step. `shuffle` and `sequential` have a single lane, the whole data set.

The ranks that compute a step share its samples out among themselves. The number of ranks therefore decides
who computes, never what: the same plan gives the same steps at any world size, and a place to resume at is
two integers, epoch and step. Where there is a lane per rank, each rank keeps to its own.

Every rank takes part in every step. One that is left without samples still gets one to compute on, to keep
its place in the collectives, with weight 0.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from evenstep.errors import UserError, unknown
from evenstep.order import digest, hashing
from evenstep.order.digest import Digest
from evenstep.order.permutation import Indices, Permutation

POLICIES = {
    "shuffle": "all samples in a new random order each epoch",
    "sequential": "all samples in the order they are stored",
    "shards": "each worker keeps to its own equal part of the data and shuffles inside it",
    "blocks": "blocks of block_size neighbours, in random order, are dealt to the workers",
}
DEALS = {
    "round_robin": "the workers take the blocks in turn",
    "random": "each block goes to any worker, so that some get more than others",
}

WINDOW = 1 << 15  # samples of a rank worked out at a time: the cost of a NumPy call is shared by many steps
HANDS = 1 << 18  # of so many at most random dealing consists: counting them takes milliseconds


class Share(NamedTuple):
    """What one rank computes in one global step."""

    indices: Indices  # never empty
    weighted: int  # how many of them count: all, or none where the rank was left without samples
    total: int  # samples in the global step, over all ranks
    most: int  # the largest share of any rank: all ranks take as many micro-batches as it needs
    digest: Digest  # of those that count


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The whole order of a training, as a value."""

    size: int
    global_batch: int
    seed: int = 0
    policy: str = "shuffle"
    block_size: int = 1000
    deal: str = "round_robin"
    workers: int = 1  # among whom shards and blocks deal; fixed at launch, whoever computes later

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise unknown("policy", self.policy, POLICIES)
        if self.deal not in DEALS:
            raise unknown("way to deal blocks", self.deal, DEALS)
        if self.size < 1:
            raise UserError("the data set is empty: there is nothing to take a step on")
        for name in ("global_batch", "block_size", "workers"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.lanes > self.global_batch:
            raise UserError(
                f"policy {self.policy} deals to {self.workers} workers, so the global batch of "
                f"{self.global_batch} is too small: each needs a sample a step; take {self.workers} or more"
            )

    @property
    def lanes(self) -> int:
        return self.workers if self.policy in ("shards", "blocks") else 1

    def lengths(self, epoch: int) -> list[int]:
        """How many samples each worker gets in an epoch."""
        if self.policy == "blocks":
            full, tail = divmod(self.size, self.block_size)
            blocks, last = _dealt(full, self.lanes, self._deal_key(epoch))
            lengths = [count * self.block_size for count in blocks]
            lengths[last] += tail
            return lengths
        return [even(self.size, self.lanes, lane) for lane in range(self.lanes)]

    def steps(self, epoch: int) -> int:
        """Global steps in an epoch, the same number for every rank."""
        lanes = self.lanes
        needed = (
            -(-(length * lanes - (lanes - 1 - lane)) // self.global_batch)
            for lane, length in enumerate(self.lengths(epoch))
            if length
        )
        return max(needed)

    def sizes(self, epoch: int, first: int, last: int) -> list[int]:
        """Samples in each of the global steps first, first + 1, ... last - 1."""
        lengths = self.lengths(epoch)
        return [sum(stop - start for start, stop in self._parts(lengths, step)) for step in range(first, last)]

    def samples(self, epoch: int, first: int, last: int) -> int:
        """Samples in the global steps first, first + 1, ... last - 1 together."""
        return sum(stop - start for start, stop in self._parts(self.lengths(epoch), first, last - first))

    def digest(self, epoch: int, first: int, last: int) -> Digest:
        """What stands for the samples of these steps."""
        lengths = self.lengths(epoch)
        found = Digest()
        for lane, (start, stop) in enumerate(self._parts(lengths, first, last - first)):
            for block in range(start, stop, WINDOW):
                places = np.arange(block, min(block + WINDOW, stop), dtype=np.int64)
                found = found.plus(digest.of(self._members(epoch, lane, lengths, places)))
        return found

    def shares(self, epoch: int, step: int, rank: int, world: int) -> Iterator[Share]:
        """What a rank computes in the steps of an epoch, from `step` on."""
        lengths = self.lengths(epoch)
        steps = self.steps(epoch)
        per_window = max(1, WINDOW * world // self.global_batch)
        while step < steps:
            window = range(step, min(step + per_window, steps))
            yield from self._window(epoch, window, lengths, rank, world)
            step = window.stop

    def share(self, epoch: int, step: int, rank: int, world: int) -> Share:
        """What a rank computes in one step."""
        if not 0 <= step < self.steps(epoch):
            raise ValueError(f"epoch {epoch} has steps 0 to {self.steps(epoch) - 1}, not {step}")
        return next(iter(self._window(epoch, range(step, step + 1), self.lengths(epoch), rank, world)))

    def weight(self, epoch: int, step: int, rank: int, world: int) -> tuple[int, int]:
        """How many samples of a rank's share count in a step, and how many the step has over all ranks."""
        cut = self._cut(self._parts(self.lengths(epoch), step), rank, world)
        return cut.weighted, cut.total

    def _window(self, epoch: int, window: range, lengths: list[int], rank: int, world: int) -> Iterator[Share]:
        """The shares of several steps, their indices worked out with one call a lane."""
        cuts = [self._cut(self._parts(lengths, step), rank, world) for step in window]
        wanted: list[list[Indices]] = [[] for _ in range(self.lanes)]
        for cut in cuts:
            for lane, start, stop in cut.ranges:
                wanted[lane].append(np.arange(start, stop, dtype=np.int64))
        found = [
            self._members(epoch, lane, lengths, np.concatenate(places)) if places else None
            for lane, places in enumerate(wanted)
        ]
        used = [0] * self.lanes
        shares = []
        for cut in cuts:
            pieces = []
            for lane, start, stop in cut.ranges:
                members = found[lane]
                assert members is not None
                pieces.append(members[used[lane] : used[lane] + stop - start])
                used[lane] += stop - start
            shares.append(pieces[0] if len(pieces) == 1 else np.concatenate(pieces))
        digests = digest.of_each(np.concatenate(shares), [len(share) for share in shares])
        for cut, indices, found_digest in zip(cuts, shares, digests, strict=True):
            counted = found_digest if cut.weighted else Digest()
            yield Share(indices, cut.weighted, cut.total, cut.most, counted)

    def _parts(self, lengths: list[int], step: int, steps: int = 1) -> list[tuple[int, int]]:
        """The part of each lane that belongs to a global step, or to so many together."""
        before, after = step * self.global_batch, (step + steps) * self.global_batch
        lanes = self.lanes
        return [
            (min(even(before, lanes, lane), length), min(even(after, lanes, lane), length))
            for lane, length in enumerate(lengths)
        ]

    def _cut(self, parts: list[tuple[int, int]], rank: int, world: int) -> "_Cut":
        """The ranges of the lanes that one rank takes out of a global step."""
        amounts = [stop - start for start, stop in parts]
        total = sum(amounts)
        if self.lanes == world > 1:
            low = sum(amounts[:rank])
            high = low + amounts[rank]
            most = max(amounts)
        else:
            low, high = total * rank // world, total * (rank + 1) // world
            most = -(-total // world)
        weighted = high - low
        if not weighted:  # keep step with the others on a sample of theirs
            low = min(low, total - 1)
            high = low + 1
        ranges = []
        passed = 0
        for lane, (start, stop) in enumerate(parts):
            first, last = max(low - passed, 0), min(high - passed, stop - start)
            if first < last:
                ranges.append((lane, start + first, start + last))
            passed += stop - start
        return _Cut(ranges, weighted, total, most)

    def _members(self, epoch: int, lane: int, lengths: list[int], places: Indices) -> Indices:
        """The samples at these places of a lane."""
        if self.policy == "sequential":
            return places
        if self.policy == "shuffle":
            return Permutation(self.size, hashing.key("shuffle", self.seed, epoch)).at(places)
        if self.policy == "shards":
            order = Permutation(lengths[lane], hashing.key("shards", self.seed, epoch, lane))
            return sum(lengths[:lane]) + order.at(places)
        return self._block_members(epoch, lane, lengths, places)

    def _block_members(self, epoch: int, lane: int, lengths: list[int], places: Indices) -> Indices:
        """Whole blocks come in random order, the neighbours in a block in theirs, the short block last."""
        full = self.size // self.block_size
        turn, within = np.divmod(places, self.block_size)
        if self.deal == "round_robin":
            dealt = turn * self.lanes + lane
        else:  # the blocks lie in random order, so consecutive ones are as random as any
            dealt = turn + sum(length // self.block_size for length in lengths[:lane])
        is_full = turn < lengths[lane] // self.block_size
        blocks = np.full(len(places), full, dtype=np.int64)
        order = Permutation(full, hashing.key("blocks", self.seed, epoch))
        blocks[is_full] = order.at(dealt[is_full])
        return blocks * self.block_size + within

    def _deal_key(self, epoch: int) -> int | None:
        return hashing.key("deal", self.seed, epoch) if self.deal == "random" else None


class _Cut(NamedTuple):
    ranges: list[tuple[int, int, int]]  # lane, start, stop
    weighted: int
    total: int
    most: int


def even(total: int, parts: int, part: int) -> int:
    """How many of `total` things dealt in turn go to one of `parts`; grows with `total`, sums up to it."""
    return (total + parts - 1 - part) // parts


@lru_cache(maxsize=64)
def _dealt(full: int, workers: int, key: int | None) -> tuple[tuple[int, ...], int]:
    """How many full blocks each worker gets, and who gets the short one; without a key, in turn.

    Random dealing throws a die for each hand. A hand is one block, or several where there are more blocks
    than HANDS, so that an epoch over 10**12 samples starts as quickly as any.
    """
    if key is None:
        return tuple(even(full, workers, worker) for worker in range(workers)), full % workers
    hand = -(-full // HANDS) or 1
    hands = -(-full // hand)
    thrown = (hashing.stream(key, hands + 1) % np.uint64(workers)).astype(np.int64)
    counts = np.bincount(thrown[:hands], minlength=workers) * hand
    if hands:
        counts[thrown[hands - 1]] -= hands * hand - full
    return tuple(int(count) for count in counts), int(thrown[hands])
