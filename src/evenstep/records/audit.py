"""Proof, from a run's own records, that each sample of an epoch was in exactly one committed step.

Every rank notes, a few times a second, which steps it took and a digest of the samples it trained on. Steps
that a restart threw away, because the snapshot it went on from is older, are undone: they are counted apart.
What is left has to cover each step once on every rank, and the digests have to add up to that of all samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np

from evenstep.errors import UserError
from evenstep.files import RunFiles
from evenstep.order import digest
from evenstep.order.digest import Digest
from evenstep.order.plan import Plan
from evenstep.records import record
from evenstep.records.events import read_events


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
    """In steps whose update was left out, as `--on-nan skip` has it."""
    repeated: int
    lost: int
    undone: int
    """Samples in steps that a restart threw away; they were trained on again."""
    proven: bool
    """The digests of what the ranks trained on add up to that of the samples these steps have."""

    @property
    def sound(self) -> bool:
        """Each sample of the committed steps once."""
        return self.repeated == self.lost == 0 and self.proven


class _Noted(NamedTuple):
    """Steps that a rank says it took."""

    epoch: int
    first: int
    steps: int
    digest: Digest
    left_out: list[int]


@dataclass
class _Session:
    """The time between a start and the next: how many ranks took part, where it began, what they took."""

    world: int
    begin: tuple[int, int] = (0, 0)  # epoch and step
    noted: list[_Noted] = field(default_factory=list)


def audit(run: RunFiles) -> list[Epoch]:
    """What became of the samples, epoch by epoch."""
    told = record.read(run)
    if "plan" not in told:
        raise UserError(f"the record in {run.folder} has no plan: the run ended before its first step")
    plan = Plan(**told["plan"])
    sessions = _sessions(run)
    ends = [*(session.begin for session in sessions[1:]), _END][: len(sessions)]
    epochs = sorted({noted.epoch for session in sessions for noted in session.noted})
    return [_epoch(plan, epoch, sessions, ends) for epoch in epochs]


_END = (1 << 62, 0)  # nothing has undone the steps of the last session


def _sessions(run: RunFiles) -> list[_Session]:
    """All sessions in the order they began; rank 0 takes part in each."""
    found: dict[str, _Session] = {}
    paths = (run.folder / "events").glob("rank-*.jsonl")
    for path in sorted(paths, key=lambda path: int(path.stem.removeprefix("rank-"))):
        current = _Session(0)
        for event in read_events(path):
            if event["name"] == "started":
                current = found.setdefault(event["session"], _Session(event["world"]))
            elif event["name"] == "resumed":
                current.begin = (event["epoch"], event["step"])
            elif event["name"] == "trained":
                trained, left_out = Digest(*event["digest"]), Digest(*event.get("left_out_digest", ()))
                noted = _Noted(
                    event["epoch"],
                    event["step"],
                    event["steps"],
                    trained.plus(left_out),
                    event.get("left_out", []),
                )
                current.noted.append(noted)
    return list(found.values())


def _epoch(plan: Plan, epoch: int, sessions: Sequence[_Session], ends: Sequence[tuple[int, int]]) -> Epoch:
    of = plan.steps(epoch)
    taken = np.zeros(of, dtype=np.int64)
    left_out = np.zeros(of, dtype=bool)
    trained, undone = Digest(), 0
    for session, end in zip(sessions, ends, strict=True):
        by_ranks = np.zeros(of, dtype=np.int64)
        for noted in session.noted:
            if noted.epoch != epoch:
                continue
            if (epoch, noted.first) < end:
                by_ranks[noted.first : noted.first + noted.steps] += 1
                left_out[noted.left_out] = True
                trained = trained.plus(noted.digest)
            else:
                undone += noted.digest.samples
        taken += by_ranks // session.world if session.world else by_ranks
    steps = int(np.flatnonzero(taken)[-1]) + 1 if taken.any() else 0
    sizes = np.array(plan.sizes(epoch, 0, steps), dtype=np.int64)
    times, out = taken[:steps], left_out[:steps]
    return Epoch(
        epoch=epoch,
        steps=steps,
        of=of,
        once=int(sizes[(times == 1) & ~out].sum()),
        left_out=int(sizes[(times == 1) & out].sum()),
        repeated=int((sizes * np.maximum(times - 1, 0)).sum()),
        lost=int(sizes[times == 0].sum()),
        undone=undone,
        proven=trained == _expected(plan, epoch, steps),
    )


def _expected(plan: Plan, epoch: int, steps: int) -> Digest:
    """The digest of the samples in the first steps of an epoch."""
    if steps == plan.steps(epoch):
        return digest.of_all(plan.size)
    expected = Digest()
    for share in islice(plan.shares(epoch, 0, 0, 1), steps):
        expected = expected.plus(share.digest)
    return expected
