"""Proof, from a run's own records, that each sample of an epoch was in exactly one committed step.

Every rank notes, a few times a second, which steps it took and a digest of the samples it trained on. Steps that
a restart threw away are undone: they are counted apart. What is left has to cover each step once, on every rank of
the session that took it, and the digests have to add up to that of the samples that these steps have.

Steps that `--on-nan skip` has left out are counted apart too, once their own digests add up to their samples.

What a whole epoch adds up to follows from N by arithmetic. Of an epoch that is not whole, the order has to be
worked out as far as it went; where that is very far, a part of what the ranks noted is checked for itself.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from evenstep.config import read_yaml
from evenstep.errors import UserError
from evenstep.files import RunFiles
from evenstep.order import digest, hashing
from evenstep.order.digest import Digest
from evenstep.order.plan import Plan
from evenstep.records import record
from evenstep.records.coverage import Coverage
from evenstep.records.lineage import Noted, Place, read_lineage, read_noted

WORKED_OUT = 1 << 27  # samples at most, of the one epoch that is not whole: it takes some seconds


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """What became of the samples of an epoch."""

    epoch: int
    steps: int
    """Committed."""
    of: int
    """Steps that the whole epoch has."""
    once: int
    left_out: int
    """In steps whose update was left out, as their losses or gradients were not finite."""
    repeated: int
    lost: int
    undone: int
    """Samples in steps that a restart threw away; they were trained on again."""
    proven: float
    """The part of the digests that was held against what they have to be, and agreed; 0 where they differ."""

    @property
    def sound(self) -> bool:
        """Each sample of the committed steps once."""
        return self.repeated == self.lost == 0 and self.proven > 0


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What became of the samples of a run."""

    epochs: list[Epoch]
    odd: list[str]
    """What cannot be in the records of a run, whatever it means for the samples."""

    @property
    def repeated(self) -> int:
        return sum(epoch.repeated for epoch in self.epochs)

    @property
    def lost(self) -> int:
        return sum(epoch.lost for epoch in self.epochs)

    @property
    def sound(self) -> bool:
        """Each sample once, and nothing in the records that speaks against it."""
        return not self.odd and all(epoch.sound for epoch in self.epochs)


def audit(run: RunFiles) -> Audit:
    """What became of the samples, epoch by epoch."""
    told = record.read(run)
    try:
        plan = Plan(**told["plan"])
    except (KeyError, TypeError):
        raise UserError(f"the record in {run.folder} holds no plan that this evenstep knows") from None
    ended = told.get("steps") if told["state"] in ("finished", "stopped") else None
    try:
        return _Auditing(run, plan, read_yaml(run.config)["epochs"], ended).audit()
    except UserError:
        raise
    except (LookupError, TypeError, ValueError) as error:
        raise UserError(f"the events in {run.folder} are not those of a run: {error!r}") from None


