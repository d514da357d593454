"""Takes what the loop reports to where it is kept: every rank to its events, rank 0 also to curves and screen."""

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console

from evenstep.config import Settled
from evenstep.files import RunFiles
from evenstep.order.plan import Plan
from evenstep.records.events import Events
from evenstep.records.screen import Screen, in_words
from evenstep.world import World

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Losses(NamedTuple):
    """The mean losses of the steps of an epoch from `first` on, and how fast they were taken."""

    first: int
    values: list[float]
    samples_per_second: float


class Recorder:
    """One rank's reporting."""

    def __init__(self, files: RunFiles, world: World, *, steps: int, epochs: int) -> None:
        self.files = files
        self.world = world
        self.events = Events(files.events(world.rank))
        self.screen: Screen | None = None
        self.curves: SummaryWriter | None = None
        if world.leads:
            # imported here: it takes half a second, and one rank needs it
            from torch.utils.tensorboard import SummaryWriter

            self.curves = SummaryWriter(str(files.tensorboard), flush_secs=10)
            self.screen = Screen(Console(), steps, epochs)
        self.events.instant("started", rank=world.rank, host=world.host, world=world.size)

    def opened(self, config: Settled, plan: Plan, parameters: int, device: str) -> None:
        """The parts are together; the first step comes next."""
        self.say(
            f"{config.task}{f' ({config.model})' if config.model else ''}: {parameters:,} parameters, "
            f"{plan.size:,} samples, {config.global_batch:,} a step, {config.strategy} on "
            f"{self.world.size} process{'es' if self.world.size > 1 else ''} ({device})"
        )
        if plan.lanes > 1:
            for epoch in range(config.epochs):
                dealt = plan.lengths(epoch)
                self.events.instant("dealt", epoch=epoch, samples=dealt)
                if epoch == 0:
                    each = ", ".join(f"{worker}: {samples:,}" for worker, samples in enumerate(dealt))
                    self.say(f"samples of the first epoch by worker: {each}")

    def losses(self, epoch: int, number: int, losses: Losses) -> None:
        """Some steps of an epoch are done, which makes `number` steps in all."""
        rate = losses.samples_per_second
        self.events.scalar("loss", epoch, losses.first, losses.values, samples_per_second=round(rate, 3))
        mean = sum(losses.values) / len(losses.values)
        if self.curves is not None:
            self.curves.add_scalar("train/loss", mean, number)
            self.curves.add_scalar("train/samples_per_second", rate, number)
        if self.screen is not None:
            self.screen.moved(epoch, number, mean, rate)

    def epoch(
        self, epoch: int, number: int, loss: float, rate: float, values: Mapping[str, Any], best: bool
    ) -> None:
        """An epoch has ended, after `number` steps in all."""
        self.events.instant("epoch", epoch=epoch, loss=loss, samples_per_second=rate)
        self.measured("validation", epoch, number, values)
        if self.screen is not None:
            self.screen.epoch(epoch, loss, rate, values, best)

    def measured(self, split: str, epoch: int, number: int, values: Mapping[str, Any]) -> None:
        """What was found on the samples of a split."""
        if not values:
            return
        self.events.instant("measured", split=split, epoch=epoch, steps=number, values=dict(values))
        if self.curves is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self.curves.add_scalar(f"{split}/{name}", value, number)

    def closed(self, best_epoch: int, test: Mapping[str, Any]) -> None:
        """The training has come to its end."""
        if test:
            self.say(f"test, with the best weights (epoch {best_epoch + 1}): {in_words(test)}")
        self.say(f"kept in {self.files.folder}")

    def say(self, line: str) -> None:
        """A line for the person who watches."""
        if self.screen is not None:
            self.screen.say(line)

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self.events.close)
            if self.curves is not None:
                stack.callback(self.curves.close)
            if self.screen is not None:
                stack.callback(self.screen.close)
