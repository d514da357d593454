"""The protocol of lockstep sessions: each rank's part of each step, and how far each rank has come. No clock,
no network, no disk.

What a rank reads in a step is arithmetic, so nothing is remembered of what was asked. A rank says how far it has
trained; the session has come as far as the slowest of its ranks, and that far its epochs are committed.
"""

from collections.abc import Mapping
from typing import NamedTuple

from evenstep.order.plan import Cut
from evenstep.service.leases import Committed, Turned
from evenstep.service.refusals import Refused, Why
from evenstep.service.spec import Spec

MOST_STEPS = 1024  # in an answer
MOST_RANGES = 1 << 16  # in an answer: a step has one or more for each lane


class Place(NamedTuple):
    """The step of an epoch that comes next."""

    epoch: int
    step: int


class Advanced(NamedTuple):
    """A rank has come so far. To be on disk before the answer goes out."""

    rank: int
    place: Place


Change = Advanced | Committed | Turned


class Lockstep:
    """A lockstep session's state, and the requests that change it; `changes` as in `Leases`."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.place = Place(0, 0)
        """Where all ranks have come to."""
        self.ranks = dict.fromkeys(range(spec.world), self.place)
        self.changes: list[Change] = []

    def batches(self, epoch: int, step: int, rank: int, world: int, count: int) -> tuple[list[Cut], int]:
        """A rank's parts of some steps of an epoch, and how many steps the epoch has."""
        self._check(rank, world, epoch)
        plan = self.spec.plan
        steps = plan.steps(epoch)
        if step >= steps or count < 1:
            raise Refused(Why.INVALID, f"epoch {epoch} has steps 0 to {steps - 1}; step {step} is none of them")
        count = min(count, MOST_STEPS, max(1, MOST_RANGES // plan.lanes), steps - step)
        return plan.cuts(epoch, range(step, step + count), rank, world), steps

    def advance(self, rank: int, world: int, epoch: int, step: int) -> None:
        """A rank has trained on its parts of all steps before this one."""
        if step == 0 and epoch:  # the end of an epoch, the last one too
            epoch -= 1
            step = self.spec.plan.steps(epoch) if epoch < self.spec.epochs else 0
        self._check(rank, world, epoch)
        steps = self.spec.plan.steps(epoch)
        if step > steps:
            raise Refused(Why.INVALID, f"epoch {epoch} has {steps} steps, not {step}")
        if epoch > self.place.epoch + 1:
            raise Refused(
                Why.UNFIT,
                f"the session stands in epoch {self.place.epoch}; rank {rank} cannot be in epoch {epoch}",
            )
        place = Place(epoch, step) if step < steps else Place(epoch + 1, 0)
        if place > self.ranks[rank]:  # else that was committed, and comes again
            self.ranks[rank] = place
            self.changes.append(Advanced(rank, place))
            self._move()

    def change_world(self, spec: Spec) -> None:
        """From now on so many ranks read, each from where all had come to."""
        self.spec = spec
        self.ranks = dict.fromkeys(range(spec.world), self.place)
        self.changes += [Advanced(rank, place) for rank, place in self.ranks.items()]

    def restore(self, ranks: Mapping[int, Place]) -> None:
        """The state that the ledger knows."""
        self.ranks.update(ranks)
        self.place = min(self.ranks.values())

    def _check(self, rank: int, world: int, epoch: int) -> None:
        if world != self.spec.world:
            raise Refused(
                Why.UNFIT,
                f"the session is read by {self.spec.world} ranks, not {world}; to change that, open it once more "
                f"with --world {world}",
            )
        if rank >= world:
            raise Refused(Why.INVALID, f"there is no rank {rank} in a world of {world}")
        if epoch >= self.spec.epochs:
            raise Refused(Why.UNFIT, f"the session has epochs 0 to {self.spec.epochs - 1}; epoch {epoch} is none")

    def _move(self) -> None:
        """Let all that every rank has trained on be committed."""
        plan, slowest = self.spec.plan, min(self.ranks.values())
        while self.place < slowest:
            epoch, step = self.place
            ends = self.place.epoch < slowest.epoch
            stop = plan.size if ends else plan.before(epoch, slowest.step)
            start = plan.before(epoch, step)
            if start < stop:
                self.changes.append(Committed(epoch, start, stop))
            self.place = Place(epoch + 1, 0) if ends else slowest
            if ends:
                self.changes.append(Turned(self.place.epoch))
