"""Takes what the loop reports to where it is kept: every rank to its events, rank 0 also to curves and screen."""

import contextlib
import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evenstep.config import Settled
from evenstep.files import RunFiles
from evenstep.order.plan import Plan
from evenstep.progress import Progress, Window
from evenstep.records.events import Events
from evenstep.records.screen import Output, Screen, in_words
from evenstep.snapshots.mirror import Sent
from evenstep.snapshots.saver import Saved
from evenstep.watch import drift, words
from evenstep.world import World

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Recorder:
    """One rank's reporting."""

    def __init__(
        self, files: RunFiles, world: World, plan: Plan, *, session: str, steps: int, epochs: int, log_every: int
    ) -> None:
        self.files = files
        self.world = world
        self.plan = plan
        self.log_every = log_every
        self.events = Events(files.events(world.rank))
        self.screen: Screen | None = None
        self.curves: SummaryWriter | None = None
        self._undrawn: list[float] = []
        self._silent = False
        """Of what is not sent the first time is told, and the last."""
        if world.leads:
            self.curves = _curves(files)
            self.screen = Screen(Output(), steps, epochs)
        self.session = session
        self.events.instant(
            "started", rank=world.rank, host=world.host, pid=os.getpid(), world=world.size, session=session
        )

    def opened(self, config: Settled, parameters: int, device: str) -> None:
        """The parts are together; the first step comes next."""
        self.say(
            f"{config.task}{f' ({config.model})' if config.model else ''}: {parameters:,} parameters, "
            f"{self.plan.size:,} samples, {config.global_batch:,} a step, {config.strategy} on "
            f"{self.world.size} process{'es' if self.world.size > 1 else ''} ({device})"
        )
        if self.plan.lanes > 1:
            each = (f"{worker}: {samples:,}" for worker, samples in enumerate(self.plan.lengths(0)))
            self.say(f"samples of the first epoch by worker: {', '.join(each)}")

    def differs(self, drifted: Sequence[str], changed: Sequence[str]) -> None:
        """The ranks do not run the same, or not what the run began with, and were told to go on."""
        if drifted:
            self.events.instant("drift", between_ranks=list(drifted))
            self.say(f"the ranks do not run the same, as --allow-drift allows: {drift.shown(drifted)}")
        if changed:
            self.events.instant("changed", since_the_beginning=list(changed))
            self.say(f"changed since the run began: {drift.shown(changed)}")

    def steps(self, progress: Progress, window: Window) -> None:
        """Some more steps of the epoch are done."""
        rate = window.samples_per_second
        left_out = {"left_out": window.bad, "left_out_digest": window.left_out} if window.bad else {}
        self.events.instant(
            "trained",
            session=self.session,
            epoch=progress.epoch,
            step=window.first,
            steps=len(window.losses),
            digest=window.digest,
            **left_out,
        )
        if self.curves is not None:
            self.events.scalar(
                "loss", progress.epoch, window.first, window.losses, samples_per_second=round(rate, 3)
            )
            self._draw(self.curves, progress.number - len(window.losses), window)
        if self.screen is not None:
            self.screen.moved(progress.epoch, progress.number, window.losses[-1], rate)

    def left_out(self, epoch: int, step: int, samples: Mapping[int, Sequence[int]]) -> None:
        """A step was left out. By rank, the samples whose loss was not finite; if none, its gradients were not."""
        self.events.instant("left out", epoch=epoch, step=step, samples=samples)
        met = "; ".join(f"the loss of rank {rank} in {words.samples(each)}" for rank, each in samples.items())
        self.say(f"{words.step(epoch, step)} is left out: {met or 'its gradients'} was not finite")

    def _draw(self, curves: "SummaryWriter", before: int, window: Window) -> None:
        """A point of the curves for every `log_every` steps: their mean."""
        for number, loss in enumerate(window.losses, start=before + 1):
            if math.isfinite(loss):
                self._undrawn.append(loss)
            if number % self.log_every == 0 and self._undrawn:
                self._point(curves, number)
                curves.add_scalar("train/samples_per_second", window.samples_per_second, number)

    def _point(self, curves: "SummaryWriter", number: int) -> None:
        curves.add_scalar("train/loss", sum(self._undrawn) / len(self._undrawn), number)
        self._undrawn.clear()

    def epoch(self, progress: Progress, best: bool) -> None:
        """An epoch has ended."""
        loss = progress.epoch_loss / max(1, progress.epoch_samples)
        rate = progress.epoch_samples / max(progress.epoch_seconds, 1e-9)
        self.events.instant("epoch", epoch=progress.epoch, loss=loss, samples_per_second=rate)
        if self.plan.lanes > 1:
            self.events.instant("dealt", epoch=progress.epoch, samples=self.plan.lengths(progress.epoch))
        self.measured("validation", progress.epoch, progress.number, progress.final)
        if self.screen is not None:
            self.screen.epoch(progress.epoch, loss, rate, progress.final, best)

    def measured(self, split: str, epoch: int, number: int, values: Mapping[str, Any]) -> None:
        """What was found on the samples of a split."""
        if not values:
            return
        self.events.instant("measured", split=split, epoch=epoch, steps=number, values=dict(values))
        if self.curves is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self.curves.add_scalar(f"{split}/{name}", value, number)

    def resumed(self, progress: Progress, snapshot: str | None) -> None:
        """The training goes on from a snapshot, or begins again where there is none."""
        self.events.instant(
            "resumed",
            session=self.session,
            of=progress.session,
            snapshot=snapshot,
            epoch=progress.epoch,
            step=progress.step,
            number=progress.number,
        )
        if snapshot is None:
            self.say("there is no snapshot to go on from: the training begins again")
        else:
            self.say(f"resumed from {snapshot}: epoch {progress.epoch + 1}, after {progress.step:,} of its steps")

    def saved(self, saved: Saved) -> None:
        """A snapshot was taken, or was not."""
        self.events.instant("saved", session=self.session, **dataclasses.asdict(saved))
        if saved.error:
            self.say(f"snapshot {saved.snapshot} FAILED: {saved.error}")
        if saved.left:
            self.say(f"older snapshots than {saved.snapshot} could NOT be taken away: {saved.left}")

    def sent(self, sent: Sent, address: str) -> None:
        """A snapshot was sent to where the run is kept too, or was not."""
        self.events.instant("sent", **dataclasses.asdict(sent))
        if sent.error and not self._silent:
            self.say(f"{sent.snapshot or 'the record'} is NOT in {address} yet: {sent.error}; it is tried again")
        elif self._silent and not sent.error:
            self.say(f"{address} takes what is sent again")
        self._silent = bool(sent.error)

    def flush(self) -> None:
        """Make sure that the events so far are written; OSError where they cannot be."""
        self.events.flush()

    def finished(self, progress: Progress, test: Mapping[str, Any]) -> None:
        """The training has come to its end."""
        if self.curves is not None and self._undrawn:
            self._point(self.curves, progress.number)
        if test:
            self.say(f"test, with the best weights (epoch {progress.best_epoch + 1}): {in_words(test)}")
        self.say(f"kept in {self.files.folder}")

    def stopped(self, progress: Progress) -> None:
        """Somebody wished the training to stop."""
        self.events.instant("stopped", epoch=progress.epoch, step=progress.step, number=progress.number)
        self.say(f"stopped after {progress.number:,} steps; to go on: evenstep resume {self.files.folder}")

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


def _curves(files: RunFiles) -> "SummaryWriter":
    from torch.utils.tensorboard import SummaryWriter  # takes half a second, and one rank needs it

    return SummaryWriter(str(files.tensorboard), flush_secs=10)
