"""The training: for each step take it and report; at each epoch's end look how good the model is."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from evenstep.batches import Batches
from evenstep.errors import UserError
from evenstep.evaluation import Values
from evenstep.records.recorder import Losses, Recorder
from evenstep.step import Stepper


@dataclass(frozen=True, kw_only=True)
class Training:
    """The parts of a training, put together."""

    batches: Batches
    stepper: Stepper
    recorder: Recorder
    validate: Callable[[], Values]
    """The loss and metrics on the validation data; nothing where there is none."""
    keep_best: Callable[[], None]
    """Keep the weights as they are now: they are the best so far."""
    goal: str
    epochs: int
    max_steps: int | None
    patience: int | None
    report_every: int


class Outcome(NamedTuple):
    """What came of a training."""

    epochs: int
    steps: int
    samples: int
    seconds: float  # in the epochs, validation apart
    final: Values
    best: Values
    best_epoch: int

    def facts(self) -> dict[str, Any]:
        """What a record keeps of it."""
        rate = self.samples / self.seconds if self.seconds else 0.0
        return {**self._asdict(), "samples_per_second": rate}


def train(parts: Training) -> Outcome:
    """Train to the end: the same decisions on every rank, since all look at the same numbers."""
    best = Best(parts.goal)
    tally = Tally(parts.report_every, parts.stepper.device, parts.stepper.strategy.world)
    number, epoch, values = 0, 0, Values()
    for epoch in range(parts.epochs):
        tally.begin()
        for step in parts.batches.epoch(epoch):
            tally.add(parts.stepper.take(step, number), step.total)
            number += 1
            if tally.full:
                parts.recorder.losses(epoch, number, tally.take())
            if number == parts.max_steps:
                break
        if tally.waiting:
            parts.recorder.losses(epoch, number, tally.take())
        values = parts.validate()
        improved = best.offer(epoch, values)
        parts.recorder.epoch(epoch, number, tally.loss, tally.rate, values, improved)
        if improved:
            parts.keep_best()
        if number == parts.max_steps or epoch - best.epoch == parts.patience:
            break
    return Outcome(epoch + 1, number, tally.all_samples, tally.all_seconds, values, best.values, best.epoch)


class Tally:
    """Gathers the losses of steps and sums them over ranks now and then: a look at each would wait for each."""

    def __init__(self, every: int, device: torch.device, world: int) -> None:
        exact = torch.float32 if device.type == "mps" else torch.float64
        self._sums = torch.zeros(every, dtype=exact, device=device)
        self._totals: list[int] = []
        self._world = world
        self.all_samples, self.all_seconds = 0, 0.0

    def begin(self) -> None:
        """An epoch starts now."""
        self._first = 0
        self.samples, self.seconds, self.sum = 0, 0.0, 0.0
        self._since = time.perf_counter()

    def add(self, losses: Tensor, total: int) -> None:
        """This rank's sum of losses in a step of so many samples over all ranks."""
        self._sums[len(self._totals)] = losses
        self._totals.append(total)

    @property
    def waiting(self) -> int:
        """Steps whose losses nobody has seen yet."""
        return len(self._totals)

    @property
    def full(self) -> bool:
        return len(self._totals) == len(self._sums)

    def take(self) -> "Losses":
        """What waits, over all ranks' samples."""
        if self._world > 1:
            dist.all_reduce(self._sums)
        sums = self._sums[: self.waiting].tolist()
        losses = [total / samples for total, samples in zip(sums, self._totals, strict=True)]
        seconds = time.perf_counter() - self._since
        samples = sum(self._totals)
        first = self._first
        self.sum += sum(sums)
        self.samples += samples
        self.seconds += seconds
        self.all_samples += samples
        self.all_seconds += seconds
        self._first += self.waiting
        self._totals.clear()
        self._sums.zero_()
        self._since = time.perf_counter()
        return Losses(first, losses, samples / seconds)

    @property
    def loss(self) -> float:
        """The mean over the epoch's samples so far."""
        return self.sum / self.samples

    @property
    def rate(self) -> float:
        """Samples per second in this epoch."""
        return self.samples / self.seconds


class Best:
    """The best validation so far, by the task's goal; without validation data, the latest is the best."""

    def __init__(self, goal: str) -> None:
        direction, _, self.name = goal.partition(" ")
        if direction not in ("min", "max") or not self.name:
            raise UserError(f"a goal is 'min' or 'max' and a metric's name, such as 'min loss', not {goal!r}")
        self._sign = 1.0 if direction == "max" else -1.0
        self._score = -math.inf
        self.epoch = 0
        self.values: Values = {}

    def offer(self, epoch: int, values: Values) -> bool:
        """Whether these values are the best so far."""
        score = self._of(values)
        if epoch and score <= self._score:
            return False
        self.epoch, self.values, self._score = epoch, values, score
        return True

    def _of(self, values: Values) -> float:
        if not values:
            return math.inf
        if self.name not in values:
            raise UserError(f"the goal names {self.name}, which is not measured; there are {', '.join(values)}")
        score = self._sign * float(values[self.name])
        return -math.inf if math.isnan(score) else score