class _Auditing:
    """One audit, and what it has taken in from the records so far."""

    def __init__(self, run: RunFiles, plan: Plan, epochs: int, ended: int | None) -> None:
        self.run = run
        self.plan = plan
        self.epochs = epochs
        self.ended = ended
        self.lineage = read_lineage(run, ended=ended is not None)
        self.odd = self.lineage.odd
        self.worlds = self.lineage.worlds
        self.covered: dict[int, Coverage] = defaultdict(Coverage)
        self.trained: dict[int, Digest] = defaultdict(Digest)
        self.left_out: dict[int, set[int]] = defaultdict(set)
        self.not_trained: dict[int, Digest] = defaultdict(Digest)
        self.undone: dict[int, int] = defaultdict(int)

    def audit(self) -> Audit:
        for noted in read_noted(self.run):
            self._take(noted)
        expected = dict(enumerate(self._expected_steps()))
        seen = expected.keys() | self.covered.keys() | self.undone.keys()
        return Audit(epochs=[self._epoch(epoch, expected.get(epoch, 0)) for epoch in sorted(seen)], odd=self.odd)

    def _take(self, noted: Noted) -> None:
        if not (0 <= noted.epoch < self.epochs and 0 <= noted.first < noted.last <= self.plan.steps(noted.epoch)):
            self.odd.append(f"there are no {noted}")
        elif noted.rank >= self.worlds.get(noted.session, noted.rank + 1):
            self.odd.append(f"there was no such rank: {noted}")
        elif not self.lineage.counts(noted):
            self.undone[noted.epoch] += noted.digest.samples
        else:
            if not self.lineage.fits(noted):
                self.odd.append(f"a session begins or ends in the midst of {noted}")
            self.covered[noted.epoch].add(noted.session, noted.rank, noted.first, noted.last)
            self.trained[noted.epoch] = self.trained[noted.epoch].plus(noted.digest)
            self._take_left_out(noted)

    def _take_left_out(self, noted: Noted) -> None:
        within = {step for step in noted.left_out if noted.first <= step < noted.last}
        if len(within) < len(noted.left_out):
            self.odd.append(f"more was left out than {noted}")
        self.left_out[noted.epoch] |= within
        self.not_trained[noted.epoch] = self.not_trained[noted.epoch].plus(noted.left_out_digest)

    def _expected_steps(self) -> Iterator[int]:
        """The steps of each epoch that have to be there: as many as the record tells of, where the run has ended;
        else those up to the newest snapshot, and what came after it."""
        left = self._committed() if self.ended is None else self.ended
        for epoch in range(self.epochs):
            if not left:
                return
            steps = min(left, self.plan.steps(epoch))
            left -= steps
            yield steps
        if left:
            self.odd.append(f"the record tells of {left} steps more than {self.epochs} epochs have")

    def _committed(self) -> int:
        if not self.lineage.way:
            return 0
        head = self.lineage.sessions[self.lineage.way[-1].session]
        return max(head.kept, self._number(self.lineage.way[-1].end))

    def _number(self, place: Place) -> int:
        """Steps from the training's start."""
        return sum(self.plan.steps(epoch) for epoch in range(min(place[0], self.epochs))) + place[1]

    def _epoch(self, epoch: int, steps: int) -> Epoch:
        once = left_out = repeated = lost = 0
        for first, last, least, most in self.covered[epoch].ranges(steps, self.worlds):
            samples = self.plan.samples(epoch, first, last)
            wanted = first < steps
            if wanted and least == most == 1:
                skipped = self._left_out(epoch, first, last)
                once += samples - skipped
                left_out += skipped
            lost += samples * (wanted and not least)
            repeated += samples * max(0, most - wanted)
        return Epoch(
            epoch=epoch,
            steps=steps,
            of=self.plan.steps(epoch),
            once=once,
            left_out=left_out,
            repeated=repeated,
            lost=lost,
            undone=self.undone[epoch],
            proven=self._proven(epoch, steps),
        )

    def _left_out(self, epoch: int, first: int, last: int) -> int:
        """Samples in those of these steps that were left out."""
        return sum(
            self.plan.samples(epoch, step, step + 1) for step in self.left_out[epoch] if first <= step < last
        )

    # What the samples' numbers have to add up to

    def _proven(self, epoch: int, steps: int) -> float:
        return self._adds_up(epoch, steps) if self._left_out_adds_up(epoch) else 0.0

    def _left_out_adds_up(self, epoch: int) -> bool:
        """Whether the ranks agree on which steps were left out, and each left out its whole part."""
        expected = Digest()
        for step in self.left_out[epoch]:
            expected = expected.plus(self.plan.digest(epoch, step, step + 1))
        return self.not_trained[epoch] == expected

    def _adds_up(self, epoch: int, steps: int) -> float:
        of, samples = self.plan.steps(epoch), self.plan.samples(epoch, 0, steps)
        rest = self.plan.size - samples
        if self.trained[epoch].samples != samples:
            return 0.0
        if steps == of:
            return float(self.trained[epoch] == digest.of_all(self.plan.size))
        if samples <= min(rest, WORKED_OUT):
            return float(self.trained[epoch] == self.plan.digest(epoch, 0, steps))
        if rest <= WORKED_OUT:
            others = self.plan.digest(epoch, steps, of)
            return float(self.trained[epoch] == digest.of_all(self.plan.size).minus(others))
        return self._spot_checked(epoch, samples)

    def _spot_checked(self, epoch: int, samples: int) -> float:
        """The part of the samples in what was looked at here and there: 0 if anything is wrong with it."""
        checked = 0
        for number, noted in enumerate(read_noted(self.run)):
            chosen = hashing.key("audit", number) % samples < WORKED_OUT
            if noted.epoch == epoch and chosen and self.lineage.counts(noted):
                checked += noted.digest.samples
                if noted.digest != self._of(noted):
                    return 0.0
        return checked / samples

    def _of(self, noted: Noted) -> Digest:
        """What a rank has to have trained on in these steps."""
        world, found = self.worlds[noted.session], Digest()
        shares = self.plan.shares(noted.epoch, noted.first, noted.rank, world)
        for share in islice(shares, noted.last - noted.first):
            found = found.plus(share.digest)
        return found
