"""The training: for each step take it; now and then report; at each epoch's end look how good the model is."""

import dataclasses
import math
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from evenstep.batches import Batches, Step
from evenstep.errors import UserError
from evenstep.evaluation import Interrupted
from evenstep.faults import computed_on, in_step, loss_not_finite, weights_not_finite
from evenstep.order.digest import Digest
from evenstep.pace import MOST, exact, paced
from evenstep.progress import Progress, Values, Window
from evenstep.records.recorder import Recorder
from evenstep.step import Stepper
from evenstep.watch.pulse import DATA, NOTES, SNAPSHOT, WEIGHTS, Pulse
from evenstep.weights import NotKept


class Wishes(NamedTuple):
    """What a rank would like to happen at the next moment that suits all."""

    stop: bool = False
    snapshot: bool = False


@dataclass(frozen=True, kw_only=True)
class Training:
    """The parts of a training, put together."""

    batches: Batches
    stepper: Stepper
    recorder: Recorder
    validate: Callable[[], Values]
    """The loss and metrics on the validation data; nothing where there is none."""
    keep_best: Callable[[], None]
    """Keep the weights as they are now: they are the best so far. NotKept where that cannot be."""
    snapshot: Callable[[Progress], None]
    """Keep all it takes to go on from here."""
    snapshot_every: int | None
    wishes: Callable[[], Wishes]
    score: "Score"
    epochs: int
    max_steps: int | None
    patience: int | None
    pulse: Pulse


def train(parts: Training, progress: Progress) -> bool:
    """Train until the end, or until somebody wishes to stop: whether it came to its end.

    All decisions are the same on every rank, since all look at the same numbers.
    """
    tally = Tally(parts.stepper.device, parts.stepper.strategy.world)
    for epoch in range(progress.epoch, parts.epochs):
        if _stopped_in_epoch(parts, progress, tally):
            return False
        _check_weights(parts, progress)
        try:
            values = parts.validate()
        except Interrupted:
            parts.pulse.phase = SNAPSHOT
            parts.snapshot(progress)
            return False
        before = dataclasses.replace(progress)
        improved = progress.measured(values, parts.score(values))
        parts.recorder.epoch(progress, improved)
        if improved:
            _keep_best(parts, progress, before)
        if progress.number == parts.max_steps or epoch - progress.best_epoch == parts.patience:
            break
        if epoch + 1 < parts.epochs:
            progress.next_epoch()
    return True


def _keep_best(parts: Training, progress: Progress, before: Progress) -> None:
    """Where they cannot be kept, what was the best still is: a full disk is no reason to end."""
    parts.pulse.phase = WEIGHTS
    try:
        parts.keep_best()
    except NotKept as error:
        progress.without_best(before)
        parts.recorder.say(f"the best weights are NOT kept: {error}; those of before still are")


def _stopped_in_epoch(parts: Training, progress: Progress, tally: "Tally") -> bool:
    """Train to the epoch's end; whether somebody wished to stop before it."""
    if progress.number == parts.max_steps:  # resumed where it had come to its end
        return False
    pulse = parts.pulse
    pulse.epoch, pulse.step, pulse.piece, pulse.phase = progress.epoch, progress.step, 0, DATA
    tally.begin(progress.step)
    steps = parts.batches.steps(progress.epoch)
    for step, losses in _taken(parts, progress):
        tally.add(losses, step)
        progress.step += 1
        progress.number += 1
        pulse.taken += 1
        pulse.step, pulse.piece, pulse.phase = progress.step, 0, DATA
        due = parts.snapshot_every is not None and progress.number % parts.snapshot_every == 0
        last = progress.number == parts.max_steps or progress.step == steps
        if tally.full or due or last:
            wishes = _compare_notes(parts, progress, tally)
            if due or wishes.snapshot or wishes.stop:
                pulse.phase = SNAPSHOT
                _check_weights(parts, progress)
                parts.snapshot(progress)
                tally.begin(progress.step)
            pulse.phase = DATA
            if wishes.stop or last:
                return wishes.stop
    return False


def _taken(parts: Training, progress: Progress) -> Iterator[tuple[Step, Tensor]]:
    """Take the epoch's steps one by one: each, and this rank's sum of its losses."""
    try:
        for step in parts.batches.epoch(progress.epoch, progress.step):
            yield step, parts.stepper.take(step, progress.number)
    except Exception as error:
        named = in_step(error, parts.batches, progress.epoch, progress.step)
        if named is error:
            raise
        raise named from error


