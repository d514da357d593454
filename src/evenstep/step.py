"""One optimizer step: micro-batches -> losses -> gradients -> update."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from evenstep.batches import Micro, Step
from evenstep.errors import UserError
from evenstep.guard import Guard
from evenstep.precision import computing
from evenstep.strategies.strategy import Strategy
from evenstep.tasks.task import Task, full_precision
from evenstep.watch.pulse import BACKWARD, DATA, FORWARD, UPDATE, Pulse

SCALE = 2.0**16  # of the loss in half precision at first, as torch has it


class Stepper:
    """Takes steps: holds the model's strategy, the optimizer, and how an update is made."""

    def __init__(
        self,
        task: Task,
        strategy: Strategy,
        optimizer: torch.optim.Optimizer,
        *,
        precision: str,
        clip: float | None,
        lr_factor: Callable[[int], float],
        pulse: Pulse | None = None,
        skips: bool = False,
    ) -> None:
        self.task = task
        self.strategy = strategy
        self.optimizer = optimizer
        self.clip = clip
        self.lr_factor = lr_factor
        self.device = strategy.device
        self.precision = precision
        # losses are raised by the world, as the gradients' mean lowers them again: in half precision the scale
        # makes up for it, lest more ranks overflow where one would not
        self.scaler = torch.amp.GradScaler(
            self.device.type, init_scale=SCALE / strategy.world, enabled=precision == "fp16"
        )
        self.pulse = pulse or Pulse()
        self.guard = Guard(strategy, self.scaler) if skips else None
        self._base_lrs = [group["lr"] for group in optimizer.param_groups]

    def take(self, step: Step, number: int) -> Tensor:
        """Take global step `number` of the training; returns the sum of the losses of this rank's samples.

        If that is not finite on any rank, and such steps are left out, it is nan on all.
        """
        if self.guard:
            self.guard.remember()
        losses = self._gradients(step)
        self.pulse.phase = UPDATE
        if self.guard and self.guard.refuses(losses):
            self.optimizer.zero_grad()
            return torch.full_like(losses, math.nan)
        self._update(number)
        return losses

    def _gradients(self, step: Step) -> Tensor:
        """Accumulate the gradients over the micro-batches."""
        # the strategy averages over ranks, so this makes the gradient that of the mean over all samples
        scale = self.strategy.world / step.total
        last = step.pieces - 1
        pulse = self.pulse
        sums = []
        for piece, micro in enumerate(step.micros):
            pulse.phase = FORWARD
            with self.strategy.syncing(piece == last):
                total = self._total(micro)
                pulse.phase = BACKWARD
                self.scaler.scale(total * scale).backward()  # type: ignore[no-untyped-call]
            sums.append(total.detach())
            pulse.piece = piece + 1
            pulse.phase = DATA
        return (
            sums[0]
            if last == 0
            else torch.stack(sums).sum(dtype=torch.promote_types(sums[0].dtype, torch.float32))
        )

    def _total(self, micro: Micro) -> Tensor:
        """The sum of the micro-batch's losses; 0, but with a graph, where its samples do not count."""
        self.strategy.count(micro.counts)
        with computing(self.precision, self.device):
            losses = self.task.losses(self.strategy.called, micro.batch)
        if losses.shape != (len(micro.indices),):
            raise UserError(
                f"losses() of {type(self.task).__name__} must return one loss per sample, a tensor of shape "
                f"({len(micro.indices)},), not {tuple(losses.shape)}; is there a reduction='none' missing?"
            )
        total = full_precision(losses).sum()
        return total if micro.counts else total * 0.0

    def _update(self, number: int) -> None:
        factor = self.lr_factor(number)
        for group, base in zip(self.optimizer.param_groups, self._base_lrs, strict=True):
            group["lr"] = base * factor
        if self.clip is not None:
            self.scaler.unscale_(self.optimizer)
            self.strategy.clip(self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