def _compare_notes(parts: Training, progress: Progress, tally: "Tally") -> Wishes:
    parts.pulse.phase = NOTES
    window, wishes = tally.take(parts.wishes())
    guard = parts.stepper.guard
    if guard is None and window.bad:
        first = window.bad[0]
        raise loss_not_finite(parts.batches, progress.epoch, first, own=tally.was_bad(first - window.first))
    progress.add(window)
    parts.recorder.steps(progress, window)
    for step in window.bad:
        assert guard is not None
        ranks = guard.left_out.pop(0)
        samples = {rank: computed_on(parts.batches, progress.epoch, step, rank) for rank in ranks}
        parts.recorder.left_out(progress.epoch, step, samples)
    return wishes


def _check_weights(parts: Training, progress: Progress) -> None:
    """Nothing is kept that is not finite. A loss says so only in the step after."""
    if not parts.stepper.strategy.finite():
        raise weights_not_finite(progress.epoch, progress.step)


class Tally:
    """Gathers the losses of steps and sums them over ranks now and then: a look at each would wait for each.

    With them travel the ranks' wishes, so that whatever is decided is decided at the same step by all.
    """

    def __init__(self, device: torch.device, world: int) -> None:
        self._notes = torch.zeros(3 + MOST, dtype=exact(device), device=device)
        self._sums = self._notes[3:]
        self._own = self._sums
        self._totals: list[int] = []
        self._world = world
        self._every = 1
        self.begin(0)

    def begin(self, step: int) -> None:
        """The next steps start now, with this one of the epoch."""
        self._first = step
        self._digests: list[Digest] = []
        self._since = time.perf_counter()

    def add(self, losses: Tensor, step: Step) -> None:
        """A step, and this rank's sum of its losses."""
        self._sums[len(self._totals)] = losses
        self._totals.append(step.total)
        self._digests.append(step.digest)

    @property
    def full(self) -> bool:
        """Whether it is time to compare notes; it becomes so at the same step on all ranks."""
        return len(self._totals) >= self._every

    def take(self, wishes: Wishes) -> tuple[Window, Wishes]:
        """What waits, over all ranks' samples, and what any of them wishes."""
        count = len(self._totals)
        notes = self._notes[: 3 + count]
        own = [time.perf_counter() - self._since, float(wishes.stop), float(wishes.snapshot)]
        notes[:3] = torch.tensor(own, dtype=notes.dtype)
        self._own = notes[3:].clone()
        if self._world > 1:
            dist.all_reduce(notes)
        time_of_all, stop, snapshot, *sums = notes.tolist()
        seconds = time_of_all / self._world
        losses = [total / samples for total, samples in zip(sums, self._totals, strict=True)]
        window = Window(self._first, losses, list(self._totals), seconds, *self._summed(losses))
        self._every = paced(count, seconds)
        self._totals.clear()
        self._notes.zero_()
        self.begin(self._first + count)
        return window, Wishes(stop > 0, snapshot > 0)

    def _summed(self, losses: list[float]) -> tuple[Digest, Digest]:
        """The digest of the samples that were trained on, and of those in steps whose loss is not finite."""
        trained, left_out = Digest(), Digest()
        for loss, digest in zip(losses, self._digests, strict=True):
            if math.isfinite(loss):
                trained = trained.plus(digest)
            else:
                left_out = left_out.plus(digest)
        return trained, left_out

    def was_bad(self, place: int) -> bool:
        """Whether this rank's part of a loss was not finite, of those that were last taken."""
        return not bool(self._own[place].isfinite())


class Score:
    """How good a validation is by the task's goal; more is better."""

    def __init__(self, goal: str, measured: Collection[str]) -> None:
        direction, _, self.name = goal.partition(" ")
        if direction not in ("min", "max") or not self.name:
            raise UserError(f"a goal is 'min' or 'max' and a metric's name, such as 'min loss', not {goal!r}")
        if self.name not in measured:
            raise UserError(f"the goal names {self.name}, which is not measured; there are {', '.join(measured)}")
        self._sign = 1.0 if direction == "max" else -1.0

    def __call__(self, values: Values) -> float:
        if not values:
            return -math.inf
        value = values[self.name]
        if not isinstance(value, int | float):
            raise UserError(f"the goal names {self.name}, which is {value!r}, not a number to go by")
        return -math.inf if math.isnan(value) else self._sign * value
